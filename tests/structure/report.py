"""The house in figures, and what of it exceeds its limits."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.structure.measures import (
    ALL,
    FRONT,
    RUN_TIME,
    Layers,
    against_layers,
    circles,
    layers_of,
    private_accesses,
    racing_imports,
    rooms,
    same_class_names,
    shortest_circle,
)
from tests.structure.source import TYPES, Access, Import, Module, read_package

LARGEST_CIRCLE_WITH_TYPES = 5
"""So many modules may name each other for type checkers without an entry in the limits."""

CIRCLES = "modules in circles at run time"
LARGEST = "largest circle with types"
PRIVATE = "private names of others"
LAYERS_RUN = "against the layers at run time"
LAYERS_TYPES = "against the layers for types"
CLASSES = "class names of several classes"
RACES = "late imports that two threads can break"


@dataclass(frozen=True, slots=True)
class Limits:
    """What `limits.toml` says.

    Attributes:
        inside: the package whose folders are layers.
        layers: from the lowest to the highest.
        explained: class names that may stand several times below one package: the package of each.
        reasons: and why.
        programs: packages of programs whose class names do not count.
        of: for each figure and room (or "" for the whole package) how much there may be; 0 where nothing is said.
    """

    inside: str
    layers: Layers
    explained: Mapping[str, str]
    reasons: Mapping[str, str]
    programs: Mapping[str, str]
    of: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure that is not at its limit, or a line of the limits that says nothing any more.

    Attributes:
        text: what is wrong.
        culprits: where, a line each.
    """

    text: str
    culprits: tuple[str, ...] = ()


class House:
    """A package, measured.

    Args:
        folder: of the package.
        limits: that hold for it.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self.limits = limits
        self.modules: dict[str, Module] = read_package(folder)
        self.rooms = rooms(self.modules)
        self.circles = circles(self.modules, RUN_TIME)
        self.circles_with_types = circles(self.modules, ALL)
        self.against_layers = list(against_layers(self.modules, limits.inside, limits.layers))
        self.layers = layers_of(self.modules, limits.inside)
        self.same_names = same_class_names(self.modules.values(), limits.explained, limits.programs)
        self.private = private_accesses(self.modules)
        self.racing = list(racing_imports(self.modules))

    def figures(self) -> dict[tuple[str, str], int]:
        """Each figure by its name and its room."""
        found: dict[tuple[str, str], int] = {}
        for name in self.rooms:
            found[CIRCLES, name] = sum(len(each) for each in self.circles if self._touches(each, name))
            sizes = [len(each) for each in self.circles_with_types if self._touches(each, name)]
            found[LARGEST, name] = max(sizes, default=0)
            found[PRIVATE, name] = len(self._private(name))
        found[LAYERS_RUN, ""] = len(self._against_layers(for_types=False))
        found[LAYERS_TYPES, ""] = len(self._against_layers(for_types=True))
        found[CLASSES, ""] = len(self.same_names)
        found[RACES, ""] = len(self.racing)
        return found

    def findings(self) -> Iterator[Finding]:
        """What is not as the limits say; nothing if the house is in order."""
        figures = self.figures()
        for (figure, name), value in figures.items():
            allowed = LARGEST_CIRCLE_WITH_TYPES if figure == LARGEST else 0
            limit = self.limits.of.get((figure, name), allowed)
            where = f"{self._shown(name)}: {figure}" if name or (figure, "") not in _WHOLE else figure
            if value > limit:
                yield Finding(f"{where}: {value}, and the limit is {limit}", tuple(self.culprits(figure, name)))
            elif value < limit and limit > allowed:
                yield Finding(f"{where}: {value}, which is better than the limit of {limit}: lower it (--lower)")
        for figure, name in sorted(self.limits.of.keys() - figures.keys()):
            yield Finding(f"limits: there is no {figure!r} of {name!r}")
        yield from self._unknown_layers()
        for name, under in self.limits.explained.items():
            if sum(name in each.classes and each.name.startswith(f"{under}.") for each in self.modules.values()) < 2:
                yield Finding(f"limits: there are no two classes {name} below {under} any more: remove the line")

    def culprits(self, figure: str, name: str) -> Iterator[str]:
        """What makes up a figure, a line each."""
        if figure == CIRCLES:
            yield from self._circles(self.circles, RUN_TIME, name)
        elif figure == LARGEST:
            large = [each for each in self.circles_with_types if len(each) > LARGEST_CIRCLE_WITH_TYPES]
            yield from self._circles(large or self.circles_with_types, ALL, name)
        elif figure == PRIVATE:
            yield from (f"{self.place(each.module, each.line)}: {each.name}" for each in self._private(name))
        elif figure == CLASSES:
            yield from (f"{each}: {', '.join(map(self._short, found))}" for each, found in self.same_names.items())
        elif figure == RACES:
            yield from map(self.shown, self.racing)
        else:
            yield from map(self.shown, self._against_layers(for_types=figure == LAYERS_TYPES))

    def shown(self, each: Import) -> str:
        """An import with its place."""
        place = self.place(each.source, each.line)
        return f"{self._short(each.source)} -> {self._short(each.target)} ({each.kind}; {place})"

    def place(self, module: str, line: int) -> str:
        """A line of a module, as an editor finds it from the folder that holds the package's rooms."""
        path = Path(*module.split(".")[1:])
        folder = self.folder / path
        for file in (folder / "__init__.py", *(folder.with_suffix(suffix) for suffix in (".py", ".pyx", ".pyi"))):
            if file.exists():
                return f"{file.relative_to(self.folder)}:{line}"
        return f"{path}:{line}"

    def _circles(self, found: list[list[str]], kinds: frozenset[str], name: str) -> Iterator[str]:
        for circle in found:
            if self._touches(circle, name):
                yield f"{len(circle)} modules: {', '.join(map(self._short, circle))}"
                for step in shortest_circle(self.modules, circle, kinds):
                    yield f"    {self.shown(step)}"

    def _touches(self, circle: list[str], name: str) -> bool:
        return any(each in {module.name for module in self.rooms[name]} for each in circle)

    def _private(self, name: str) -> list[Access]:
        here = {module.name for module in self.rooms[name]}
        return [each for each in self.private if each.module in here]

    def _against_layers(self, *, for_types: bool) -> list[Import]:
        return [each for each in self.against_layers if (each.kind == TYPES) == for_types]

    def _unknown_layers(self) -> Iterator[Finding]:
        known = {name for level in self.limits.layers for name in level} | {FRONT}
        for name in sorted(self.layers.keys() - known):
            yield Finding(f"{self.limits.inside}.{name} is in no layer: say in the limits where it belongs")

    def _short(self, module: str) -> str:
        return module.partition(".")[2] or module

    def _shown(self, name: str) -> str:
        return name or self.folder.name


