"""User functions on a worker: how they are found and called, and how their results are used."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.utils._pytree as pytree

from skipper.tensor_engine.shared.metadata import TensorMetadata, metadata
from skipper.tensor_engine.shared.opaque_ref import OPAQUE_META, OpaqueRef
from skipper.tensor_engine.shared.remote_functions import (
    ANSWER,
    IGNORED,
    INPUT,
    OBJECT,
    WHOLE,
    Kind,
    ProcessGroupSpec,
    Source,
    Task,
    unpack,
)
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.heap import Poison, poison_storage
from skipper.tensor_engine.worker.interpreter import Interpreter
from skipper.tensor_engine.worker.operations import laid_out
from skipper.tensor_engine.worker.process_groups import WorkerGroups

_FUNCTIONS = 1024
"""How many functions sent by value a process caches, each with its own globals."""


def call(worker: Interpreter, told: FunctionCall, inputs: Sequence[Any], constant: bytes) -> list[Any]:
    """Call the function of a `Task` with the arguments in ``constant``."""
    task: Task = told.static
    poison = next((value for value in inputs if isinstance(value, Poison)), None)
    if poison is not None:
        if task.has_groups:
            _leave(worker, constant, inputs)
        return [poison] * len(told.outputs)
    groups = WorkerGroups.of(worker) if task.has_groups else None
    versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in inputs]
    try:
        args, kwargs = unpack(constant, inputs, groups.get if groups is not None else _no_group)
        with _within():
            result = resolve(task.source)(*args, **kwargs)
        return use(task, told.outputs, result, inputs)
    except SystemExit as error:
        raise RuntimeError(f"the function has ended with SystemExit: {error}") from error
    except Exception as error:
        changed = [
            value
            for value, version in zip(inputs, versions, strict=True)
            if isinstance(value, torch.Tensor) and value._version != version
        ]
        if groups is not None:
            _leave(worker, constant, inputs)
        if not changed:
            raise
        poison = worker.poison(told.name, error)
        for value in changed:
            poison_storage(worker.heap, value, poison)
        return [poison] * len(told.outputs)


class _RunsForScript(threading.local):
    is_worker: bool = False


_here = _RunsForScript()


def is_worker() -> bool:
    """Whether this thread runs a function for the script."""
    return _here.is_worker


@contextlib.contextmanager
def _within() -> Iterator[None]:
    _here.is_worker = True
    try:
        yield
    finally:
        _here.is_worker = False


def use(task: Task, outputs: Sequence[TensorMetadata], result: Any, inputs: Sequence[Any]) -> list[Any]:
    """Turn a result into the outputs of the instruction."""
    if task.use == IGNORED:
        return []
    if task.use == ANSWER:
        return [cloudpickle.dumps(pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), result))]
    if task.use == WHOLE:
        return [OpaqueRef(result)]
    return parts_of(task.kinds, outputs, result, inputs)


def parts(worker: Interpreter, told: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """Take the parts out of a result that the worker keeps as a whole; ``inputs[0]`` refers to it."""
    task: Task = told.static
    return parts_of(task.kinds, told.outputs, inputs[0].value, inputs[1:])


def describe(worker: Interpreter, value: OpaqueRef, argument: None) -> bytes:
    """The pickled description of a result that the worker keeps as a whole: metadata replaces tensors and objects."""
    return bytes(cloudpickle.dumps(pytree.tree_map(_described, value.value)))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, OpaqueRef):
        return OPAQUE_META
    return metadata(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def take(worker: Interpreter, value: Any, argument: None) -> Any:
    """A value, unchanged."""
    return value


def parts_of(kinds: Sequence[Kind], outputs: Sequence[TensorMetadata], result: Any, inputs: Sequence[Any]) -> list[Any]:
    """The tensors and objects in a result.

    Raises:
        RuntimeError: they are not what the script expects.
    """
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor | OpaqueRef)]
    if len(found) != len(kinds):
        raise RuntimeError(f"the script expects {len(kinds)} tensors or objects, and {len(found)} were returned")
    taken: list[Any] = []
    storages: set[int] | None = None
    for leaf, (kind, base) in zip(found, kinds, strict=True):
        if kind == INPUT:
            continue
        meta = outputs[len(taken)]
        if (kind == OBJECT) != isinstance(leaf, OpaqueRef):
            wanted = "a reference to an object" if kind == OBJECT else f"{meta!r}"
            raise RuntimeError(f"the script expects {wanted}, and {type(leaf).__name__} was returned")
        if isinstance(leaf, OpaqueRef):
            taken.append(leaf)
            continue
        if tuple(leaf.shape) != meta.shape or leaf.dtype != meta.dtype:
            dtype = str(leaf.dtype).removeprefix("torch.")
            raise RuntimeError(f"the script expects {meta!r}, and {dtype}{list(leaf.shape)} was returned")
        if base is not None:
            taken.append(leaf.detach())
            continue
        if storages is None:
            storages = {_storage(value) for value in inputs if isinstance(value, torch.Tensor)}
        fresh = leaf.detach().resolve_conj().resolve_neg()
        if fresh.device.type != meta.device.type:
            fresh = fresh.to(meta.device.type)
        if _storage(fresh) in storages:
            fresh = fresh.clone()  # the script expects a tensor of its own
        storages.add(_storage(fresh))
        taken.append(laid_out(fresh, meta))
    return taken


def resolve(source: Source | Callable[..., Any]) -> Callable[..., Any]:
    """The function: by its path, unpickled, or as it is.

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such function.
    """
    if isinstance(source, str):
        return _by_path(source)
    return _by_value(source) if isinstance(source, bytes) else source


@functools.cache
def _by_path(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if name:
        found: Any = importlib.import_module(module)
        names = name.split(".")
    else:
        found, names = _longest_module(path)
    for each in names:
        found = getattr(found, each)
    return cast(Callable[..., Any], getattr(found, "__remote_function__", found))


def _longest_module(path: str) -> tuple[Any, list[str]]:
    names = path.split(".")
    for count in range(len(names), 0, -1):
        module = ".".join(names[:count])
        try:
            return importlib.import_module(module), names[count:]
        except ModuleNotFoundError as error:
            if count == 1 or (error.name is not None and not (module + ".").startswith(error.name + ".")):
                raise
    raise ModuleNotFoundError(path)


@functools.lru_cache(maxsize=_FUNCTIONS)
def _by_value(pickled: bytes) -> Callable[..., Any]:
    return cast(Callable[..., Any], pickle.loads(pickled))


def _leave(worker: Interpreter, constant: bytes, inputs: Sequence[Any]) -> None:
    """Break the process groups among the arguments: this worker cannot take part."""
    groups = WorkerGroups.of(worker)
    unpack(constant, [None] * len(inputs), groups.abandon)


def _no_group(spec: ProcessGroupSpec) -> None:
    raise RuntimeError(f"the process group {spec.number} was not announced")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
