"""Any model whose weights are to be synced: names and shapes of its tensors, from its config or from a list of them.

No weights are read and nothing is downloaded. A config is that of transformers, which makes the model on torch's meta
device, where tensors have no memory.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from skipper.benchmarks.errors import UsageError
from skipper.torchstore.algebra.layout import Ints

__all__ = ["GivenModel", "read_document", "read_model"]

_MOST_ELEMENTS = 1 << 48
_KINDS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")


@dataclass(frozen=True, slots=True)
class GivenModel:
    """Tensors by name.

    Attributes:
        name: Name of the model, for people.
        tensors: The name and shape of each.
    """

    name: str
    tensors: tuple[tuple[str, Ints], ...]

    def shapes(self) -> dict[str, Ints]:
        """The shape of every tensor, by name."""
        return dict(self.tensors)

    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(prod(shape) for _, shape in self.tensors)


def read_model(given: str, layers: int | None = None) -> GivenModel:
    """The model that a user names.

    Args:
        given: A JSON file: a ``config.json`` of transformers, or an object of names and shapes (`read_document`); a
            folder with a ``config.json``; or the name of a model in the local cache of Hugging Face.
        layers: So many layers, where the model is to have fewer than its config says.

    Raises:
        UsageError: There is none, it is something else, or it needs transformers.
    """
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        return _configured(given, _cached(given), layers)
    try:
        document = read_document(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if "model_type" in document:
        return _configured(path.stem if path.stem != "config" else path.absolute().parent.name, document, layers)
    if layers is not None:
        raise UsageError(f"{path} lists tensors: which of them to leave out for fewer layers is not known")
    return GivenModel(path.stem, tuple(document.items()))


def read_document(data: bytes, where: str) -> dict[str, Any]:
    """A config of transformers as it is, if there is a ``model_type`` in it; else shapes by name.

    Args:
        data: JSON: a config, ``{NAME: SHAPE}``, or ``{NAME: {"shape": SHAPE}}`` as the header of safetensors has them.
            A key ``__metadata__``, and other fields of a tensor than its shape, do not count.
        where: Where it comes from, for errors.

    Raises:
        UsageError: It is something else.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(
            f"{where} is not a model: pass a config of transformers with model_type, or an object of names and shapes"
        )
    return document if "model_type" in document else dict(_listed(document))


def _listed(document: Mapping[str, Any]) -> dict[str, Ints]:
    shapes: dict[str, Ints] = {}
    for name, value in document.items():
        if name == "__metadata__":
            continue
        shape = value.get("shape") if isinstance(value, Mapping) else value
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise UsageError(
                f"{name!r} has no shape: a list of positive whole numbers is expected, or no model_type is given"
            )
        shapes[name] = tuple(shape)
    if not shapes:
        raise UsageError("the model has no tensors")
    if sum(map(prod, shapes.values())) > _MOST_ELEMENTS:
        raise UsageError("the model is larger than any that there is")
    return shapes


def _configured(name: str, fields: Mapping[str, Any], layers: int | None) -> GivenModel:
    """What transformers makes of a config."""
    transformers = _transformers()
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"transformers {transformers.__version__} does not know the model_type {kind!r} of {name}: install a newer "
            "one, or give a JSON file of names and shapes"
        )
    fields = {key: value for key, value in fields.items() if key not in ("auto_map", "quantization_config")}
    try:
        config = transformers.AutoConfig.for_model(**fields)
        if layers is not None:
            _shorten(config.get_text_config(), layers)
        with torch.device("meta"):
            model = _made(transformers, config)
    except Exception as error:  # any error of a model's code about a config that does not fit it
        raise UsageError(
            f"transformers makes no model of the config of {name}: {type(error).__name__}: {error}"
        ) from error
    shapes: dict[str, Ints] = {}
    seen: set[int] = set()
    for key, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and tensor.is_floating_point():  # tied ones once
            seen.add(id(tensor))
            shapes[key] = tuple(tensor.shape)
    return GivenModel(name, tuple(shapes.items()))


def _made(transformers: Any, config: Any) -> torch.nn.Module:
    for architecture in config.architectures or ():
        if known := getattr(transformers, str(architecture), None):
            model: torch.nn.Module = known(config)
            return model
    for kind in _KINDS:
        auto = getattr(transformers, kind)
        if type(config) in auto._model_mapping:
            made: torch.nn.Module = auto.from_config(config)
            return made
    raise ValueError(f"no class of transformers is known for the model_type {config.model_type!r}")


def _shorten(config: Any, layers: int) -> None:
    """Reduce the number of layers in a config, and its lists with an entry for each layer."""
    before = config.num_hidden_layers
    if layers > before:
        raise ValueError(f"it has {before} layers, and {layers} are asked for")
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers


def _cached(name: str) -> Mapping[str, Any]:
    """The config of a model in the local cache."""
    try:
        fields: Mapping[str, Any] = _transformers().AutoConfig.from_pretrained(name, local_files_only=True).to_dict()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{name} is neither a file nor a folder with a config.json, nor a model in the local cache of Hugging Face"
        ) from error
    return fields


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "a config needs transformers, which is not installed: pip install transformers, or give a "
            "JSON file of names and shapes"
        ) from error