_WHOLE = {(LAYERS_RUN, ""), (LAYERS_TYPES, ""), (CLASSES, ""), (RACES, "")}


def read_limits(path: Path) -> Limits:
    """The limits of a file like `limits.toml`."""
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    explained = data.get("class names that are explained", {})
    of = {
        (figure, name): limit
        for figure, found in data.get("limits", {}).items()
        for name, limit in (found.items() if isinstance(found, dict) else [("", found)])
    }
    return Limits(
        inside=data["layers"]["inside"],
        layers=data["layers"]["upwards"],
        explained={name: entry["below"] for name, entry in explained.items()},
        reasons={name: entry["why"] for name, entry in explained.items()},
        programs=data.get("programs", {}),
        of=of,
    )


def lower(path: Path, house: House) -> list[str]:
    """Write lower limits where the house is better than they say; never a higher one. Returns what was changed."""
    figures = house.figures()
    lines, changed, figure = [], [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = re.fullmatch(r'\[limits\.?(?:"(.*)")?\]', line)
        if line.startswith("["):
            figure = (heading[1] or "whole") if heading else ""
        entry = re.fullmatch(r'"?([^"=]*?)"? = (\d+)', line)
        if figure and entry:
            key = (entry[1], "") if figure == "whole" else (figure, entry[1])
            allowed = LARGEST_CIRCLE_WITH_TYPES if key[0] == LARGEST else 0
            value = figures.get(key, 0)
            if value < int(entry[2]):
                changed.append(f"{key[0]}{f' of {key[1]}' if key[1] else ''}: {entry[2]} -> {max(value, allowed)}")
                if value <= allowed:
                    continue  # what is said of no room is the limit then
                line = f"{line.rpartition('=')[0]}= {value}"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return changed
