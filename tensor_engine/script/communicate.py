"""Reductions over the axes of a mesh, and tensors that move from one mesh to another: the script's part.

Gradients go the opposite way: each of these is a linear map from what all ranks of a mesh have to what all ranks of a
mesh get, and its gradient is the transposed map. So ``x.backward()`` gives the gradients of the *sum of x over the
ranks*, here as everywhere in the engine; of a loss that all ranks have in common, take one rank's
(``loss.slice_mesh(gpus=0).backward()``), or ``avg`` the gradients that every rank has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import MeshMismatchError, ReductionError, StreamMismatchError
from skipper.tensor_engine.script import activation, recording
from skipper.tensor_engine.script.bundles import REDUCE, PendingReduction, call_together, runs
from skipper.tensor_engine.script.issue import issue_call, ship
from skipper.tensor_engine.script.plans import mesh_axes, plan_move, plan_reduction
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.script.tensor import Tensor, two_meshes, value_of, wrap
from skipper.tensor_engine.script.value import Value
from skipper.tensor_engine.shared import reductions
from skipper.tensor_engine.shared.metadata import TensorMetadata, metadata
from skipper.tensor_engine.worker.communication import Reduction

T = TypeVar("T")


@overload
def reduce(
    tensor: torch.Tensor,
    axes: str | Sequence[str],
    reduction: str = "sum",
    *,
    scatter: bool = False,
    mesh: ProcMesh | None = None,
    out: torch.Tensor | None = None,
) -> Tensor: ...


@overload
def reduce(
    tensor: T, axes: str | Sequence[str], reduction: str = "sum", *, scatter: bool = False, mesh: ProcMesh | None = None
) -> T: ...


def reduce(
    tensor: Any,
    axes: str | Sequence[str],
    reduction: str = "sum",
    *,
    scatter: bool = False,
    mesh: ProcMesh | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Combine the values that ranks have along axes of the mesh.

    Every rank gets the result, unless ``mesh`` says otherwise; it is computed in the order of the ranks, so that all
    get the same bits. Returns at once.

    Args:
        tensor: a tensor of a mesh; or a pytree of them, such as a dictionary of gradients: the workers exchange small
            ones together.
        axes: the axes to reduce over; with several axes the ranks count with the last one fastest.
        reduction: ``"sum"``, ``"avg"``, ``"product"``, ``"min"``, ``"max"`` (where one value is NaN, so is the result),
            ``"band"``, ``"bor"``, ``"bxor"``; or ``"stack"``, which puts all values along a new outermost dim.
        scatter: cut the result along dim 0 into as many parts as there are ranks, and give each rank its own. With
            ``"stack"`` it is an all-to-all: rank j gets part j of all ranks, concatenated along dim 0.
        mesh: a slice of the tensor's mesh: only its ranks get the result, which is a tensor of that slice.
        out: a tensor of the same mesh, with the shape and dtype of the result, which is written into it.

    Returns:
        A new contiguous tensor, or ``out``; for a pytree, one of the same structure.

    Raises:
        KeyError: the mesh has no such axis.
        ValueError: there is no such reduction, an axis is named twice, dim 0 cannot be cut evenly, ``out`` has another
            shape or dtype, or arguments exclude each other.
        ReductionError: (a `TypeError`) the reduction is not defined for the dtype, or it needs a gradient and has none.
        MeshMismatchError: (a `ValueError`) ``mesh`` is not a part of the tensor's mesh, or ``out`` is of another mesh.
        LocalTensorError: this is not a tensor of a mesh.
        RuntimeError: ``out`` requires a gradient, and gradients are being recorded.
    """
    if _is_tree(tensor):
        if out is not None:
            raise ValueError("out= is for one tensor, not for a pytree of them")
        return _of_tree(tensor, lambda leaves: _reduce_leaves(leaves, axes, reduction, scatter, mesh))
    value = value_of(tensor)
    names = mesh_axes(value.mesh, axes)
    reductions.require(reduction, value.meta.dtype)
    if mesh is not None and (scatter or out is not None):
        raise ValueError("mesh= cannot be combined with scatter= or out=")
    plan = _reduction(value, names, reduction, scatter, mesh)
    if torch.is_grad_enabled() and tensor.requires_grad:
        if out is not None:
            raise ValueError("reduce(out=...) has no gradient: do not pass out=, or reduce tensor.detach()")
        if reduction not in _WITH_GRADIENT:
            raise ReductionError(
                f"{reduction} has no gradient here: reduce tensor.detach(), or take one of {', '.join(_WITH_GRADIENT)}"
            )
        result: Tensor = _Reduce.apply(tensor, names, reduction, scatter, mesh)  # type: ignore[no-untyped-call]
        return result
    if out is None:
        return _issue_reduce(value, plan, mesh)
    return _write(value, plan, out)


