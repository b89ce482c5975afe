"""Messages to an owner that serves copies and atomic operations over UCX, as targets call it.

They come from a UCX client of the test's own, in the same process, so that a crash of the owner is one of the child.
"""

import ctypes
import importlib.util
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from skipper.dataplane.backends.ucx.card import UcxCard
from skipper.dataplane.epochs import WORD
from tests.fuzz.mutation import join_parts, split_parts
from tests.fuzz.verdicts import Broken, Void

_ASK_ATOMIC, _ASK_READ, _ASK_WRITE, _FORGET = 1, 3, 5, 6
_HEAD = struct.Struct("<5Q")  # connection, ticket, slot, count, past_cache
_ITEM = struct.Struct("<4Q")  # word_at, word_expected, at, nbytes
_MOST_HEADER_NBYTES = 4096
_NBYTES = 4096
_ROUNDS = 50

# Addresses are others in every process: a word that begins so stands for one of these, plus what follows.
_BASE, _WORD, _EPOCH = 0xB0B0 << 48, 0xC0C0 << 48, 0xD0D0 << 48
_OFFSET = (1 << 48) - 1


class _Owner:
    """A buffer that may be read and written in the middle of memory that may not, and a client of its worker."""

    def __init__(self) -> None:
        dataplane.configure(backend="ucx")
        self.memory = bytearray(3 * _NBYTES)
        self.middle = memoryview(self.memory)[_NBYTES : 2 * _NBYTES]
        self.buffer = RDMABuffer(self.middle)
        handle = self.buffer._exported_handle()
        section = UcxCard.of(handle.card)
        word = section.page_address + handle.slot * WORD
        self.stands_for = {_BASE: handle.base, _WORD: word, _EPOCH: handle.epoch}
        self.client = _client()
        status = self.client.sender_open(section.worker)
        if status < 0:
            raise Broken(f"UCX does not connect to the owner: {status}")

    def translate(self, header: bytes) -> bytes:
        """A header with this process' addresses."""
        words = bytearray(header)
        for at in range(0, len(words) - 7, 8):
            (word,) = struct.unpack_from("<Q", words, at)
            known = self.stands_for.get(word & ~_OFFSET)
            if known is not None:
                struct.pack_into("<Q", words, at, (known + (word & _OFFSET)) % (1 << 64))
        return bytes(words)

    def is_whole(self) -> bool:
        """Whether nothing was written but the buffer."""
        return not any(self.memory[:_NBYTES]) and not any(self.memory[2 * _NBYTES :])


@cache
def _owner() -> _Owner:
    return _Owner()


def _client() -> ctypes.CDLL:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        raise Void
    home = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "ucx_sender.so"
        source = Path(__file__).with_name("ucx_sender.c")
        libraries = [f"-L{home / 'lib'}", "-l:libucp.so.0", "-l:libucs.so.0", "-Wl,--allow-shlib-undefined"]
        command = ["gcc", "-O1", "-shared", "-fPIC", "-isystem", home / "include", source, "-o", made, *libraries]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(made))


def ask_owner(data: bytes) -> None:
    """Messages of any number and content; the owner still does what it is asked for afterwards."""
    owner = _owner()
    for part in split_parts(data)[:8]:
        header, content = part[1 : 1 + _MOST_HEADER_NBYTES], b"content " * 64
        if not part:
            continue
        header = owner.translate(header)
        status = owner.client.sender_send(part[0] % 8, header, len(header), content, len(content), _ROUNDS)
        if status < 0:
            raise Broken(f"the connection to the owner broke: {status}")
    if not owner.is_whole():
        raise Broken("memory beside the buffer was written")


def owner_seeds() -> Iterator[bytes]:
    """A read, a write, an atomic operation, a connection that is given up; and of each one that is refused."""
    head = _HEAD.pack(1, 2, 0, 1, 0)
    inside = _ITEM.pack(_WORD, _EPOCH, _BASE + 8, 512)
    outside = _ITEM.pack(_WORD, _EPOCH, _BASE + _NBYTES - 256, 512)
    two = (
        _HEAD.pack(1, 2, 0, 2, 1) + _ITEM.pack(_WORD, _EPOCH, _BASE, 256) + _ITEM.pack(_WORD, _EPOCH, _BASE + 256, 256)
    )
    for item in (inside, outside):
        yield join_parts(bytes([_ASK_READ]) + head + item)
        yield join_parts(bytes([_ASK_WRITE]) + head + item)
        yield join_parts(bytes([_ASK_ATOMIC]) + head + item + struct.pack("<3Q", 1, 2, 3))
    yield join_parts(bytes([_ASK_WRITE]) + two, bytes([_ASK_READ]) + two)
    yield join_parts(bytes([_FORGET]) + struct.pack("<2Q", 1, 2), bytes([_ASK_WRITE]) + head + inside)
