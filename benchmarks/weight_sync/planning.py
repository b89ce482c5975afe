"""Plans of a large job, made and replayed in one process: 10,000 tensors from 64 ranks to one of 48."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from skipper import dataplane
from skipper.benchmarks.weight_sync.model import Model, fsdp, tensor_parallel
from skipper.torchstore.algebra.layout import Ints, Layout, contiguous_strides
from skipper.torchstore.algebra.manifest import Binding, Manifest, MeshPosition, TensorItem
from skipper.torchstore.tensors.local_tensors import LocalTensor
from skipper.torchstore.tensors.plan import Plan, Source, compile_read

__all__ = ["Planned", "measure_planning"]

_DTYPE = torch.bfloat16

# Every dim of a cut tensor is a multiple of 64 and of 48, and the tensors are small: it is their number that counts.
_SMALL = Model(layers=0, hidden=192, intermediate=192, key_value=192, vocabulary=192)


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning cost.

    Attributes:
        compile_s: Seconds for the plan of one reader, each time from nothing.
        replay_us: Microseconds of one replay for each of its segments.
        segments: Contiguous runs of the plan.
        tensors: Number of tensors of the model.
    """

    compile_s: list[float]
    replay_us: list[float]
    segments: int
    tensors: int


def measure_planning(*, tensors: int, sources: int, readers: int, iterations: int) -> Planned:
    """Compile the plan of one of ``readers`` ranks ``iterations`` times; replay the last ten times as often."""
    shapes = _many(tensors)
    source_layouts, target_layouts = fsdp(shapes, sources), tensor_parallel(shapes, readers)
    published = [_source(source_layouts, (rank,), (sources,)) for rank in range(sources)]
    targets = _targets(target_layouts, (readers // 2,))
    compile_s: list[float] = []
    plan: Plan | None = None
    for _ in range(iterations):
        begin = time.perf_counter()
        plan = compile_read("model", published, targets)
        segments = plan.segments  # this turns the plan into an action that can be submitted
        compile_s.append(time.perf_counter() - begin)
    if plan is None:
        raise ValueError("at least one iteration is needed")
    replay_us: list[float] = []
    for _ in range(10 * iterations):
        begin = time.perf_counter()
        plan.action.submit().get()
        replay_us.append((time.perf_counter() - begin) * 1e6 / segments)
    return Planned(compile_s, replay_us, segments, tensors)


def _many(number: int) -> dict[str, Ints]:
    """``number`` shapes in the proportions of a real model."""
    per_layer = len(Model(layers=1).shapes()) - len(Model(layers=0).shapes())
    layers = -(-number // per_layer)
    return dict(list(replace(_SMALL, layers=layers).shapes().items())[:number])


def _source(layouts: Mapping[str, Layout], coordinate: Ints, mesh_shape: Ints) -> Source:
    """One publisher's manifest, with the memory of its tensors."""
    itemsize = _DTYPE.itemsize
    items: dict[str, TensorItem] = {}
    end = 0
    for name, layout in layouts.items():
        shape = layout.local_shape(coordinate)
        strides = tuple(stride * itemsize for stride in contiguous_strides(shape))
        items[name] = TensorItem(str(_DTYPE), layout.global_shape, layout.pieces(coordinate), 0, end, strides, itemsize)
        end += prod(shape) * itemsize
    memory = dataplane.empty((end,), torch.uint8).zero_()
    manifest = Manifest.of("state_dict", MeshPosition(coordinate, mesh_shape, (0,)), items, (), {})
    return Source(manifest, Binding(f"memory of {coordinate}", "direct", "", (dataplane.RDMABuffer(memory),)))


def _targets(layouts: Mapping[str, Layout], coordinate: Ints) -> dict[str, LocalTensor]:
    return {
        name: LocalTensor(
            torch.zeros(layout.local_shape(coordinate), dtype=_DTYPE),
            layout.global_shape,
            layout.pieces(coordinate),
            layout,
            coordinate,
        )
        for name, layout in layouts.items()
    }
