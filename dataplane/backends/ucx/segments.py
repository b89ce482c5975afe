"""The largest pieces that a process sends and takes over TCP.

UCX does not tell its peers, and ends a process that gets a larger piece than its own size. So handles carry both sizes.
"""

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_MARKED = struct.Struct("<4sII")
_MARK = b"segs"
_SIZE = re.compile(r"(\d+)([kmg]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SENDS, _TAKES = "TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"


@dataclass(frozen=True, slots=True)
class Segments:
    """The sizes of one process.

    Attributes:
        sends: Bytes of the largest piece that it sends; 0 where that is not known.
        takes: Bytes of the largest that it can take; likewise.
    """

    sends: int
    takes: int

    @classmethod
    def of(cls, chosen: Mapping[str, str]) -> Self:
        """The sizes of this process, from the options that are set in code and those of the environment."""
        return cls(*(_size(chosen.get(name) or os.environ.get(f"UCX_{name}", "")) for name in (_SENDS, _TAKES)))

    @classmethod
    def after(cls, address: bytes) -> Self:
        """Read what `pack` has put behind a worker's address, if it has."""
        if len(address) >= _MARKED.size:
            mark, sends, takes = _MARKED.unpack_from(address, len(address) - _MARKED.size)
            if mark == _MARK:
                return cls(sends, takes)
        return cls(0, 0)

    def pack(self) -> bytes:
        """As bytes behind the worker's address; UCX itself knows where the address ends."""
        return _MARKED.pack(_MARK, self.sends, self.takes)

    def obstacle(self, peer: "Segments") -> str | None:
        """Why the two cannot talk over TCP; None where they can, as far as is known."""
        ways = (self.sends, peer.takes, "here", "there"), (peer.sends, self.takes, "there", "here")
        for sends, takes, one, other in ways:
            if 0 < takes < sends:
                return (
                    f"{_SENDS} is {sends} bytes {one} and {_TAKES} {takes} {other}, where a larger piece would end the "
                    "process; set both to the same wherever one talks to the other (dataplane.configure(ucx={...}))"
                )
        return None


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _UNITS[found[2].lower()] if found else 0
    return size if size < 1 << 32 else 0
