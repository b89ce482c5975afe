"""One script on two hosts; one of them is lost, and comes back."""

import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from skipper import control
from skipper.control import Actor, attach_to_hosts, current_rank, endpoint

SKIPPER = [sys.executable, "-m", "skipper"]  # in a shell: skipper
SECRET = str(Path(tempfile.mkdtemp()) / "cluster.secret")
MACHINES = ["127.0.0.2", "127.0.0.3"]
with socket.create_server((MACHINES[0], 0)) as free:
    PORT = free.getsockname()[1]  # between machines: one that you choose, such as 7431


def start_agent(machine: str) -> subprocess.Popen[bytes]:
    serve = ["host", "serve", "--address", f"tcp://{machine}:{PORT}", "--secret-file", SECRET]
    return subprocess.Popen([*SKIPPER, *serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


subprocess.run([*SKIPPER, "host", "secret", SECRET], check=True, capture_output=True)
agents = [start_agent(machine) for machine in MACHINES]


class Greeter(Actor):
    @endpoint
    def greet(self) -> str:
        return f"hello from {current_rank()}"


hosts = attach_to_hosts([f"tcp://{machine}:{PORT}" for machine in MACHINES], secret_file=SECRET)
print(hosts.extent)
procs = hosts.spawn_procs(per_host={"gpus": 2})
print(procs.extent)
greeters = procs.spawn("greeters", Greeter)
for line in greeters.greet.call().get(timeout=20):
    print(line)

print(greeters.slice(hosts=1).greet.call().get(timeout=20))

lost = threading.Event()
control.unhandled_fault_hook = lambda failure: lost.set()
agents[1].kill()
agents[1].wait(timeout=20)
lost.wait(timeout=20)
print("hosts lost:", hosts.lost())
print("host 0 goes on:", greeters.slice(hosts=0).greet.call().get(timeout=20))

agents[1] = start_agent(MACHINES[1])
hosts = hosts.reattach()
greeters = hosts.spawn_procs(per_host={"gpus": 2}).spawn("greeters", Greeter)
print(len(greeters.greet.call().get(timeout=20)), "actors greet")

hosts.stop().get(timeout=20)
for agent in agents:
    agent.terminate()
    agent.wait(timeout=20)
