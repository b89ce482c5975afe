"""A vLLM model in the form that its `load_weights` fills, which differs from the form in which it runs.

After a load, vLLM changes many layers: it packs, transposes or quantizes their weights. To load again, it replaces the
weights by tensors of the original form without memory ("layerwise reload"). When all weights of a layer have arrived,
it gives the layer memory, processes it, and copies the result over the weights in use. This module records a plan on
those tensors, and passes to vLLM what was read by the plan: only this rank's parts, not whole tensors that vLLM would
have to slice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from skipper import torchstore as ts
from skipper.torchstore.plans.regions import RecordedTensor, WholeTensors, dtype_of

_CALL_S = 1.0  # longer than a call takes

Tensors = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class RecordedLoad:
    """How a model takes some weights.

    Attributes:
        plan: Which parts of them go where; the parameters in it are filled completely, or together with later weights.
        loaded: The parameters that `load_weights` reports as loaded; None: it reports nothing.
    """

    plan: ts.LoadPlan
    loaded: frozenset[str] | None


class LoadForm:
    """One model of a worker.

    Args:
        model: The model that vLLM runs.
        model_config: vLLM's configuration of that model.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._config = model_config
        self._loaders: list[tuple[torch.Tensor, Any]] = []
        self._ties: dict[str, list[str]] = {}

    def record(self, shapes: Shapes) -> RecordedLoad:
        """Record what the model's `load_weights` does with weights of these shapes; the model does not change.

        Raises:
            RecordingError: It refuses them, or takes values from another source.
        """
        loaded: list[Any] = []

        def load(weights: Any) -> None:
            loaded[:] = [model.load_weights(weights)]

        model: Any = self._model
        layers = layerwise()
        layers.initialize_layerwise_reload(model)
        try:
            for tensor in _tensors(model):
                tensor.weight_loader = _own_loader(tensor)  # type: ignore[attr-defined]
            with _part_of_a_model():
                plan = ts.record_plan(model, shapes, load_weights=load)
        finally:
            for layer in model.modules():
                layers.get_layerwise_info(layer).load_numel_total = 0  # no weights yet is not an error
            layers.finalize_layerwise_reload(model, self._config)
        return RecordedLoad(plan, None if loaded[0] is None else frozenset(loaded[0]))

    def begin(self) -> None:
        """Prepare the model for new weights; until `end` it cannot run."""
        self._ties = _ties(self._model)
        layerwise().initialize_layerwise_reload(self._model)

    def place(self, staged: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
        """Give the model some of its weights. All weights of a layer come in one call.

        Args:
            staged: This rank's parameters, complete, in the form in which they were recorded.
            whole: Checkpoint tensors for the model's own `load_weights`.
        """
        layers, model = layerwise(), self._model
        # A layer that shares its weight with another one may keep its own form of it: the head of tied embeddings.
        ties = {tied: tensor for name, tensor in staged.items() for tied in self._ties.get(name, ())}
        staged = {**staged, **ties}
        names = {name: name.rpartition(".") for name in staged}
        owners = {path: model.get_submodule(path) for path, _, _ in names.values()}
        for path, _, attribute in names.values():
            tensor = getattr(owners[path], attribute)
            self._loaders.append((tensor, _own_loader(tensor)))
            tensor.weight_loader = _copy
        for layer in owners.values():
            layers.initialize_online_processing(layer)
        if whole:
            with _part_of_a_model():
                model.load_weights(list(whole.items()))  # type: ignore[operator]
        for name, (path, _, attribute) in names.items():
            tensor = getattr(owners[path], attribute)
            tensor.weight_loader(tensor, staged[name])

    def names_of(self, path: str) -> set[str]:
        """The tensors that a layer takes from a checkpoint, by full names, between `begin` and `end`."""
        layer = self._model.get_submodule(path)
        own = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
        return {f"{path}.{name}" for name in own if name not in layer._non_persistent_buffers_set}

    def end(self) -> None:
        """Let the model run with the weights that it was given, and with the old ones elsewhere."""
        try:
            layerwise().finalize_layerwise_reload(self._model, self._config)
        finally:
            for tensor, loader in self._loaders:
                tensor.weight_loader = loader  # type: ignore[attr-defined]
            self._loaders.clear()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """`begin` at the start of the block, and `end` at its end, even after an error."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def missing(self, loaded: frozenset[str]) -> list[str]:
        """Parameters that were not loaded, by vLLM's own rule: in quantized models, some never are."""
        if getattr(self._config, "quantization", None) is not None:
            return []
        return sorted({name for name, _ in self._model.named_parameters()} - loaded)


def empty_for(recorded: RecordedTensor, device: torch.device) -> torch.Tensor:
    """Memory of a parameter's recorded form: zeros, also in padding that is never filled."""
    tensor = torch.empty_strided(recorded.shape, recorded.strides, dtype=dtype_of(recorded.dtype), device=device)
    return tensor.zero_()


def module_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module with these tensors under these names, for `load_by_plan`."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        module, (*path, attribute) = root, name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_buffer(attribute, tensor)
    return root


def parts_of(plan: ts.LoadPlan, nbytes: int | None) -> Iterator[ts.LoadPlan]:
    """A plan in parts with at most ``nbytes`` bytes of parameters, or of one layer; None: the whole plan."""
    layers: dict[str, list[str]] = {}
    for name in plan.parameters:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    whole, names, filled = plan.whole, list[str](), 0
    for layer in layers.values():
        size = sum(plan.parameters[name].nbytes for name in layer)
        if nbytes is not None and names and filled + size > nbytes:
            yield _part(plan, names, whole)
            whole, names, filled = (), [], 0
        names += layer
        filled += size
    yield _part(plan, names, whole)


def all_whole(plan: ts.LoadPlan, reason: str) -> ts.LoadPlan:
    """The same weights, each passed whole to `load_weights`."""
    groups = tuple(WholeTensors((name,), reason) for name in plan.checkpoint)
    return ts.LoadPlan({}, plan.checkpoint, (), (), groups, plan.skipped)


def filled_numel(plan: ts.LoadPlan) -> dict[str, int]:
    """The number of elements of each parameter that a plan fills."""
    found = dict.fromkeys(plan.parameters, 0)
    regions = [(copy.parameter, copy.into) for copy in plan.copies] + [
        (fill.parameter, fill.into) for fill in plan.fills
    ]
    for name, into in regions:
        found[name] += into.numel
    return found


def _part(plan: ts.LoadPlan, names: list[str], whole: tuple[WholeTensors, ...]) -> ts.LoadPlan:
    mine = set(names)
    copies = tuple(copy for copy in plan.copies if copy.parameter in mine)
    fills = tuple(fill for fill in plan.fills if fill.parameter in mine)
    read = {copy.checkpoint for copy in copies}.union(*(group.names for group in whole))
    checkpoint = {name: tensor for name, tensor in plan.checkpoint.items() if name in read}
    return ts.LoadPlan({name: plan.parameters[name] for name in names}, checkpoint, copies, fills, whole, ())


def _ties(model: torch.nn.Module) -> dict[str, list[str]]:
    """The other names of parameters with several names, by the first name."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(tensor), name)
        if known != name:
            found.setdefault(known, []).append(name)
    return found


def _copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Called by vLLM as a parameter's loader, with keyword arguments."""
    param.data.copy_(loaded_weight)


def _own_loader(tensor: torch.Tensor) -> Any:
    """A parameter's loader, without the wrappers by which vLLM defers it."""
    loader: Any = getattr(tensor, "weight_loader", None) or _default_loader()
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        yield from layer.parameters(recurse=False)
        yield from layer.buffers(recurse=False)


def layerwise() -> Any:
    """VLLM's reload, layer by layer."""
    return import_module("vllm.model_executor.model_loader.reload.layerwise")


def config_context(vllm_config: Any) -> AbstractContextManager[Any]:
    """Set vLLM's configuration, for code that processes weights outside of vLLM's own calls."""
    found: AbstractContextManager[Any] = import_module("vllm.config").set_current_vllm_config(vllm_config)
    return found


@contextmanager
def config_beside(vllm_config: Any) -> Iterator[None]:
    """The same in a thread other than the one that computes.

    vLLM has one configuration for all threads, which its calls set and reset. This begins between two such calls.
    """
    current: Any = import_module("vllm.config").get_current_vllm_config_or_none
    end = time.monotonic() + _CALL_S
    while current() is not None and time.monotonic() < end:
        time.sleep(0.001)
    with config_context(vllm_config):
        yield


def _default_loader() -> Any:
    return import_module("vllm.model_executor.model_loader.weight_utils").default_weight_loader


def _part_of_a_model() -> AbstractContextManager[None]:
    """A block in which only some weights are loaded; vLLM's check for all of them, in some versions, is off."""
    try:
        validation: Any = import_module("vllm.model_executor.model_loader.mtp_validation")
    except ImportError:
        return nullcontext()
    found: AbstractContextManager[None] = validation.disable_mtp_completeness_check()
    return found
