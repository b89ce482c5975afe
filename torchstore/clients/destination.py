"""State dicts to fill: from a reader's tensors to a plan, and back to the nested dict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from skipper.torchstore.algebra.manifest import Path, TensorItem
from skipper.torchstore.clients.catalog import Opened
from skipper.torchstore.clients.requests import StateDictGet
from skipper.torchstore.errors import KindMismatchError, LayoutMismatchError, StateDictMismatchError
from skipper.torchstore.support.process import this_process
from skipper.torchstore.tensors.landing import Landing, land, lands
from skipper.torchstore.tensors.local_tensors import LocalTensor, describe, fingerprint, memory_of
from skipper.torchstore.tensors.naming import NameMap, Part, Stack, ask, map_names
from skipper.torchstore.tensors.overlap import check_distinct
from skipper.torchstore.tensors.plan import Plan, compile_read
from skipper.torchstore.tensors.state_dict import flatten, unflatten
from skipper.torchstore.tensors.values import load, new_tensor


@dataclass(frozen=True, slots=True)
class Destination:
    """A state dict to fill.

    Attributes:
        get: The request.
        leaves: The entries of what was given, by name.
        paths: How their names lead back.
        mark: The fingerprint under which plans for it are kept.
    """

    get: StateDictGet
    leaves: Mapping[str, Any]
    paths: Mapping[str, Path]
    mark: tuple[Any, ...]

    @staticmethod
    def of(get: StateDictGet) -> Destination:
        """Describe a state dict by its names and its tensors' places and layouts."""
        leaves, paths = flatten(get.into) if get.into is not None else ({}, {})
        taken = fingerprint(leaves)
        hash(taken)  # now, because the read may first wait for its version: by then the cache holds something else
        return Destination(get, leaves, paths, (get.strict, get.names, taken))

    @property
    def names(self) -> NameMap | None:
        """Returns the stored names if they differ; None: they are the same."""
        return self.get.names

    def answers(self) -> dict[str, Stack | None]:
        """The results of `names` for each entry (None: it is not read); empty without such a function.

        Raises:
            TypeError: It returns something that is not allowed.
        """
        return {} if self.names is None else {name: ask(self.names, name) for name in self.leaves}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The given tensors that may be read into."""
        unread = {name for name, answer in self.answers().items() if answer is None}
        return {
            name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor) and name not in unread
        }


def compile_state_dict(
    key: str, destination: Destination, opened: Opened, earlier: Mapping[str, Landing] = MappingProxyType({})
) -> tuple[Plan, dict[str, torch.Tensor]]:
    """The plan of a state dict, and the tensors that had to be created because none were given for them."""
    stored, leaves = opened.tensors(), destination.leaves
    objects = {name for source in opened.sources for name in source.manifest.objects}
    if destination.names is not None:
        mapped = map_names(key, leaves, destination.names, stored, objects, strict=destination.get.strict)
        plan = compile_targets(key, opened, mapped.targets, mapped.stored, earlier)
        plan.filled = tuple(destination.tensors())
        return plan, mapped.created
    stored = _to_fill(stored, leaves)
    if destination.get.into is not None and destination.get.strict:
        missing = tuple(name for name in leaves if name not in stored and name not in objects)
        unexpected = tuple(name for name in (*stored, *sorted(objects)) if name not in leaves)
        if missing or unexpected:
            raise StateDictMismatchError(key, missing, unexpected)
    for name in objects:
        if isinstance(leaves.get(name), torch.Tensor):
            raise KindMismatchError(f"{key}/{name}", "an object is stored there, a tensor was given")
    created: dict[str, torch.Tensor] = {}
    targets: dict[str, LocalTensor] = {}
    for name, item in stored.items():
        tensor = leaves.get(name)
        if not isinstance(tensor, torch.Tensor):
            tensor = created[name] = new_tensor(item.global_shape, item.dtype)
        targets[name] = describe(tensor, key=f"{key}/{name}")
    plan = compile_targets(key, opened, targets, {}, earlier)
    plan.filled = tuple(name for name in targets if name not in created)
    return plan, created


def compile_copy(key: str, destination: Destination, opened: Opened, peer_copy: Opened) -> Plan:
    """The plan that fills a destination from the copy of a reader with the same destination, under the same names."""
    given, stored = destination.tensors(), opened.tensors()
    # With ``strict=False`` the version may hold only some of the names.
    names = [name for name in given if destination.names is not None or name in stored]
    targets = {name: describe(given[name], key=f"{key}/{name}") for name in names}
    return compile_read(key, peer_copy.sources, targets)


def compile_targets(
    key: str,
    opened: Opened,
    targets: Mapping[str, LocalTensor],
    names: Mapping[str, str],
    earlier: Mapping[str, Landing] = MappingProxyType({}),
) -> Plan:
    """The plan that fills these targets; quantized tensors are dequantized if their values are requested."""
    _check_distinct(key, targets, names, opened)
    into, stored, landings = land(key, targets, names, opened.tensors(), earlier)
    plan = compile_read(key, opened.sources, into, reader=this_process().pid, stored=stored)
    plan.landings = landings
    return plan


def _check_distinct(key: str, targets: Mapping[str, LocalTensor], names: Mapping[str, str], opened: Opened) -> None:
    """Refuse targets that share memory but are not tied in the same way in the store.

    Raises:
        DestinationOverlapError: See above.
    """
    written = [(label, target) for label, target in targets.items() if target.pieces]

    def source(index: int) -> tuple[Any, ...]:
        label, target = written[index]
        whole = target.pieces[0].box.shape == target.global_shape
        return () if whole else target.pieces, opened.places(names.get(label, label))

    check_distinct(key, [(label, target.tensor) for label, target in written], source)


def _to_fill(stored: Mapping[str, TensorItem], leaves: Mapping[str, Any]) -> Mapping[str, TensorItem]:
    """The stored tensors, without the scales of those that will be dequantized."""
    scales = {
        beside
        for name, item in stored.items()
        if item.scaled and isinstance(leaf := leaves.get(name), torch.Tensor) and lands(item, leaf.dtype)
        for beside in item.scaled.beside()
    }
    if not scales:
        return stored
    return {name: item for name, item in stored.items() if name not in scales or name in leaves}


def rebuild(
    destination: Destination, created: Mapping[str, Any], opened: Opened, singly: Mapping[str, Any]
) -> dict[Any, Any]:
    """The state dict as it was put, with the reader's own tensors, and with entries that were put separately since."""
    given, leaves, objects = destination.get.into, destination.leaves, {**objects_of(opened), **singly}
    stored = _to_fill(opened.tensors(), leaves)
    if destination.names is not None:
        return _rebuild_mapped(destination, destination.names, created, objects)
    if isinstance(given, dict) and not objects and not created and len(leaves) == len(stored):
        return given  # everything went into the given tensors: the given dict is the answer
    values = {name: created.get(name, leaves.get(name)) for name in stored} | objects
    paths = {name: path for source in opened.sources for name, path in source.manifest.paths.items()}
    return unflatten({name: values[name] for name in paths if name in values}, paths)


