"""Files of the repository that a page links to become part of the site, so that no link leads out of it.

Pages are written to be read where they lie, too: ``../examples/README.md`` is a file there, and a page here. MkDocs
calls the functions below, by the names that it gives to its events.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "repository"
ALWAYS = ("examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md")

_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)#\s]+)(?P<after>[#)])")
_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>\w+)[ \t][^\n`]*$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what the pages link to, and what that links to in turn."""
    waiting = [ROOT / name for name in ALWAYS]
    for file in files.documentation_pages():
        waiting += _linked(Path(config.docs_dir) / file.src_uri)
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.is_relative_to(config.docs_dir):
            continue
        seen.add(path)
        uri = _uri(path)
        level = InclusionLevel.INCLUDED if uri.endswith(".md") and _shown(path) else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=level))
        if path.suffix == ".md":
            waiting += _linked(path)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Have links lead to where their files are in the site, and fences say nothing but their language."""
    here = page.file.src_uri
    source = ROOT / _path(here)

    def moved(link: re.Match[str]) -> str:
        target = _inside(source, link["target"])
        if target is None:
            return link[0]
        uri = os.path.relpath(_uri(target), os.path.dirname(here) or ".")
        return f"{link['before']}{uri}{link['after']}"

    return _FENCE.sub(r"\g<ticks>\g<language>", _LINK.sub(moved, markdown))


def _linked(page: Path) -> Iterator[Path]:
    for link in _LINK.finditer(page.read_text(encoding="utf-8")):
        target = _inside(page, link["target"])
        if target is not None:
            yield target


def _inside(page: Path, target: str) -> Path | None:
    """The file of the repository that a link of a page names, if it is one."""
    path = Path(os.path.normpath(page.parent / target))
    return path if "://" not in target and path.is_relative_to(ROOT) and path.is_file() else None


def _shown(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix() in ALWAYS


def _uri(path: Path) -> str:
    """Where a file of the repository is in the site."""
    name = path.relative_to(ROOT)
    return (name.relative_to("docs") if name.parts[0] == "docs" else Path(FOLDER, name)).as_posix()


def _path(uri: str) -> Path:
    """The file of the repository that is there in the site."""
    path = Path(uri)
    return path.relative_to(FOLDER) if path.parts[0] == FOLDER else Path("docs", path)
