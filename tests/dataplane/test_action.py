"""`RDMAAction`: blocks of one array, and that a submission of many segments runs no Python for each of them."""

import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout
from skipper.dataplane.layout import Row
from skipper.dataplane.operation import DONE

WAIT_S = 60.0


def box_of(array: np.ndarray[Any, Any], begin: tuple[int, ...], shape: tuple[int, ...]) -> RemoteLayout:
    offset = sum(i * stride for i, stride in zip(begin, array.strides, strict=True))
    return RemoteLayout(offset, shape, array.strides, array.itemsize)


def test_blocks_are_read_as_slices_would_be() -> None:
    source = np.arange(5 * 6 * 4, dtype=np.int32).reshape(5, 6, 4)
    buffer = RDMABuffer(source)
    into, expected = np.zeros((3, 8, 7), np.int32), np.zeros((3, 8, 7), np.int32)
    action = RDMAAction()
    for i, j in product(range(2), range(3)):
        action.read_remote(into, buffer, layout=box_of(source, (i, 2 * j, 1), (1, 2, 3)), at=(i, 2 * j + 1, 4))
        expected[i, 2 * j + 1 : 2 * j + 3, 4:7] = source[i, 2 * j : 2 * j + 2, 1:4]
    action.submit().get()
    assert (into == expected).all()
    assert action.nbytes == 6 * 6 * 4


def test_blocks_are_written_as_slices_would_be() -> None:
    target = np.zeros((6, 5), np.int16)
    source = np.arange(30, dtype=np.int16).reshape(5, 6).T  # strided: (6, 5)
    buffer = RDMABuffer(target)
    action = RDMAAction()
    for i in range(3):
        action.write_remote(buffer, source, layout=box_of(target, (2 * i, 0), (2, 5)), at=(2 * i, 0))
    action.submit().get()
    assert (target == source).all()


def test_blocks_of_several_arrays_may_alternate() -> None:
    source = np.arange(8, dtype=np.int64)
    buffer = RDMABuffer(source)
    one, _gap, two = np.zeros((3, 4), np.int64)
    action = RDMAAction()
    for i in range(4):
        action.read_remote(one, buffer, layout=RemoteLayout(8 * i, (1,), (8,), 8), at=(i,))
        action.read_remote(two, buffer, layout=RemoteLayout(32 + 8 * i, (1,), (8,), 8), at=[i])
    action.submit().get()
    assert one.tolist() == [0, 1, 2, 3]
    assert two.tolist() == [4, 5, 6, 7]
    assert action.segments == 2


def test_memory_that_was_a_source_is_checked_again_as_a_destination() -> None:
    source = np.zeros(4, np.int64)
    source.flags.writeable = False
    buffer = RDMABuffer(np.zeros(4, np.int64))
    whole = RemoteLayout(0, (4,), (8,), 8)
    action = RDMAAction().write_remote(buffer, source, layout=whole, at=(0,))
    with pytest.raises(ValueError, match="read-only"):
        action.read_remote(source, buffer, layout=whole, at=(0,))


@pytest.mark.parametrize(
    ("at", "shape"),
    [((0,), (1, 1)), ((0, 0, 0), (1, 1)), ((-1, 0), (1, 1)), ((3, 0), (2, 1)), ((0, 5), (1, 1)), ((0, 0), (1, 0))],
    ids=str,
)
def test_a_block_that_is_not_there_is_refused(at: tuple[int, ...], shape: tuple[int, ...]) -> None:
    array = np.zeros((4, 5), np.int8)
    buffer = RDMABuffer(np.zeros((4, 5), np.int8))
    with pytest.raises(ValueError, match=r"block|indices"):
        RDMAAction().read_remote(array, buffer, layout=RemoteLayout(0, shape, (5, 1), 1), at=at)


