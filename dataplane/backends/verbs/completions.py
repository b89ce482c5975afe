"""The completion queue of a device, with the file descriptor to sleep on until something completes."""

import os
from typing import Any

from skipper.dataplane.backends.verbs.device import Device, pyverbs

_CHANNEL = "anon_inode:[infinibandevent]"


class Completions:
    """A completion queue with its channel. For one thread at a time.

    Attributes:
        queue: pyverbs' own object, for queue pairs to complete on.
        events: Readable while there is an event to be taken by `acknowledge`.
    """

    def __init__(self, device: Device) -> None:
        cq = pyverbs("cq")
        known = descriptors_of(_CHANNEL)
        self._channel = cq.CompChannel(device.context)
        (self.events,) = descriptors_of(_CHANNEL) - known
        # Whoever finds the event gone, because another thread took it, must not block.
        os.set_blocking(self.events, False)
        self.queue = cq.CQ(device.context, device.completions, None, self._channel)

    def poll(self, most: int) -> list[Any]:
        """What has completed, at most `most`; never waits."""
        found: list[Any] = self.queue.poll(most)[1]
        return found

    def arm(self) -> None:
        """Let the next completion be an event. What completed before is none: `poll` once more before sleeping."""
        self.queue.req_notify()

    def acknowledge(self) -> None:
        """Take the event."""
        self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)


def descriptors_of(file: str) -> set[int]:
    """Descriptors of this process that are open on such a file: pyverbs tells no other way which one is an object's."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == file:
                found.add(int(name))
        except FileNotFoundError:
            continue  # closed since, as that of the listing itself is
    return found
