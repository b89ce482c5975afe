"""The part of the documentation that a run writes: how Skipper stands, and the pictures."""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from skipper.benchmarks.errors import BenchmarkError

__all__ = ["newest_page", "renewed", "summary"]

_BEGIN = "<!-- written by `make bench-peers`: begin -->"
_END = "<!-- written by `make bench-peers`: end -->"
_BLOCK = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
_STANDING = re.compile(r"^## How Skipper stands\n\n(?P<table>.*?)\n\n", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"^!\[(?P<words>[^]]*)\]\((?P<name>[^)]+)\)$", re.MULTILINE)


def newest_page(folder: Path) -> Path | None:
    """The page of the last run whose results are in a folder; their names begin with the date."""
    return max(folder.glob("*.md"), default=None)


def summary(page: Path, folder: Path) -> str:
    """What a document in ``folder`` says of a run.

    Args:
        page: Of the run.
        folder: Where the document lies, which links lead from.

    Raises:
        BenchmarkError: It is no page of a run.
    """
    text = page.read_text(encoding="utf-8")
    standing = _STANDING.search(text)
    if standing is None:
        raise BenchmarkError(f"{page} does not say how Skipper stands")
    beside = Path(os.path.relpath(page.parent, folder)).as_posix()
    lines = [f"The last run: [{page.stem}]({beside}/{page.name}).", "", standing["table"]]
    for picture in _PICTURE.finditer(text):
        lines += ["", f"![{picture['words']}]({beside}/{picture['name']})"]
    return "\n".join(lines)


def renewed(document: Path, page: Path) -> str:
    """The text of a document with the summary of a run in its place.

    Raises:
        BenchmarkError: The document has no such place, or the page is none of a run.
    """
    text = document.read_text(encoding="utf-8")
    if _BLOCK.search(text) is None:
        raise BenchmarkError(f"{document} has no place for a summary: {_BEGIN}")
    block = "\n".join([_BEGIN, "", summary(page, document.parent), "", _END])
    return _BLOCK.sub(lambda _: block, text)
