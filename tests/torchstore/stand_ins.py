"""The parts of vLLM 0.33 and verl 0.9 that the adapters touch, declared anew from their protocols.

Where one of them is installed it is used instead. What is abstract there is abstract here, with the same parameters, so
that an adapter that lacks a method cannot be instantiated, and one with other parameters fails `same_parameters`.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Replicate | Shard, ...] | None = field(default=None, kw_only=True)


class WeightSource(ABC):
    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self) -> bool:
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self) -> Any:
        raise NotImplementedError

    def iter_local(self) -> Any:
        raise NotImplementedError


class ModuleSource(WeightSource):
    """Of a module whose parameters may be DTensors with plain Shard and Replicate placements."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [self._describe(name, weight) for name, weight in self._module.named_parameters()]

    def _describe(self, name: str, weight: torch.Tensor) -> ParamMeta:
        mesh = getattr(weight, "device_mesh", None)
        if mesh is None:
            return ParamMeta(name, weight.dtype, tuple(weight.shape))
        placements = tuple(Shard(p.dim) if p.is_shard() else Replicate() for p in weight.placements)
        owners = tuple(mesh.mesh.flatten().tolist())
        shapes = {"owners": owners, "mesh_shape": tuple(mesh.mesh.shape), "placements": placements}
        return ParamMeta(name, weight.dtype, tuple(weight.shape), **shapes)

    def iter_full(self) -> Any:
        for name, weight in self._module.named_parameters():
            yield name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    def iter_local(self) -> Any:
        for name, weight in self._module.named_parameters():
            yield name, weight.to_local() if hasattr(weight, "to_local") else weight


@dataclass
class WeightTransferInitInfo:
    pass


@dataclass
class WeightTransferUpdateInfo:
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]

    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not getattr(cls, "backend", None):
            raise TypeError(f"{cls.__name__} names no backend")

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC):
    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return _parsed(self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return _parsed(self.update_info_cls, update_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class TrainerWeightTransferEngine(ABC):
    init_info_cls: type

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.is_sender = is_sender
        self.rank = rank
        self.client = client
        self.source = source

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...


class Factory:
    """How vLLM knows its engines: by name, imported when asked for."""

    def __init__(self) -> None:
        self._registry: dict[str, Callable[[], type]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is registered already")
        self._registry[name] = lambda: getattr(import_module(module), class_name)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> Any: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Any) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class CheckpointEngineRegistry:
    _registry: ClassVar[dict[str, type]] = {}

    @staticmethod
    def register(backend: str) -> Any:
        def keep(engine: type) -> type:
            CheckpointEngineRegistry._registry[backend] = engine
            return engine

        return keep

    @classmethod
    def new(cls, backend: str, *args: Any, **options: Any) -> Any:
        return cls._registry[backend](*args, **options)


def install() -> None:
    """Have ``import vllm`` and ``import verl`` find these where the projects themselves are not installed."""
    if "vllm" not in sys.modules and find_spec("vllm") is None:
        here = sys.modules[__name__]
        _module("vllm.distributed.weight_transfer.base", **vars(here))
        _module(
            "vllm.distributed.weight_transfer.factory",
            WeightTransferEngineFactory=Factory(),
            WeightTransferTrainerFactory=Factory(),
        )
        _module("vllm.distributed.weight_transfer", HTTPVLLMWeightSyncClient=HTTPClient)
        _module("vllm.model_executor.model_loader.reload.layerwise", **RELOADS)
        _module("vllm.config", set_current_vllm_config=_current, get_current_vllm_config_or_none=lambda: None)
        _module("vllm.model_executor.model_loader.weight_utils", default_weight_loader=torch.Tensor.copy_)
        _module("vllm.model_executor.model_loader.mtp_validation", disable_mtp_completeness_check=_incomplete)
    if "verl" not in sys.modules and find_spec("verl") is None:
        engines = {"CheckpointEngine": CheckpointEngine, "CheckpointEngineRegistry": CheckpointEngineRegistry}
        _module("verl.checkpoint_engine.base", **engines)


def same_parameters(engine: type, base: type) -> list[str]:
    """Abstract methods whose parameters the engine has changed; ``**kwargs`` leave it free."""
    changed = []
    for name in base.__abstractmethods__:  # type: ignore[attr-defined]
        theirs = list(inspect.signature(getattr(base, name)).parameters.values())
        ours = list(inspect.signature(getattr(engine, name)).parameters.values())
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in theirs):
            continue
        if [(p.name, p.kind, p.default) for p in ours] != [(p.name, p.kind, p.default) for p in theirs]:
            changed.append(name)
    return changed


class Model(torch.nn.Module):
    """A model as vLLM holds it: takes (name, tensor) pairs, and has to be told when an update begins and ends."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(33, 20, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(7, dtype=dtype))
        self.c = torch.nn.Parameter(torch.zeros(4, 8, 10, dtype=dtype))
        self.calls: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own, names = dict(self.named_parameters()), []
        with torch.no_grad():
            for name, weight in weights:
                names.append(name)
                own[name].copy_(weight)
        self.calls.append(" ".join(names))

    def values(self) -> list[float]:
        """The distinct values of all parameters."""
        return sorted({value for weight in self.parameters() for value in weight.detach().float().unique().tolist()})


class PPMissingLayer(torch.nn.Identity):
    """What a worker of a pipeline has in the place of another one's layers."""


class Stage(Model):
    """Some layers of a model of three, as a stage of a pipeline has them."""

    def __init__(self, *mine: int) -> None:
        torch.nn.Module.__init__(self)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(16, 8 + number) if number in mine else PPMissingLayer() for number in range(3)
        )
        self.calls: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """It passes over those of layers that it does not have."""
        own = dict(self.named_parameters())
        super().load_weights((name, weight) for name, weight in weights if name in own)


