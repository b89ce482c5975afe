"""Run a model's own `load_weights` on tensors without values, and record what it does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from skipper.torchstore.algebra.strided import NotStridedError, Pair, Strided, meet, merged
from skipper.torchstore.errors import RecordingError
from skipper.torchstore.plans.load_plan import LoadPlan, tensors_of
from skipper.torchstore.plans.provenance import (
    Computed,
    Constant,
    Contents,
    FromCheckpoint,
    Written,
    addresses,
    storage_id,
)
from skipper.torchstore.plans.regions import (
    RecordedTensor,
    RegionCopy,
    RegionFill,
    WholeTensors,
    dtype_of,
    is_scattered,
)
from skipper.torchstore.protocol.meta import TensorMeta
from skipper.torchstore.tensors.local_tensors import is_dtensor, why_not_dense

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's own function that loads a checkpoint: it takes names and whole tensors, in any order."""

CheckpointShapes = Mapping[str, "torch.Tensor | TensorMeta | tuple[tuple[int, ...], torch.dtype]"]
"""The content of a checkpoint, by name: tensors (on any device, meta too), the ``tensors`` of `get_meta`, or shapes
with dtypes."""

_MOST_REPEATS = 64  # the most copies of one element in a parameter; beyond that, the whole tensor is read
_ALIKE = {"aten::clone", "aten::_to_copy"}
_CONSTANTS = {"aten::zeros": 0.0, "aten::zeros_like": 0.0, "aten::new_zeros": 0.0}
_FILLED = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2}  # the position of their value
_CONSTANTS |= {"aten::ones": 1.0, "aten::ones_like": 1.0, "aten::new_ones": 1.0}


