"""What an operation returns: it runs once on fake tensors, and the result holds for all operations of its kind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from skipper.tensor_engine.errors import NotPropagatableError
from skipper.tensor_engine.script.by_value import definition_of, has_shapes
from skipper.tensor_engine.script.call_site import GIVEN, NEW, SAME, SEQUENCE, CallSite
from skipper.tensor_engine.script.tensor import Tensor
from skipper.tensor_engine.script.value import Value
from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.metadata import TensorMetadata, metadata_of
from skipper.tensor_engine.worker.operations import CONSTANT, FIXED, INPUT, LIST, TUPLE, Description, Node

_log = logging.getLogger("torch._subclasses.fake_tensor")

_ELSE = "put this part into a remote function and give it propagate=, or fetch what it needs"
_MASK = f"keep the shape, by torch.where(mask, x, 0) or the like, or {_ELSE}"
_VALUES = (
    'call it in a remote function with propagate="inspect", which asks the first rank for the shape, or fetch its '
    "argument, by inspect(x)"
)

_INSTEAD = {
    "aten::bincount": f"with a known number of bins torch.zeros(bins).index_add_(0, x, weights) does it; or {_VALUES}",
    "aten::masked_select": _MASK,
    "aten::index": _MASK,
    "aten::nonzero": f"torch.nonzero_static(x, size=...) has a known shape; or {_MASK}",
    "aten::_unique": _VALUES,
    "aten::_unique2": _VALUES,
    "aten::unique_dim": _VALUES,
    "aten::unique_consecutive": _VALUES,
}
"""Replacement functions, by the operation."""

_fake_mode: FakeTensorMode | None = None

propagating = threading.RLock()
"""Held while the fake mode is in use: all threads share it, and it is not thread-safe."""


def fake_mode() -> FakeTensorMode:
    """The fake mode of the script."""
    global _fake_mode
    if _fake_mode is None:
        _fake_mode = FakeTensorMode()
    return _fake_mode


def _lstsq(
    matrix: torch.Tensor,
    right: torch.Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    solution: torch.Tensor | None = None,
    residuals: torch.Tensor | None = None,
    rank: torch.Tensor | None = None,
    singular_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """`torch.linalg.lstsq`: with two of its drivers, the shape of the residuals depends on the matrix rank.

    Raises:
        NotPropagatableError: the driver is one of these two.
    """
    driver = driver or ("gelsy" if matrix.device.type == "cpu" else "gels")
    rows, columns = matrix.shape[-2:]
    if rows > columns and driver in ("gelss", "gelsd"):
        raise NotPropagatableError(
            f"linalg.lstsq with the driver {driver} returns residuals only where the matrices have full rank, which "
            'the workers alone know: take driver="gelsy" or "gels"'
        )
    is_vector = right.dim() == 1 or (right.dim() == matrix.dim() - 1 and right.shape == matrix.shape[:-1])
    columns_of_right = (1,) if is_vector else (right.shape[-1],)
    batches = matrix.shape[:-2], right.shape[: -1 if is_vector else -2]
    batch = tuple(torch.broadcast_shapes(*batches))  # type: ignore[no-untyped-call]
    lowest = min(rows, columns)
    of_ranks = batch if driver != "gels" else (0,)
    shapes = (
        (*batch, columns) if is_vector else (*batch, columns, *columns_of_right),
        (*batch, *columns_of_right) if rows > columns and driver != "gelsy" else (0,),
        of_ranks,
        (*batch, lowest) if driver in ("gelss", "gelsd") else (0,),
    )
    real = matrix.dtype.to_real()
    dtypes = (matrix.dtype, real, torch.int64, real)
    made = [matrix.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    given = (solution, residuals, rank, singular_values)
    for out, each in zip(given, made, strict=True):
        if out is not None and out.shape != each.shape:
            out.resize_(each.shape)
    return tuple(each if out is None else out for out, each in zip(given, made, strict=True))


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sequence, and the input of its gradient, with a column for each symbol and gap."""
    times, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, times, 2 * max(target_lengths, default=0) + 1)


_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten.linalg_lstsq.default: _lstsq,
    torch.ops.aten.linalg_lstsq.out: _lstsq,
}
"""The results for fake tensors of operations that torch does not know."""


