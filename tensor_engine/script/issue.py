"""Turns an operation of torch into an instruction for the workers. Every operation takes this path, so it is short."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import LocalTensorError, NotPropagatableError
from skipper.tensor_engine.script import activation, recording
from skipper.tensor_engine.script.call_site import NEW, SAME, SEQUENCE, CallSite
from skipper.tensor_engine.script.fetch import fetch_first
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.propagation import propagate
from skipper.tensor_engine.script.session import all_sessions
from skipper.tensor_engine.script.tensor import Tensor, refuse_mixture, value_of, wrap
from skipper.tensor_engine.script.value import Value
from skipper.tensor_engine.shared.metadata import TensorMetadata, metadata_of
from skipper.tensor_engine.worker.calls import FunctionCall

Special = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Runs in place of issuing an operation: called with the overload and its arguments."""

_PLAIN = frozenset(
    {int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex, float}
)
"""Types whose values may be part of a key, together with the type: 1, 1.0 and True are equal."""

_run_backward = torch.autograd.graph._engine_run_backward.__code__
"""The code of the function from which torch calls its autograd engine."""

_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
"""Their text shows all of their bytes; the memory of a tensor of a mesh is not even here."""

_HERE = __name__.rpartition(".")[0]
"""The package of this module."""

_MOST_SITES = 4096
"""How many call sites are cached."""

new_ref: Callable[[], int] = itertools.count(1).__next__
"""Returns the number of a new value."""


class _Facts:
    """What the script knows about an overload of torch.

    Attributes:
        func: the overload, kept alive so that its identity stays valid.
        by_type: the arguments, by position and by name, whose numbers do not change the shape of the result.
        writes: the arguments that it changes.
        special: runs in place of issuing it.
    """

    __slots__ = ("by_type", "func", "special", "writes")

    def __init__(self, func: Any, special: Special | None) -> None:
        self.func = func
        self.by_type: frozenset[int | str] = frozenset()
        self.writes: tuple[int | str, ...] = ()
        self.special = special
        if isinstance(func, HigherOrderOperator):
            return
        if not func._schema.name.removeprefix("aten::").startswith(("arange", "linspace", "logspace", "range")):
            self.by_type = frozenset(
                where
                for index, argument in enumerate(func._schema.arguments)
                if str(argument.type).removeprefix("Optional[").removesuffix("]") in ("number", "float", "Tensor")
                or str(argument.type) == "List[number]"
                for where in (index, argument.name)
            )
        self.writes = tuple(
            argument.name if argument.kwarg_only else index
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )


_facts: dict[int, _Facts] = {}
"""The facts by the identity of the overload: torch has one object for each."""

