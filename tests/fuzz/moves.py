"""What comes with handles, as targets call it; see `handshakes` for what comes to the sockets."""

import dataclasses
import fcntl
import os
import struct
from collections.abc import Iterator
from functools import cache

from skipper import dataplane
from skipper.dataplane import RDMABuffer, memfd, process
from skipper.dataplane import handle as handles
from skipper.dataplane.backends.handshake import TOKEN_BYTES
from skipper.dataplane.backends.ucx import admission as ucx_admission
from skipper.dataplane.backends.ucx.card import Traits, UcxCard, pack_parts, unpack_parts
from skipper.dataplane.backends.verbs import card as verbs_card
from skipper.dataplane.backends.verbs.device import Atomics
from skipper.dataplane.handle import SHM, UCX, VERBS, Card, Handle
from skipper.dataplane.identity import OwnerId, new_owner
from skipper.dataplane.regions import HOST
from tests.fuzz.mutation import join_parts, numbers_of, split_parts
from tests.fuzz.verdicts import Broken

_SECONDS = 20.0


# Handles


def signed(card: bytes, body: bytes) -> bytes:
    """A handle whose two halves are taken for what its owner has made."""
    _know_secret()
    card = card[:0xFFFF]
    return handles.join(card, process.current().keys.seal(card, body))


@cache
def _know_secret() -> None:
    """Not that of whoever runs this: inputs are to mean the same everywhere."""
    dataplane.configure(secret=bytes(range(32)))


def read_handle(data: bytes) -> None:
    """Bytes that are said to be a handle."""
    _look_at(RDMABuffer.deserialize(data))


def read_signed_handle(data: bytes) -> None:
    """The halves of a handle, behind the check that nobody has altered them: every section is opened."""
    card, body, *_ = *split_parts(data), b"", b""
    buffer = RDMABuffer.deserialize(signed(card, body))
    _look_at(buffer)
    handle, offset, nbytes = handles.parse(card, body)
    if not 0 <= offset <= offset + nbytes <= handle.total:
        raise Broken(f"the handle of {handle} speaks of bytes [{offset}, {offset + nbytes})")
    if UCX in handle.card.sections:
        theirs = Traits.after(UcxCard.of(handle.card).worker)
        theirs.obstacle(Traits(1, 1, (1, 22, 0)))
        theirs.mismatch(Traits(1, 1, (1, 22, 0)))
    if UCX in handle.sections:
        unpack_parts(handle.sections[UCX], 1)
    if VERBS in handle.card.sections and VERBS in handle.sections:
        verbs_card.remote_of(handle)


def _look_at(buffer: RDMABuffer) -> None:
    repr(buffer)
    buffer.at(0, buffer.nbytes)
    _ = buffer.writable, buffer.owner, buffer.nbytes


def handle_seeds() -> Iterator[bytes]:
    """Handles of this process, whole."""
    for handle in _handles():
        yield signed(handle.card.encoded, handle.body(8, handle.total - 8))
    yield RDMABuffer(bytearray(64)).serialize()


def signed_handle_seeds() -> Iterator[bytes]:
    """Their halves."""
    for handle in _handles():
        yield join_parts(handle.card.encoded, handle.body(8, handle.total - 8))


def _handles() -> Iterator[Handle]:
    owner = OwnerId(1, 4711, 2, 3)
    contact = verbs_card.VerbsCard(bytes(TOKEN_BYTES), 0x1000, (7, 8), Atomics(1), "tcp:127.0.0.1:4711")
    page_key, worker = b"k" * 30, b"w" * 40 + Traits(4, 4, (1, 22, 0)).pack()
    admission = ucx_admission.Contact(bytes(TOKEN_BYTES), "tcp:127.0.0.1:4711")
    cards = {
        SHM: struct.pack("<I", 5),
        UCX: UcxCard(0x2000, 6, page_key, admission, worker).pack(),
        VERBS: contact.pack(),
    }
    bodies = {
        SHM: struct.pack("<IQQ", 5, 6, 7),
        UCX: pack_parts(b"r" * 40),
        VERBS: verbs_card.pack_body(0x3000, (1, 2)),
    }
    for numbers in ((SHM,), (UCX,), (VERBS,), (SHM, UCX, VERBS)):
        card = Card.make(owner, 9, {number: cards[number] for number in numbers})
        sections = {number: bodies[number] for number in numbers}
        yield Handle(card, 1, 2, 0x4000, 4096, True, HOST, 0, sections)


@cache
def _shared() -> tuple[RDMABuffer, Handle]:
    """A buffer of this process in memory that others may map; it is read as they do."""
    buffer = RDMABuffer(dataplane.empty_array(4096, "u1"), writable=False)
    return buffer, buffer._exported_handle()


def resolve_shared(data: bytes) -> None:
    """A handle of shared memory of a process that is there, with other numbers in it."""
    _, handle = _shared()
    (slot, total), rest = numbers_of(data, 1 << 32, 1 << 64)
    page, body = handle.card.sections[SHM], handle.sections[SHM]
    altered = bytes(left ^ right for left, right in zip(page + body, rest.ljust(64, b"\0"), strict=False))
    card = Card.make(handle.card.owner, handle.card.page_token, {SHM: altered[: len(page)]})
    other = dataclasses.replace(
        handle,
        card=card,
        slot=handle.slot ^ slot,
        total=handle.total ^ total,
        sections={SHM: altered[len(page) :]},
    )
    peer = process.current().transports["shm"].connect(card)
    try:
        remote = peer.resolve(other)
        into = bytearray(min(other.total, 8192))
        with memoryview(into) as view:
            peer.copy(dataplane.memory.contiguous(view, "into"), remote, 0, to_remote=False, timeout=_SECONDS).get()
    finally:
        peer.close()


def resolve_shared_seeds() -> Iterator[bytes]:
    """As it is, and twice as long."""
    yield bytes(12)
    yield bytes(4) + (8192 ^ 4096).to_bytes(8, "little")
    yield bytes(12) + bytes(24)


def attach_shared(data: bytes) -> None:
    """Shared memory whose header its owner has written over."""
    owner = _me()
    fd = os.memfd_create("skipper", os.MFD_ALLOW_SEALING)
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        (pages, token), header = numbers_of(data, 4, 1 << 64)
        os.ftruncate(fd, pages * page)
        os.pwrite(fd, header[:page], max(0, pages - 1) * page)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memfd.attach(owner, fd, token)
    finally:
        os.close(fd)


def attach_shared_seeds() -> Iterator[bytes]:
    """A header of another process, and none."""
    yield bytes([2]) + (9).to_bytes(8, "little") + memfd._HEADER.pack(memfd._MAGIC, 1, 9, 4096)
    yield bytes([0]) + bytes(8)


@cache
def _me() -> OwnerId:
    return new_owner()