class _Template:
    """The arguments of an operation, with numbers in place of tensors and constants."""

    def __init__(self, by_type: frozenset[int | str]) -> None:
        self.values: list[Value] = []
        self.constants = 0
        self._by_type = by_type

    def node(self, argument: Any, where: int | str) -> Node:
        if isinstance(argument, Tensor):
            self.values.append(argument.remote_value)
            return INPUT, len(self.values) - 1
        if isinstance(argument, list | tuple):
            kind = LIST if isinstance(argument, list) else TUPLE
            return kind, [self.node(item, where) for item in argument]
        if where in self._by_type and isinstance(argument, int | float | complex):
            self.constants += 1
            return CONSTANT, self.constants - 1
        return FIXED, argument


def propagate(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    by_type: frozenset[int | str],
    writes: Sequence[int | str],
) -> CallSite:
    """Run an operation on fake tensors in place of tensors of a mesh.

    The numbers in the arguments ``by_type`` do not matter for the shape of the result, and travel as constants.
    ``writes`` are the arguments that the operation changes.

    Raises:
        NotPropagatableError: what it returns depends on values that only the workers have.
    """
    name = func._schema.name + (f".{func._overloadname}" if func._overloadname != "default" else "")
    template = _Template(by_type)
    arg_nodes = [template.node(argument, index) for index, argument in enumerate(args)]
    kwarg_nodes = {key: template.node(argument, key) for key, argument in kwargs.items()}
    mode = fake_mode()
    with propagating, mode, torch.no_grad():
        fakes = fake_inputs(template.values)
        supply = iter(fakes)
        fake_args = [_replace(argument, supply) for argument in args]
        fake_kwargs = {key: _replace(argument, supply) for key, argument in kwargs.items()}
        before = [metadata_of(fake) for fake in fakes]
        _log.disabled = True  # the exception contains everything that would be logged
        try:
            result = _RULES.get(func, func)(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotPropagatableError(
                f"what {name} returns depends on values that only the workers have, so that the script cannot know "
                f"its shape: {_INSTEAD.get(func._schema.name, _ELSE)}"
            ) from error
        except UnsupportedFakeTensorException as error:
            raise NotPropagatableError(f"{name} cannot be run on fake tensors: {error}") from error
        except UnsupportedOperatorException as error:
            raise _without_shapes(name) from error
        except RuntimeError as error:
            if has_shapes(func):
                raise
            raise _without_shapes(name) from error
        finally:
            _log.disabled = False
        after = [metadata_of(fake) for fake in fakes]
    written = frozenset(_inputs_at(arg_nodes, kwarg_nodes, writes))
    reading = _Reading(name, fakes, _given_back(func, arg_nodes, kwarg_nodes))
    shape = reading.read(result, ())
    reshaped = _reshaped(func, name, before, after, written, reading)
    views = frozenset(index for index, (_, base) in enumerate(reading.outputs) if base is not None)
    description = Description(
        (func._schema.name, func._overloadname),
        definition_of(func),
        arg_nodes,
        kwarg_nodes,
        outputs=[(path, meta) for path, (meta, _) in zip(reading.paths, reading.outputs, strict=True)],
        views=views,
        reshapes=frozenset(index for index, _ in reshaped),
    )
    form = Form(
        "skipper.tensor_engine.worker.operations:operation_site",
        name,
        outputs=len(reading.outputs),
        inputs=len(fakes),
        constants=template.constants,
        writes=tuple(sorted(written)),
    )
    return CallSite(form, description.packed(), reading.outputs, shape, reshaped)


def _without_shapes(name: str) -> NotPropagatableError:
    return NotPropagatableError(
        f"the script does not know what {name} returns: say it by torch.library.register_fake, or put it into a "
        "remote function and give it propagate="
    )


class _Reading:
    """Takes apart the result of a run on fake tensors."""

    def __init__(self, name: str, fakes: Sequence[torch.Tensor], same: Mapping[tuple[int, ...], int]) -> None:
        self.outputs: list[tuple[TensorMetadata, int | None]] = []
        self.paths: list[tuple[int, ...]] = []
        self.same = same
        self._name = name
        self._inputs = {id(fake): index for index, fake in reversed(list(enumerate(fakes)))}
        self._storages = {fake.untyped_storage()._cdata: index for index, fake in reversed(list(enumerate(fakes)))}

    def read(self, result: Any, path: tuple[int, ...]) -> tuple[int, Any]:
        if isinstance(result, FakeTensor):
            index = self.same.get(path, self._inputs.get(id(result)))
            if index is not None:
                return SAME, index
            if result.layout is not torch.strided:
                raise NotPropagatableError(f"{self._name} returns a tensor that is {result.layout}, not strided")
            return NEW, self.add(metadata_of(result), self._storages.get(result.untyped_storage()._cdata), path)
        if isinstance(result, list | tuple):
            return SEQUENCE, (type(result), [self.read(item, (*path, index)) for index, item in enumerate(result)])
        if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise NotPropagatableError(f"{self._name} returns a number that only the workers can know")
        return GIVEN, result

    def add(self, meta: TensorMetadata, base: int | None, path: tuple[int, ...]) -> int:
        self.outputs.append((meta, base))
        self.paths.append(path)
        return len(self.outputs) - 1


def _reshaped(
    func: Any,
    name: str,
    before: Sequence[TensorMetadata],
    after: Sequence[TensorMetadata],
    written: frozenset[int],
    reading: _Reading,
) -> list[tuple[int, int]]:
    """Inputs that get another shape in place, and the outputs that they become.

    There is one if the operation does nothing else, such as `unsqueeze_`; tensors passed as ``out=`` are resized.
    """
    changed = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new]
    paths = {index: path for path, index in reading.same.items()}
    if torch.Tag.inplace_view in func.tags:
        paths = dict.fromkeys(changed if len(changed) == 1 else (), ())
    elif not written.issuperset(changed):
        paths = {}
    if not paths.keys() >= set(changed):
        raise NotPropagatableError(
            f"{name} would change a tensor from {before[changed[0]]!r} to {after[changed[0]]!r} in place, which a "
            "tensor of a mesh cannot do: make it of the right shape to begin with"
        )
    return [(index, reading.add(after[index], index, paths[index])) for index in changed]


