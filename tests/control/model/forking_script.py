"""Copies of the script and of its actors that use the job after a fork."""

import os
import subprocess
import sys

from skipper import control
from skipper.control import Actor, endpoint, this_host, this_proc


class Worker(Actor):
    @endpoint
    def fork(self) -> int | None:
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return None


if __name__ == "__main__":
    mine = this_proc().spawn("mine", Worker)
    other = this_host().spawn_procs().spawn("other", Worker)
    print(mine.fork.call_one().get(20), other.fork.call_one().get(20), flush=True)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), other.fork.call_one().get(20))
    else:
        try:
            other.fork.call_one()
        except control.ForkedProcessError as error:
            print("script" in str(error))
        control.shutdown()
        print(subprocess.run(["echo", "said"], capture_output=True, text=True).stdout.strip())
        sys.exit(6)