def test_a_block_needs_a_layout_and_whole_indices() -> None:
    array = np.zeros((4, 5), np.int8)
    buffer = RDMABuffer(np.zeros((4, 5), np.int8))
    with pytest.raises(ValueError, match="layout"):
        RDMAAction().read_remote(array, buffer, at=(0, 0))
    with pytest.raises(TypeError):
        RDMAAction().read_remote(array, buffer, layout=RemoteLayout(0, (1, 1), (5, 1), 1), at=(0.0, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        RDMAAction().read_remote(array, buffer, layout=RemoteLayout(0, (1,), (1,), 1), at=(0,))


def test_a_short_submission_is_over_when_it_returns() -> None:
    source, into = np.arange(8), np.zeros(8, np.int64)
    action = RDMAAction().read_remote(into, RDMABuffer(source))
    for _ in range(2):
        source += 1
        assert action.submit() is DONE
        assert (into == source).all()


def test_many_transfers_are_compiled_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    array = np.zeros(1000, np.uint8)
    buffer, into = RDMABuffer(array), np.zeros(1000, np.uint8)
    compile_box = dataplane.action.compile_box

    def look_and_compile(*args: Any, **options: Any) -> list[Row]:
        seen.append(gc.isenabled())
        return compile_box(*args, **options)

    monkeypatch.setattr("skipper.dataplane.action.compile_box", look_and_compile)
    for count in (1, 1000):
        action = RDMAAction()
        for at in range(count):
            action.read_remote(into[at : at + 1], buffer.at(at, 1))
        action.submit().get()
    assert seen[0]
    assert not any(seen[1:])
    assert gc.isenabled()


def test_what_was_compiled_before_a_configuration_is_compiled_again() -> None:
    with owned(640_000) as (whole, _):
        action = RDMAAction().read_remote(np.zeros(whole.nbytes, np.uint8), whole)
        action.submit().get()
        dataplane.configure(backend="ucx")
        try:
            with pytest.raises(dataplane.BackendUnavailableError, match="export"):
                action.submit().get()
        finally:
            dataplane.configure(backend="auto")
        action.submit().get()


def python_steps(work: Callable[[], object]) -> int:
    """Instructions of Python that `work` executes in this thread: a loop without any call counts too."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


def scattered(buffer: RDMABuffer, into: np.ndarray[Any, Any], segments: int) -> RDMAAction:
    """Read all of the buffer in equal segments, in the opposite order: none can be joined with the next."""
    nbytes = buffer.nbytes // segments
    action = RDMAAction()
    for i in range(segments):
        layout = RemoteLayout(buffer.nbytes - (i + 1) * nbytes, (nbytes,), (1,), 1)
        action.read_remote(into, buffer, layout=layout, at=(i * nbytes,))
    assert action.segments == segments
    return action


def many(buffers: list[RDMABuffer], into: np.ndarray[Any, Any]) -> RDMAAction:
    """Read every buffer whole, side by side."""
    nbytes = buffers[0].nbytes
    action = RDMAAction()
    for i, buffer in enumerate(buffers):
        action.read_remote(into[i * nbytes : (i + 1) * nbytes], buffer)
    return action


def same_steps_for_few_and_for_many(few: RDMAAction, lots: RDMAAction) -> None:
    for action in (few, lots):
        action.submit().get()  # copy threads are started once
        python_steps(action.submit)  # Python 3.12 tells of instructions from the second time on
    # The collector may run finalizers of others in this thread: the fewest of some runs have none.
    steps = [min(python_steps(action.submit) for _ in range(3)) for action in (few, lots)]
    assert steps[0] == steps[1] > 0


@pytest.mark.parametrize("nbytes", [640_000, 40_960_000], ids=["inline", "threads"])
def test_a_submission_within_a_process_runs_no_python_per_segment(nbytes: int) -> None:
    source = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    into, again = np.zeros_like(source), np.zeros_like(source)
    buffer = RDMABuffer(source)
    few, lots = scattered(buffer, into, 10), scattered(buffer, again, 10_000)
    same_steps_for_few_and_for_many(few, lots)
    assert (again.reshape(10_000, -1)[::-1].reshape(-1) == source).all()


def test_a_submission_within_a_process_runs_no_python_per_buffer() -> None:
    source = np.random.default_rng(1).integers(0, 255, 640_000, np.uint8)
    into = np.zeros_like(source)
    few = many([RDMABuffer(part) for part in source.reshape(10, -1)], into)
    lots = many([RDMABuffer(part) for part in source.reshape(10_000, -1)], into)
    same_steps_for_few_and_for_many(few, lots)
    assert (into == source).all()


def _own(connection: Connection, nbytes: int) -> None:
    array = dataplane.empty_array(nbytes, np.uint8)
    array[:] = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    whole = RDMABuffer(array)
    parts = [RDMABuffer(part) for part in array[: 10_000 * 64].reshape(10_000, -1)]
    connection.send((whole, parts))
    connection.recv()


@contextmanager
def owned(nbytes: int) -> Iterator[tuple[RDMABuffer, list[RDMABuffer]]]:
    """A buffer of shared memory of another process, and 10,000 of the parts of its beginning."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    owner = spawn.Process(target=_own, args=(there, nbytes), daemon=True)
    owner.start()
    there.close()
    try:
        assert here.poll(WAIT_S)
        yield here.recv()
    finally:
        here.close()
        owner.join(WAIT_S)
        owner.close()


@pytest.mark.parametrize("nbytes", [640_000, 40_960_000], ids=["inline", "threads"])
def test_a_submission_over_shared_memory_runs_no_python_per_segment_or_buffer(nbytes: int) -> None:
    with owned(nbytes) as (whole, parts):
        assert whole.backend == "shm"
        source = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
        into = np.zeros_like(source)
        same_steps_for_few_and_for_many(scattered(whole, into.copy(), 10), scattered(whole, into, 10_000))
        assert (into.reshape(10_000, -1)[::-1].reshape(-1) == source).all()
        apart = np.zeros(640_000, np.uint8)
        same_steps_for_few_and_for_many(many(parts[:10], apart[:640]), many(parts, apart))
        assert (apart == source[:640_000]).all()


@pytest.mark.parametrize("nbytes", [1, 7, 64, 100, 10_000])
def test_pieces_together_move_what_the_whole_moves(nbytes: int) -> None:
    source = np.arange(6 * 5 * 4, dtype=np.int32).reshape(6, 5, 4)
    other = np.arange(9, dtype=np.int64)
    buffer, small = RDMABuffer(source), RDMABuffer(other)
    into, rest, expected = np.zeros((7, 6, 4), np.int32), np.zeros(9, np.int64), np.zeros((7, 6, 4), np.int32)
    action = RDMAAction()
    action.read_remote(into, buffer, layout=box_of(source, (1, 1, 0), (5, 4, 4)), at=(2, 0, 0))
    action.read_remote(rest, small)
    expected[2:, :4] = source[1:, 1:]
    pieces = action.split(nbytes)
    assert action.split(nbytes) is pieces
    assert sum(piece.nbytes for piece in pieces) == action.nbytes
    assert max(piece.nbytes for piece in pieces) < nbytes + 64  # a row is not divided
    for piece in pieces:
        piece.submit().get()
    assert (into == expected).all()
    assert (rest == other).all()


def test_pieces_know_nothing_of_what_is_added_later() -> None:
    source, into = np.ones(4, np.int64), np.zeros(4, np.int64)
    action = RDMAAction().read_remote(into, RDMABuffer(source))
    before = action.split(8)
    action.read_remote(np.zeros(4, np.int64), RDMABuffer(source))
    assert sum(piece.nbytes for piece in before) == 32
    assert sum(piece.nbytes for piece in action.split(8)) == 64
    with pytest.raises(ValueError, match="positive"):
        action.split(0)
