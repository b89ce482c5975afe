"""What `python -m tests.structure` counts: import circles and races, broken layers, class and private names."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tests.structure.source import CALL, RUN, TYPES, Access, Import, Module

RUN_TIME = frozenset({RUN, CALL})
ALL = frozenset({RUN, CALL, TYPES})
FRONT = ""
"""The layer of the modules that stand beside the layers: it is above all others."""

Layers = Sequence[Sequence[str]]
"""From the lowest to the highest; those of one level may not import each other."""


def room(module: str) -> str:
    """In which room of the package a module is: the first folder, or "" for modules beside the rooms."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def rooms(modules: Mapping[str, Module]) -> dict[str, list[Module]]:
    """The modules of each room."""
    packages = {name for name, module in modules.items() if module.is_package and name.count(".") == 1}
    found: dict[str, list[Module]] = defaultdict(list)
    for name, module in modules.items():
        in_room = ".".join(name.split(".")[:2]) in packages
        found[room(name) if in_room else ""].append(module)
    return dict(found)


def circles(modules: Mapping[str, Module], kinds: Collection[str]) -> list[list[str]]:
    """The sets of modules that all reach each other by imports of these kinds, the largest first."""
    targets = _targets(modules, kinds)
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []
    for start in modules:
        if start in order:
            continue
        stack = [(start, iter(targets[start]))]
        order[start] = low[start] = len(order)
        open_.append(start)
        while stack:  # Tarjan's strongly connected components, without recursion
            name, rest = stack[-1]
            for target in rest:
                if target not in order:
                    order[target] = low[target] = len(order)
                    open_.append(target)
                    stack.append((target, iter(targets[target])))
                    break
                if target in open_:
                    low[name] = min(low[name], order[target])
            else:
                stack.pop()
                if stack:
                    low[stack[-1][0]] = min(low[stack[-1][0]], low[name])
                if low[name] == order[name]:
                    begin = open_.index(name)
                    if len(open_) - begin > 1:
                        found.append(sorted(open_[begin:]))
                    del open_[begin:]
    return sorted(found, key=lambda circle: (-len(circle), circle))


def shortest_circle(modules: Mapping[str, Module], circle: Collection[str], kinds: Collection[str]) -> list[Import]:
    """A shortest way by imports from a module of a circle back to it."""
    steps: dict[str, dict[str, Import]] = {
        name: {each.target: each for each in modules[name].imports if each.kind in kinds and each.target in circle}
        for name in circle
    }
    found = (_way_back(steps, name) for name in sorted(circle))
    return min(found, key=len)


def _way_back(steps: Mapping[str, Mapping[str, Import]], start: str) -> list[Import]:
    came: dict[str, Import] = {}
    waiting = deque([start])
    while waiting and start not in came:
        for target, step in steps[waiting.popleft()].items():
            if target not in came:
                came[target] = step
                waiting.append(target)
    way = [came[start]]
    while way[-1].source != start:
        way.append(came[way[-1].source])
    return way[::-1]


def _targets(modules: Mapping[str, Module], kinds: Collection[str]) -> dict[str, list[str]]:
    return {
        name: sorted({each.target for each in module.imports if each.kind in kinds}) for name, module in modules.items()
    }


def racing_imports(modules: Mapping[str, Module]) -> Iterator[Import]:
    """The imports within functions that two threads can break, if both are the first to need a package.

    ``from package.module import name`` holds the lock of the module while it waits for the package, whose front holds
    its own while it waits for the module; Python ends that by showing one of the two a module half made. ``from package
    import module`` waits for the package before it touches the module.
    """
    targets = {
        name: {part for each in module.imports if each.kind == RUN for part in _with_packages(each.target)}
        for name, module in modules.items()
    }
    for name, module in sorted(modules.items()):
        loaded = _reachable(targets, _with_packages(name))
        for each in module.imports:
            package = each.target.rpartition(".")[0]
            is_late = each.kind == CALL and not each.is_by_package and package not in loaded
            if is_late and each.target in _reachable(targets, [package]):
                yield each


def _with_packages(module: str) -> list[str]:
    """A module and the packages around it, which are imported before it."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _reachable(targets: Mapping[str, Collection[str]], starts: Iterable[str]) -> set[str]:
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = set(targets.get(waiting.pop(), ())) - found
        found |= new
        waiting.extend(new)
    return found


def layer(module: str, inside: str) -> str | None:
    """The layer of a module of the package ``inside``: the folder below it, or `FRONT`; None outside."""
    if module == inside:
        return FRONT
    if not module.startswith(f"{inside}."):
        return None
    return module[len(inside) + 1 :].partition(".")[0]


def layers_of(modules: Mapping[str, Module], inside: str) -> dict[str, list[Module]]:
    """The modules of each folder below the package ``inside``; modules beside them are in `FRONT`."""
    packages = {layer(name, inside) for name, module in modules.items() if module.is_package}
    found: dict[str, list[Module]] = defaultdict(list)
    for name, module in modules.items():
        of = layer(name, inside)
        if of is not None:
            found[of if of in packages else FRONT].append(module)
    return dict(found)


def against_layers(modules: Mapping[str, Module], inside: str, layers: Layers) -> Iterator[Import]:
    """The imports that do not lead downwards, of each module pair and kind the first."""
    height = {name: level for level, names in enumerate(layers) for name in names} | {FRONT: len(layers)}
    homes = {module.name: of for of, each in layers_of(modules, inside).items() for module in each}
    seen: set[tuple[str, str, bool]] = set()
    for source, of in sorted(homes.items()):
        for each in modules[source].imports:
            to = homes.get(each.target)
            if to is None or to == of or of not in height or to not in height or height[to] < height[of]:
                continue
            key = (source, each.target, each.kind == TYPES)
            if key not in seen:
                seen.add(key)
                yield each


def same_class_names(
    modules: Iterable[Module], explained: Mapping[str, str], programs: Collection[str]
) -> dict[str, list[str]]:
    """Public class names that several modules define, with these modules.

    Args:
        modules: to look at.
        explained: names that may stand several times below a package: what is below it counts as one place.
        programs: packages whose modules are programs of their own and do not count.
    """
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module in modules:
        if any(_is_below(module.name, each) for each in programs):
            continue
        for name in module.classes:
            if not name.startswith("_"):
                under = explained.get(name)
                place = under if under is not None and _is_below(module.name, under) else module.name
                places[name][place].append(module.name)
    return {
        name: sorted(module for each in found.values() for module in each)
        for name, found in sorted(places.items())
        if len(found) > 1
    }


def _is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def private_accesses(modules: Mapping[str, Module]) -> list[Access]:
    """Private names that are used in one module and defined in others of the package alone."""
    defined = {name for module in modules.values() for name in module.defines}
    return [
        access
        for module in modules.values()
        for access in module.accesses
        if access.private in defined and access.private not in module.defines
    ]
