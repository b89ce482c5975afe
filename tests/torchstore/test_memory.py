"""What the store takes beside the models; the long run is ``python -m tests.torchstore.memory --versions 1000``."""

import mmap
import os
from collections.abc import Iterator

import pytest

from skipper.control import ProcMesh, this_host
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.memory import BUCKET, MIB, Sampler, run


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    yield procs
    procs.stop().get(timeout=20)


@pytest.mark.parametrize("mode", ["direct", "snapshot"])
async def test_no_more_memory_is_taken_than_the_versions_need(procs: ProcMesh, mode: Mode) -> None:
    report = await run(procs, 6, 2 * BUCKET, mode, 1)
    assert report["samples"] > 0
    assert report["peak_extra_mib"] <= report["bound_mib"]
    if mode == "snapshot":  # both copies are seen, so that more would be seen too
        assert report["of_it_shared_mib"] > 0.9 * 2 * 2 * BUCKET / MIB


def test_private_and_shared_memory_are_both_seen() -> None:
    sampler = Sampler([os.getpid()])
    # Not of malloc, which may use again what was freed.
    private, shared = mmap.mmap(-1, 48 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), os.memfd_create("shared")
    try:
        private.write(b"\x01" * len(private))
        os.write(shared, bytes(8 * MIB))
        more = [now - first for now, first in zip(sampler.now(), sampler.first, strict=True)]
    finally:
        private.close()
        os.close(shared)
    assert more[0] > 40 * MIB  # others of this process may have let go of some
    assert more[1] == 8 * MIB
