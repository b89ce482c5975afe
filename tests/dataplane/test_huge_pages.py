"""Huge pages where the system allows them, and what memory costs where small blocks share it."""

import ctypes
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMABuffer, arena
from skipper.dataplane._copy import HUGE_PAGE
from skipper.dataplane.arena import HUGE_BLOCK, Arena
from skipper.dataplane.identity import new_owner, page_size

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
COLLAPSE = 25  # MADV_COLLAPSE, linux/mman.h since Linux 6.1: huge pages now, whatever the settings say
WAIT_S = 60.0

needs_huge_pages = pytest.mark.skipif(not SETTINGS.exists(), reason="this kernel has no transparent huge pages")


def smaps(address: int) -> dict[str, str]:
    """What the kernel says of the part of a mapping that holds an address."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= address < end
        elif inside:
            found[name.removesuffix(":")] = value.strip()
    return found


def shared_kib() -> int:
    """Shared memory that is mapped here, as the kernel counts it against this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0])


def pinned_by_any_page() -> int:
    """KiB that the first byte written to shared memory may cost."""
    setting = SETTINGS / "shmem_enabled"
    asked_only = not setting.exists() or any(word in setting.read_text() for word in ("[never]", "[advise]", "[deny]"))
    return 4 if asked_only else HUGE_PAGE >> 10


@needs_huge_pages
@pytest.mark.parametrize("nbytes", [HUGE_BLOCK, 5 << 20, 63 << 20, 65 << 20])
def test_large_blocks_lie_at_huge_pages_and_ask_for_them(nbytes: int) -> None:
    blocks = [Arena(new_owner()).allocate(nbytes)]
    shared = Arena(new_owner())
    shared.allocate(100)
    blocks += [shared.allocate(nbytes), shared.allocate(nbytes)]
    for block in blocks:
        assert block.address % HUGE_PAGE == 0
        assert "hg" in smaps(block.address)["VmFlags"].split()
        assert "hg" in smaps(block.address + (nbytes // HUGE_PAGE - 1) * HUGE_PAGE)["VmFlags"].split()


@needs_huge_pages
def test_small_blocks_do_not_ask_for_them() -> None:
    fresh = Arena(new_owner())
    for nbytes in (1, 4096, 1 << 20, HUGE_BLOCK - 1):
        assert "hg" not in smaps(fresh.allocate(nbytes).address)["VmFlags"].split()


def test_a_small_block_costs_a_small_page() -> None:
    fresh = Arena(new_owner())
    before = shared_kib()
    block = fresh.allocate(100)
    np.frombuffer(memoryview(block), np.uint8)[:] = 1
    # One for the data, one for what the file itself says at its end.
    assert shared_kib() - before <= 4 * pinned_by_any_page()


def test_thousands_of_small_blocks_cost_what_they_hold() -> None:
    fresh = Arena(new_owner())
    before = shared_kib()
    blocks = [fresh.allocate(4000) for _ in range(5000)]
    for block in blocks:
        np.frombuffer(memoryview(block), np.uint8)[:] = 1
    assert shared_kib() - before <= 5000 * 4032 / 1024 * 1.05 + 2 * (HUGE_PAGE >> 10)


@pytest.mark.parametrize("nbytes", [2 << 20, 6 << 20, 70 << 20])
def test_what_is_freed_beyond_the_kept_share_leaves_the_process(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_KEEP_BYTES", 16 << 20)
    fresh = Arena(new_owner())
    before = shared_kib()
    blocks = [fresh.allocate(nbytes) for _ in range((140 << 20) // nbytes)]
    for block in blocks:
        np.frombuffer(memoryview(block), np.uint8)[:: page_size()] = 1
    touched = shared_kib() - before
    assert touched >= 130 << 10
    del block, blocks
    assert shared_kib() - before <= (16 << 10) + (nbytes >> 10)


def test_pages_that_were_given_back_come_again_empty_and_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_KEEP_BYTES", 0)
    fresh = Arena(new_owner())
    for mark in (1, 2, 3):
        array = np.frombuffer(memoryview(fresh.allocate(6 << 20)), np.uint8)
        assert not array.any()
        array[:] = mark
        assert (array == mark).all()
        del array


def _owner(connection: Connection, nbytes: int) -> None:
    """Shares memory of which it has made huge pages, if it can."""
    array = dataplane.empty_array(nbytes, np.uint8)
    array[:] = 5
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(array.__array_interface__["data"][0])
    failed = libc.madvise(address, ctypes.c_size_t(nbytes), COLLAPSE) != 0
    reason = os.strerror(ctypes.get_errno()) if failed else ""
    connection.send((RDMABuffer(array).serialize(), reason))
    connection.recv()


@needs_huge_pages
@pytest.mark.parametrize("nbytes", [HUGE_BLOCK, 66 << 20])
def test_a_reader_maps_the_huge_pages_of_an_owner_as_such(nbytes: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    owner = spawn.Process(target=_owner, args=(there, nbytes), daemon=True)
    owner.start()
    there.close()
    try:
        assert here.poll(WAIT_S)
        raw, reason = here.recv()
        buffer = RDMABuffer.deserialize(raw)
        into = np.empty(nbytes, np.uint8)
        buffer.read_into(into).get()
        assert (into == 5).all()
        remote = buffer.route()[1]
        assert remote.address % HUGE_PAGE == 0
        seen = smaps(remote.address)
        assert "hg" in seen["VmFlags"].split()
        if reason:
            pytest.skip(f"this kernel makes no huge pages of shared memory on demand: {reason}")
        assert int(seen["ShmemPmdMapped"].split()[0]) >= nbytes // HUGE_PAGE * HUGE_PAGE >> 10
    finally:
        here.close()
        owner.join(WAIT_S)
        owner.close()
