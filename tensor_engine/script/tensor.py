"""`Tensor`: a tensor whose shards lie on the workers; the script holds only what is known of it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from skipper.tensor_engine.errors import LocalTensorError, MeshMismatchError, PickleError, StreamMismatchError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.shared.metadata import Metadata

if TYPE_CHECKING:
    from skipper.control import ProcMesh
    from skipper.tensor_engine.script.instruction_stream import InstructionStream
    from skipper.tensor_engine.script.streams import Stream

_Dispatch = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class Storage:
    """What a tensor and its views share; that somebody has borrowed it concerns all of them.

    Attributes:
        barred: why none of them may be used just now, or None.
        frozen: why none of them may be changed just now, or None.
        keeps_frozen: whether it stays so when it is not lent any more.
        lent: to how many borrowers.
    """

    __slots__ = ("barred", "frozen", "keeps_frozen", "lent")

    def __init__(self) -> None:
        self.barred: Exception | None = None
        self.frozen: Exception | None = None
        self.keeps_frozen = False
        self.lent = 0

    def refuse_change(self) -> None:
        """See whether it may be changed.

        Raises:
            BorrowedTensorError: it is lent, or has been borrowed, to be read only.
        """
        if self.frozen is not None:
            raise self.frozen.with_traceback(None)


class Value:
    """A tensor on the workers of an instruction stream, under a number; its memory there goes with this object.

    Attributes:
        ref: its number, unique in the script.
        meta: what is known of it.
        instruction_stream: the workers that have it, and the stream to which it belongs.
        mesh: those workers as the user laid them out.
        storage: shared with its views.
        barred: why it may not be used any more, or None.
    """

    __slots__ = ("__weakref__", "_freed", "barred", "instruction_stream", "mesh", "meta", "ref", "storage")

    def __init__(
        self,
        ref: int,
        meta: Metadata,
        instruction_stream: InstructionStream,
        mesh: ProcMesh,
        storage: Storage | None = None,
    ) -> None:
        self.ref = ref
        self.meta = meta
        self.instruction_stream = instruction_stream
        self.mesh = mesh
        self.storage = storage or Storage()
        self.barred: Exception | None = None
        self._freed: deque[int] = instruction_stream.freed
        if (recorder := recording.current) is not None:
            recorder.note_made(self)

    def check(self) -> None:
        """See whether it may be used.

        Raises:
            DroppedTensorError: it has been dropped.
            BorrowedTensorError: it is lent, or was borrowed and given back.
        """
        barred = self.barred or self.storage.barred
        if barred is not None:
            raise barred.with_traceback(None)

    def __del__(self) -> None:
        # Only a note: this runs wherever the last reference happens to go, also in the middle of an operation.
        self._freed.append(self.ref)


class Tensor(torch.Tensor):
    """A tensor whose shards lie on the workers of a mesh.

    It comes from operations under ``with mesh.activate():`` and from operations on other such tensors. Shape, dtype,
    strides and device are those of one shard. Its values stay where they are: `inspect` and `fetch_shard` bring those
    of one rank.

    The memory on the workers is freed when the last reference to the tensor, and to those views of it that are in
    use, is gone; or at `drop`.
    """

    __slots__ = ("_value",)
    _value: Value
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *args: object, **kwargs: object) -> Tensor:
        """Refuse: tensors of a mesh are not made by their class."""
        raise TypeError("a tensor of a mesh is made by torch's functions under `with mesh.activate():`")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation is that of a plain function
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Issue an operation."""
        return _dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The same value outside of autograd; what is assigned takes the tensor's place, as ``module.half()`` does."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        value = value_of(other)
        _set_data(self, other)
        self._value = value

    @property
    def mesh(self) -> ProcMesh:
        """The processes that have the shards."""
        return self._value.mesh

    @property
    def stream(self) -> Stream:
        """The stream to which it belongs."""
        from skipper.tensor_engine.script.streams import stream_of

        return stream_of(self._value.instruction_stream.stream)

    def drop(self) -> None:
        """Free the memory on the workers now; using the tensor after that is a `DroppedTensorError`.

        Views of it keep what they view. It may be called again.
        """
        _drop(self._value)

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
        from skipper.tensor_engine.script import communicate

        return communicate.reduce(self, axes, reduction, scatter=scatter, mesh=mesh, out=out)

    def reduce_(self, axes: str | Sequence[str], reduction: str = "sum") -> Tensor:
        """`reduce` into this tensor."""
        from skipper.tensor_engine.script import communicate

        return communicate.reduce_(self, axes, reduction)

    def all_to_all(self, axes: str | Sequence[str]) -> Tensor:
        """Give the parts along dim 0 to the ranks along axes of the mesh: see `communicate.all_to_all`."""
        from skipper.tensor_engine.script import communicate

        return communicate.all_to_all(self, axes)

    def to_mesh(self, mesh: ProcMesh) -> Tensor:
        """The same values on another mesh: see `communicate.to_mesh`."""
        from skipper.tensor_engine.script import communicate

        return communicate.to_mesh(self, mesh)

    def slice_mesh(self, **selection: int | slice) -> Tensor:
        """The same tensor on a part of its mesh: see `communicate.slice_mesh`."""
        from skipper.tensor_engine.script import communicate

        return communicate.slice_mesh(self, **selection)

    def tolist(self) -> Any:
        """The values of the first rank, as (lists of) numbers: a fetch, like `item`."""
        return _fetch_first(self._value).tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: the memory is elsewhere."""
        raise LocalTensorError("a tensor of a mesh has no memory here: fetch a shard by inspect(tensor).numpy()")

    def __array__(self, dtype: Any = None) -> NoReturn:
        raise LocalTensorError("a tensor of a mesh has no memory here: fetch a shard by inspect(tensor).numpy()")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise PickleError(
            "a tensor of a mesh cannot be pickled: fetch a shard by inspect(tensor), or pass it to an actor's endpoint"
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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"<tensor {self._value.meta!r}, {self._value.mesh!r}{grad}>"


_set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_make: Callable[..., Tensor] = torch.Tensor._make_wrapper_subclass


def wrap(value: Value) -> Tensor:
    """A new tensor of the script for a value on the workers; several may share one."""
    meta = value.meta
    tensor = _make(
        Tensor, meta.shape, strides=meta.stride, storage_offset=meta.offset, dtype=meta.dtype, device=meta.device
    )
    tensor._value = value
    return tensor


def refuse_mixture(what: str, first: Value, other: Value) -> NoReturn:
    """Say why two values cannot meet that are not of one instruction stream.

    Args:
        what: the operation, and what of it does not go together: ``add: tensors``.
        first: the one.
        other: the other.

    Raises:
        StreamMismatchError: they are of different streams.
        MeshMismatchError: they are of different meshes.
    """
    one, two = first.instruction_stream, other.instruction_stream
    if one.members == two.members and one.session is two.session:
        raise StreamMismatchError(
            f"{what} of the streams {one.stream.name!r} and {two.stream.name!r} meet: borrow one for the stream of the "
            "other"
        )
    raise MeshMismatchError(
        f"{what} of {first.mesh!r} and {other.mesh!r} meet: bring one to the mesh of the other by "
        "to_mesh, or take a part of it by slice_mesh"
    )


def value_of(tensor: object) -> Value:
    """The value behind a tensor of a mesh, which may be used.

    Raises:
        LocalTensorError: this is no tensor of a mesh.
        DroppedTensorError: it has been dropped.
        BorrowedTensorError: it is lent, or was borrowed and given back.
    """
    if not isinstance(tensor, Tensor):
        raise LocalTensorError(f"a tensor of a mesh is needed here, not {type(tensor).__name__}")
    value = tensor._value
    value.check()
    if (recorder := recording.current) is not None:
        recorder.note_tensor(tensor)
    return value


def _unset(*args: object) -> Any:
    raise RuntimeError("tensor_engine has not been imported as a package")


_dispatch: _Dispatch = _unset
_drop: Callable[[Value], None] = _unset
_fetch_first: Callable[[Value], torch.Tensor] = _unset


def connect(dispatch: _Dispatch, drop: Callable[[Value], None], fetch_first: Callable[[Value], torch.Tensor]) -> None:
    """Set what the methods of `Tensor` do; the modules that do it need the class themselves."""
    global _dispatch, _drop, _fetch_first
    _dispatch, _drop, _fetch_first = dispatch, drop, fetch_first
