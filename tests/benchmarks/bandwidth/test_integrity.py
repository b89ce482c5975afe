"""The proof is only worth something if it fails when it should: every fault here must be named."""

from collections.abc import Callable

import numpy as np
import pytest

from skipper.benchmarks.bandwidth import memory
from skipper.benchmarks.bandwidth.integrity import Direction, directions, prove_after, prove_before
from skipper.benchmarks.bandwidth.memory import HostMemory
from skipper.benchmarks.bandwidth.messages import Mismatch, Where, Workload
from skipper.benchmarks.errors import IntegrityError

SIZE = 3000
BATCH = 2
TOTAL = SIZE * BATCH

Move = Callable[[np.ndarray, np.ndarray], None]


class Desk:
    """An end whose transfers are whatever a test says, within one process."""

    def __init__(self) -> None:
        self.bytes: dict[Where, np.ndarray] = {where: np.zeros(TOTAL, np.uint8) for where in ("exposed", "local")}
        self.move: Callable[[], None] = lambda: None
        self.blind = False

    def fill(self, where: Where, size: int, *, seed: int) -> None:
        memory.fill(HostMemory(self.bytes[where]), 0, TOTAL, seed=seed, offset=0)

    def verify(self, where: Where, size: int, *, seed: int) -> Mismatch | None:
        if self.blind:
            return None
        return memory.first_mismatch(HostMemory(self.bytes[where]), 0, TOTAL, seed=seed, offset=0)

    def corrupt(self, where: Where, size: int, *, at: int) -> None:
        self.bytes[where][at] ^= 0xFF

    def transfer(self, size: int, *, runs: int) -> int:
        for _ in range(runs):
            self.move()
        return 1


def whole(to: np.ndarray, source: np.ndarray) -> None:
    to[:] = source


def without_the_last_byte(to: np.ndarray, source: np.ndarray) -> None:
    to[:-1] = source[:-1]


def one_byte_late(to: np.ndarray, source: np.ndarray) -> None:
    to[1:] = source[:-1]


def buffers_swapped(to: np.ndarray, source: np.ndarray) -> None:
    to[:] = np.roll(source, SIZE)


def nothing(to: np.ndarray, source: np.ndarray) -> None:
    pass


def with_damage_to_the_source(to: np.ndarray, source: np.ndarray) -> None:
    to[:] = source
    source[0] ^= 1


def workload(op: str, *, bidirectional: bool) -> Workload:
    return Workload(
        op=op,
        backend="auto",
        mem="host",
        batch=BATCH,
        largest=SIZE,
        bidirectional=bidirectional,
        timeout_s=1.0,
    )


def ends(op: str, *, bidirectional: bool, move: Move) -> tuple[Desk, Desk, list[Direction]]:
    near, far = Desk(), Desk()
    for mover, owner in ((near, far), (far, near)):
        mine, theirs = mover.bytes["local"], owner.bytes["exposed"]
        if op == "read":
            mover.move = lambda mine=mine, theirs=theirs: move(mine, theirs)
        else:
            mover.move = lambda mine=mine, theirs=theirs: move(theirs, mine)
    return near, far, directions(workload(op, bidirectional=bidirectional), near, far)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_whole_transfers_pass_every_proof(op: str, bidirectional: bool) -> None:
    near, far, ways = ends(op, bidirectional=bidirectional, move=whole)
    assert len(ways) == 1 + bidirectional
    prove_before(ways, SIZE, batch=BATCH, seed=0)
    prove_after(ways, SIZE, seed=0)
    for mover in (near, far):
        mover.move = lambda: None
    with pytest.raises(IntegrityError, match="after the timed transfers"):
        prove_after(ways, SIZE, seed=0)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("move", [without_the_last_byte, one_byte_late, buffers_swapped, nothing])
def test_wrong_bytes_are_found_at_the_destination(op: str, move: Move) -> None:
    _, _, ways = ends(op, bidirectional=False, move=move)
    with pytest.raises(IntegrityError, match=f"client's {op} of 3000: .* byte .* of the destination"):
        prove_before(ways, SIZE, batch=BATCH, seed=0)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_transfer_that_changes_its_source_is_found(op: str) -> None:
    _, _, ways = ends(op, bidirectional=False, move=with_damage_to_the_source)
    with pytest.raises(IntegrityError, match=r"byte 0 is .* of the source"):
        prove_before(ways, SIZE, batch=BATCH, seed=0)


def test_a_check_that_sees_nothing_is_found_out_by_the_negative_control() -> None:
    near, _, ways = ends("read", bidirectional=False, move=whole)
    near.blind = True
    with pytest.raises(IntegrityError, match="corrupted on purpose, unnoticed"):
        prove_before(ways, SIZE, batch=BATCH, seed=0)


def test_the_other_direction_is_proved_too() -> None:
    _, far, ways = ends("read", bidirectional=True, move=whole)
    far.move = lambda: None
    with pytest.raises(IntegrityError, match="the server's read"):
        prove_before(ways, SIZE, batch=BATCH, seed=0)
