"""A safetensors checkpoint as it lies on disk: which tensors there are, and any box of any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
"""What the sharded checkpoints of the Hugging Face libraries call their table of contents."""


class CheckpointError(ValueError):
    """The folder does not hold a readable safetensors checkpoint."""


class Checkpoint:
    """The tensors of one ``.safetensors`` file, or of all that lie in a folder.

    Nothing but the files' headers is read until `read` is called. Instances pickle as their path.

    Args:
        path: A file or a folder. In a folder with an index the index decides; else every file counts.

    Raises:
        CheckpointError: Nothing there, a damaged file, or one name in two files without an index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        wanted = _read_index(path / INDEX) if (path / INDEX).is_file() else None
        for file in _files(path, wanted):
            self._add(file, wanted)
        if wanted is not None and wanted.keys() - self._files.keys():
            lacking = sorted(wanted.keys() - self._files.keys())
            raise CheckpointError(f"{INDEX} names {len(lacking)} tensors that are not there: {lacking[:3]}")
        if not self.shapes:
            raise CheckpointError(f"{path} holds no tensors")

    def __reduce__(self) -> tuple[type[Checkpoint], tuple[Path]]:
        return Checkpoint, (self.path,)

    def _add(self, file: Path, wanted: Mapping[str, str] | None) -> None:
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 - not a mapping
                    if wanted is not None and wanted.get(name) != file.name:
                        continue
                    if name in self._files:
                        raise CheckpointError(f"{name!r} is in {self._files[name].name} and in {file.name}")
                    self._files[name] = file
                    self.shapes[name] = tuple(content.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def read(self, boxes: Mapping[str, Sequence[slice]]) -> dict[str, Tensor]:
        """Read one box of each named tensor; each file is opened once.

        Args:
            boxes: By name, a slice for each dim of that tensor.
        """
        tensors: dict[str, Tensor] = {}
        for file in sorted({self._files[name] for name in boxes}):
            with safe_open(file, framework="pt") as content:
                for name in (name for name in boxes if self._files[name] == file):
                    tensors[name] = content.get_slice(name)[tuple(boxes[name])]
        return tensors


def _files(path: Path, wanted: Mapping[str, str] | None) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if wanted is not None:
        return [path / name for name in sorted(set(wanted.values()))]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"there is no .safetensors file in {path}")
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text())
        return {str(name): Path(file).name for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of a checkpoint: {error!r}") from error
