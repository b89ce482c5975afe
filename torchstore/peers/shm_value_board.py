"""The board: shared memory with the newest versions of small values, for readers on the controller's host.

Once a reader has requested a small value, the controller posts it, and every later version, in memory that other
processes of its host map. A reader copies the record at the place that it knows and checks it: a digest distinguishes a
complete record from one that is being written, and a serial number, unique for every record, identifies the record's
value. In any other case it asks the controller, as if there were no board.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import NamedTuple

import numpy as np

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.errors import StoreError
from skipper.torchstore.support.lru_cache import LRUCache

PAGE_NBYTES = 1 << 20
_PAGES = 64
_SMALLEST_NBYTES = 128  # of a record's space; each larger kind has twice the space of the previous one
_KEPT_PLACES = 4096  # places kept by each reader
_READS = 3  # attempts to read a record that is being written

_DIGEST_NBYTES = 8
_HEAD = struct.Struct("<QQI")  # serial, version, length of the value; the digest of all of it comes first
_VALUE_AT = _DIGEST_NBYTES + _HEAD.size
_BLANK = bytes(_VALUE_AT)


class BoardPlace(NamedTuple):
    """The place where a value is posted.

    Attributes:
        page: The number of the board's page.
        offset: The offset of the record in it, in bytes.
        nbytes: Space of the record.
        serial: Its number, never 0.
    """

    page: int
    offset: int
    nbytes: int
    serial: int


_ANSWER = struct.Struct("<QIIIQ")  # version, and the place; its serial is 0 if the value is not posted


def pack_answer(version: int, place: BoardPlace | None, value: bytes) -> bytes:
    """The controller's answer to a reader of a small value."""
    return _ANSWER.pack(version, *(place or (0, 0, 0, 0))) + value


def open_answer(packed: bytes) -> tuple[int, BoardPlace | None, bytes]:
    """The inverse of `pack_answer`: the version, the place of later ones, and the value.

    Raises:
        StoreError: It is cut short, or gives an impossible place for a posted value.
    """
    if len(packed) < _ANSWER.size:
        raise StoreError(f"the controller's answer has {len(packed)} bytes, and {_ANSWER.size} or more were expected")
    version, *numbers = _ANSWER.unpack_from(packed)
    place = BoardPlace(*numbers)
    if place.serial and not _VALUE_AT <= place.nbytes <= PAGE_NBYTES - place.offset:
        raise StoreError(f"the controller says that a value is posted at {place}, which is on no page")
    return version, place if place.serial else None, packed[_ANSWER.size :]


@dataclass(slots=True)
class _Posted:
    place: BoardPlace
    value: bytes


