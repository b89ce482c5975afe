"""The connection of one lane to one owner, made anew where it broke, with the keys that were unpacked for it."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dataplane import memfd
from dataplane.backends.ucx_lane import Lane

if TYPE_CHECKING:
    from types import ModuleType

    from dataplane.backends import _ucp

_KEYS = 16384  # unpacked keys kept per connection

Unpacked = tuple["_ucp.Endpoint", tuple["_ucp.RemoteKey", ...]]


@dataclass(slots=True)
class Keys:
    """Packed keys, and what they were last unpacked to, by connection.

    For a single registration also: the page of its epoch word, if it is mapped here, and the word's address over there.
    """

    packed: tuple[bytes, ...]
    page: memfd.Mapping | None = None
    far_word: int = 0
    unpacked: "dict[Connection, Unpacked]" = field(default_factory=dict)


class Connection:
    """Thread-safe. Nothing is connected before the first use."""

    def __init__(self, ucp: "ModuleType", lane: Lane, worker_address: bytes) -> None:
        self.lane = lane
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
        if known is not None and known[0].usable:  # one that was replaced was closed before
            return known
        with self._lock:
            endpoint = self._endpoint
            if endpoint is None or not endpoint.usable:
                require_owner()
                self._unpacked.clear()
                if endpoint is not None:
                    endpoint.close()
                endpoint = self._endpoint = self._ucp.Endpoint(self.lane.worker, self._worker_address)
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

    def _unpack(self, endpoint: "_ucp.Endpoint", packed: bytes) -> "_ucp.RemoteKey":
        key = self._unpacked.get(packed)
        if key is None:
            key = self._unpacked[packed] = self._ucp.RemoteKey(endpoint, packed)
            if len(self._unpacked) > _KEYS:
                self._unpacked.popitem(last=False)
        return key
