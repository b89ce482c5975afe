"""Batches: boxes of any strides between local memory and buffers, as often as asked."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout
from tests.conformance.conftest import Case
from tests.conformance.test_transfers import handle_to, pattern
from tests.sameness import assert_same

Owner = Any


def layout_of(view: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> RemoteLayout:
    """Where a view of `base` lies in a buffer that holds base's bytes."""
    return RemoteLayout(
        view.__array_interface__["data"][0] - base.__array_interface__["data"][0],
        view.shape,
        view.strides,
        view.itemsize,
    )


def test_boxes_read_and_written_are_the_boxes_asked_for(owner: Owner) -> None:
    shape = (6, 7, 8, 3)
    remote = np.frombuffer(pattern(6 * 7 * 8 * 3 * 4), np.float32).reshape(shape)
    name, buffer = handle_to(owner, remote.tobytes())
    boxes = (
        np.s_[1:4, 2:6, :, :],
        np.s_[:, :, 3, 1:],
        np.s_[5:6, 6:7, 7, 2],
        np.s_[::2, ::-1, 1::3, :],
        np.s_[:, :, :, :],
        np.s_[2:3, 0:1, 4:8, 0:2],
    )
    for box in boxes:
        wanted = remote[box]
        into = np.zeros_like(wanted)
        RDMAAction().read_remote(into, buffer, layout=layout_of(wanted, remote)).submit().get()
        assert_same(into.tobytes(), wanted.tobytes(), f"bytes of {box}")
    expected = remote.copy()
    action = RDMAAction()
    target, source = expected[1:5, 3, ::2, 1], np.frombuffer(pattern(4 * 4 * 4, 5), np.float32).reshape(4, 4)
    action.write_remote(buffer, source.T, layout=layout_of(target, expected)).submit().get()
    expected[1:5, 3, ::2, 1] = source.T
    assert_same(owner("content", name), expected.tobytes())


def test_local_sides_may_be_strided_and_neighbours_stay_untouched(owner: Owner) -> None:
    content = pattern(24 * 8)
    _, buffer = handle_to(owner, content)
    grid = np.full((10, 20), -1, np.int64)
    RDMAAction().read_remote(grid[2:8, 4:12:2], buffer).submit().get()
    expected = np.full((10, 20), -1, np.int64)
    expected[2:8, 4:12:2] = np.frombuffer(content, np.int64).reshape(6, 4)
    assert (grid == expected).all()


def test_submitting_again_moves_what_is_there_by_then(owner: Owner) -> None:
    name, buffer = handle_to(owner, bytes(4096))
    into = np.empty(4096, np.uint8)
    action = RDMAAction().read_remote(into, buffer)
    for value in (1, 2, 3):
        owner("fill", name, value)
        action.submit().get()
        assert (into == value).all()


def test_many_segments_of_many_buffers_in_one_submission(owner: Owner) -> None:
    made = [handle_to(owner, pattern(3000, seed))[1] for seed in range(40)]
    rows = np.zeros((40, 3000), np.uint8)
    action = RDMAAction()
    for row, buffer in zip(rows, made, strict=True):
        for begin in range(0, 3000, 100):
            action.read_remote(row[begin : begin + 100], buffer.at(begin, 100))
    assert action.nbytes == 40 * 3000
    action.submit().get()
    # Neighbouring segments of a buffer are joined.
    assert action.segments == 40
    for seed, row in enumerate(rows):
        assert_same(row.tobytes(), pattern(3000, seed))


def test_element_sized_runs_of_a_large_matrix(owner: Owner) -> None:
    remote = np.frombuffer(pattern(1000 * 400 * 2), np.int16).reshape(1000, 400)
    _, buffer = handle_to(owner, remote.tobytes())
    column = np.empty(1000, np.int16)
    action = RDMAAction().read_remote(column, buffer, layout=layout_of(remote[:, 7], remote))
    action.submit().get()
    assert action.segments == 1000
    assert (column == remote[:, 7]).all()


def test_reads_and_writes_of_several_owners_in_one_action(remote_case: Case, start: Any) -> None:
    first, second = start(), start()
    _, source = handle_to(first, pattern(5000, 1))
    name, target = handle_to(second, bytes(700))
    into = bytearray(5000)
    RDMAAction().read_remote(into, source).write_remote(target, pattern(700, 2)).submit().get()
    assert_same(into, pattern(5000, 1))
    assert_same(second("content", name), pattern(700, 2))


