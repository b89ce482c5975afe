"""The connection of one lane to one owner, made anew where it broke, with the keys that were unpacked for it."""

import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dataplane import memfd
from dataplane.backends.ucx_lane import Lane

if TYPE_CHECKING:
    from types import ModuleType

    from dataplane.backends import _ucp

_KEYS = 16384  # unpacked keys kept per connection
_TOLD = 64

# Over these alone UCX emulates copies of host memory: the owner's process itself touches it, at any address that is
# named. Those for GPU memory are there wherever a GPU is, and do not help.
_EMULATING = frozenset(
    {"tcp", "posix", "sysv", "ud_verbs", "ud_mlx5", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm_copy", "rocm_ipc"}
)

Unpacked = tuple["_ucp.Endpoint", tuple["_ucp.RemoteKey", ...]]


@dataclass(slots=True)
class Keys:
    """Packed keys, and what they were last unpacked to, by connection.

    For a single registration also: the page of its epoch word, if it is mapped here, the word's address over there, and
    the way of its short copies, with how many connections had been given up when it was made.
    """

    packed: tuple[bytes, ...]
    page: memfd.Mapping | None = None
    far_word: int = 0
    way: "_ucp.Way | None" = None
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

    def __init__(self, ucp: "ModuleType", lane: Lane, worker_address: bytes, abandoned: Abandoned) -> None:
        self.lane = lane
        self.emulated = self.over_tcp = False
        self._abandoned = abandoned
        self._told = 0
        self._ucp = ucp
        self._worker_address = worker_address
        self._lock = threading.Lock()
        self._endpoint: _ucp.Endpoint | None = None
        self._unpacked: OrderedDict[bytes, _ucp.RemoteKey] = OrderedDict()

    def ready(self, keys: Keys, require_owner: Callable[[], None]) -> Unpacked:
        """The endpoint that works, with these keys unpacked for it.

        Args:
            keys: What the caller needs.
            require_owner: Called before connecting anew; raises where there is nobody to connect to.

        Raises:
            UcxError: No connection can be made.
        """
        known = keys.unpacked.get(self)
        # One that was replaced was closed before.
        if known is not None and known[0].usable and self._told == self._abandoned.count:
            return known
        with self._lock:
            endpoint = self._endpoint
            if endpoint is None or not endpoint.usable:
                require_owner()
                self._unpacked.clear()
                if endpoint is not None:
                    endpoint.close()
                    self._abandoned.note(endpoint.number)
                endpoint = self._endpoint = self._connect()
            if self._told != self._abandoned.count:
                self._told, numbers = self._abandoned.last()
                endpoint.forget(numbers)
            unpacked = endpoint, tuple([self._unpack(endpoint, packed) for packed in keys.packed])
            keys.unpacked[self] = unpacked
            return unpacked

    def close(self) -> None:
        """Cut it by force. Idempotent; the next use connects anew."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
            self._unpacked.clear()
        if endpoint is not None:
            endpoint.close()

    def _connect(self) -> "_ucp.Endpoint":
        endpoint: _ucp.Endpoint = self._ucp.Endpoint(self.lane.worker, self._worker_address, 1 + secrets.randbits(63))
        self.emulated = bool(endpoint.transports) and _EMULATING.issuperset(endpoint.transports)
        self.over_tcp = self.emulated and "tcp" in endpoint.transports
        self._told = 0
        return endpoint

    def _unpack(self, endpoint: "_ucp.Endpoint", packed: bytes) -> "_ucp.RemoteKey":
        key = self._unpacked.get(packed)
        if key is None:
            key = self._unpacked[packed] = self._ucp.RemoteKey(endpoint, packed)
            if len(self._unpacked) > _KEYS:
                self._unpacked.popitem(last=False)
        return key
