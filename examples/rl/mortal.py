"""The actor that dies on request, and takes its process along, whatever the other actors of that are doing."""

from __future__ import annotations

import os
import signal

from skipper.control import Actor, endpoint


class Mortal(Actor):
    """Each actor has a thread of its own, so this one hears of its end while another computes."""

    @endpoint
    def die(self) -> None:
        """End this process as a fault of its machine would."""
        os.kill(os.getpid(), signal.SIGKILL)
