"""Handles as bytes: whatever arrives is either a handle or a `DescriptorError`."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipper.dataplane import (
    BackendUnavailableError,
    BufferDroppedError,
    DataplaneError,
    DescriptorError,
    OwnerDiedError,
    OwnerId,
    RDMABuffer,
    empty_array,
    process,
)
from skipper.dataplane import handle as handles
from skipper.dataplane.handle import Card, Handle
from skipper.dataplane.identity import new_owner
from skipper.dataplane.regions import MemoryKind
from tests.handles import parsed, proved, proved_handle

numbers = st.integers(0, (1 << 64) - 1)
sections = st.dictionaries(st.integers(0, 255), st.binary(max_size=40), max_size=3)


@st.composite
def any_handle(draw: st.DrawFn) -> tuple[Handle, int, int]:
    owner = OwnerId(draw(numbers), draw(st.integers(1, 0x7FFFFFFF)), draw(numbers), draw(numbers))
    total = draw(st.integers(1, 1 << 48))
    offset = draw(st.integers(0, total - 1))
    handle = Handle(
        card=Card.make(owner, draw(numbers), draw(sections)),
        slot=draw(st.integers(0, (1 << 32) - 1)),
        epoch=draw(numbers),
        base=draw(st.integers(0, 1 << 62)),
        total=total,
        writable=draw(st.booleans()),
        kind=draw(st.sampled_from(MemoryKind)),
        device=draw(st.integers(0, 65535)),
        sections=draw(sections),
    )
    return handle, offset, draw(st.integers(1, total - offset))


@given(any_handle())
def test_what_is_written_is_read_back(made: tuple[Handle, int, int]) -> None:
    handle, offset, nbytes = made
    assert parsed(proved_handle(handle, offset, nbytes)) == made


@given(st.binary(max_size=300))
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(DescriptorError):
        RDMABuffer.deserialize(raw)


@given(any_handle(), st.data())
def test_damage_is_refused(made: tuple[Handle, int, int], data: st.DataObject) -> None:
    handle, offset, nbytes = made
    raw = bytearray(proved_handle(handle, offset, nbytes))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DescriptorError):
        RDMABuffer.deserialize(raw)
    with pytest.raises(DescriptorError):
        RDMABuffer.deserialize(proved_handle(handle, offset, nbytes)[:at])


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_garbage_with_a_good_proof_is_parsed_or_refused(card: bytes, body: bytes) -> None:
    try:
        buffer = RDMABuffer.deserialize(proved(card, body))
    except DescriptorError:
        return
    assert buffer.nbytes > 0


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_forged_handle_of_shared_memory_never_reaches_beyond_it(data: st.DataObject) -> None:
    """As if from another process, with any numbers in it: a typed error, or exactly bytes of the owner's arena."""
    array = empty_array(4096, np.uint8)
    array[:] = 7
    genuine = process.current().export(RDMABuffer(array)._registration)  # type: ignore[arg-type]
    card, handle = genuine.card, genuine
    # Another token: no handle of this process, so that it is looked at as a foreign one. The pid is ours.
    owner = replace(card.owner, token=card.owner.token ^ 1)
    change = data.draw(st.sampled_from(["fd", "token", "offset", "total", "slot", "short", "nothing"]))
    page, memory = card.sections[handles.SHM], handle.sections[handles.SHM]
    wild = data.draw(numbers)
    if change == "fd":
        memory = (wild & 0xFFFFFFFF).to_bytes(4, "little") + memory[4:]
    elif change == "token":
        memory = memory[:4] + wild.to_bytes(8, "little") + memory[12:]
    elif change == "offset":
        memory = memory[:12] + wild.to_bytes(8, "little")
    elif change == "total":
        handle = replace(handle, total=max(4096, wild & ((1 << 48) - 1)), base=0)
    elif change == "slot":
        handle = replace(handle, slot=wild & 0xFFFFFFFF)
    elif change == "short":
        memory = memory[: wild % len(memory)]
    forged = replace(
        handle,
        card=Card.make(owner, card.page_token, {handles.SHM: page}),
        sections={handles.SHM: memory},
    )
    offset = data.draw(st.integers(0, forged.total - 1))
    nbytes = min(16, forged.total - offset)
    buffer = RDMABuffer.deserialize(proved_handle(forged, offset, nbytes))
    with pytest.raises((DescriptorError, BufferDroppedError, OwnerDiedError, BackendUnavailableError)):
        buffer.read_into(bytearray(nbytes)).get()


def test_a_handle_of_this_version_begins_with_its_magic_and_stays_short() -> None:
    raw = RDMABuffer(empty_array(10, np.uint8)).serialize()
    assert raw[:4] == b"SKb2"
    assert len(raw) < 180


def test_a_message_with_many_handles_carries_the_card_once() -> None:
    array = empty_array((100, 64), np.uint8)
    buffers = [RDMABuffer(row) for row in array]
    one, many = len(pickle.dumps(buffers[0])), len(pickle.dumps(buffers))
    assert many < one + 100 * 135
    copies = pickle.loads(pickle.dumps(buffers))
    assert [copy.nbytes for copy in copies] == [64] * 100
    assert copies[0].owner is copies[99].owner


def test_pickling_runs_no_code_of_the_sender() -> None:
    reduced = RDMABuffer(empty_array(10, np.uint8)).__reduce__()
    assert reduced[0] == RDMABuffer._from_halves
    assert [type(part) for part in reduced[1]] == [bytes, bytes]


def test_text_is_no_handle() -> None:
    with pytest.raises(TypeError):
        RDMABuffer.deserialize("SKb1")  # type: ignore[arg-type]


def test_a_section_too_long_for_its_length_is_refused() -> None:
    with pytest.raises(DataplaneError, match="65535"):
        Card.make(new_owner(), 0, {1: bytes(70_000)})