_sites: dict[tuple[Hashable, ...], CallSite] = {}
_sites_lock = threading.Lock()


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Issue an operation of torch.

    Raises:
        LocalTensorError: tensors of the script are among the arguments.
        MeshMismatchError: its tensors are not all on one mesh.
        StreamMismatchError: its tensors are not all of one stream.
        NotPropagatableError: the script cannot know what it returns.
    """
    facts = _facts.get(id(func)) or _learn(func)
    if facts.special is not None:
        return facts.special(func, args, kwargs)
    key: list[Any] = [facts]
    is_of_formula = False
    tensors: list[Tensor] = []
    constants: list[Any] = []
    by_type = facts.by_type
    for position, argument in enumerate(args):
        kind = type(argument)
        if kind is Tensor:
            key.append(argument.remote_value.meta)
            tensors.append(argument)
        elif kind in _PLAIN:
            key.append(kind)
            if position in by_type and argument is not None:
                constants.append(argument)
            else:
                key.append(argument)
        elif not _walk(func, argument, position in by_type, key, tensors, constants):
            return _local(func, args, kwargs)
    for name, argument in kwargs.items():
        key.append(name)
        if not _walk(func, argument, name in by_type, key, tensors, constants):
            return _local(func, args, kwargs)

    if tensors:
        value = tensors[0].remote_value
        instruction_stream, mesh = value.instruction_stream, value.mesh
        for each in tensors:
            value = each.remote_value
            if value.instruction_stream is not instruction_stream:
                return _mixed(func, args, kwargs, tensors, value)
            if value.barred is not None or value.storage.barred is not None:
                value.check()
        if len(tensors) > 2 or (len(tensors) == 2 and value.storage is tensors[0].remote_value.storage):
            _note_aliases(tensors, key)
    else:
        active = activation.current()
        if active is None:
            return func(*args, **kwargs)  # under no_mesh
        if torch._C._current_graph_task_id() != -1 and _is_of_a_formula():
            made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor) and not made.dim():
                return made  # a number, for tensors of any mesh
            is_of_formula = True
        instruction_stream, mesh = active.instruction_stream, active.mesh
    if (recorder := recording.current) is not None:
        for each in tensors:
            recorder.note_tensor(each, each.remote_value)

    site = _sites.get(tuple(key))
    if site is None:
        site = _remember(tuple(key), propagate(func, args, kwargs, by_type, facts.writes))
    else:
        site.is_in_use = True
    for index in site.form.writes:
        changed = tensors[index].remote_value.storage
        changed.recipe = None
        if changed.frozen is not None:
            changed.refuse_change()
    inputs = [each.remote_value.ref for each in tensors]
    single = site.single
    if single is not None:
        meta, base = single
        storage = None if base is None else tensors[base].remote_value.storage
        value = Value(new_ref(), meta, instruction_stream, mesh, storage)
        if is_of_formula:
            value.storage.recipe = meta, (func, args, kwargs)
        result = wrap(value)
        stack = instruction_stream.put(site, (value.ref,), inputs, constants, 3)
        if recorder is not None:
            recorder.note(instruction_stream, site, (value,), inputs, constants, stack)
        return result
    if site.same is not None:
        stack = instruction_stream.put(site, (), inputs, constants, 3)
        if recorder is not None:
            recorder.note(instruction_stream, site, (), inputs, constants, stack)
        return tensors[site.same]
    outputs = [
        Value(new_ref(), meta, instruction_stream, mesh, None if base is None else tensors[base].remote_value.storage)
        for meta, base in site.outputs
    ]
    stack = instruction_stream.put(site, [value.ref for value in outputs], inputs, constants, 3)
    if recorder is not None:
        recorder.note(instruction_stream, site, outputs, inputs, constants, stack)
    for index, output in site.reshaped:
        tensors[index].remote_value = outputs[output]
        _reshape(func, args, kwargs, tensors[index])
    return _assemble(site.result, outputs, tensors)


def _is_of_a_formula() -> bool:
    """Whether torch itself creates a tensor for a derivative, which need not be on the active mesh.

    Such a formula runs directly under the autograd engine, with no Python function between.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HERE):
        frame = frame.f_back
    is_formula = frame is None or frame.f_code is _run_backward
    return is_formula and not recording.is_tracing()


def _mixed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor], other: Value) -> Any:
    """Run an operation whose tensors are not all of one mesh and stream, if those of one side can be made again.

    For derivatives torch creates tensors on the active mesh, which may be another mesh than theirs. A tensor that the
    operation changes is not made again: other holders of it would not see the change.

    Raises:
        MeshMismatchError: they cannot.
        StreamMismatchError: they cannot.
        DroppedTensorError: they cannot, and one has been dropped.
        BorrowedTensorError: they cannot, and one is lent, or was borrowed and given back.
    """
    changed = _changed_by(func, args, kwargs)
    anew = {
        id(each): each.remote_value
        for each in tensors
        if _can_be_made_anew(each.remote_value) and id(each) not in changed
    }
    values = [each.remote_value for each in tensors if id(each) not in anew]
    if not anew or len({value.instruction_stream for value in values}) != 1:
        for each in tensors:
            each.remote_value.check()  # a dropped one need not be moved to the others
        refuse_mixture(f"{_name(func)}: tensors", tensors[0].remote_value, other)
    with activation.on_its_own(values[0], dispatch):
        made = {key: _made_anew(value) for key, value in anew.items()}
    return dispatch(
        func,
        *torch.utils._pytree.tree_map_only(Tensor, lambda each: made.get(id(each), each), (tuple(args), dict(kwargs))),
    )


def _can_be_made_anew(value: Value) -> bool:
    """Whether torch has created it for a derivative, or it is a view of such a tensor."""
    recipe, meta = value.storage.recipe, value.meta
    if recipe is None:
        return False
    made = recipe[0]
    return (meta.dtype, meta.is_conj, meta.is_neg) == (made.dtype, made.is_conj, made.is_neg)


