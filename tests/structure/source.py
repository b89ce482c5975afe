"""The modules of a package as their source tells it: what each imports and when, its classes, its use of private names.

Nothing is imported. Compiled modules count by their ``.pyx`` and their stub, and a stub without a module counts too.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RUN = "run"
"""The import runs when its module is imported."""
CALL = "call"
"""The import runs when a function is called."""
TYPES = "types"
"""The import is for type checkers: it stands under ``TYPE_CHECKING`` or in a stub."""

GENERATED = "_generated"
SUFFIXES = (".py", ".pyx", ".pyi")
_INCLUDED = (".pxi", ".pxd", ".h")
_IMPORT_OF_CYTHON = re.compile(r"^(?P<indent> *)(?P<statement>(?:from [\w.]+ )?import [^#\n]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Import:
    """One module names another.

    Attributes:
        source: the module in which the import stands.
        target: the module that is imported.
        kind: when it runs: `RUN`, `CALL` or `TYPES`.
        line: of the file.
        is_by_package: it is ``from package import module``, which imports the package before it touches the module.
    """

    source: str
    target: str
    kind: str
    line: int
    is_by_package: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """A private name that is used outside of the module that defines it.

    Attributes:
        module: that uses it.
        line: of its file.
        name: as it is written there.
        private: the name itself.
    """

    module: str
    line: int
    name: str
    private: str


@dataclass(slots=True)
class Module:
    """What one module consists of; a stub and its module are one.

    Attributes:
        name: as it is imported.
        is_package: whether it is an ``__init__``.
        nlines: lines of its files.
        imports: of modules, of this package or not.
        classes: names of its classes, those within classes included.
        defines: private names that it defines.
        accesses: private names that it takes from something other than ``self``, wherever they are defined.
    """

    name: str
    is_package: bool
    nlines: int = 0
    imports: list[Import] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    defines: set[str] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


def read_package(folder: Path) -> dict[str, Module]:
    """Every module below the folder of a package, by its name; links are followed, generated code is left out."""
    found: dict[str, Module] = {}
    files = list(_files(folder))
    names = {name for _, name in files}
    for path, name in files:
        module = found.setdefault(name, Module(name, path.stem == "__init__"))
        text = path.read_text(encoding="utf-8")
        module.nlines += text.count("\n")
        if path.suffix == ".pyx":
            module.nlines += sum(
                _nlines(each) for each in path.parent.glob(f"{path.stem}*") if each.suffix in _INCLUDED
            )
            text = "\n".join(match["indent"] + match["statement"] for match in _imports_of_cython(text))
            text = re.sub(r"^ +(.*)", r"def _(): \1", text, flags=re.MULTILINE)
        _Reader(module, names, is_stub=path.suffix == ".pyi").visit(ast.parse(text, str(path)))
    return found


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(each for each in folders if each not in (GENERATED, "__pycache__"))
        for file in sorted(files):
            path = Path(place, file)
            if path.suffix in SUFFIXES:
                parts = path.relative_to(folder.parent).with_suffix("").parts
                yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _nlines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _imports_of_cython(text: str) -> Iterator[re.Match[str]]:
    return (found for found in _IMPORT_OF_CYTHON.finditer(text) if "(" not in found["statement"])


class _Reader(ast.NodeVisitor):
    """Fills a `Module` from a syntax tree."""

    def __init__(self, module: Module, names: set[str], *, is_stub: bool) -> None:
        self._module = module
        self._names = names
        self._kind = TYPES if is_stub else RUN
        self._foreign: set[str] = set()  # names bound by imports of other packages
        self._package = module.name.partition(".")[0]

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)
            if alias.name.partition(".")[0] != self._package:
                self._foreign.add(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node)
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            is_module = inner in self._names
            self._add(inner if is_module else base, node.lineno, is_by_package=is_module)
            if base.partition(".")[0] != self._package:
                self._foreign.add(alias.asname or alias.name)
            elif _is_private(alias.name) and inner not in self._names:
                self._access(node.lineno, inner, alias.name)

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if test.removeprefix("not ") not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)
            return
        for body, is_for_types in ((node.body, not test.startswith("not ")), (node.orelse, test.startswith("not "))):
            outer, self._kind = self._kind, TYPES if is_for_types else self._kind
            for each in body:
                self.visit(each)
            self._kind = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._module.classes.add(node.name)
        self._module.defines.add(node.name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """``import_module("a.b")`` is an import as well."""
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and node.args:
            (given, *_) = node.args
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                self._add(given.value, node.lineno)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._module.defines.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and _is_own(node.value):
            self._module.defines.add(node.attr)
        elif _is_private(node.attr) and not _is_own(node.value) and _root(node.value) not in self._foreign:
            self._access(node.lineno, ast.unparse(node), node.attr)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__slots__" for target in node.targets):
            self._module.defines.update(
                each.value
                for each in ast.walk(node.value)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
        self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._module.defines.add(node.name)
        outer, self._kind = self._kind, CALL if self._kind == RUN else self._kind
        self.generic_visit(node)
        self._kind = outer

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self._module.name.split(".")
        parts = parts[: len(parts) - node.level + self._module.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _add(self, target: str, line: int, *, is_by_package: bool = False) -> None:
        if target in self._names and target != self._module.name:
            self._module.imports.append(Import(self._module.name, target, self._kind, line, is_by_package))

    def _access(self, line: int, name: str, private: str) -> None:
        self._module.accesses.append(Access(self._module.name, line, name, private))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_own(value: ast.expr) -> bool:
    """Whether an expression is the object or the class whose method this is."""
    if isinstance(value, ast.Name):
        return value.id in ("self", "cls")
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super" or (value.func.id == "type" and len(value.args) == 1 and _is_own(value.args[0]))
    return False


def _root(value: ast.expr) -> str:
    """The name with which an expression begins."""
    while isinstance(value, (ast.Attribute, ast.Call, ast.Subscript)):
        value = value.func if isinstance(value, ast.Call) else value.value
    return value.id if isinstance(value, ast.Name) else ""
