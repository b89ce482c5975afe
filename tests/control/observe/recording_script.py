"""A script with many actors, which calls all of them over and over: how often, and what that took, is its last line."""

import json
import sys
import time

from skipper.control import Actor, endpoint, this_host


class Member(Actor):
    """One of many."""

    @endpoint
    def add(self, number: int) -> int:
        """One more."""
        return number + 1


def main(actors: int, processes: int, seconds: float) -> None:
    """Call, and say how it went; end when the standard input does."""
    procs = this_host().spawn_procs({"gpus": processes}, name="workers")
    meshes = [procs.spawn(f"members{number}", Member) for number in range(actors // processes)]
    for mesh in meshes:
        mesh.initialized.get(120)
    print("there", flush=True)
    time.sleep(1.0)  # looks have begun, where there are any
    begin, begin_cpu, rounds = time.monotonic(), time.process_time(), 0
    while time.monotonic() - begin < seconds:
        for call in [mesh.add.call(rounds) for mesh in meshes]:
            call.get(60)
        rounds += 1
        time.sleep(0.05)
    took_s = time.monotonic() - begin
    cpu = (time.process_time() - begin_cpu) / took_s
    print(json.dumps({"rounds_per_s": rounds / took_s, "cpu": cpu}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
