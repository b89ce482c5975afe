"""A process is stopped that has something to do at its end: ``tidy_script.py LOG MODULE_TO_PRELOAD*``."""

import atexit
import os
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import TextIO

from skipper import control
from skipper.control import Actor, endpoint, this_host


class Thing:
    pass


class Tidy(Actor):
    thing: Thing
    file: TextIO

    def __init__(self, log: str) -> None:
        def work() -> None:
            time.sleep(0.2)
            note(log, "thread")

        atexit.register(note, log, "atexit of the actor")
        Tidy.thing = Thing()
        weakref.finalize(Tidy.thing, note, log, "finalizer")
        Tidy.file = Path(f"{log}.buffered").open("w")  # noqa: SIM115 - left open on purpose
        Tidy.file.write("buffered")
        threading.Thread(target=work, daemon=False).start()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def note(log: str, text: str) -> None:
    with open(log, "a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    log, *preload = sys.argv[1:]
    control.configure(preload=preload)
    procs = this_host().spawn_procs(bootstrap=partial(atexit.register, note, log, "atexit of the bootstrap"))
    procs.spawn("tidy", Tidy, log).pid.call_one().get()
    procs.stop().get()
