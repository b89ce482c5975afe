"""Talks to an actor that has stopped, while the script ends and waits for another one."""

import threading
import time

from skipper import control
from skipper.control import Actor, endpoint, this_host


class Worker(Actor):
    @endpoint
    def hear(self) -> None:
        pass

    @endpoint
    def hang(self) -> None:
        time.sleep(60)


if __name__ == "__main__":
    worker = this_host().spawn_procs().spawn("worker", Worker)
    hanging = this_host().spawn_procs().spawn("hanging", Worker)
    worker.hear.call_one().get()
    hanging.hang.broadcast()  # so that the end takes its grace, while the worker has stopped at once

    def talk_on() -> None:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            worker.hear.broadcast()
            time.sleep(0.01)

    threading.Thread(target=talk_on, daemon=True).start()
    control.shutdown(grace_s=1.5)
    print("ended")