def record_plan(
    model: torch.nn.Module, checkpoint: CheckpointShapes, *, load_weights: LoadWeights | None = None
) -> LoadPlan:
    """Record which regions of the checkpoint tensors a model's own `load_weights` copies, and to where.

    `load_weights` runs once or a few times on tensors of the meta device: no checkpoint is read, and nothing is written
    to the model, which may be on any device, including the meta device. The recorder follows views, copies, casts, cat,
    stack, pad and padding with a number. For anything else (arithmetic, quantization, reading a value) the plan lists
    the checkpoint tensors as ``whole``: `load_by_plan` passes those to `load_weights` each time. `load_weights` has to
    do the same with tensors of other values, and with only some of the names.

    Args:
        model: One rank's model, as the engine has built it. Its parameters and buffers are plain tensors.
        checkpoint: All tensors that `load_weights` gets, in that order: tensors, of which only shape and dtype count,
            ``(await get_meta(key)).tensors``, or tuples of shape and dtype.
        load_weights: The function, if the model has no method of that name.

    Returns:
        The plan: for this rank's model, and for every checkpoint of these names, shapes and dtypes.

    Raises:
        RecordingError: `load_weights` has raised (that error is the cause), or it fills parameters from another source.
        TypeError: The model has no `load_weights` and none was given, or ``checkpoint`` holds something else.
        ValueError: A parameter is a DTensor, or has no dense memory of its own (quantized by torch, lazy).
    """
    load = load_weights if load_weights is not None else getattr(model, "load_weights", None)
    if not callable(load):
        raise TypeError(f"{type(model).__name__} has no load_weights: give record_plan(..., load_weights=...)")
    for name, tensor in tensors_of(model).items():
        if is_dtensor(tensor):
            raise ValueError(f"{name!r} is a DTensor: it says itself what it holds, so read it by get_state_dict")
        if not tensor.is_meta and (reason := why_not_dense(tensor)):
            raise ValueError(f"{name!r} cannot be filled: {reason}")
    shapes = {name: _shape_of(name, value) for name, value in checkpoint.items()}
    looked_at: dict[str, str] = {}
    while True:  # each time without the tensors whose values were requested, until there are none
        recorder = _Recorder(model, {name: shapes[name] for name in shapes if name not in looked_at})
        try:
            with torch.no_grad(), _unchanged(model) as replaced, recorder:
                load(recorder.weights())
                written = recorder.written(replaced())
            kept = recorder.kept()
        except Exception as error:
            if isinstance(error, RecordingError) and not recorder.looked_at:
                raise
            if not recorder.looked_at:
                raise RecordingError(recorder.current, f"it raised {type(error).__name__}: {error}") from error
        if not recorder.looked_at:
            return _plan(model, shapes, written, looked_at, kept)
        looked_at |= recorder.looked_at


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Intercepts every operation, below autograd, from any caller; executes only views.

    Attributes:
        current: The checkpoint tensor that `load_weights` got last.
        looked_at: Checkpoint tensors whose values were requested, and by which operation.
    """

    def __init__(self, model: torch.nn.Module, shapes: Mapping[str, RecordedTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = ""
        self.looked_at: dict[str, str] = {}
        self._contents = Contents()
        self._shapes = shapes
        self._model = model
        for tensor in tensors_of(model).values():
            self._contents.add(tensor.detach())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint that `load_weights` iterates over."""
        for name, shape in self._shapes.items():
            tensor = torch.empty(shape.shape, dtype=dtype_of(shape.dtype), device="meta")
            self._contents.add(tensor, Written(shape.all, FromCheckpoint(name, shape.all)))
            self.current = name
            yield name, tensor

    def written(self, replaced: Mapping[str, torch.Tensor]) -> dict[str, list[Written]]:
        """The new content of each parameter, by its first name; ``replaced`` parameters have new memory."""
        found: dict[str, list[Written]] = {}
        seen: set[tuple[int, Strided, torch.dtype]] = set()
        for name, tensor in tensors_of(self._model).items():
            tensor = tensor.detach()
            if name in replaced:
                names = self._contents.names([replaced[name]])
                found[name] = [Written(addresses(tensor), Computed(names, "the parameter is replaced"))]
                continue
            place = (storage_id(tensor), addresses(tensor), tensor.dtype)
            if place not in seen:
                seen.add(place)
                own = Strided(0, tuple(tensor.shape), tensor.stride())
                found[name] = self._contents.read(tensor, own)
        for name, parts in found.items():
            for part in parts:
                if isinstance(part.source, Computed) and not part.source.names and name not in replaced:
                    raise RecordingError(self.current, f"it fills {name} from another source: {part.source.reason}")
        return found

    def kept(self) -> frozenset[str]:
        """Checkpoint tensors whose elements are in living tensors that are neither parameters nor buffers."""
        return self._contents.escaped(tensors_of(self._model).values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute one operation of `load_weights`."""
        kwargs = kwargs or {}
        operation = func._schema.name
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        changed = _changed(func, args, kwargs)
        if operation in _CONSTANTS:
            return self._constant(func, args, kwargs, _CONSTANTS[operation])
        if operation in _FILLED:
            return self._constant(func, args, kwargs, args[_FILLED[operation]])
        if not any(self._contents.is_known(tensor) for tensor in given):
            return func(*args, **kwargs)
        with self:  # in inference mode there are operations that consist of others
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if operation == "aten::copy_":
            self._begin(args[0])
            self._contents.copy(args[0], args[1], untold=self._untold(args[1]))
            return args[0]
        if operation in ("aten::fill_", "aten::zero_") and self._fill(args):
            return args[0]
        if changed:
            self._spoil(changed, self._contents.names(given), str(func))
            results = tuple(changed) if func._schema.returns else (None,)
            return results[0] if len(results) == 1 else results
        if operation in _ALIKE:
            made = self._without_values(func, args, kwargs)
            self._contents.copy(made, args[0], untold=None)
            return made
        if operation in ("aten::cat", "aten::stack"):
            return self._join(func, args, kwargs)
        if operation == "aten::constant_pad_nd":
            return self._pad(func, args, kwargs)
        return self._compute(func, args, kwargs, given)

    def _constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
        made = func(*args, **kwargs)
        if made.is_meta:
            self._contents.add(made, Written(addresses(made), _number(value)))
        return made

    def _begin(self, tensor: torch.Tensor) -> None:
        """Follow a tensor that the engine has created, from its present values on."""
        if not self._contents.is_known(tensor) and not tensor.is_meta:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            everything = tensor.as_strided((size,), (1,), 0)
            untold = self._untold(everything)
            self._contents.add(everything, *([Written(addresses(everything), untold)] if untold else []))

    def _fill(self, args: tuple[Any, ...]) -> bool:
        """Record a fill with a number. Returns False if the value is unknown now."""
        into = args[0]
        value = args[1] if len(args) > 1 else 0.0
        if isinstance(value, torch.Tensor):
            if self._contents.is_known(value):
                self._contents.copy(into, value, untold=None)
                return True
            if value.is_meta:
                return False
            value = value.item()
        self._contents.copy(into, torch.empty((), dtype=into.dtype, device="meta"), untold=_number(value))
        return True

    def _join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        made: torch.Tensor = self._without_values(func, args, kwargs)
        tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
        start = 0
        self._contents.add(made)
        for number, tensor in enumerate(tensors):
            if func._schema.name == "aten::stack":
                into = made.select(dim, number)
            elif tensor.shape == (0,):  # torch's cat ignores these, for any shape of the others
                continue
            else:
                into = made.narrow(dim, start, tensor.shape[dim])
                start += tensor.shape[dim]
            self._contents.copy(into, tensor, untold=self._untold(tensor))
        return made

    def _pad(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        made: torch.Tensor = self._without_values(func, args, kwargs)
        tensor, pads = args[0], args[1]
        value = args[2] if len(args) > 2 else kwargs.get("value", 0.0)
        self._contents.add(made, Written(addresses(made), _number(value)))
        into = made
        for number in range(len(pads) // 2):
            dim, (before, after) = tensor.ndim - 1 - number, pads[2 * number : 2 * number + 2]
            kept = tensor.shape[dim] + min(before, 0) + min(after, 0)
            tensor = tensor.narrow(dim, max(-before, 0), kept)
            into = into.narrow(dim, max(before, 0), kept)
        self._contents.copy(into, tensor, untold=None)
        return made

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> Any:
        """A view; or an operation that a plan cannot express, whose result has a shape and no values."""
        if any(result.alias_info is not None for result in func._schema.returns):  # a view
            return func(*args, **kwargs)
        names = self._contents.names(given)
        if not names:  # it reads a tensor that the engine itself has created
            return func(*args, **kwargs)
        if func._schema.name == "aten::_local_scalar_dense":
            self.looked_at |= dict.fromkeys(sorted(names), str(func))
            return torch.ones((), dtype=given[0].dtype).item()
        try:
            made = self._without_values(func, args, kwargs)
        except NotImplementedError:  # torch raises this if a shape depends on values
            self.looked_at |= dict.fromkeys(sorted(names), str(func))
            raise
        results = [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, torch.Tensor)]
        if not results:
            self.looked_at |= dict.fromkeys(sorted(names), str(func))
        before = {storage_id(tensor) for tensor in given}
        self._spoil([tensor for tensor in results if storage_id(tensor) not in before], names, str(func))
        return made

    def _spoil(self, tensors: list[torch.Tensor], names: frozenset[str], reason: str) -> None:
        for tensor in tensors:
            self._contents.spoil(tensor, names | ({self.current} if not names and self.current else set()), reason)

    def _untold(self, tensor: torch.Tensor) -> Constant | Computed | None:
        """The content of a tensor that does not come from the checkpoint; None: unknown."""
        if self._contents.is_known(tensor) or not tensor.numel():
            return None
        first = tensor[(0,) * tensor.ndim]
        if not tensor.is_meta and bool((tensor == first).all()):
            return _number(first.item())
        # It probably belongs to the checkpoint tensor that is being loaded.
        return Computed(frozenset({self.current} - {""}), "values that come from no checkpoint tensor")

    def _without_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result on the meta device, for arguments on any device."""
        args, kwargs = tree_map_only(torch.Tensor, _shadow, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        return func(*args, **kwargs)


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _number(value: Any) -> Constant | Computed:
    if isinstance(value, complex):
        return Computed(frozenset(), "a complex number")
    return Constant(value)


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return found


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Restore a model's own tensors afterwards; yields a function that returns those that it no longer has."""
    before = [
        (module, name, tensor, tensor.data)
        for module in model.modules()
        for name, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
    ]
    places = {name: (storage_id(tensor), addresses(tensor), tensor.dtype) for name, tensor in tensors_of(model).items()}

    def replaced() -> dict[str, torch.Tensor]:
        now = tensors_of(model)
        found = {}
        for name, place in places.items():
            tensor = now.get(name)
            if tensor is not None and (storage_id(tensor), addresses(tensor), tensor.dtype) != place:
                found[name] = tensor.detach()
        return found

    try:
        yield replaced
    finally:
        for module, name, tensor, data in before:
            if getattr(module, name, None) is not tensor:
                setattr(module, name, tensor)
            if storage_id(tensor) != storage_id(data) or addresses(tensor) != addresses(data):
                tensor.data = data


def _shape_of(name: str, value: Any) -> RecordedTensor:
    match value:
        case torch.Tensor() | TensorMeta():
            return RecordedTensor.of(value.shape, value.dtype)
        case (shape, torch.dtype() as dtype):
            return RecordedTensor.of(shape, dtype)
    raise TypeError(f"{name!r}: a tensor, a TensorMeta or a tuple of shape and dtype is expected, not {value!r}")


def _plan(
    model: torch.nn.Module,
    shapes: Mapping[str, RecordedTensor],
    written: Mapping[str, list[Written]],
    looked_at: Mapping[str, str],
    kept: frozenset[str],
) -> LoadPlan:
    """The plan from the new contents of the parameters, in the order of the model's names."""
    parameters = {
        name: RecordedTensor.of(tensor.shape, tensor.dtype, tensor.stride())
        for name, tensor in tensors_of(model).items()
        if written.get(name)
    }
    copies: list[RegionCopy] = []
    fills: list[RegionFill] = []
    groups = [(frozenset({name}), f"its value is needed by {reason}") for name, reason in looked_at.items()]
    groups += [(frozenset({name}), "the model keeps it outside of its parameters") for name in sorted(kept)]
    for name, parts in written.items():
        for part in parts:
            match part.source:
                case Constant(value=value):
                    fills += (RegionFill(name, into, value) for into in _boxes(part.into, parameters[name]))
                case Computed(names=names, reason=reason):
                    groups.append((names, reason))
                case FromCheckpoint() as source:
                    found = _copies(name, parameters[name], part.into, source, shapes[source.name])
                    if isinstance(found, str):
                        groups.append((frozenset({source.name}), found))
                    else:
                        copies += found
    whole = _joined([(names, reason) for names, reason in groups if names])
    given = {name for group in whole for name in group.names}
    order = {name: number for number, name in enumerate(parameters)}
    copies = sorted(
        (copy for copy in copies if copy.checkpoint not in given),
        key=lambda copy: (order[copy.parameter], copy.into.offset),
    )
    fills.sort(key=lambda fill: (order[fill.parameter], fill.into.offset))
    used = given | {copy.checkpoint for copy in copies}
    named = {copy.parameter for copy in copies} | {fill.parameter for fill in fills}
    return LoadPlan(
        {name: tensor for name, tensor in parameters.items() if name in named},
        {name: shape for name, shape in shapes.items() if name in used},
        tuple(copies),
        tuple(fills),
        whole,
        tuple(name for name in shapes if name not in used),
    )


def _copies(
    name: str, parameter: RecordedTensor, into: Strided, source: FromCheckpoint, tensor: RecordedTensor
) -> list[RegionCopy] | str:
    """A part of a parameter as regions along the dims of both tensors, or the reason why that is impossible."""
    long = tuple(
        tuple(stride for size, stride in zip(each.shape, each.strides, strict=True) if size > 1)
        for each in (parameter, tensor)
    )
    found: list[RegionCopy] = []
    try:
        for one in _repeats(Pair(source.at, into)):
            for along in meet(one, Pair(tensor.all, tensor.all)).found:
                for pair in _along_dims(along, parameter):
                    short = merged(pair, (long[0], long[1]))
                    casts = tuple(str(dtype) for dtype in source.casts)
                    found.append(RegionCopy(name, short.at, source.name, short.of, casts))
    except NotStridedError as error:
        return str(error)
    if any(is_scattered(copy, tensor.shape) for copy in found):
        return f"{name} takes more scattered elements of it than can be read efficiently"
    return found


def _along_dims(pair: Pair, parameter: RecordedTensor) -> Iterator[Pair]:
    """The same, split along the dims of the parameter, to be read as boxes; unchanged if that is impossible."""
    try:
        for cut in meet(pair, Pair(parameter.all, parameter.all)).found:
            yield Pair(cut.of, cut.at)
    except NotStridedError:
        yield pair


def _repeats(pair: Pair) -> Iterator[Pair]:
    """The same without repeated elements: one copy for each repetition.

    Raises:
        NotStridedError: There are too many repetitions.
    """
    dims = [dim for dim, size in enumerate(pair.at.shape) if size > 1 and not pair.at.strides[dim]]
    if prod(pair.at.shape[dim] for dim in dims) > _MOST_REPEATS:
        raise NotStridedError("an element is repeated too often")
    if not dims:
        yield pair
        return
    dim = dims[0]
    for index in range(pair.at.shape[dim]):
        at, of = (
            Strided(
                each.offset + index * each.strides[dim],
                (*each.shape[:dim], *each.shape[dim + 1 :]),
                (*each.strides[:dim], *each.strides[dim + 1 :]),
            )
            for each in (pair.at, pair.of)
        )
        yield from _repeats(Pair(at, of))


def _boxes(region: Strided, parameter: RecordedTensor) -> Iterator[Strided]:
    """A region of a parameter, along its dims."""
    long = tuple(s for size, s in zip(parameter.shape, parameter.strides, strict=True) if size > 1)
    for pair in _along_dims(Pair(region, region), parameter):
        yield merged(pair, (long, long)).at


def _joined(groups: list[tuple[frozenset[str], str]]) -> tuple[WholeTensors, ...]:
    """Group tensors that are used in one computation; each group once, with the first reason."""
    found: list[tuple[set[str], str]] = []
    for names, reason in groups:
        together = [group for group in found if group[0] & names]
        found = [group for group in found if not group[0] & names]
        merged_names = set(names).union(*(group[0] for group in together))
        found.append((merged_names, together[0][1] if together else reason))
    return tuple(WholeTensors(tuple(sorted(names)), reason) for names, reason in found)
