"""Names and shapes that differ between the two sides: a user's function returns the sources of a reader's tensor.

The function takes a name of the reader's state dict and returns the stored name, a `Part` of a stored tensor, a `Stack`
of several, or None (not read). This module converts that into plain targets for `plan.compile_read`: views of the
reader's memory, each with the boxes of *one* stored tensor. So all checks are the same as without a function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from skipper.torchstore.algebra.layout import Box, Ints, Layout, Piece, plus
from skipper.torchstore.algebra.manifest import TensorItem
from skipper.torchstore.errors import KindMismatchError, LayoutMismatchError, StateDictMismatchError
from skipper.torchstore.tensors.landing import lands
from skipper.torchstore.tensors.local_tensors import LocalTensor, describe
from skipper.torchstore.tensors.values import new_tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor, or a range of it along one dim.

    Attributes:
        name: The name of the stored tensor.
        start: Where the range begins, in elements along ``dim``.
        stop: Where it ends; None: at the end of the tensor.
        chunk: (index, count): only one of the ``count`` chunks into which `torch.chunk` cuts that range. With it, a
            plain tensor that holds one rank's shard says which shard.
        dim: A dimension of the stored tensor.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"fused": torch.arange(6.0)}, "policy")
        mine = {"first": torch.zeros(2), "last": torch.zeros(3)}
        parts = {"first": torchstore.Part("fused", 0, 2), "last": torchstore.Part("fused", chunk=(1, 2))}
        ts.get_state_dict("policy", mine, names=parts.get)
        print(mine["first"].tolist(), mine["last"].tolist())  # [0.0, 1.0] [3.0, 4.0, 5.0]
        ts.shutdown()
        ```
    """

    name: str
    start: int = 0
    stop: int | None = None
    chunk: tuple[int, int] | None = None
    dim: int = 0

    def window(self, shape: Ints) -> Box:
        """The box of this part in a tensor of this shape.

        Raises:
            ValueError: The tensor has no such box.
        """
        dim = self.dim + len(shape) if self.dim < 0 else self.dim
        if not 0 <= dim < len(shape):
            if self == Part(self.name):  # all of a tensor without dims
                return Box.whole(shape)
            raise ValueError(f"{self} is about dim {self.dim} of a tensor of shape {shape}")
        start, stop = self.start, shape[dim] if self.stop is None else self.stop
        if not 0 <= start <= stop <= shape[dim]:
            raise ValueError(f"{self} is not within a tensor of shape {shape}")
        if self.chunk is not None:
            index, count = self.chunk
            if not 0 <= index < count:
                raise ValueError(f"{self}: there is no chunk {index} of {count}")
            size = -(-(stop - start) // count)
            start, stop = min(start + index * size, stop), min(start + (index + 1) * size, stop)
        return Box(
            tuple(start if at == dim else 0 for at in range(len(shape))),
            tuple(stop - start if at == dim else size for at, size in enumerate(shape)),
        )


class Stack:
    """Several stored tensors, or parts of them, one after another along one dim: a fused tensor.

    Args:
        parts: The parts, from first to last; a string is a whole stored tensor.
        dim: The dim along which they are stacked.
        per_shard: How a DTensor destination is sharded. True: each rank stacks *its shards* of the parts, like the
            fused projections of tensor-parallel engines. False: the stack of the whole parts is sharded. For a plain
            tensor both are the same.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"q": torch.zeros(2, 4), "k": torch.ones(1, 4)}, "policy")
        mine = {"qk": torch.empty(3, 4)}
        ts.get_state_dict("policy", mine, names={"qk": torchstore.Stack("q", "k")}.get)
        print(mine["qk"][:, 0].tolist())  # [0.0, 0.0, 1.0]
        ts.shutdown()
        ```
    """

    __slots__ = ("dim", "parts", "per_shard")

    def __init__(self, *parts: Part | str, dim: int = 0, per_shard: bool = True) -> None:
        if not parts:
            raise ValueError("a stack needs at least one part")
        self.parts = tuple(Part(part) if isinstance(part, str) else part for part in parts)
        self.dim = dim
        self.per_shard = per_shard

    def __repr__(self) -> str:
        return f"Stack({', '.join(map(repr, self.parts))}, dim={self.dim}, per_shard={self.per_shard})"


NameMap = Callable[[str], "str | Part | Stack | None"]
"""Returns the source of a name of the reader's state dict; always the same one, because plans depend on it."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A reader's state dict in terms of stored tensors.

    Attributes:
        targets: Views of the reader's memory, by label.
        stored: The stored name of each label.
        created: Tensors that had to be created because none were given, by the reader's name.
    """

    targets: dict[str, LocalTensor]
    stored: dict[str, str]
    created: dict[str, torch.Tensor]


def map_names(
    key: str,
    leaves: Mapping[str, Any],
    names: NameMap,
    items: Mapping[str, TensorItem],
    objects: Collection[str],
    *,
    strict: bool,
) -> Mapped:
    """Call the function for every name, and compute which boxes go where.

    Raises:
        StateDictMismatchError: A stored name does not exist; the message says for which name it was requested. Or, with
            ``strict``, a stored name is not used.
        LayoutMismatchError: Parts and destination do not fit.
        KindMismatchError: An object where a tensor was expected.
        TypeError: The function's result is not allowed.
    """
    mapped = Mapped({}, {}, {})
    missing: list[str] = []
    used: set[str] = set()
    for name, leaf in leaves.items():
        answer = ask(names, name)
        if answer is None:
            continue
        absent = [part.name for part in answer.parts if part.name not in items and part.name not in objects]
        missing += [f"{stored} (for {name})" for stored in absent]
        used.update(part.name for part in answer.parts)
        if not absent:
            _map_one(key, name, leaf, answer, items, mapped)
    for name in tuple(used):  # scales are read with their elements
        scaled = items[name].scaled if name in items else None
        used.update(scaled.beside() if scaled else ())
    unexpected = tuple(sorted({*items, *objects} - used)) if strict else ()
    if missing or unexpected:
        raise StateDictMismatchError(key, tuple(missing), unexpected)
    return mapped


def ask(names: NameMap, name: str) -> Stack | None:
    """The function's result; one that is not a stack becomes a stack of one part.

    Raises:
        TypeError: The result is not allowed.
    """
    answer = names(name)
    if answer is None or isinstance(answer, Stack):
        return answer
    if isinstance(answer, str | Part):
        return Stack(answer)
    raise TypeError(f"names({name!r}) must return a string, a Part, a Stack or None, not {answer!r}")


def _map_one(key: str, name: str, leaf: Any, answer: Stack, items: Mapping[str, TensorItem], mapped: Mapped) -> None:
    whole = len(answer.parts) == 1 and answer.parts[0] == Part(answer.parts[0].name)
    first = answer.parts[0].name
    where = f"{key}/{' + '.join(part.name for part in answer.parts)} (for {name})"
    if any(part.name not in items for part in answer.parts):
        if isinstance(leaf, torch.Tensor) or not whole:
            raise KindMismatchError(where, "an object is stored there, a tensor is expected")
        return  # an object is read as an object
    if not isinstance(leaf, torch.Tensor):
        if not whole:
            raise KindMismatchError(where, "give a tensor for an entry that is made of parts of others")
        leaf = mapped.created[name] = new_tensor(items[first].global_shape, items[first].dtype)
    target = describe(leaf, key=where)
    if whole:
        mapped.targets[name], mapped.stored[name] = target, first
        return
    try:
        wholes = [_shape_for(items[part.name], leaf) for part in answer.parts]
        windows = [part.window(whole) for part, whole in zip(answer.parts, wholes, strict=True)]
        fed = list((_by_shards if answer.per_shard else _by_wholes)(target, windows, answer.dim))
    except ValueError as error:
        raise LayoutMismatchError(where, str(error)) from error
    for number, (part, shape, window, view) in enumerate(zip(answer.parts, wholes, windows, fed, strict=True)):
        if view.pieces:
            label = f"{name}[{number}]" if len(fed) > 1 else name
            mapped.stored[label] = part.name
            mapped.targets[label] = replace(
                view,
                global_shape=shape,
                pieces=tuple(
                    Piece(Box(plus(piece.box.offsets, window.offsets), piece.box.shape), piece.local)
                    for piece in view.pieces
                ),
            )


def _shape_for(item: TensorItem, leaf: torch.Tensor) -> Ints:
    """The shape of a stored tensor for a destination of this dtype."""
    return item.value_shape if lands(item, leaf.dtype) else item.global_shape


def _by_shards(target: LocalTensor, windows: list[Box], dim: int) -> Iterator[LocalTensor]:
    """The part of the local tensor that belongs to each window: its shard under the destination's own placements.

    Raises:
        ValueError: The stacked shards do not have the local tensor's shape.
    """
    given = target.layout or Layout(target.global_shape)
    if given.mesh_shape and not target.coordinate:  # not in this mesh: it holds no element of any part
        yield from (replace(target, pieces=()) for _ in windows)
        return
    layouts = [Layout(window.shape, given.mesh_shape, given.placements) for window in windows]
    shapes = [layout.local_shape(target.coordinate) for layout in layouts]
    _check_stack(tuple(target.tensor.shape), shapes, dim, "here")
    start = 0
    for layout, shape in zip(layouts, shapes, strict=True):
        size = shape[dim] if shape else 1
        view = target.tensor.narrow(dim, start, size) if shape else target.tensor
        yield LocalTensor(view, layout.global_shape, layout.pieces(target.coordinate), layout, target.coordinate)
        start += size


def _by_wholes(target: LocalTensor, windows: list[Box], dim: int) -> Iterator[LocalTensor]:
    """The part of the local tensor that belongs to each window: the destination is a shard of the whole stack.

    Raises:
        ValueError: The stacked windows do not have the destination's global shape.
    """
    _check_stack(target.global_shape, [window.shape for window in windows], dim, "altogether")
    start = 0
    for window in windows:
        place = Box(tuple(start if at == dim else 0 for at in range(len(window.shape))), window.shape)
        pieces: list[Piece] = []
        for piece in target.pieces:
            common = piece.box.intersect(place)
            if common is not None:
                inside = common.relative_to(piece.box.offsets)
                stored = Box(common.relative_to(place.offsets), common.shape)
                pieces.append(Piece(stored, plus(piece.local, inside)))
        yield replace(target, global_shape=window.shape, pieces=tuple(pieces))
        start += window.shape[dim]


def _check_stack(shape: Ints, parts: list[Ints], dim: int, where: str) -> None:
    if len(parts) == 1 and parts[0] == shape:
        return
    even = 0 <= dim < len(shape) and all(
        len(part) == len(shape) and (*part[:dim], *part[dim + 1 :]) == (*shape[:dim], *shape[dim + 1 :])
        for part in parts
    )
    if not even or sum(part[dim] for part in parts) != shape[dim]:
        stacked = ", ".join(map(str, parts))
        raise ValueError(f"the destination has the shape {shape} {where}, its parts {stacked} (stacked on dim {dim})")
