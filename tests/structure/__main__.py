"""Shows how the package is built, and fails where it is not as `limits.toml` says: ``python -m tests.structure``.

It prints, for each room, its size, the circles of its imports (those within functions counted) and how often it uses
private names of other modules; the layers of `control`, with the imports that go against them; and class names that
stand for several classes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.structure.measures import FRONT
from tests.structure.report import (
    CIRCLES,
    CLASSES,
    LARGEST,
    LAYERS_RUN,
    LAYERS_TYPES,
    PRIVATE,
    RACES,
    House,
    lower,
    read_limits,
)
from tests.structure.source import Module

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Path(__file__).with_name("limits.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the house; 1 where it is not as its limits say."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="the members of circles, every private name")
    parser.add_argument("--lower", action="store_true", help="write today's figures where they are below their limits")
    parser.add_argument("--package", type=Path, default=ROOT / "src" / "skipper", help="the folder of another package")
    parser.add_argument("--limits", type=Path, default=LIMITS, help="and its limits")
    options = parser.parse_args(argv)
    house = House(options.package, read_limits(options.limits))
    print("\n".join(_page(house, verbose=options.verbose)))
    if options.lower:
        for line in lower(options.limits, house):
            print(f"lowered: {line}")
        house = House(options.package, read_limits(options.limits))
    findings = list(house.findings())
    for finding in findings:
        print(f"error: {finding.text}", *finding.culprits, sep="\n  ", file=sys.stderr)
    return 1 if findings else 0


def _page(house: House, *, verbose: bool) -> Iterator[str]:
    figures = house.figures()
    yield f"{'room':<16}{'modules':>8}{'lines':>8}{'in circles':>12}{'with types':>12}{'private':>9}"
    for name, modules in sorted(house.rooms.items()):
        size = f"{name or house.folder.name:<16}{len(modules):>8}{_nlines(modules):>8,}"
        yield size + f"{figures[CIRCLES, name]:>12}{figures[LARGEST, name]:>12}{figures[PRIVATE, name]:>9}"
    yield ""
    yield "in circles: modules that reach each other by imports at run time, within functions or not"
    yield "with types: the largest set that does so if imports for type checkers count, too"
    yield "private: uses of names with an underscore that another module defines"
    for figure in (CIRCLES, LARGEST, PRIVATE) if verbose else ():
        for name in sorted(house.rooms):
            if figures[figure, name]:
                yield from ("", f"{figure}, {name or house.folder.name}:")
                yield from (f"  {line}" for line in house.culprits(figure, name))
    yield ""
    yield f"layers of {house.limits.inside}, each may import those above it in this list"
    for level in house.limits.layers:
        for name in level:
            modules = house.layers.get(name, [])
            beside = "" if name == level[0] else f"   beside {level[0]}"
            yield f"  {name:<14}{len(modules):>8}{_nlines(modules):>8,}{beside}"
    front = house.layers.get(FRONT, [])
    yield f"  {'(front)':<14}{len(front):>8}{_nlines(front):>8,}"
    for figure in (LAYERS_RUN, LAYERS_TYPES, RACES):
        yield f"{figure}: {figures[figure, '']}"
        yield from (f"  {line}" for line in house.culprits(figure, ""))
    yield ""
    yield f"{CLASSES}: {figures[CLASSES, '']}"
    yield from (f"  {line}" for line in house.culprits(CLASSES, ""))
    if house.limits.reasons:
        yield "explained:"
        yield from (f"  {name}: {why}" for name, why in sorted(house.limits.reasons.items()))


def _nlines(modules: Sequence[Module]) -> int:
    return sum(module.nlines for module in modules)


if __name__ == "__main__":
    sys.exit(main())
