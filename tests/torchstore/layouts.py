"""Pairs of layouts from Hypothesis, resharded by the store and compared with DTensor and DCP, bit for bit.

    python -m tests.torchstore.layouts --pairs 10000

Real here: a gloo process group of eight processes, DTensors on meshes of one to three axes, the store from
`put_state_dict` to `get_state_dict` in both modes. What a destination should hold is said by DTensor's
`distribute_tensor` of the whole tensor; where DTensor can redistribute the source itself, that must agree too; and so
must what DCP saves in the one layout and loads in the other.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from math import prod
from typing import Any, get_args

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from skipper import torchstore as ts
from skipper.control import shutdown, this_host
from skipper.torchstore.algebra.layout import Layout, Replicate, Shard, StridedShard
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.layout_ranks import Case, LayoutRank, Verdict, environment
from tests.torchstore.oracle import as_this_torch_cuts

WORLD_SIZE = 8
BATCH = 250  # pairs of one state dict
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]
SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16]


def meshes_of(world_size: int) -> list[tuple[int, ...]]:
    """Every mesh of one to three axes that has that many ranks."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    found = [(world_size,)]
    found += [(size, world_size // size) for size in sizes]
    found += [(a, b, world_size // a // b) for a in sizes for b in sizes if world_size // a % b == 0]
    return found


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    # Sampled, not drawn as integers: hypothesis likes small numbers, and small tensors hide few mistakes.
    return tuple(draw(st.sampled_from(SIZES)) for _ in range(draw(st.sampled_from([0, 1, 2, 2, 3, 3]))))


@st.composite
def layouts_of(draw: st.DrawFn, shape: tuple[int, ...], meshes: st.SearchStrategy[tuple[int, ...]]) -> Layout:
    """Any placements on any of the meshes."""
    mesh = draw(meshes)
    dims = range(len(shape))
    if dims and len(mesh) > 1 and draw(st.integers(0, 3)) == 0:  # what FSDP2 over tensor parallelism makes
        dim = draw(st.sampled_from(dims))
        over = (*(Replicate() for _ in mesh[:-2]), StridedShard(dim, mesh[-1]), Shard(dim))
        return as_this_torch_cuts(Layout(shape, mesh, over))
    strided = [StridedShard(dim, factor) for dim in dims for factor in (2, 3, 4)]
    placement = st.sampled_from([Replicate(), Replicate(), *[Shard(dim) for dim in dims] * 6, *strided])
    return as_this_torch_cuts(Layout(shape, mesh, tuple(draw(placement) for _ in mesh)))


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    shape = draw(shapes())
    meshes = st.sampled_from(meshes_of(world_size))
    source = draw(layouts_of(shape, meshes))
    if draw(st.booleans()):  # DTensor redistributes within one mesh only
        meshes = st.just(source.mesh_shape)
    return draw(st.sampled_from(DTYPES)), source, draw(layouts_of(shape, meshes))


def drawn(number: int, world_size: int, start: int) -> list[Case]:
    """That many different pairs of layouts (as far as there are), always the same ones for one ``start``."""
    found: dict[Case, None] = {}

    @seed(start)
    @settings(
        max_examples=number + number // 2,  # small tensors come more than once
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(world_size))
    def collect(case: Case) -> None:
        found[case] = None

    collect()
    return list(found)[:number]


@asynccontextmanager
async def ranks(world_size: int) -> AsyncIterator[Any]:
    """A process group of that many processes, and a store."""
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    procs = this_host().spawn_procs(per_host={"gpus": world_size}, env=environment())
    await ts.initialize()
    try:
        mesh = procs.spawn("ranks", LayoutRank)
        await mesh.join.call(rendezvous.port, world_size)
        yield mesh
        await mesh.leave.call()
    finally:
        await ts.shutdown()
        await procs.stop()


async def check(mesh: Any, pairs: list[Case], *, with_dcp: int) -> Verdict:
    """Reshard all pairs in batches, in both modes by turns; the first ``with_dcp`` pairs by DCP as well."""
    total = Verdict()
    modes: tuple[Mode, ...] = get_args(Mode)
    for number, start in enumerate(range(0, len(pairs), BATCH)):
        batch, mode, key = pairs[start : start + BATCH], modes[number % len(modes)], f"batch-{number}"
        with tempfile.TemporaryDirectory() as folder:
            by_rank = list(await mesh.reshard.call(key, mode, batch, folder if start < with_dcp else None))
        await ts.delete(key)
        for verdict in by_rank[1:]:  # pairs are counted once, bytes and failures on every rank
            verdict.pairs = verdict.redistributed = verdict.checkpointed = 0
        for verdict in by_rank:
            total.add(verdict)
    return total


async def run(pairs: int, with_dcp: int, start: int, world_size: int) -> dict[str, Any]:
    """The whole run, in figures."""
    found = drawn(pairs, world_size, start)
    begin = time.perf_counter()
    async with ranks(world_size) as mesh:
        verdict = await check(mesh, found, with_dcp=with_dcp)
    both = [layout for _, *sides in found for layout in sides]
    return {
        "pairs": verdict.pairs,
        "by_mesh_axes": {axes: sum(len(layout.mesh_shape) == axes for layout in both) for axes in (1, 2, 3)},
        "layouts_with_strided_shards": sum(any(isinstance(p, StridedShard) for p in at.placements) for at in both),
        "layouts_with_empty_shards": sum(any(not at.pieces(where) for where in at.coordinates()) for at in both),
        "layouts_with_uneven_shards": sum(
            len({at.local_shape(where) for where in at.coordinates()}) > 1 for at in both
        ),
        "empty_tensors": sum(prod(at.global_shape) == 0 for at in both) // 2,
        "bytes_read": verdict.nbytes,
        "also_redistributed_by_dtensor": verdict.redistributed,
        "also_saved_and_loaded_by_dcp": verdict.checkpointed,
        "wrong": verdict.wrong,
        "not_as_redistributed": verdict.not_as_redistributed,
        "not_as_checkpointed": verdict.not_as_checkpointed,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> int:
    """Print one line of JSON; 1 when a pair was not bit-equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--dcp", type=int, default=1_000, help="how many of them by DCP as well (in whole batches)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=WORLD_SIZE)
    options = parser.parse_args()
    try:
        report = asyncio.run(run(options.pairs, options.dcp, options.seed, options.ranks))
    finally:
        shutdown()
    print(json.dumps(report), flush=True)
    return int(bool(report["wrong"] or report["not_as_redistributed"] or report["not_as_checkpointed"]))


if __name__ == "__main__":
    sys.exit(main())
