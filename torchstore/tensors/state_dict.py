"""Nested state dicts as flat names and back.

``{"model": {"weight": w, "bias": b}, "step": 3}`` becomes ``{"model.weight": w, "model.bias": b, "step": 3}``
plus, for each name, the path that leads back. Lists are flattened if they contain tensors or dicts, as in
`torch.distributed.checkpoint`, and tuples if they contain tensors; any other value is a leaf, which is pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from skipper.torchstore.algebra.manifest import Path

_DEEPEST = 100  # levels; each needs a few Python frames
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))


class _Index(int):
    """A position in a list (or tuple); its type distinguishes it from a dict's integer key."""

    kind: type[list[Any]] | type[tuple[Any, ...]]

    def __new__(cls, position: int, kind: type[list[Any]] | type[tuple[Any, ...]] = list) -> _Index:
        index = super().__new__(cls, position)
        index.kind = kind
        return index

    def __reduce__(self) -> tuple[Any, ...]:
        return _Index, (int(self), self.kind)


class Flattened(Mapping[str, Any]):
    """A flattened state dict: its leaves by name, and for each name the path that leads back."""

    __slots__ = ("leaves", "paths")

    def __init__(self, leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
        self.leaves = leaves
        self.paths = paths

    def __getitem__(self, name: str) -> Any:
        return self.leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


def path_of(steps: Iterable[str | int]) -> Path:
    """A path from dict keys, which are strings, and positions in lists."""
    return tuple(_Index(step) if isinstance(step, int) else step for step in steps)


def steps_of(path: Path) -> tuple[str | int, ...]:
    """The inverse of `path_of`; dict keys become strings."""
    return tuple(int(step) if isinstance(step, _Index) else str(step) for step in path)


def flatten(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Name every leaf of a nested dict.

    Returns:
        The leaves by name (the steps joined by "."), and the path of each name.

    Raises:
        TypeError: ``state_dict`` is not a mapping, or a key in it does not equal its own copy (a tensor, for example).
        ValueError: Two leaves would have the same name, as in ``{"a.b": 1, "a": {"b": 2}}``, or it contains itself.
    """
    if isinstance(state_dict, Flattened):
        return dict(state_dict.leaves), dict(state_dict.paths)
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping, not {type(state_dict).__name__}")
    if all(isinstance(value, torch.Tensor) and type(key) is str for key, value in state_dict.items()):
        return dict(state_dict), {key: (key,) for key in state_dict}  # a model's: nothing to flatten
    leaves: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, value in _walk((), state_dict, ()):
        name = ".".join(map(str, path))
        if name in leaves:
            raise ValueError(
                f"two entries of the state dict are both named {name!r} ({_steps(paths[name])} and {_steps(path)}): "
                "rename one of them"
            )
        leaves[name] = value
        paths[name] = path
    return leaves, paths


def _walk(path: Path, value: Any, within: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
    if id(value) in within or len(within) > _DEEPEST:
        raise ValueError(f"the state dict contains itself, or is too deep, at {_steps(path):.200}")
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            if type(key) is not str:
                _check_key(path, key)
            # The common case, a tensor at this level, without another generator per parameter.
            if isinstance(item, torch.Tensor):
                yield (*path, key), item
            else:
                yield from _walk((*path, key), item, (*within, id(value)))
    elif isinstance(value, list | tuple) and (_holds_tensors(value) or _holds_dicts(value)):
        kind: type[list[Any]] | type[tuple[Any, ...]] = list if isinstance(value, list) else tuple
        for position, item in enumerate(value):
            yield from _walk((*path, _Index(position, kind)), item, (*within, id(value)))
    else:
        yield path, value


def _check_key(path: Path, key: Any) -> None:
    """Refuse a key that would not find its entry after it was sent.

    Raises:
        TypeError: It cannot be pickled, or does not equal its copy.
    """
    if type(key) in _PLAIN_KEYS:
        return
    try:
        same = not isinstance(key, torch.Tensor) and bool(pickle.loads(pickle.dumps(key)) == key)
    except Exception:  # noqa: BLE001  # any error of the key's own methods
        same = False
    if not same:
        within = f" within {'.'.join(map(str, path))!r}" if path else ""
        raise TypeError(
            f"a {type(key).__name__} cannot be a key of a stored state dict{within}: a copy of it is another key; "
            "use strings or numbers (of an optimizer, put its state_dict())"
        )


def _steps(path: Path) -> str:
    """A path in Python notation."""
    return "".join(f"[{int(step) if isinstance(step, _Index) else step!r}]" for step in path)


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor) or depth > _DEEPEST:  # a list within itself: `_walk` detects that
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensors(item, depth + 1) for item in value.values())
    # A named tuple would lose its type on the way back: it stays a leaf.
    plain = isinstance(value, list) or type(value) is tuple
    return plain and any(_holds_tensors(item, depth + 1) for item in value)


def _holds_dicts(value: Any, within: tuple[int, ...] = ()) -> bool:
    if not isinstance(value, list) or id(value) in within:
        return False
    return any(isinstance(item, Mapping) or _holds_dicts(item, (*within, id(value))) for item in value)


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """Rebuild the nested dict; names without a value are left out.

    Raises:
        KeyError: A leaf has no path.
    """
    root: dict[Any, Any] = {}
    sequences: list[tuple[dict[Any, Any], Any, type[Any]]] = []
    for name, value in leaves.items():
        path = paths[name]
        here = root
        for step, following in pairwise(path):
            if step not in here:
                here[step] = {}
                if isinstance(following, _Index):
                    sequences.append((here, step, following.kind))
            here = here[step]
        here[path[-1]] = value
    # Innermost first: a list within a list is complete before the outer one copies it.
    for parent, step, kind in reversed(sequences):
        items = parent[step]
        parent[step] = kind(items[position] for position in sorted(items))
    return root