class ValueBoard:
    """The controller's side. For one thread."""

    def __init__(self) -> None:
        self._pages: list[tuple[memoryview, RDMABuffer]] = []
        self._used = PAGE_NBYTES  # of the last page
        self._free: dict[int, list[tuple[int, int]]] = {}  # by space: page and offset
        self._posted: dict[str, _Posted] = {}
        self._serials = count(1)

    def __contains__(self, key: object) -> bool:
        return key in self._posted

    def place(self, key: str, version: int, value: bytes) -> BoardPlace | None:
        """The place of a value and its later versions; posts the value if needed. None: there is no place."""
        posted = self._posted.get(key)
        if posted is not None:
            return posted.place
        place = self._allot(len(value))
        if place is not None:
            self._posted[key] = _Posted(place, value)
            self._write(place, version, value)
        return place

    def post(self, key: str, version: int, value: bytes) -> None:
        """Replace the posted value of a key; an empty value, or one without space, removes it."""
        posted = self._posted[key]
        if not value or _VALUE_AT + len(value) > posted.place.nbytes:
            self._take_down(key)
        elif value is not posted.value:
            posted.value = value
            self._write(posted.place, version, value)

    def share(self, page: int) -> RDMABuffer:
        """A page, for readers."""
        return self._pages[page][1]

    def close(self) -> None:
        """Remove everything."""
        for _, buffer in self._pages:
            buffer.drop()
        self._pages.clear()
        self._free.clear()
        self._posted.clear()
        self._used = PAGE_NBYTES

    def _allot(self, nbytes: int) -> BoardPlace | None:
        room = _SMALLEST_NBYTES
        while room < _VALUE_AT + nbytes:
            room *= 2
        free = self._free.get(room)
        if free:
            page, offset = free.pop()
            return BoardPlace(page, offset, room, next(self._serials))
        if room > PAGE_NBYTES - self._used and not self._add_page():
            return None
        offset = self._used
        self._used += room
        return BoardPlace(len(self._pages) - 1, offset, room, next(self._serials))

    def _add_page(self) -> bool:
        if len(self._pages) == _PAGES:
            return False
        try:
            memory = dataplane.empty_array(PAGE_NBYTES, np.uint8)
            self._pages.append((memory.data, RDMABuffer(memory, writable=False)))
        except DataplaneError:  # the system has no memory left: readers continue to ask
            return False
        self._used = 0
        return True

    def _write(self, place: BoardPlace, version: int, value: bytes) -> None:
        head = _HEAD.pack(place.serial, version, len(value))
        record = _digest(head, value) + head + value
        self._pages[place.page][0][place.offset : place.offset + len(record)] = record

    def _take_down(self, key: str) -> None:
        page, offset, room, _ = self._posted.pop(key).place
        self._pages[page][0][offset : offset + _VALUE_AT] = _BLANK
        self._free.setdefault(room, []).append((page, offset))


class BoardReader:
    """The places on the board that one client knows. Thread-safe."""

    def __init__(self) -> None:
        self._places: LRUCache[str, BoardPlace] = LRUCache(_KEPT_PLACES)
        self._pages: dict[int, RDMABuffer | None] = {}
        self._lock = Lock()

    def learn(self, key: str, place: BoardPlace) -> None:
        """Remember where a value is posted."""
        with self._lock:
            self._places.put(key, place)

    def forget(self, keys: Iterable[str]) -> None:
        """Stop looking for these keys."""
        with self._lock:
            for key in keys:
                self._places.pop(key)

    def missing_page(self, key: str) -> int | None:
        """The page to request before a key can be looked up; None: none."""
        with self._lock:
            place = self._places.get(key)
        return None if place is None or place.page in self._pages else place.page

    def add_page(self, page: int, buffer: RDMABuffer) -> None:
        """Use a page from now on, if its memory can be mapped here."""
        try:
            mapped = buffer.backend in ("shm", "local")
            if mapped:
                buffer.route()  # found once for all parts of it
        except DataplaneError:
            mapped = False
        self._pages[page] = buffer if mapped else None

    def look(self, key: str) -> tuple[int, bytes] | None:
        """The newest version of a value, and its bytes; None: ask the controller."""
        with self._lock:
            place = self._places.get(key)
        page = None if place is None else self._pages.get(place.page)
        if place is None or page is None:
            return None
        for _ in range(_READS):
            record = bytearray(place.nbytes)
            try:
                page.at(place.offset, place.nbytes).read_into(record).get()
            except DataplaneError:
                break  # the controller, if it still exists, reports the state of the store
            serial, version, nbytes = _HEAD.unpack_from(record, _DIGEST_NBYTES)
            if serial != place.serial:
                break
            value = bytes(record[_VALUE_AT : _VALUE_AT + nbytes])
            if _digest(record[_DIGEST_NBYTES:_VALUE_AT], value) == record[:_DIGEST_NBYTES]:
                return version, value
        else:
            return None  # it changes faster than it can be read
        self.forget((key,))
        return None


def _digest(head: bytes | bytearray, value: bytes) -> bytes:
    return blake2b(head + value, digest_size=_DIGEST_NBYTES).digest()
