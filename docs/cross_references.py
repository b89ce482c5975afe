"""Docstrings say `Name` where they mean another public name: in the API reference that is a link.

griffe, which reads the packages for mkdocstrings, calls the method below when it has read one of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # as MkDocs itself does while it loads the files next to this one
from api_reference import packages

_NAME = re.compile(r"(?<![`\w\[])`(?P<name>[A-Za-z_][\w.]*)`(?!`)")


class CrossReferences(griffe.Extension):
    """Makes links of single-quoted public names."""

    def __init__(self) -> None:
        super().__init__()
        self._public = list(_public())

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings of a package, all modules of it."""
        for each in _with_docstrings(pkg):
            if each.docstring is not None:
                linked = partial(_linked, known=self._known(_room(each.path)))
                each.docstring.value = _NAME.sub(linked, each.docstring.value)

    @cache  # noqa: B019 -- one instance, which lives as long as the build
    def _known(self, room: str) -> dict[str, str]:
        """What is meant by which name in a room: its own public names come before all others."""
        own = {name: target for name, target in self._public if _room(target) == room}
        return {**dict(self._public), **own}


def _room(path: str) -> str:
    """The room of what has this path: ``skipper.control`` for ``skipper.control.Actor``."""
    return ".".join(path.split(".")[:2])


def _public() -> Iterator[tuple[str, str]]:
    """What may be meant by which name, and where it is described."""
    for package in reversed(packages()):
        for name in package.names:
            public = f"{package.name}.{name}"
            yield from ((each, package.target(name)) for each in (public, public.removeprefix("skipper."), name))


def _linked(found: re.Match[str], known: dict[str, str]) -> str:
    target = known.get(found["name"])
    return found[0] if target is None else f"[{found[0]}][{target}]"


def _with_docstrings(each: griffe.Object) -> Iterator[griffe.Object]:
    yield each
    for member in each.members.values():
        if isinstance(member, griffe.Object):
            yield from _with_docstrings(member)
