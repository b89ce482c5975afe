"""Importing modules anew whose files have changed, each after those that it imports itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from types import ModuleType


def reload_modules(files: set[str]) -> list[str]:
    """Import modules anew that came from some of these files, given as real paths; their names, in that order."""
    importlib.invalidate_caches()
    loaded = {
        name: module
        for name, module in sys.modules.copy().items()
        if name != "__main__" and os.path.realpath(getattr(module, "__file__", None) or "/") in files
    }
    graph = {name: loaded.keys() & set(_imports(module)) - {name} for name, module in loaded.items()}
    try:
        names = list(TopologicalSorter(graph).static_order())
    except CycleError:  # modules that import one another: there is no order in which all see the new ones
        names = list(loaded)
    for name in names:
        importlib.reload(loaded[name])
    return names


def _imports(module: ModuleType) -> Iterator[str]:
    """What its file imports now, by absolute names; of ``from a import b`` both ``a`` and ``a.b``."""
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    with open(str(module.__file__), "rb") as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