def fake_inputs(values: Sequence[Value]) -> list[torch.Tensor]:
    """A fake tensor for each value; values with a common storage get fake tensors with a common one."""
    extents: dict[tuple[int, torch.dtype, torch.device], int] = {}
    for value in values:
        key = (id(value.storage), value.meta.dtype, value.meta.device)
        extents[key] = max(extents.get(key, 0), value.meta.extent)
    bases = {key: torch.empty((extent,), dtype=key[1], device=key[2]) for key, extent in extents.items()}
    fakes: dict[int, torch.Tensor] = {}
    for value in values:
        if value.ref not in fakes:
            meta = value.meta
            base = bases[id(value.storage), meta.dtype, meta.device]
            fake = fakes[value.ref] = base.as_strided(meta.shape, meta.stride, meta.offset)
            torch._C._set_conj(fake, meta.is_conj)
            torch._C._set_neg(fake, meta.is_neg)
    return [fakes[value.ref] for value in values]


def _replace(argument: Any, supply: Any) -> Any:
    if isinstance(argument, Tensor):
        return next(supply)
    if isinstance(argument, list | tuple):
        return type(argument)(_replace(item, supply) for item in argument)
    return argument


def _given_back(func: Any, args: Sequence[Node], kwargs: Mapping[str, Node]) -> dict[tuple[int, ...], int]:
    """The positions in the result of inputs that it changes, by its schema: fake tensors may come back as others."""
    arguments = {
        frozenset(argument.alias_info.before_set): kwargs.get(argument.name)
        or (args[index] if index < len(args) else None)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    returns = func._schema.returns
    found: dict[tuple[int, ...], int] = {}
    for index, each in enumerate(returns):
        node = arguments.get(frozenset(each.alias_info.before_set)) if each.alias_info is not None else None
        if node is not None and node[0] == INPUT:
            found[() if len(returns) == 1 else (index,)] = node[1]
    return found


def _inputs_at(args: Sequence[Node], kwargs: Mapping[str, Node], writes: Sequence[int | str]) -> list[int]:
    """The indices of the inputs in these arguments."""
    found: list[int] = []

    def collect(node: Node) -> None:
        if node[0] == INPUT:
            found.append(node[1])
        elif node[0] in (LIST, TUPLE):
            for item in node[1]:
                collect(item)

    for where in writes:
        if isinstance(where, int):
            if where < len(args):
                collect(args[where])
        elif where in kwargs:
            collect(kwargs[where])
    return found