class StageSource(WeightSource):
    """A stage of a trainer's pipeline: it knows what all have, and gives its own.

    Args:
        stages: The layers of each rank.
        rank: This one.
    """

    def __init__(self, stages: list[list[int]], rank: int) -> None:
        self.stage, self._stages = Stage(*stages[rank]), stages

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        owners = {layer: (rank,) for rank, layers in enumerate(self._stages) for layer in layers}
        return [
            ParamMeta(name, weight.dtype, tuple(weight.shape), owners=owners[int(name.split(".")[1])])
            for name, weight in Stage(0, 1, 2).named_parameters()
        ]

    def iter_full(self) -> Any:
        yield from self.stage.named_parameters()


class LocalStageSource(StageSource):
    """The same, for engines that take shards."""

    def iter_local(self) -> Any:
        yield from self.stage.named_parameters()


@dataclass
class ModelConfig:
    """vLLM's, of one model."""

    enforce_eager: bool = True

    def __str__(self) -> str:
        return "config"


def worker_config(stages: int = 1, *, enforce_eager: bool = True, **parallel: Any) -> Any:
    parallel_config = SimpleNamespace(pipeline_parallel_size=stages, **parallel)
    return SimpleNamespace(parallel_config=parallel_config, model_config=ModelConfig(enforce_eager))


def _layerwise_info(layer: torch.nn.Module) -> Any:
    """The tensors that a load fills, without their values; in these models they are those that are there."""
    parameters = {name: tensor.detach().to("meta") for name, tensor in layer.named_parameters(recurse=False)}
    return SimpleNamespace(restore_metadata=(parameters, {}), restore_device=torch.device("cpu"))


RELOADS = {
    "get_layerwise_info": _layerwise_info,
    "initialize_layerwise_reload": lambda model: model.calls.append("initialize"),
    "initialize_online_processing": lambda layer: None,
    "finalize_layerwise_reload": lambda model, config: model.calls.append(f"finalize {config}"),
}


class HTTPClient:
    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url = base_url
        self.timeout = timeout

    def _post(self, path: str, json: Any = None) -> None:
        raise NotImplementedError


@contextmanager
def _incomplete() -> Any:
    yield


def _current(config: Any) -> Any:
    return nullcontext(config)


def _parsed(kind: type, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"not for {kind.__name__}: {error}") from error


def _module(path: str, **names: Any) -> None:
    parent = ""
    for name in path.split("."):
        parent = f"{parent}.{name}" if parent else name
        module = sys.modules.setdefault(parent, ModuleType(parent))
        module.__path__ = []
    vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})
