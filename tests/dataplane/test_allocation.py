"""`empty_array`, `is_shared` and `memcpy`: memory for users of numpy."""

import mmap
import os

import numpy as np
import pytest

from skipper import dataplane

PAGE = mmap.PAGESIZE


def backing_file(array: np.ndarray) -> str:
    """The memfd that an array lies in, as a path."""
    address = array.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
            if begin <= address < end:
                return f"/proc/self/map_files/{begin:x}-{end:x}"
    raise LookupError(hex(address))


def test_empty_array_takes_shapes_and_dtypes_like_numpy() -> None:
    assert dataplane.empty_array(3).dtype == np.float64
    assert dataplane.empty_array((2, 3), "i4").shape == (2, 3)
    assert dataplane.empty_array((), np.int8).shape == ()
    assert dataplane.empty_array((0, 3), np.int8).nbytes == 0
    with pytest.raises(ValueError, match="negative"):
        dataplane.empty_array((2, -1))
    with pytest.raises(TypeError, match="references"):
        dataplane.empty_array(3, object)


def test_is_shared_tells_the_two_kinds_apart() -> None:
    assert dataplane.is_shared(dataplane.empty_array(5))
    assert not dataplane.is_shared(np.zeros(5))
    with pytest.raises(TypeError):
        dataplane.is_shared("text")


def test_released_pages_are_the_systems_again_and_their_neighbours_are_untouched() -> None:
    array = dataplane.empty_array(64 * PAGE, np.uint8)
    array[:] = 7
    before = os.stat(backing_file(array)).st_blocks
    assert dataplane.release_pages(array[PAGE - 1 : 11 * PAGE + 1]) == 10 * PAGE
    assert os.stat(backing_file(array)).st_blocks == before - 10 * PAGE // 512
    assert not array[PAGE : 11 * PAGE].any()
    assert (array[:PAGE] == 7).all()
    assert (array[11 * PAGE :] == 7).all()
    array[PAGE] = 1
    assert array[PAGE] == 1


def test_nothing_is_released_of_less_than_a_page_or_of_memory_from_elsewhere() -> None:
    array = dataplane.empty_array(64 * PAGE, np.uint8)
    array[:] = 7
    assert dataplane.release_pages(array[1 : PAGE + 1]) == 0
    assert dataplane.release_pages(np.zeros(10 * PAGE, np.uint8)) == 0
    assert (array == 7).all()
    with pytest.raises(ValueError, match="contiguous"):
        dataplane.release_pages(array[::2])


def test_memcpy_copies_with_any_number_of_threads() -> None:
    source = np.random.default_rng(0).integers(0, 255, 5_000_001, np.uint8)
    for threads in (1, 2, 5):
        for stream in (False, True):
            target = np.zeros_like(source)
            dataplane.memcpy(target[3:], source[3:], threads=threads, stream=stream)
            assert (target[3:] == source[3:]).all()
            assert not target[:3].any()


def test_memcpy_past_the_cache_touches_nothing_else() -> None:
    source = np.arange(1, 200, dtype=np.uint8)
    for nbytes in range(1, 150):
        for begin in range(33):
            target = np.zeros(300, np.uint8)
            dataplane.memcpy(target[begin : begin + nbytes], source[:nbytes], stream=True)
            assert (target[begin : begin + nbytes] == source[:nbytes]).all()
            assert np.count_nonzero(target) == nbytes


def test_memcpy_refuses_what_does_not_fit() -> None:
    array = np.zeros(10, np.uint8)
    with pytest.raises(ValueError, match="bytes"):
        dataplane.memcpy(array, bytes(9))
    with pytest.raises(ValueError, match="overlap"):
        dataplane.memcpy(array[:6], array[4:])
    with pytest.raises(ValueError, match="read-only"):
        dataplane.memcpy(bytes(3), array[:3])
    for threads in (0, -1):
        with pytest.raises(ValueError, match="threads"):
            dataplane.memcpy(array, bytes(10), threads=threads)