def _rebuild_mapped(
    destination: Destination, names: NameMap, created: Mapping[str, Any], objects: Mapping[str, Any]
) -> dict[Any, Any]:
    """The state dict as it was given, with stored objects in place of entries that are not tensors."""
    given, values = destination.get.into, {**destination.leaves, **created}
    if isinstance(given, dict) and not created and all(isinstance(value, torch.Tensor) for value in values.values()):
        return given
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            answer = ask(names, name)
            values[name] = value if answer is None else objects[answer.parts[0].name]
    return unflatten(values, destination.paths)


def into_entries(key: str, destination: Destination, names: Collection[str]) -> dict[str, torch.Tensor | None]:
    """The destinations of entries that were put separately, by name: a given tensor, or None for a new value.

    Raises:
        LayoutMismatchError: Such an entry is only a part of one of the reader's entries.
        DestinationOverlapError: It shares memory with another one.
    """
    if destination.names is None:
        given = destination.tensors()
        memory = [(name, memory_of(tensor)) for name, tensor in given.items()]
        check_distinct(key, memory, lambda index: memory[index][0] if memory[index][0] in names else "")
        return {name: given.get(name) for name in names}
    found: dict[str, torch.Tensor | None] = {}
    for name, stack in destination.answers().items():
        leaf, parts = destination.leaves[name], () if stack is None else stack.parts
        for part in parts:
            if part.name in names:
                if len(parts) > 1 or part != Part(part.name) or not isinstance(leaf, torch.Tensor):
                    where = f"{key}/{part.name}"
                    raise LayoutMismatchError(
                        where,
                        f"it was put again by itself, so it is no longer a part of {name}: put the state dict again",
                    )
                found[part.name] = leaf
    return found


def objects_of(opened: Opened) -> dict[str, Any]:
    """The entries that are not tensors; with several publishers, those of the first one."""
    merged: dict[str, Any] = {}
    for share in reversed(opened.grant.shares):
        if share.objects:
            merged.update(load(share.objects))
    return merged
