"""The API reference: a page for each package, made of its ``__all__``. MkDocs calls the functions below.

Comments within ``__all__`` are the headings. What a name is comes from its docstring, by mkdocstrings, which imports
nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("control", "dataplane", "torchstore", "tensor_engine")
FOLDER = "reference"


@dataclass(frozen=True)
class Package:
    """The public face of a package.

    Attributes:
        name: as it is imported.
        groups: headings, and the names below each; the first heading may be empty.
        origins: the module that a name is imported from, where it is.
    """

    name: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    origins: dict[str, str]

    @property
    def page(self) -> str:
        """Its page, by its path in the site."""
        return f"{FOLDER}/{self.name}.md"

    @property
    def names(self) -> list[str]:
        """All public names."""
        return [name for _, names in self.groups for name in names]

    def target(self, name: str) -> str:
        """By which path the public name is described: where a module has the same one, by that of its definition."""
        is_module = (ROOT / "src" / self.name.replace(".", "/") / f"{name}.py").exists()
        return f"{self.origins[name] if is_module else self.name}.{name}"


def packages() -> list[Package]:
    """Every package that says by ``__all__`` what is public in it, each floor with those within it."""
    found = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("__init__.py"))]
    read = (_read(path) for path in found)
    return [package for package in read if package is not None]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages to the navigation, as a part of the reference."""
    pages = [{package.name: package.page} for package in packages()]
    assert config.nav is not None
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference.append({"API": pages})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    known = {package.name: package for package in packages()}
    described: dict[tuple[str, str], Package] = {}
    for package in known.values():
        files.append(File.generated(config, package.page, content=_page(package, known, described)))
    return files


def _read(path: Path) -> Package | None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    public = next((node for node in tree.body if isinstance(node, ast.Assign) and _assigns_all(node)), None)
    if public is None:
        return None
    name = ".".join(("skipper", *path.parent.relative_to(ROOT).parts))
    origins = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    lines = source.splitlines()[public.lineno - 1 : public.end_lineno]
    return Package(name, tuple(_groups(lines)), origins)


def _assigns_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def _groups(lines: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    heading, names = "", list[str]()
    for line in lines:
        code, _, comment = line.partition("#")
        names += re.findall(r'"(\w+)"', code)
        if comment:
            if names:
                yield heading, tuple(names)
            heading, names = comment.strip(), []
    if names:
        yield heading, tuple(names)


def _page(package: Package, known: dict[str, Package], described: dict[tuple[str, str], Package]) -> str:
    """The page; names that another package's page has described already are links to there."""
    parts = [f"# {package.name}", f"::: {package.name}\n    options: {{members: false, show_root_heading: false}}"]
    for heading, names in package.groups:
        if heading:
            parts.append(f"## {heading[0].upper()}{heading[1:]}")
        for name in names:
            first = described.setdefault((_home(package, name, known), name), package)
            parts.append(_entry(package, name) if first is package else _reference(package, name, first))
    return "\n\n".join(parts) + "\n"


def _home(package: Package, name: str, known: dict[str, Package]) -> str:
    """The module that a public name comes from, whatever packages have passed it on."""
    origin = package.origins.get(name, package.name)
    while (
        origin in known and known[origin].origins.get(name, origin) != origin
    ):  # a module of a package is its own home
        origin = known[origin].origins[name]
    return origin


def _entry(package: Package, name: str) -> str:
    public, defined = f"{package.name}.{name}", package.target(name)
    if defined == public:
        return f"::: {public}"
    return f'[](){{#{public}}}\n\n::: {defined}\n    options: {{heading: "{public}", toc_label: "{name}"}}'


def _reference(package: Package, name: str, first: Package) -> str:
    public = f"{first.name}.{name}"
    return f"[](){{#{package.name}.{name}}}\n\n### `{name}`\nThe same as [`{public}`][{first.target(name)}]."
