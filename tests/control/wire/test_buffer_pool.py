"""What was received before takes what comes next, but never while somebody still has it."""

import pytest

from skipper.control.wire import buffer_pool
from skipper.control.wire.buffer_pool import BufferPool
from tests.control.conftest import wait_until

NBYTES = 1 << 20


def filled(kept: BufferPool, content: bytes, *, is_bytes: bool) -> bytes | bytearray:
    value, memory = kept.allocate(len(content), is_bytes=is_bytes)
    memory[:] = content
    return value


@pytest.mark.parametrize("is_bytes", [True, False])
def test_an_object_that_was_let_go_is_filled_again(is_bytes: bool) -> None:
    kept = BufferPool()
    value = filled(kept, bytes(NBYTES), is_bytes=is_bytes)
    assert type(value) is (bytes if is_bytes else bytearray)
    first = id(value)
    del value
    again = filled(kept, b"\x01" * NBYTES, is_bytes=is_bytes)
    assert id(again) == first
    assert again.count(1) == NBYTES


@pytest.mark.parametrize("is_bytes", [True, False])
def test_an_object_that_somebody_still_has_is_never_touched(is_bytes: bool) -> None:
    kept = BufferPool()
    held = filled(kept, bytes(NBYTES), is_bytes=is_bytes)
    view = memoryview(filled(kept, b"\x01" * NBYTES, is_bytes=is_bytes))[7:9]
    others = [filled(kept, bytes([number]) * NBYTES, is_bytes=is_bytes) for number in range(2, 6)]
    assert len({id(value) for value in (held, *others)}) == 5
    assert held.count(0) == NBYTES
    assert bytes(view) == b"\x01\x01"
    assert [value[0] for value in others] == [2, 3, 4, 5]


def test_an_object_of_another_size_or_type_is_not_taken() -> None:
    kept = BufferPool()
    filled(kept, bytes(NBYTES), is_bytes=True)
    assert len(filled(kept, bytes(NBYTES + 1), is_bytes=True)) == NBYTES + 1
    assert type(filled(kept, bytes(NBYTES), is_bytes=False)) is bytearray


def test_bytes_that_are_filled_again_have_the_hash_of_what_they_hold() -> None:
    kept = BufferPool()
    value = filled(kept, bytes(NBYTES), is_bytes=True)
    first, before = id(value), hash(value)
    del value
    value = filled(kept, b"\x01" * NBYTES, is_bytes=True)
    assert id(value) == first
    assert hash(value) == hash(b"\x01" * NBYTES) != before


def test_what_is_kept_is_bounded_and_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "KEPT_NBYTES", 3 * NBYTES)
    kept = BufferPool()
    held = [filled(kept, bytes(NBYTES), is_bytes=True) for _ in range(5)]
    assert {id(value) for _, value in kept._kept} == {id(value) for value in held[2:]}
    monkeypatch.setattr(buffer_pool, "KEPT_S", 0.02)
    soon_forgotten = BufferPool()
    filled(soon_forgotten, bytes(NBYTES), is_bytes=True)
    wait_until(lambda: not soon_forgotten._kept, "what nobody needs to be forgotten")
