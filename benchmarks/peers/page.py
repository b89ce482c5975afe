"""A run as a page in Markdown, and the summary of it that the documentation shows."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from skipper.benchmarks.environment import Environment
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.output import significant
from skipper.benchmarks.peers.results import Figure, Standing
from skipper.benchmarks.peers.roster import PeerLibrary
from skipper.benchmarks.peers.work import FAMILIES, ROWS, Family, Row
from skipper.benchmarks.statistics import Summary

__all__ = ["machine_label", "page", "renewed", "summary"]

_TITLES: dict[Family, str] = {
    "actors": "Actors",
    "memory": "One-sided memory",
    "store": "Store of tensors",
    "engine": "Tensor engine",
}

_SHOWN = {
    "read": "One-sided reads of each library over their size, in GB/s",
    "write": "One-sided writes of each library over their size, in GB/s",
    "actors": "Actors: each library compared with plain gRPC and sockets",
    "store": "Store of tensors: each library compared with memcpy",
    "engine": "Tensor engine: each library compared with plain gRPC and memcpy",
}
"""Captions of the pictures, by the last word of their names."""

_BEGIN = "<!-- written by `make bench-peers`: begin -->"
_END = "<!-- written by `make bench-peers`: end -->"
_BLOCK = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
_STANDING = re.compile(r"^## How Skipper stands\n\n(?P<table>.*?)\n\n", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"^!\[(?P<words>[^]]*)\]\((?P<name>[^)]+)\)$", re.MULTILINE)


def machine_label(environment: Environment) -> str:
    """A neutral name for the machine: how many cores may be used."""
    return f"{environment['cores_usable']}-core-cpu"


def page(
    found: Mapping[tuple[str, str], Figure],
    standings: Sequence[Standing],
    reasons: Mapping[tuple[str, str], str],
    *,
    rows: Sequence[Row],
    peers: Sequence[PeerLibrary],
    versions: Mapping[str, str],
    rounds: int,
    environment: Environment,
    pictures: Sequence[str],
) -> str:
    """Make the page.

    Args:
        found: Figures by row and peer.
        standings: How Skipper compares.
        reasons: Why there is no figure, by row and peer.
        rows: The requested rows.
        peers: The peers that took part.
        versions: The installed version of each, unless it is this project.
        rounds: The number of rounds.
        environment: Environment of the run.
        pictures: File names, in the folder of the page.
    """
    families = [family for family in FAMILIES if any(row.family == family for row in rows)]
    lines = [
        "# Side by side with the peers",
        "",
        f"{environment['time']}, {environment['cpu']}, {environment['cores_usable']} cores, "
        f"{int(environment['memory_nbytes'] or 0) / 2**30:.0f} GiB, {environment['kernel']}, "
        f"Python {environment['python']}, torch {environment['torch']}, commit {environment['commit']}.",
        "",
        f"{rounds} rounds; each asked every peer once for every row, in an order that rotates. A figure is the median "
        "of its rounds' medians; after it the ratio to the yardstick of the same round: median, minimum, maximum, "
        "and the number of rounds. Lower times and higher rates are better. What is measured and how: "
        "[performance.md](../../docs/performance.md).",
        "",
        "## How Skipper stands",
        "",
        *_standing_lines(standings),
    ]
    for family in families:
        lines += ["", f"## {_TITLES[family]}", "", *_family_lines(found, family, rows, peers)]
    lines += ["", "## Who took part", "", *_peer_lines(peers, versions, families)]
    lines += ["", "## What was not measured", "", *_reason_lines(reasons, rows, peers)]
    for picture in pictures:
        lines += ["", f"![{picture}]({picture})"]
    return "\n".join(lines) + "\n"


def _standing_lines(standings: Sequence[Standing]) -> Iterator[str]:
    yield "| row | Skipper | best of the others | Skipper is faster by |"
    yield "|---|---|---|---|"
    for each in standings:
        if each.other is None or each.times is None:
            other, verdict = "nobody else does this", ""
        else:
            other = f"{each.other.peer.title}: {_value(each.other)}"
            verdict = f"{'' if each.first else '**behind:** '}{_spread(each.times)}"
        yield f"| {each.row.title} | {_value(each.ours)} | {other} | {verdict} |"


def _family_lines(
    found: Mapping[tuple[str, str], Figure], family: Family, rows: Sequence[Row], peers: Sequence[PeerLibrary]
) -> Iterator[str]:
    taking_part = [peer for peer in peers if family in peer.ways]
    yield "| row | yardstick | " + " | ".join(peer.title for peer in taking_part) + " |"
    yield "|---" * (len(taking_part) + 2) + "|"
    for row in rows:
        if row.family == family:
            cells = [_cell(found.get((row.name, peer.name))) for peer in taking_part]
            yield f"| {row.title} | {row.yardstick} | " + " | ".join(cells) + " |"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    is_yardstick = figure.peer.name == figure.row.yardstick
    return _value(figure) if figure.ratio is None or is_yardstick else f"{_value(figure)}<br>{_spread(figure.ratio)}"


def _value(figure: Figure) -> str:
    unit = {"us": "µs", "1/s": "/s"}.get(figure.row.unit, figure.row.unit)
    return f"{significant(figure.value, 3)} {unit}"


def _spread(ratio: Summary) -> str:
    low, middle, high = (significant(value, 2) for value in (ratio.min, ratio.p50, ratio.max))
    return f"{middle} ({low} to {high}, n {ratio.n})"


def _peer_lines(peers: Sequence[PeerLibrary], versions: Mapping[str, str], families: Sequence[Family]) -> Iterator[str]:
    yield "| peer | version | how it does the work |"
    yield "|---|---|---|"
    for peer in peers:
        if not any(family in peer.ways for family in families):
            continue
        ways = "; ".join(f"*{family}*: {peer.ways[family]}" for family in families if family in peer.ways)
        yield f"| {peer.title} | {versions.get(peer.name, '')} | {ways} |"


def _reason_lines(
    reasons: Mapping[tuple[str, str], str], rows: Sequence[Row], peers: Sequence[PeerLibrary]
) -> Iterator[str]:
    """Rows with the same peer and reason are grouped."""
    titles = {peer.name: peer.title for peer in peers}
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer in peers:
            if (row.name, peer.name) in reasons:
                grouped.setdefault((peer.name, reasons[row.name, peer.name]), []).append(f"`{row.name}`")
    yield "| peer | rows | why |"
    yield "|---|---|---|"
    for (name, reason), which in grouped.items():
        yield f"| {titles[name]} | {', '.join(which)} | {reason.replace('|', '/')} |"


def summary(page: Path, folder: Path) -> str:
    """What a document in ``folder`` says about a run.

    Args:
        page: Page of the run.
        folder: The document's folder, from which links start.

    Raises:
        BenchmarkError: It is not the page of a run.
    """
    text = page.read_text(encoding="utf-8")
    standing = _STANDING.search(text)
    if standing is None:
        raise BenchmarkError(f"{page} does not say how Skipper stands")
    beside = Path(os.path.relpath(page.parent, folder)).as_posix()
    lines = [f"The last run: [{page.stem}]({beside}/{page.name}).", "", *_with_anchors(standing["table"].splitlines())]
    for picture in _PICTURE.finditer(text):
        lines += ["", f"![{_described(picture)}]({beside}/{picture['name']})"]
    return "\n".join(lines)


def _with_anchors(table: Sequence[str]) -> Iterator[str]:
    """The lines of a table of rows, each with an anchor for links, such as ``#row-call``."""
    left = list(ROWS)
    for line in table:
        title = line.removeprefix("| ").partition(" |")[0]
        row = next((row for row in left if row.title == title), None)
        if row is None:
            yield line
        else:
            left.remove(row)  # the next row with this title is another one
            yield f'| <a id="row-{row.name}"></a>{title} |{line.partition(" |")[2]}'


def _described(picture: re.Match[str]) -> str:
    """The caption of a picture, for readers who cannot see it."""
    return _SHOWN.get(Path(picture["name"]).stem.rpartition("_")[2], picture["words"])


def renewed(document: Path, page: Path) -> str:
    """The text of a document with the summary of a run in its place.

    Raises:
        BenchmarkError: The document has no such place, or the page is not the page of a run.
    """
    text = document.read_text(encoding="utf-8")
    if _BLOCK.search(text) is None:
        raise BenchmarkError(f"{document} has no place for a summary: {_BEGIN}")
    block = "\n".join([_BEGIN, "", summary(page, document.parent), "", _END])
    return _BLOCK.sub(lambda _: block, text)
