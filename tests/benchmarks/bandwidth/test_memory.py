import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.memory import TILE, HostMemory, allocate, fill, first_mismatch
from skipper.benchmarks.bandwidth.messages import Offer

LENGTH = 2 * TILE + 1000


def pattern(seed: int, *, offset: int = 0, length: int = LENGTH) -> HostMemory:
    memory = HostMemory(np.zeros(length, np.uint8))
    fill(memory, 0, length, seed=seed, offset=offset)
    return memory


def test_the_tile_is_a_prime_just_below_a_power_of_two() -> None:
    assert all(TILE % divisor for divisor in range(2, int(TILE**0.5) + 1))
    assert TILE < 1 << 20


@given(offset=st.integers(0, 3 * TILE), length=st.integers(1, 5000))
def test_the_pattern_depends_on_the_position_in_the_stream_alone(offset: int, length: int) -> None:
    whole = pattern(1, length=offset + length) if offset + length < LENGTH else None
    part = pattern(1, offset=offset, length=length)
    assert first_mismatch(part, 0, length, seed=1, offset=offset) is None
    if whole is not None:
        assert np.array_equal(whole.peek(offset, offset + length), part.peek(0, length))


@given(at=st.integers(0, LENGTH - 1))
def test_one_wrong_byte_is_found_wherever_it_is(at: int) -> None:
    memory = pattern(2)
    right = int(memory.peek(at, at + 1)[0])
    memory.put(at, np.array([right ^ 1], np.uint8))
    mismatch = first_mismatch(memory, 0, LENGTH, seed=2, offset=0)
    assert mismatch is not None
    assert (mismatch.at, mismatch.expected, mismatch.found) == (at, right, right ^ 1)


@pytest.mark.parametrize("shift", [1, 64, 4096, 1 << 16, 1 << 20])
def test_bytes_at_the_wrong_place_are_wrong_bytes(shift: int) -> None:
    assert first_mismatch(pattern(3, offset=shift), 0, LENGTH, seed=3, offset=0) is not None


def test_bytes_of_another_seed_are_wrong_bytes() -> None:
    assert first_mismatch(pattern(4), 0, LENGTH, seed=5, offset=0) is not None


@pytest.mark.parametrize("shared", [False, True])
def test_the_yardstick_copies_the_beginning(shared: bool) -> None:
    source, target = pattern(6, length=4096), allocate("host", 4096, shared=shared)
    target.copier(source, 1000)()
    assert np.array_equal(target.peek(0, 1000), source.peek(0, 1000))
    assert not target.peek(1000, 4096).any()
    with pytest.raises(ValueError, match="cannot be copied"):
        target.copier(source, 4097)


def offer(*addresses: int, pid: int | None = None, started: int | None = None) -> Offer:
    pid = os.getpid() if pid is None else pid
    began = ceiling.started(pid) if started is None else started
    assert began is not None
    return Offer(register_us=0.0, boot_id=ceiling.boot_id(), pid=pid, started=began, addresses=list(addresses))


@pytest.mark.parametrize("op", ["read", "write"])
def test_the_kernels_own_copy_moves_every_buffer_in_order(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Calls as short as these are split as those of many GiB are.
    monkeypatch.setattr(ceiling, "_MOST_BYTES", 5000)
    monkeypatch.setattr(ceiling, "_MOST_IOVECS", 2)
    pieces = [pattern(seed, length=8000) for seed in range(3)]
    local = pattern(7, length=3 * 7000)
    assert local.address is not None
    addresses = [piece.address for piece in pieces if piece.address is not None]
    before = np.concatenate([piece.peek(0, 7000) for piece in pieces]), local.peek(0, 21000).copy()
    assert ceiling.kernel_copier(op, offer(*addresses), 7000, local=local.address) is not None
    after = np.concatenate([piece.peek(0, 7000) for piece in pieces]), local.peek(0, 21000)
    moved = before[0] if op == "read" else before[1]
    assert all(np.array_equal(side, moved) for side in after)


def test_the_kernels_own_copy_is_left_out_where_it_cannot_be_had() -> None:
    target = HostMemory(np.zeros(10, np.uint8))
    assert target.address is not None
    assert ceiling.kernel_copier("read", offer(), 10, local=target.address) is None
    assert ceiling.kernel_copier("read", offer(target.address, started=1), 10, local=target.address) is None
    assert ceiling.kernel_copier("read", offer(4096), 10, local=target.address) is None
    assert ceiling.started(2**22 + 1) is None
