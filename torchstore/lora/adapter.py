"""A LoRA adapter in PEFT's terms: its tensors under the names of a checkpoint, its config, and what it belongs to."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
_KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_NAME = re.compile(rf"^(?P<module>.+)\.(?P<kind>{'|'.join(_KINDS)})(?:\.(?P<rest>.+))?$")
_WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """The weights that an adapter was trained on.

    The example of `LoRAMerger` shows one.

    Attributes:
        key: The key of the base in a store, or any name that both sides agree on, such as that of a checkpoint.
        version: Its number.
    """

    key: str
    version: int = 0


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of one matrix by an adapter: `scale` times the product of its two factors.

    Attributes:
        module: The name of the module in the base model.
        a: The factor of shape (rank, columns).
        b: The factor of shape (rows, rank).
        scale: The number by which their product is multiplied.
        is_transposed: The base has the transposed matrix: an embedding, or a layer with ``fan_in_fan_out``.
    """

    module: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    is_transposed: bool


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """An adapter, or one version of it.

    The example of `LoRAMerger` shows one.

    Attributes:
        tensors: The tensors, by the names that PEFT writes into ``adapter_model.safetensors`` and that
            `set_peft_model_state_dict` takes: ``base_model.model.MODULE.lora_A.weight``. `lora_adapter_of` gives the
            model's own tensors.
        config: The fields of ``adapter_config.json``.
        base: The base that it belongs to; None: unknown.
        version: The version that was read; None: it was not read from a store.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    base: BaseVersion | None = None
    version: int | None = None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the two files of a PEFT checkpoint, which vLLM's ``LoRARequest(lora_path=...)`` loads.

        Each file appears complete, the weights first. This needs the package safetensors, and whole tensors.

        Raises:
            TypeError: A tensor is a DTensor: read the adapter without ``into`` and save that.
        """
        from safetensors.torch import save_file

        if any(hasattr(tensor, "device_mesh") for tensor in self.tensors.values()):
            raise TypeError("save writes whole tensors, and there are DTensors: get_lora without into= gives those")
        there = Path(folder)
        there.mkdir(parents=True, exist_ok=True)
        weights, config = there / f".{_WEIGHTS_FILE}.new", there / f".{_CONFIG_FILE}.new"
        save_file({name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}, weights)
        config.write_text(json.dumps(dict(self.config), indent=2, sort_keys=True))
        weights.replace(there / _WEIGHTS_FILE)
        config.replace(there / _CONFIG_FILE)

    def products(self) -> Iterator[LowRank]:
        """The updates of all matrices.

        Raises:
            ValueError: It is of a kind that adds something else (DoRA), or a factor is missing.
        """
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self.tensors.items():
            found = _NAME.match(name.removeprefix(_PREFIX))
            if found is None:
                raise ValueError(f"{name!r} is not a tensor of a LoRA adapter")
            factors.setdefault(found["module"], {})[found["kind"]] = tensor
        for module, kinds in factors.items():
            if self.config.get("use_dora") or "lora_magnitude_vector" in kinds:
                raise ValueError(
                    f"{module!r} is adapted by DoRA, which scales the base's rows: it cannot be added to it"
                )
            embeds = "lora_embedding_A" in kinds
            a, b = (kinds.get(f"lora_{'embedding_' if embeds else ''}{side}") for side in "AB")
            if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                raise ValueError(f"{module!r} has no two factors that are matrices and fit each other")
            yield LowRank(
                module, a, b, self._scale(module, a.shape[0]), embeds or bool(self.config.get("fan_in_fan_out"))
            )

    def _scale(self, module: str, rank: int) -> float:
        alpha = float(_by_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", rank)))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def lora_adapter_of(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    adapter: str = "default",
    config: Mapping[str, Any] | None = None,
    base: BaseVersion | None = None,
) -> LoRAAdapter:
    """Select the adapter of a model: its tensors as they are, no copies, under the names of a checkpoint.

    Args:
        model: One that PEFT has adapted, also below FSDP2, DDP, `torch.compile` and activation checkpointing; or any
            module or state dict whose tensors are named ``MODULE.lora_A.weight`` and ``MODULE.lora_B.weight`` (with or
            without an adapter's name before ``weight``). DTensors stay DTensors.
        adapter: Which of PEFT's adapters.
        config: The fields of ``adapter_config.json``; None: those of ``model.peft_config``.
        base: The base that the adapter belongs to.

    Raises:
        ValueError: The model has no such adapter; it has no config and none was given; or it also trains whole tensors
            (``modules_to_save``, biases), which are not part of an adapter's tensors.
    """
    if config is None:
        known = getattr(model, "peft_config", None) or getattr(getattr(model, "module", None), "peft_config", None)
        if not isinstance(known, Mapping) or adapter not in known:
            raise ValueError(
                f"the model has no PEFT config of an adapter {adapter!r}: give config= with lora_alpha and r"
            )
        config = known[adapter].to_dict() if hasattr(known[adapter], "to_dict") else dict(known[adapter])
    plain = {name: _plain(value) for name, value in config.items()}
    _check_config(plain)
    tensors = {}
    for name, tensor in _tensors_of(model):
        found = _NAME.match(_WRAPPERS.sub("", name))
        if found is None or (named := _checkpoint_name(found, adapter)) is None:
            continue
        tensors[named] = tensor
    if not tensors:
        raise ValueError(f"the model has no tensors lora_A, lora_B of an adapter {adapter!r}")
    return LoRAAdapter(MappingProxyType(tensors), MappingProxyType(plain), base)


def _tensors_of(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(model, torch.nn.Module):
        return model.named_parameters()
    return [(name, value) for name, value in model.items() if isinstance(value, torch.Tensor)]


def _checkpoint_name(found: re.Match[str], adapter: str) -> str | None:
    """The name in a checkpoint; None for a tensor of another adapter."""
    rest = found["rest"] or ""
    if rest not in ("", "weight", adapter, f"{adapter}.weight"):
        return None
    name = f"{_PREFIX}{found['module'].removeprefix(_PREFIX)}.{found['kind']}"
    return name if found["kind"].startswith("lora_embedding") else f"{name}.weight"


def _check_config(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ValueError(f"the adapter is {kind}, not LORA: put its tensors by put_state_dict")
    for field in ("modules_to_save", "trainable_token_indices"):
        if config.get(field):
            raise ValueError(f"the adapter has {field}={config[field]!r}, whole tensors: put them by put_state_dict")
    if config.get("bias", "none") != "none":
        raise ValueError(f"the adapter has bias={config['bias']!r}, whole tensors: put them by put_state_dict")


def _plain(value: Any) -> Any:
    """A field of a config as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _by_pattern(patterns: Any, module: str, otherwise: Any) -> Any:
    """The value of PEFT's config for a module, by patterns that match the end of its name, after a dot."""
    if isinstance(patterns, Mapping):
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    return otherwise