def test_an_empty_action_is_done(case: Case) -> None:
    action = RDMAAction()
    assert action.nbytes == action.segments == 0
    action.submit().get()


def test_misfits_are_refused_while_building(owner: Owner) -> None:
    _, buffer = handle_to(owner, bytes(64))
    _, readonly = handle_to(owner, bytes(64), writable=False)
    action = RDMAAction()
    four = np.zeros((2, 2), np.float32)
    good = RemoteLayout(0, (2, 2), (8, 4), 4)
    bad_layouts = (
        RemoteLayout(0, (2, 3), (8, 4), 4),
        RemoteLayout(0, (2, 2), (8,), 4),
        RemoteLayout(0, (2, 2), (8, 4), 8),
        RemoteLayout(52, (2, 2), (8, 4), 4),
        RemoteLayout(-4, (2, 2), (8, 4), 4),
        RemoteLayout(0, (2, 2), (-8, 4), 4),
        RemoteLayout(0, (2, 2), (1 << 62, 4), 4),
    )
    for layout in bad_layouts:
        with pytest.raises(ValueError, match=r"box|elements"):
            action.read_remote(four, buffer, layout=layout)
    with pytest.raises(ValueError, match="overlaps itself"):
        action.read_remote(np.lib.stride_tricks.as_strided(four, (2, 2), (0, 4)), buffer, layout=good)
    with pytest.raises(ValueError, match="overlaps itself"):
        action.write_remote(buffer, four, layout=RemoteLayout(0, (2, 2), (4, 4), 4))
    with pytest.raises(ValueError, match="read-only"):
        action.write_remote(readonly, four, layout=good)
    with pytest.raises(ValueError, match="bytes"):
        action.read_remote(four, buffer)
    with pytest.raises(TypeError):
        action.read_remote(four, "buffer")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        action.read_remote(four, buffer, layout=(0, (2, 2), (8, 4), 4))  # type: ignore[arg-type]
    assert action.nbytes == 0


def test_a_source_may_repeat_elements(owner: Owner) -> None:
    name, buffer = handle_to(owner, bytes(12))
    repeated = np.broadcast_to(np.array([1, 2, 3], np.uint8), (4, 3))
    RDMAAction().write_remote(buffer, repeated).submit().get()
    assert_same(owner("content", name), bytes([1, 2, 3] * 4))


def test_a_dropped_buffer_fails_the_action_with_its_name(owner: Owner) -> None:
    from skipper.dataplane import BufferDroppedError

    (_, kept), (name, dropped) = handle_to(owner, bytes(10)), handle_to(owner, bytes(10))
    action = RDMAAction().read_remote(bytearray(10), kept).read_remote(bytearray(10), dropped)
    write = RDMAAction().write_remote(dropped, bytes(10))
    for each in (action, write):
        each.submit().get()
    owner("drop", name)
    for each in (action, write, action):
        with pytest.raises(BufferDroppedError, match="dropped"):
            each.submit().get()
    RDMAAction().read_remote(bytearray(10), kept).submit().get()


def test_a_short_action_may_be_submitted_by_several_threads_at_once(owner: Owner) -> None:
    name, buffer = handle_to(owner, pattern(4000))
    into = np.zeros((50, 40), np.uint8)
    read = RDMAAction()
    for i, row in enumerate(into):
        read.read_remote(row, buffer.at(80 * i, 40))
    write = RDMAAction().write_remote(buffer.at(40, 40), bytes(range(40)))

    def submit(_: int) -> None:
        for _ in range(50):
            read.submit().get()
            write.submit().get()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(submit, range(6)))
    expected = np.frombuffer(pattern(4000), np.uint8).reshape(50, 80).copy()
    assert (into == expected[:, :40]).all()
    expected[0, 40:] = range(40)
    assert_same(owner("content", name), expected.tobytes())


def test_an_action_outlives_the_names_of_its_memory(owner: Owner) -> None:
    content = pattern(50_000)
    _, buffer = handle_to(owner, content)
    seen: list[Any] = []

    def build() -> RDMAAction:
        into = np.zeros(50_000, np.uint8)
        seen.append(memoryview(into))
        return RDMAAction().read_remote(into, RDMABuffer.deserialize(buffer.serialize()))

    build().submit().get()
    assert_same(seen[0].tobytes(), content)