@overload
def reduce_(tensor: torch.Tensor, axes: str | Sequence[str], reduction: str = "sum") -> Tensor: ...


@overload
def reduce_(tensor: T, axes: str | Sequence[str], reduction: str = "sum") -> T: ...


def reduce_(tensor: Any, axes: str | Sequence[str], reduction: str = "sum") -> Any:
    """`reduce` into the tensor itself, if the result has its shape, as for all reductions but ``"stack"``.

    For a pytree, such as the list of all gradients of a model, this takes one instruction, and few messages between
    workers.

    Raises:
        RuntimeError: the tensor requires a gradient, and gradients are being recorded.
        Exception: as `reduce`.
    """
    if _is_tree(tensor):
        return _of_tree(tensor, lambda leaves: _reduce_leaves_in_place(leaves, axes, reduction))
    value, plan = _plain_reduction(tensor, axes, reduction)
    return _write(value, plan, tensor)


def _of_tree(tree: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    """The tree with its tensors replaced."""
    leaves, spec = tree_flatten(tree)
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for index, changed in zip(where, change([leaves[index] for index in where]), strict=True):
        leaves[index] = changed
    return tree_unflatten(leaves, spec)


def _plain_reduction(tensor: Any, axes: str | Sequence[str], kind: str) -> tuple[Value, Reduction]:
    value = value_of(tensor)
    names = mesh_axes(value.mesh, axes)
    reductions.require(kind, value.meta.dtype)
    return value, _reduction(value, names, kind)


def _reduce_leaves(
    leaves: list[torch.Tensor], axes: str | Sequence[str], kind: str, scatter: bool, mesh: ProcMesh | None
) -> list[Tensor]:
    has_gradients = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if scatter or mesh is not None or kind == reductions.STACK or has_gradients:
        return [reduce(leaf, axes, kind, scatter=scatter, mesh=mesh) for leaf in leaves]
    results: list[Tensor] = []
    for run in _runs([_plain_reduction(leaf, axes, kind) for leaf in leaves], is_new=True):
        results += _issue_together(run, [value.meta.contiguous() for value, _ in run])
    return results


def _reduce_leaves_in_place(leaves: list[torch.Tensor], axes: str | Sequence[str], kind: str) -> list[Tensor]:
    planned = [_plain_reduction(leaf, axes, kind) for leaf in leaves]
    for leaf, (value, plan) in zip(leaves, planned, strict=True):
        _require_writable(leaf, value, plan)
    for run in _runs(planned, is_new=False):
        _issue_together(run, ())
    for leaf in leaves:
        torch.autograd.graph.increment_version(leaf)
    return cast(list[Tensor], leaves)  # by value_of


def _runs(planned: Sequence[tuple[Value, Reduction]], *, is_new: bool) -> list[list[tuple[Value, Reduction]]]:
    return runs(
        (
            each,
            PendingReduction(
                (each[0].instruction_stream, each[0].mesh),
                each[1],
                is_new,
                each[0].storage,
                None if is_new else each[0].storage,
            ),
        )
        for each in planned
    )


def _issue_together(run: Sequence[tuple[Value, Reduction]], outputs: Sequence[TensorMetadata]) -> list[Tensor]:
    """Reduce a bundle of values; into themselves if there are no outputs."""
    values, plans = [value for value, _ in run], [plan for _, plan in run]
    call = call_together(plans, _name(plans[0]), outputs)
    return issue_call(
        call.function,
        (*values, *(values if call.writes else ())),
        call.outputs,
        instruction_stream=values[0].instruction_stream,
        mesh=values[0].mesh,
        name=call.name,
        static=call.static,
        sees_poison=call.sees_poison,
        writes=call.writes,
    )


def all_to_all(tensor: torch.Tensor, axes: str | Sequence[str]) -> Tensor:
    """``reduce(tensor, axes, "stack", scatter=True)``: part j along dim 0 of every rank goes to rank j.

    Raises:
        Exception: as `reduce`.
    """
    return reduce(tensor, axes, reductions.STACK, scatter=True)


def all_gather(tensor: torch.Tensor, axes: str | Sequence[str], dim: int = 0) -> Tensor:
    """Concatenate the tensors of all ranks along axes, along one of their dims; every rank gets the result.

    ``reduce(tensor, axes, "stack")`` stacks them along a new dim.

    Args:
        tensor: a tensor of a mesh, with at least one dim.
        axes: the axes to gather along; with several axes the ranks count with the last one fastest.
        dim: the dim along which they are concatenated.

    Raises:
        IndexError: the tensor has no such dim.
        Exception: as `reduce`.
    """
    along = range(tensor.dim())[dim]
    gathered: Any = end_to_end(reduce(tensor, axes, reductions.STACK), along)
    return cast(Tensor, gathered)


def end_to_end(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """The shards of ranks, stacked along dim 0, concatenated along one of their dims instead."""
    return stacked.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@overload
def to_mesh(tensor: torch.Tensor, mesh: ProcMesh) -> Tensor: ...


@overload
def to_mesh(tensor: T, mesh: ProcMesh) -> T: ...


def to_mesh(tensor: Any, mesh: ProcMesh) -> Any:
    """Bring a tensor to another mesh, which may be of other processes.

    Each rank of ``mesh`` gets the shard of the rank with the same coordinates. Along axes that only ``mesh`` has, all
    ranks get the same. Returns at once; the sending ranks do not wait for the receiving ones.

    Args:
        tensor: a tensor of a mesh; or one of the script, which all ranks get; or a pytree of them (`place` also takes
            modules).
        mesh: a mesh with at least the axes of the tensor's mesh, of the same sizes.

    Returns:
        A new contiguous tensor on the same stream; for a pytree, one of the same structure.

    Raises:
        MeshMismatchError: (a `ValueError`) ``mesh`` lacks an axis, or has it in another size.
    """
    if _is_tree(tensor):
        return tree_map_only(torch.Tensor, lambda each: to_mesh(each, mesh), tensor)
    if not isinstance(tensor, Tensor):
        recording.refuse("to_mesh of a tensor of the script", "bring it there outside, and pass it as an argument")
        return ship(
            tensor, instruction_stream=session_of(mesh).instruction_stream(mesh, activation.current_stream()), mesh=mesh
        )
    value = value_of(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: Tensor = _ToMesh.apply(tensor, mesh)  # type: ignore[no-untyped-call]
        return result
    return _issue_move(value, mesh)


def slice_mesh(tensor: torch.Tensor, **selection: int | slice) -> Tensor:
    """The same tensor on a part of its mesh: ``t.slice_mesh(gpus=0)``. Nothing moves, and memory is shared.

    Args:
        tensor: a tensor of a mesh.
        **selection: as for ``ProcMesh.slice``.

    Raises:
        KeyError: the mesh has no such axis.
        IndexError: nothing is selected.
    """
    value = value_of(tensor)
    mesh = value.mesh.slice(**selection)
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: Tensor = _Slice.apply(tensor, mesh)  # type: ignore[no-untyped-call]
        return result
    return _issue_part(value, mesh)


def laid_out(tensor: torch.Tensor, mesh: ProcMesh) -> Tensor:
    """The same tensor on the same processes with other axes. Nothing moves, and memory is shared; without gradients.

    Raises:
        MeshMismatchError: (a `ValueError`) ``mesh`` is of other processes, or has them in another order.
    """
    value = value_of(tensor)
    if value.mesh == mesh:
        return wrap(value)
    if (value.mesh.uid, value.mesh.ranks) != (mesh.uid, mesh.ranks):
        raise MeshMismatchError(f"a tensor of {value.mesh!r} is not of the processes of {mesh!r}")
    return _issue_part(value, mesh)


def _is_tree(what: object) -> bool:
    return isinstance(what, list | tuple | dict)


_WITH_GRADIENT = ("sum", "avg", reductions.STACK)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axes: tuple[str, ...], reduction: str, scatter: bool, mesh: ProcMesh | None
    ) -> Tensor:
        value = value_of(tensor)
        ctx.plan = (axes, reduction, scatter, value.mesh)
        return _issue_reduce(value, _reduction(value, axes, reduction, scatter, mesh), mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        axes, reduction, scatter, mesh = ctx.plan
        back: torch.Tensor
        if value_of(grad).mesh.ranks != mesh.ranks:
            # Move it from the ranks that got the result to all ranks. The others got nothing, so they add zeros.
            grad = _issue_spread(value_of(grad), mesh)
        if scatter and reduction == reductions.STACK:
            back = reduce(grad, axes, reductions.STACK, scatter=True)
        elif scatter:
            back = reduce(grad, axes, reductions.STACK).flatten(0, 1)
        elif reduction == reductions.STACK:
            back = reduce(grad, axes, "sum", scatter=True).squeeze(0)
        else:
            back = reduce(grad, axes, "sum")
        if reduction == "avg":
            back = back / math.prod(mesh.extent[axis] for axis in axes)
        return back, None, None, None, None


class _ToMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: ProcMesh) -> Tensor:
        value = value_of(tensor)
        ctx.mesh = value.mesh
        return _issue_move(value, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        source: ProcMesh = ctx.mesh
        back: torch.Tensor = grad
        here = value_of(grad).mesh
        broadcast = tuple(axis for axis in here.extent if axis not in source.extent)
        if broadcast:
            back = reduce(grad, broadcast, "sum", mesh=here.slice(**dict.fromkeys(broadcast, 0)))
        return to_mesh(back, source), None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: ProcMesh) -> Tensor:
        value = value_of(tensor)
        ctx.mesh = value.mesh
        return _issue_part(value, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _issue_spread(value_of(grad), ctx.mesh), None


def _reduction(
    value: Value, axes: tuple[str, ...], kind: str, scatter: bool = False, onto: ProcMesh | None = None
) -> Reduction:
    """The description of a reduction for workers. Workers have numbers of their own, even on the same mesh."""
    return plan_reduction(value.instruction_stream.session.numbers, value.mesh, axes, kind, scatter, value.meta, onto)


def _issue_reduce(value: Value, plan: Reduction, onto: ProcMesh | None) -> Tensor:
    here = value.instruction_stream
    owner = None if onto is None else here.session.instruction_stream(onto, here.stream)
    return issue_call(
        REDUCE,
        (value,),
        (metadata(plan.result_shape(), value.meta.dtype, value.meta.device),),
        instruction_stream=here,
        mesh=value.mesh if onto is None else onto,
        owner=owner,
        name=_name(plan),
        static=plan,
        sees_poison=True,
    )[0]


def _write(value: Value, plan: Reduction, out: torch.Tensor) -> Tensor:
    """Reduce into ``out``."""
    into = _require_writable(out, value, plan)
    issue_call(
        REDUCE,
        (value, into),
        (),
        instruction_stream=value.instruction_stream,
        mesh=value.mesh,
        name=_name(plan),
        static=plan,
        sees_poison=True,
        writes=(1,),
    )
    torch.autograd.graph.increment_version(out)  # autograd must not use the version that it has saved
    assert isinstance(out, Tensor)  # by value_of
    return out


def _require_writable(out: torch.Tensor, value: Value, plan: Reduction) -> Value:
    """The value of a tensor that may get the result of a reduction.

    Raises:
        RuntimeError: it requires a gradient, and gradients are being recorded.
        StreamMismatchError: it is of another stream than the reduced value.
        MeshMismatchError: it is of another mesh.
        ValueError: it has another shape or dtype than the result.
    """
    if torch.is_grad_enabled() and out.requires_grad:
        raise RuntimeError(
            "autograd does not see a reduction into a tensor that requires a gradient: use what reduce returns, or "
            "do it under torch.no_grad()"
        )
    into = value_of(out)
    here, there = value.instruction_stream, into.instruction_stream
    if here is not there:
        if here.ranks == there.ranks and here.session is there.session:
            raise StreamMismatchError("out= belongs to another stream than the tensor: borrow one of them")
        raise MeshMismatchError(f"out= and the reduced tensor are of {two_meshes(into, value)}")
    shape = plan.result_shape()
    if into.meta.shape != shape or into.meta.dtype != value.meta.dtype:
        raise ValueError(f"the result is {value.meta.dtype} {list(shape)}; into {into.meta!r} it cannot be written")
    return into


def _issue_move(value: Value, mesh: ProcMesh) -> Tensor:
    source, target = value.instruction_stream.session, session_of(mesh)
    plan = plan_move(source.numbers, value.mesh, target.numbers, mesh, value.meta)
    if plan.groups:
        issue_call(
            "skipper.tensor_engine.worker.communication:send",
            (value,),
            (),
            instruction_stream=value.instruction_stream,
            mesh=value.mesh,
            name="to_mesh (sending)",
            static=plan,
            sees_poison=True,
        )
    return issue_call(
        "skipper.tensor_engine.worker.communication:receive",
        (value,) if source is target else (),
        (value.meta.contiguous(),),
        instruction_stream=target.instruction_stream(mesh, value.instruction_stream.stream),
        mesh=mesh,
        name="to_mesh",
        static=plan,
        sees_poison=True,
    )[0]


def _issue_part(value: Value, mesh: ProcMesh) -> Tensor:
    tensor = issue_call(
        "skipper.tensor_engine.worker.communication:part",
        (value,),
        (value.meta,),
        instruction_stream=value.instruction_stream.session.instruction_stream(mesh, value.instruction_stream.stream),
        mesh=mesh,
        name="slice_mesh",
    )[0]
    tensor.remote_value.storage = value.storage
    return tensor


def _issue_spread(value: Value, mesh: ProcMesh) -> Tensor:
    return issue_call(
        "skipper.tensor_engine.worker.communication:spread",
        (value,),
        (value.meta.contiguous(),),
        instruction_stream=value.instruction_stream.session.instruction_stream(mesh, value.instruction_stream.stream),
        mesh=mesh,
        name="the gradient of a part of the mesh",
    )[0]


def _name(plan: Reduction) -> str:
    return f"reduce({plan.kind!r}{', scatter=True' if plan.scatter else ''})"
