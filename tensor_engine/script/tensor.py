"""`Tensor`: a tensor whose shards are on the workers; the script has only its metadata."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch._C._dynamo import eval_frame as frames

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import (
    CheckpointTargetError,
    LocalTensorError,
    MeshMismatchError,
    PickleError,
    StreamMismatchError,
)
from skipper.tensor_engine.script import methods, recording
from skipper.tensor_engine.script.streams import Stream, stream_of
from skipper.tensor_engine.script.value import Value

left_to_their_class: set[type] = set()
"""Classes that run operations in their own way, with tensors of a mesh inside: torch's `DTensor`, once it is in use."""


class Tensor(torch.Tensor):
    """A tensor whose shards are on the workers of a mesh.

    Operations under ``with mesh.activate():`` and operations on other such tensors make it. Shape, dtype, strides and
    device are those of one shard. Its values stay on the workers: `inspect` and `fetch_shard` bring those of one rank.

    The memory on the workers is freed when the last reference to the tensor, and to those views of it that are in
    use, is gone; or at `drop`.

    Attributes:
        remote_value: its value on the workers: for the engine, not for users.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import inspect

        procs = this_host().spawn_procs({"gpus": 2})
        with procs.activate():
            x = torch.ones(3) * procs.rank_tensor("gpus")  # on both processes
        print(inspect(x, gpus=1).tolist())  # [1.0, 1.0, 1.0]
        ```
    """

    __slots__ = ("remote_value",)
    remote_value: Value
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *args: object, **kwargs: object) -> Tensor:
        """Refuse: tensors of a mesh are not made by their class."""
        raise TypeError("a tensor of a mesh is made by torch's functions under `with mesh.activate():`")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as a plain function
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Issue an operation."""
        if left_to_their_class and not left_to_their_class.isdisjoint(types):
            return NotImplemented
        return methods.wired.dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The same value outside of autograd; an assignment replaces the tensor's value, as ``module.half()`` does."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        value = value_of(other)
        _set_data(self, other)
        self.remote_value = value

    @property
    def mesh(self) -> ProcMesh:
        """The processes that have the shards."""
        return self.remote_value.mesh

    @property
    def stream(self) -> Stream:
        """The stream to which it belongs."""
        return stream_of(self.remote_value.instruction_stream.stream)

    def drop(self) -> None:
        """Free the memory on the workers now; using the tensor after that is a `DroppedTensorError`.

        Views of it keep what they view. It may be called again.
        """
        self.remote_value.drop()

    def reduce(
        self,
        axes: str | Sequence[str],
        reduction: str = "sum",
        *,
        scatter: bool = False,
        mesh: ProcMesh | None = None,
        out: torch.Tensor | None = None,
    ) -> Tensor:
        """Combine the values that ranks have along axes of the mesh: see `communicate.reduce`."""
        return methods.wired.reduce(self, axes, reduction, scatter=scatter, mesh=mesh, out=out)

    def reduce_(self, axes: str | Sequence[str], reduction: str = "sum") -> Tensor:
        """`reduce` into this tensor."""
        return methods.wired.reduce_(self, axes, reduction)

    def all_to_all(self, axes: str | Sequence[str]) -> Tensor:
        """Send the parts along dim 0 to the ranks along axes of the mesh: see `communicate.all_to_all`."""
        return methods.wired.all_to_all(self, axes)

    def all_gather(self, axes: str | Sequence[str], dim: int = 0) -> Tensor:
        """Concatenate the tensors of all ranks along axes, along a dim: see `communicate.all_gather`."""
        return methods.wired.all_gather(self, axes, dim)

    def to_mesh(self, mesh: ProcMesh) -> Tensor:
        """The same values on another mesh: see `communicate.to_mesh`."""
        return methods.wired.to_mesh(self, mesh)

    def slice_mesh(self, **selection: int | slice) -> Tensor:
        """The same tensor on a part of its mesh: see `communicate.slice_mesh`."""
        return methods.wired.slice_mesh(self, **selection)

    def tolist(self) -> Any:
        """The values of the first rank, as (lists of) numbers: a fetch, like `item`."""
        return methods.wired.fetch_first(self.remote_value).tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: the memory is elsewhere."""
        raise LocalTensorError("a tensor of a mesh has no memory here: fetch a shard by inspect(tensor).numpy()")

    def __array__(self, dtype: Any = None) -> NoReturn:
        raise LocalTensorError("a tensor of a mesh has no memory here: fetch a shard by inspect(tensor).numpy()")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise PickleError(
            "a tensor of a mesh cannot be pickled: fetch a shard by inspect(tensor), or pass it to an actor's endpoint"
        )

    def __get_tensor_shard__(self, index: object) -> torch.Tensor:
        """What `torch.distributed.checkpoint` saves: the shard of the first rank, which is fetched."""
        shard: torch.Tensor = methods.wired.fetch_first(self.remote_value)
        return shard

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse to be loaded into by `torch.distributed.checkpoint`: it would fill what has been fetched."""
        raise CheckpointTargetError(
            "a checkpoint cannot be loaded into tensors of a mesh: load it into tensors of the script, and bring these "
            "there, by model.load_state_dict(state) or mesh.place(state)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy on the workers, for `copy.deepcopy` of modules."""
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user has made, the leaves of autograd's graph, are deep-copied")
        known: Tensor | None = memo.get(id(self))
        if known is not None:
            return known
        with torch.no_grad():
            made: Any = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = made
            made.grad = copy.deepcopy(self.grad, memo)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return cast(Tensor, made)

    def __format__(self, format_spec: str) -> str:
        """By a format, the number of the first rank, which is fetched; without one as `repr`."""
        if format_spec and not self.dim():
            return format(self.item(), format_spec)
        return str(super().__format__(format_spec))  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"<tensor {self.remote_value.meta!r}, {self.remote_value.mesh!r}{grad}>"