def _made_anew(value: Value) -> Any:
    """The same tensor, or the same view of one, made again on the active mesh."""
    recipe, meta = value.storage.recipe, value.meta
    assert recipe is not None  # it can be made again
    whole = dispatch(*recipe[1])
    if meta is recipe[0]:
        return whole
    return dispatch(_aten.as_strided.default, (whole, meta.shape, meta.stride, meta.offset), {})


def _changed_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The identities of the tensors that an operation changes."""
    written = [
        kwargs.get(where) if isinstance(where, str) else args[where]
        for where in _facts[id(func)].writes
        if isinstance(where, str) or where < len(args)
    ]
    return {id(leaf) for leaf in torch.utils._pytree.tree_leaves(written)}


def _learn(func: Any) -> _Facts:
    if isinstance(func, HigherOrderOperator):
        return _facts.setdefault(id(func), _Facts(func, _taken_apart))
    special = _here if func.namespace == "profiler" else _specials.get(func)
    return _facts.setdefault(id(func), _Facts(func, special))


def _walk(func: Any, argument: Any, by_type: bool, key: list[Any], tensors: list[Tensor], constants: list[Any]) -> bool:
    """Add an argument of any type to a key.

    Returns:
        False where it holds a tensor or a generator of the script.
    """
    kind = type(argument)
    if kind is Tensor:
        key.append(argument.remote_value.meta)
        tensors.append(argument)
    elif kind in _PLAIN:
        key.append(kind)
        if by_type and isinstance(argument, int | float | complex):
            constants.append(argument)
        else:
            key.append(argument)
    elif kind is list or kind is tuple:
        key.append(kind)
        key.append(len(argument))
        return all(_walk(func, item, by_type, key, tensors, constants) for item in argument)
    elif isinstance(argument, torch.Tensor | torch.Generator):
        return False
    elif isinstance(argument, list | tuple):
        return _walk(func, list(argument), by_type, key, tensors, constants)  # such as torch.Size
    else:
        what = type(argument).__name__ if isinstance(argument, _STORAGES) else f"{argument!r:.80}"
        raise NotPropagatableError(f"{func._schema.name} takes {what}, which cannot be sent to the workers")
    return True


def _note_aliases(tensors: Sequence[Tensor], key: list[Any]) -> None:
    """Add to a key which tensors are the same, or share their storage."""
    storages: dict[int, int] = {}
    for index, each in enumerate(tensors):
        storages.setdefault(id(each.remote_value.storage), index)
    if len(storages) < len(tensors):
        refs: dict[int, int] = {}
        for index, each in enumerate(tensors):
            refs.setdefault(each.remote_value.ref, index)
        key.append(tuple(storages[id(each.remote_value.storage)] for each in tensors))
        key.append(tuple(refs[each.remote_value.ref] for each in tensors))


def _remember(key: tuple[Hashable, ...], site: CallSite) -> CallSite:
    """Cache a site, unless another thread has just done so; returns the one to use from now on."""
    with _sites_lock:
        evicted = _evict() if len(_sites) >= _MOST_SITES else None
        site = _sites.setdefault(key, site)
    if evicted is not None:
        for session in all_sessions():
            session.forget_site(evicted.number)
    return site


def _evict() -> CallSite:
    """Evict the oldest site that has not been used since the last look at it (the clock algorithm).

    So sites in use stay, as with LRU. A use only sets a mark, which costs less than reordering.
    """
    while True:
        oldest = next(iter(_sites))
        site = _sites.pop(oldest)
        if not site.is_in_use:
            return site
        site.is_in_use = False
        _sites[oldest] = site


def _reshape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> None:
    """Give the script's tensor the shape that the operation gives to the workers'."""
    meta = tensor.remote_value.meta
    included = torch._C._meta_in_tls_dispatch_include()
    with torch._C._DisableTorchDispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            if torch.Tag.inplace_view in func.tags:
                func(*args, **kwargs)
            else:
                _aten.resize_.default(tensor, meta.shape)
                _aten.as_strided_.default(tensor, meta.shape, meta.stride, meta.offset)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(included)


def _assemble(result: tuple[int, Any], outputs: Sequence[Value], tensors: Sequence[Tensor]) -> Any:
    kind, what = result
    if kind == NEW:
        return wrap(outputs[what])
    if kind == SAME:
        return tensors[what]
    if kind == SEQUENCE:
        return what[0]([_assemble(item, outputs, tensors) for item in what[1]])
    return what


def _name(func: Any) -> str:
    return str(func._schema.name)


def issue_call(
    function: str,
    inputs: Sequence[Tensor | Value],
    outputs: Sequence[TensorMetadata],
    *,
    instruction_stream: InstructionStream,
    mesh: ProcMesh,
    owner: InstructionStream | None = None,
    name: str | None = None,
    static: Hashable = None,
    constant: object = None,
    sees_poison: bool = False,
    writes: Sequence[int] = (),
) -> list[Tensor]:
    """Make the workers of an instruction stream call a function of this package, in order with the operations.

    Args:
        function: its path, ``module:name`` (see `calls.FunctionCall.function` for how it is called).
        inputs: its inputs; a worker of the instruction stream that does not have one gets None for it.
        outputs: the metadata of the tensors that it makes.
        instruction_stream: whose workers call it.
        mesh: those workers in the user's layout, which is the mesh of the outputs.
        owner: the instruction stream of the outputs, if only some workers have any; then ``mesh`` consists of these.
        name: for people; None: the function's own name.
        static: for `calls.FunctionCall.static`; sent once, and part of the key of the cached site.
        constant: sent with the instruction, anything that can be pickled; None for nothing.
        sees_poison: for `calls.FunctionCall.sees_poison`.
        writes: which inputs it changes.

    Returns:
        The outputs.
    """
    values = [each if isinstance(each, Value) else value_of(each) for each in inputs]
    for index in writes:
        values[index].storage.refuse_change()
    if (recorder := recording.current) is not None:
        for value in values:
            recorder.note_value(value)
    call = FunctionCall(
        function,
        name or function.partition(":")[2],
        len(values),
        tuple(outputs),
        static,
        constant is not None,
        sees_poison,
        tuple(writes),
    )
    key = ("call", call)
    site = _sites.get(key)
    if site is None:
        site = _remember(key, CallSite.of_call(call))
    else:
        site.is_in_use = True
    made = [Value(new_ref(), meta, owner or instruction_stream, mesh) for meta in outputs]
    refs, given = [value.ref for value in made], [value.ref for value in values]
    constants = (constant,) if call.has_constant else ()
    stack = instruction_stream.put(site, refs, given, constants, 3, is_plain=False)
    if recorder is not None:
        recorder.note(instruction_stream, site, made, given, constants, stack)
    return [wrap(value) for value in made]


def ship(data: torch.Tensor, *, instruction_stream: InstructionStream, mesh: ProcMesh) -> Tensor:
    """Send a tensor of the script to all workers of an instruction stream; it is copied before this returns."""
    if data.layout is not torch.strided:
        raise LocalTensorError(
            f"a tensor of the script, {list(data.shape)} of {data.dtype}, is {data.layout}, and tensors of a mesh are "
            "strided: bring x.to_dense(), or the parts that it is made of"
        )
    source = data.detach().resolve_conj().resolve_neg()
    device = source.device
    meta = metadata_of(source).contiguous()
    host = source.to("cpu").contiguous()
    raw = bytes(host.flatten().view(torch.uint8).numpy()) if host.numel() else b""
    return issue_call(
        "skipper.tensor_engine.worker.data:receive",
        (),
        (meta,),
        instruction_stream=instruction_stream,
        mesh=mesh,
        name="a tensor from the script",
        static=(meta.dtype, meta.shape, device.type),
        constant=raw,
    )[0]


def _lift(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch.tensor(data)`: torch has just read the data into a tensor of the script; send it to the mesh."""
    data = args[0]
    if isinstance(data, Tensor):
        return data
    active = activation.current()
    if active is None:
        return func(*args, **kwargs)
    return ship(data, instruction_stream=active.instruction_stream, mesh=active.mesh)


