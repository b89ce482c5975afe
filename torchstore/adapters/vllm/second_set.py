"""A second set of a model's weights: it is filled while the engine computes with the first, and then replaces it.

vLLM changes many weights after it has loaded them, and the result is not always a parameter: on CPUs it is a packed
matrix inside a function. So the second set is a twin of the model: the same modules again, with their own memory, which
vLLM's own code loads and processes. The engine never computes with the twin. Between two steps of the engine, the twin
and the model exchange everything that the load has changed: parameters, buffers and attributes.

If the model is compiled, or CUDA graphs have been captured, addresses must not change. Then the values are copied, from
memory of the same device, as at the end of vLLM's own reload.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from itertools import chain
from types import FrameType, MethodType
from typing import Any, Literal

import torch

from skipper.control.support import cgroup
from skipper.torchstore.adapters.vllm.load_form import LoadForm, layerwise
from skipper.torchstore.errors import SecondSetError

Flip = Literal["pointers", "copy"]

_MODULE_OWN = frozenset(vars(torch.nn.Module())) - {"training"}
"""The internal attributes of `torch.nn.Module`: parameters, buffers, children and hooks."""

_TABLES = ("_parameters", "_buffers")
_ABSENT = object()


class SecondSet:
    """The twin of one model of a worker.

    Args:
        model: The model that vLLM runs.
        vllm_config: vLLM's complete configuration.
        device: The device of its parameters.
        staging_nbytes: The bytes that one load reads at a time.
        limit_nbytes: The memory for the set and one load together; None: the free memory.

    Attributes:
        model: The twin.
        form: The load form of the twin.
        vllm_config: The given configuration.
        nbytes: The size of the set: that of the load form or of the model's present form, the larger of the two.
        flip_by: "pointers", or "copy" if addresses must not change.
        why_copy: The reason for "copy"; otherwise empty.

    Raises:
        SecondSetError: This engine changes its weights by itself, or there is not enough memory. Nothing was allocated.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        device: torch.device,
        *,
        staging_nbytes: int,
        limit_nbytes: int | None = None,
    ) -> None:
        _check_engine(vllm_config)
        metadata = [layerwise().get_layerwise_info(layer).restore_metadata for layer in model.modules()]
        layers = [sum(tensor.nbytes for kind in layer for tensor in kind.values()) for layer in metadata]
        self.nbytes = max(sum(layers), sum(each.nbytes() for each in _storages(model).values()))
        _check_memory(device, self.nbytes, max(staging_nbytes, max(layers)) + 2 * max(layers), limit_nbytes)
        self.why_copy = "" if vllm_config.model_config.enforce_eager else "vLLM runs without enforce_eager"
        if not self.why_copy and _held_elsewhere(model):
            gc.collect()  # a failed load may have left a reference cycle
            self.why_copy = _held_elsewhere(model)
        self.flip_by: Flip = "copy" if self.why_copy else "pointers"
        self._original = model
        self._twins: dict[int, torch.nn.Module] = {}
        self._baselines: list[tuple[Any, Any, dict[str, Any]]] = []
        self.model = self._twin_of(model, _Copies())
        self.form = LoadForm(self.model, vllm_config.model_config)
        self.vllm_config = vllm_config
        self.begin()

    def belongs_to(self, model: torch.nn.Module) -> bool:
        """Whether it is the twin of this model."""
        return self._original is model

    def begin(self) -> None:
        """Before a load, in the thread that computes: bring the twin's modules to the present state of the model's."""
        self._baselines.clear()
        helpers: dict[int, Any] = {}
        for module in self._original.modules():
            self._reset(module, self._twins[id(module)], helpers)

    def check(self) -> None:
        """After a load: check that the twin can replace the model.

        Raises:
            SecondSetError: Addresses must not change, and the load has created a new object that is not a tensor.
        """
        if self.flip_by == "copy":
            for _ in self._copied():
                pass

    def flip(self) -> None:
        """Let the model compute with what was loaded; called in the thread that computes, between two steps.

        Raises:
            SecondSetError: As for `check`; nothing has changed.
        """
        if self.flip_by == "copy":
            with torch.no_grad():
                for target, values in list(self._copied()):
                    target.copy_(values)
            return
        for module in self._original.modules():
            twin = self._twins[id(module)]
            for table in _TABLES:
                one, other = vars(module)[table], vars(twin)[table]
                kept = dict(one)
                one.clear()
                one.update(other)
                other.clear()
                other.update(kept)
        for owner, twin_owner, names in self._changed():
            for name in names:
                _exchange(vars(owner), vars(twin_owner), name)

    def _twin_of(self, module: torch.nn.Module, copies: _Copies) -> torch.nn.Module:
        known = self._twins.get(id(module))
        if known is not None:
            return known
        twin: torch.nn.Module = object.__new__(type(module))
        self._twins[id(module)] = twin
        vars(twin).update(vars(module))
        for table in _TABLES:
            own = vars(module)[table]
            vars(twin)[table] = {name: copies.of(tensor, module, twin) for name, tensor in own.items()}
        vars(twin)["_non_persistent_buffers_set"] = set(vars(module)["_non_persistent_buffers_set"])
        children = vars(module)["_modules"].items()
        vars(twin)["_modules"] = {name: child and self._twin_of(child, copies) for name, child in children}
        info = layerwise().get_layerwise_info(module)
        twin_info = layerwise().get_layerwise_info(twin)
        twin_info.restore_device = info.restore_device
        twin_info.restore_metadata = tuple(
            {name: _of_class(tensor.data, tensor, module, twin) for name, tensor in kind.items()}
            for kind in info.restore_metadata
        )
        return twin

    def _reset(self, owner: Any, twin: Any, helpers: dict[int, Any]) -> None:
        """Give a twin the attributes of its owner; objects outside the modules that process weights get a twin, too."""
        skipped = _MODULE_OWN if isinstance(owner, torch.nn.Module) else frozenset()
        attributes = {
            name: self._translated(value, helpers) for name, value in vars(owner).items() if name not in skipped
        }
        for name in [name for name in vars(twin) if name not in skipped and name not in attributes]:
            del vars(twin)[name]
        vars(twin).update(attributes)
        self._baselines.append((owner, twin, attributes))

    def _translated(self, value: Any, helpers: dict[int, Any]) -> Any:
        if isinstance(value, torch.nn.Module):
            return self._twins.get(id(value), value)
        if (
            isinstance(value, type)
            or not hasattr(value, "process_weights_after_loading")
            or not hasattr(value, "__dict__")
        ):
            return value
        if id(value) not in helpers:
            helpers[id(value)] = object.__new__(type(value))
            self._reset(value, helpers[id(value)], helpers)
        return helpers[id(value)]

    def _changed(self) -> Iterator[tuple[Any, Any, list[str]]]:
        """The attributes that the load has set, by their owners."""
        for owner, twin, before in self._baselines:
            skipped = _MODULE_OWN if isinstance(owner, torch.nn.Module) else frozenset()
            now = {name: value for name, value in vars(twin).items() if name not in skipped}
            names = [name for name in before | now if before.get(name, _ABSENT) is not now.get(name, _ABSENT)]
            if names:
                yield owner, twin, names

    def _copied(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The pairs to copy, for a flip that keeps all addresses."""
        for module in self._original.modules():
            twin = self._twins[id(module)]
            for table in _TABLES:
                yield from _pairs(type(module).__name__, vars(module)[table], vars(twin)[table])
        for owner, twin, names in self._changed():
            old, new = vars(owner), vars(twin)
            values = {
                name: new[name] for name in names if name in new and not _is_same(old.get(name, _ABSENT), new[name])
            }
            yield from _pairs(type(owner).__name__, old, values)


class _Copies:
    """Tensors with new memory; those that share memory share it again."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor | None, module: torch.nn.Module, twin: torch.nn.Module) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
            data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            data.set_(self._storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
            self._tensors[id(tensor)] = _of_class(data, tensor, module, twin)
        return self._tensors[id(tensor)]


def _of_class(data: torch.Tensor, tensor: torch.Tensor, module: torch.nn.Module, twin: torch.nn.Module) -> torch.Tensor:
    """A tensor with the class and the attributes of another one; bound methods of the module become the twin's."""
    data = data.detach()
    data.__class__ = tensor.__class__  # as vLLM does; the constructors of its classes need more arguments
    for name, value in vars(tensor).items():
        is_bound = isinstance(value, MethodType) and value.__self__ is module
        vars(data)[name] = value.__func__.__get__(twin) if is_bound else value
    return data.requires_grad_(tensor.requires_grad)


def _pairs(owner: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name, value in new.items():
        there = old.get(name)
        if value is there:
            continue
        if not isinstance(value, torch.Tensor) or not isinstance(there, torch.Tensor) or not _is_alike(value, there):
            raise SecondSetError(
                f"loading replaces {name!r} of {owner} by a new tensor, but addresses must not change in this engine: "
                "start vLLM with enforce_eager, or send without background=True"
            )
        yield there.data, value.data


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _is_same(old: Any, new: Any) -> bool:
    plain = bool | int | float | str | bytes | None
    return isinstance(old, plain) and isinstance(new, plain) and type(old) is type(new) and old == new


def _exchange(one: dict[str, Any], other: dict[str, Any], name: str) -> None:
    first, second = one.pop(name, _ABSENT), other.pop(name, _ABSENT)
    if second is not _ABSENT:
        one[name] = second
    if first is not _ABSENT:
        other[name] = first


def _storages(model: torch.nn.Module) -> dict[int, torch.UntypedStorage]:
    """The memory of a model."""
    found = {}
    for tensor in chain(model.parameters(), model.buffers()):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage
    return found


def _check_engine(vllm_config: Any) -> None:
    """Refuse an engine that writes to its weights while it serves."""
    reasons = {
        "EPLB moves experts between ranks": getattr(vllm_config.parallel_config, "enable_eplb", False),
        "calculate_kv_scales sets scales of the cache": getattr(
            getattr(vllm_config, "cache_config", None), "calculate_kv_scales", False
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise SecondSetError(
                f"no second set of weights for this engine: {reason} while it serves; send without background=True"
            )


def _check_memory(device: torch.device, set_nbytes: int, load_nbytes: int, limit_nbytes: int | None) -> None:
    nbytes = set_nbytes + load_nbytes
    sizes = f"a second set of weights takes {set_nbytes:,} bytes on {device}, and each load of it {load_nbytes:,} more"
    if limit_nbytes is not None and nbytes > limit_nbytes:
        raise SecondSetError(f"{sizes}; second_set_nbytes allows {limit_nbytes:,} for both")
    free = _free_nbytes(device)
    if nbytes > free:
        raise SecondSetError(
            f"{sizes}; {free:,} are free: give vLLM less for its cache, or send without background=True"
        )


def _free_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return cgroup.free_memory()


def _held_elsewhere(model: torch.nn.Module) -> str:
    """The other holders of a parameter, which would still use the old one after a flip."""
    # A call passes a tuple on as it is; from Python 3.14 on, one that it makes of a list is found among the holders.
    held = tuple(tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.numel())
    known = {id(vars(module)[table]) for module in model.modules() for table in _TABLES}
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()  # frozen objects are not looked at
    try:
        holders = gc.get_referrers(*held)
    finally:
        if frozen:
            gc.freeze()
    for holder in holders:
        if id(holder) not in known and holder is not held and not isinstance(holder, FrameType):
            return f"a {type(holder).__name__} outside of the modules holds one of their tensors"
    return ""