def keep_the_compiler_out(function: Callable[..., Any]) -> None:
    """Make `torch.compile` skip a function and all that it calls: it traces the Python code of what it compiles."""
    leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, leave)


keep_the_compiler_out(Tensor.__torch_dispatch__)

_set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_make: Callable[..., Tensor] = torch.Tensor._make_wrapper_subclass


def wrap(value: Value) -> Tensor:
    """A new tensor of the script for a value on the workers; several may share one."""
    meta = value.meta
    tensor = _make(
        Tensor, meta.shape, strides=meta.stride, storage_offset=meta.offset, dtype=meta.dtype, device=meta.device
    )
    if meta.is_conj:
        torch._C._set_conj(tensor, True)
    if meta.is_neg:
        torch._C._set_neg(tensor, True)
    tensor.remote_value = value
    return tensor


def refuse_mixture(what: str, first: Value, other: Value) -> NoReturn:
    """Say why two values of different instruction streams cannot meet in an operation: ``what``, as ``add: tensors``.

    Raises:
        StreamMismatchError: they are of different streams.
        MeshMismatchError: they are of different meshes.
    """
    one, two = first.instruction_stream, other.instruction_stream
    if one.members == two.members and one.session is two.session:
        raise StreamMismatchError(
            f"{what} of the streams {one.stream.name!r} and {two.stream.name!r} cannot be combined: borrow one for the "
            "stream of the other"
        )
    raise MeshMismatchError(
        f"{what} of {two_meshes(first, other)} cannot be combined: bring one to the mesh of the other by to_mesh, or "
        "take a part of it by slice_mesh"
    )


def two_meshes(first: Value, other: Value) -> str:
    """Name the meshes of two values, which may have the same name."""
    one, two = repr(first.mesh), repr(other.mesh)
    return f"two meshes that are both called {one}" if one == two else f"{one} and {two}"


def local_of(tensor: object) -> object:
    """The local tensor of a `DTensor`; else the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor) if type(tensor) in left_to_their_class else tensor


def version_of(tensor: torch.Tensor) -> int:
    """How often it has been changed, as counted by autograd."""
    return tensor._version


def value_of(tensor: object) -> Value:
    """The value behind a tensor of a mesh, which may be used.

    Raises:
        LocalTensorError: this is not a tensor of a mesh.
        DroppedTensorError: it has been dropped.
        BorrowedTensorError: it is lent, or was borrowed and given back.
    """
    if not isinstance(tensor, Tensor):
        raise LocalTensorError(f"a tensor of a mesh is needed here, not {type(tensor).__name__}")
    value = tensor.remote_value
    value.check()
    if (recorder := recording.current) is not None:
        recorder.note_tensor(tensor, value)
    return value
