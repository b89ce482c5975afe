"""Processes that end for want of memory and by a signal, in a control group: ``eater_script.py GROUP``."""

import os
import signal
import sys
from pathlib import Path

from skipper import control
from skipper.control import Actor, endpoint, this_host


class Eater(Actor):
    @endpoint
    def eat(self) -> None:
        held = bytearray()
        while True:
            held += bytes(1 << 20) + os.urandom(1)

    @endpoint
    def die(self) -> None:
        signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    control.unhandled_fault_hook = lambda failure: None
    for name in ("eat", "die"):
        eater = this_host().spawn_procs().spawn("eater", Eater)
        try:
            getattr(eater, name).call_one().get(20)
        except control.SupervisionError as error:
            print(error)
