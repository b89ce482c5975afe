"""The connection of one lane to one owner, made anew where it broke, with the keys that were unpacked for it."""

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skipper.dataplane import memfd
from skipper.dataplane.backends.exchange import WireUpKeys
from skipper.dataplane.backends.ucx.admission import Admission, Contact
from skipper.dataplane.backends.ucx.lane import Lane
from skipper.dataplane.errors import TransferTimeoutError

if TYPE_CHECKING:
    from types import ModuleType

    from skipper.dataplane.backends.ucx import _ucp

_KEYS = 16384  # unpacked keys kept per connection
_TOLD = 64

# Over these alone UCX emulates copies of host memory: the owner's process itself touches it, at any address that is
# named. Those for GPU memory are there wherever a GPU is, and do not help.
_EMULATING = frozenset(
    {"tcp", "posix", "sysv", "ud_verbs", "ud_mlx5", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm_copy", "rocm_ipc"}
)

Unpacked = tuple["_ucp.Endpoint", tuple["_ucp.RemoteKey", ...], Lane]
"""What an operation needs: an endpoint, the keys for it, the lane that it belongs to."""


@dataclass(slots=True)
class Keys:
    """Packed keys, and what they were last unpacked to, by connection.

    For a single registration also: the page of its epoch word, if it is mapped here, the word's address over there, and
    the way of its short copies, with its lane and how many connections had been given up when it was made.
    """

    packed: tuple[bytes, ...]
    page: memfd.Mapping | None = None
    far_word: int = 0
    way: "tuple[_ucp.Way, Lane] | None" = None
    way_told: int = 0
    unpacked: "dict[Connection, Unpacked]" = field(default_factory=dict)


class Abandoned:
    """The numbers of the connections to one owner that were given up last. Thread-safe.

    What such a one had sent may still lie in a socket, until a link heals or an owner goes on. It must not land on top
    of what was written since, so the owner is told to ignore it before anything else is sent.

    Attributes:
        count: Of all that ever were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._last: deque[int] = deque(maxlen=_TOLD)

    def note(self, number: int) -> None:
        """Add one; once is enough."""
        with self._lock:
            if number not in self._last:
                self._last.append(number)
                self.count += 1

    def last(self) -> tuple[int, list[int]]:
        """The count, and those that the owner should know."""
        with self._lock:
            return self.count, list(self._last)


class Connection:
    """Thread-safe. Nothing is connected before the first use.

    Attributes:
        emulated: Whether it has no transport that reaches the owner's memory by itself; known once connected.
        over_tcp: Whether bytes travel over TCP, for that reason.
    """

    def __init__(
        self,
        ucp: "ModuleType",
        lane: Lane,
        worker_address: bytes,
        contact: Contact | None,
        wire_up_keys: WireUpKeys,
        abandoned: Abandoned,
        lane_instead: Callable[[Lane], Lane],
        *,
        far: bool,
    ) -> None:
        """Of a lane to a worker.

        Args:
            ucp: The binding.
            lane: Carries it.
            worker_address: Of the owner.
            contact: Where to ask before connecting over TCP; None: it has none.
            wire_up_keys: To ask there.
            abandoned: The connections to this owner that were given up.
            lane_instead: Returns another lane for the same purpose.
            far: Whether the owner is on another host; else TCP is used only where one of the two knows nothing else.
        """
        self._lane = lane
        self._leave_lane = lane.join(self)
        self._lane_instead = lane_instead
        self._used_tcp = False
        self.emulated = self.over_tcp = False
        self._abandoned = abandoned
        self._told = 0
        self._ucp = ucp
        self._worker_address = worker_address
        self._contact = contact
        self._wire_up_keys = wire_up_keys
        self._asks_first = contact is not None and (far or contact.within_host)
        self._lock = threading.Lock()
        self._endpoint: _ucp.Endpoint | None = None
        self._unpacked: OrderedDict[bytes, _ucp.RemoteKey] = OrderedDict()

    def ready(self, keys: Keys, require_owner: Callable[[], None], deadline: float) -> Unpacked:
        """The endpoint that works, with these keys unpacked for it.

        Args:
            keys: What the caller needs.
            require_owner: Called before connecting anew; raises where there is nobody to connect to.
            deadline: On CLOCK_MONOTONIC.

        Raises:
            UcxError: No connection can be made.
            TransferError: The owner does not let this process connect.
            TransferTimeoutError: The deadline passed before the owner had answered.
        """
        known = keys.unpacked.get(self)
        # One that was replaced was closed before.
        if known is not None and known[0].usable and self._told == self._abandoned.count:
            return known
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferTimeoutError("the deadline passed before the owner had let this process connect")
        try:
            endpoint = self._endpoint
            if endpoint is None or not endpoint.usable:
                require_owner()
                self._unpacked.clear()
                if endpoint is not None:
                    endpoint.close()
                    self._abandoned.note(endpoint.number)
                endpoint = self._endpoint = self._connect(deadline)
            if self._told != self._abandoned.count:
                self._told, numbers = self._abandoned.last()
                endpoint.forget(numbers)
            unpacked = endpoint, tuple([self._unpack(endpoint, packed) for packed in keys.packed]), self._lane
            keys.unpacked[self] = unpacked
            return unpacked
        finally:
            self._lock.release()

    def close(self) -> None:
        """Cut it by force. Idempotent; the next use connects anew."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
            self._unpacked.clear()
        if endpoint is not None:
            endpoint.close()

    def _connect(self, deadline: float) -> "_ucp.Endpoint":
        endpoint = None if self._asks_first else self._new_endpoint()
        if self._contact is not None and (endpoint is None or _may_use_tcp(endpoint)):
            if endpoint is not None:
                endpoint.close()
                self._asks_first = self._used_tcp = True
            endpoint = self._admitted(self._contact, deadline)
        assert endpoint is not None
        self.emulated = bool(endpoint.transports) and _EMULATING.issuperset(endpoint.transports)
        self.over_tcp = self.emulated and "tcp" in endpoint.transports
        self._told = 0
        return endpoint

    def _admitted(self, contact: Contact, deadline: float) -> "_ucp.Endpoint":
        # Two workers number their connections; where one has missed any, the owner's would connect to here, and nobody
        # listens here. So only a worker that has not met the owner's can connect to it.
        if self._used_tcp:
            self._lane = self._lane_instead(self._lane)
            self._leave_lane()
            self._leave_lane = self._lane.join(self)
            self._used_tcp = False
        with Admission(contact, self._wire_up_keys(), self._lane.sources, deadline) as admission:
            endpoint = self._new_endpoint()
            try:
                if _may_use_tcp(endpoint):
                    self._used_tcp = True
                    admission.connected()
            except BaseException:
                endpoint.close()
                raise
        return endpoint

    def _new_endpoint(self) -> "_ucp.Endpoint":
        endpoint: _ucp.Endpoint = self._ucp.Endpoint(self._lane.worker, self._worker_address, 1 + secrets.randbits(63))
        return endpoint

    def _unpack(self, endpoint: "_ucp.Endpoint", packed: bytes) -> "_ucp.RemoteKey":
        key = self._unpacked.get(packed)
        if key is None:
            key = self._unpacked[packed] = self._ucp.RemoteKey(endpoint, packed)
            if len(self._unpacked) > _KEYS:
                self._unpacked.popitem(last=False)
        return key


def _may_use_tcp(endpoint: "_ucp.Endpoint") -> bool:
    """Some versions of UCX do not tell."""
    return not endpoint.transports or "tcp" in endpoint.transports