def _detach(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make another tensor of the script for the same value: the workers know nothing about autograd."""
    source = args[0]
    if not isinstance(source, Tensor):
        return _local(func, args, kwargs)
    return wrap(value_of(source))


def _detach_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor of a mesh itself: autograd has already done its part."""
    return args[0] if isinstance(args[0], Tensor) else _local(func, args, kwargs)


def _item(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    if not isinstance(source, Tensor):
        return _local(func, args, kwargs)
    return fetch_first(value_of(source)).item()


def _taken_apart(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that takes functions, such as that of flex_attention, as the operations that it consists of.

    Raises:
        NotPropagatableError: torch cannot decompose it.
    """
    parts = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if parts is None:
        raise NotPropagatableError(
            f"{func.name()} takes functions, and torch has no rule to take it apart: put it into a remote function and "
            "give it propagate="
        )
    with activation.intercepted():
        return parts(*args, **kwargs)


def _here(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that concerns only the script."""
    return func(*args, **kwargs)


def _local(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on tensors of the script, or with one of its generators, in the script.

    If there are also tensors of a mesh among the arguments, numbers of the script are sent: tensors without dims, which
    torch also allows among tensors of a GPU. So are tensors that are copied into a tensor of a mesh.

    Raises:
        LocalTensorError: there are other tensors of the script.
    """
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    there = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if there is None:
        return func(*args, **kwargs)
    changed = _changed_by(func, args, kwargs)
    value = value_of(there)
    if func is _aten.copy_.default and there is args[0] and _is_constant(args[1]):
        source = ship(args[1], instruction_stream=value.instruction_stream, mesh=value.mesh)
        return dispatch(func, (there, source, *args[2:]), kwargs)
    is_formula = torch._C._current_graph_task_id() != -1 and _is_of_a_formula()  # torch has made them itself
    sent: dict[tuple[Any, ...], Tensor] = {}

    def bring(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            raise LocalTensorError(
                f"{_name(func)}: a generator of the script cannot draw numbers for a tensor of a mesh: do not pass it, "
                "and seed the workers' generators by tensor_engine.random"
            )
        if isinstance(leaf, Tensor) or not isinstance(leaf, torch.Tensor):
            return leaf
        if not (is_formula or _is_number(leaf)) or id(leaf) in changed:
            raise LocalTensorError(
                f"{_name(func)}: a tensor of the script, {list(leaf.shape)} of {leaf.dtype}, cannot be mixed with "
                "tensors of a mesh: make it there, by torch.tensor(data) under `with mesh.activate():`, or bring it "
                "there, by to_mesh(tensor, mesh)"
            )
        key = (leaf.dtype, leaf.shape, leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        if key not in sent:
            sent[key] = ship(leaf, instruction_stream=value.instruction_stream, mesh=value.mesh)
        return sent[key]

    return dispatch(func, *torch.utils._pytree.tree_map(bring, (tuple(args), dict(kwargs))))


def _is_number(leaf: torch.Tensor) -> bool:
    """Whether a tensor of the script can stand for a number, now and in each replay."""
    return not leaf.dim() and _is_constant(leaf)


def _is_constant(leaf: torch.Tensor) -> bool:
    """Whether an operation needs only the values of a tensor of the script, now and in each replay."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.device.type == "cpu"
        and not (leaf.requires_grad and torch.is_grad_enabled())
        and not recording.is_tracing()
    )


def _zeros(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Zeros without memory, which derivatives use: a worker gets real ones, which it can change and send."""
    return dispatch(_aten.zeros.default, args, kwargs)


def _equal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch.equal` on the first rank, like everything that returns a value to the script."""
    one, two = args
    if not (isinstance(one, Tensor) or isinstance(two, Tensor)):
        return _local(func, args, kwargs)
    return one.shape == two.shape and bool(fetch_first(value_of((one == two).all())))


def _allclose(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch.allclose` on the first rank."""
    if not any(isinstance(each, Tensor) for each in args[:2]):
        return _local(func, args, kwargs)
    return bool(fetch_first(value_of(torch.isclose(*args, **kwargs).all())))


_aten = torch.ops.aten
_specials: dict[Any, Special] = {
    _aten.lift_fresh.default: _lift,
    _aten.lift.default: _lift,
    _aten.detach.default: _detach,
    _aten.detach_.default: _detach_,
    _aten._local_scalar_dense.default: _item,
    _aten._efficientzerotensor.default: _zeros,
    _aten.equal.default: _equal,
    _aten.allclose.default: _allclose,
}
