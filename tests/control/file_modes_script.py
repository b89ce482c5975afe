"""A job that makes every kind of file there is, in ``$TMPDIR``, and lists them with their modes."""

import os
from contextlib import closing

from skipper import control, dataplane
from skipper.control import Actor, endpoint, serve_job, this_host
from skipper.control.cluster.jobs.folder import JobFolder, start_into
from skipper.control.cluster.workspace import sync_workspace
from skipper.control.observe import collect_logs
from skipper.control.rpc.user_secret import shared_secret
from skipper.dataplane import RDMABuffer


class Speaker(Actor):
    def __init__(self) -> None:
        self.memory = dataplane.empty(1 << 20)
        self.buffer = RDMABuffer(self.memory)

    @endpoint
    def speak(self) -> RDMABuffer:
        print("hello", flush=True)
        return self.buffer

    @endpoint
    def open_files(self) -> dict[str, int]:
        found = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                name, mode = os.readlink(f"/proc/self/fd/{fd}"), os.stat(f"/proc/self/fd/{fd}").st_mode
            except OSError:
                continue
            if name.startswith(("/memfd:skipper", "/tmp", "/dev/shm")):
                found[name] = mode & 0o7777
        return found


def main() -> None:
    here = os.environ["TMPDIR"]
    logs = collect_logs(folder=f"{here}/kept/logs")
    with serve_job("open"), closing(JobFolder(f"{here}/shared/jobs")) as folder:
        shared_secret()
        start_into(folder.logs / "agent.log", ["true"]).communicate()
        speakers = this_host().spawn_procs({"gpus": 2}).spawn("speakers", Speaker)
        speakers.speak.call().get(30)
        os.mkdir(f"{here}/code", 0o700)
        sync_workspace(this_host().spawn_procs(), f"{here}/code", f"{here}/there/code")
        for open_files in speakers.open_files.call().get(30):
            for name, mode in open_files.items():
                print(f"OPEN {mode:04o} {name}")
        for top, folders, files in os.walk(here):
            for name in folders + files:
                path = os.path.join(top, name)
                print(f"FILE {os.lstat(path).st_mode & 0o7777:04o} {path}")
    control.shutdown()
    del logs


if __name__ == "__main__":
    main()
