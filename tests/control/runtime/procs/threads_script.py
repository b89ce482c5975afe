"""Actors, each in need of threads, in a control group that may have few: ``threads_script.py GROUP COUNT``."""

import os
import sys
from pathlib import Path

from skipper import control
from skipper.control import Actor, endpoint, this_host


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    control.unhandled_fault_hook = lambda failure: None
    try:
        procs = this_host().spawn_procs()
        for _ in range(int(sys.argv[2])):
            print(procs.spawn("echo", Echo).echo.call_one(1).get(20))
    except control.ControlError as error:
        print(type(error).__name__, error)
