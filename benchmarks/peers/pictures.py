"""The run as pictures: rates over sizes, and the speed of the peers in units of each row's yardstick."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skipper.benchmarks.peers.results import Figure
from skipper.benchmarks.peers.roster import OURS, PeerLibrary
from skipper.benchmarks.peers.work import SIZES, Row
from skipper.benchmarks.sizes import format_size

__all__ = ["draw"]


def draw(
    found: Mapping[tuple[str, str], Figure], rows: Sequence[Row], peers: Sequence[PeerLibrary], stem: Path
) -> list[str]:
    """Write a PNG file for reads, for writes and for each other family with figures.

    Args:
        found: Figures by row and peer.
        rows: In the order in which they are shown.
        peers: In the order in which they are shown; each has the same color in all pictures.
        stem: What the files' names begin with.

    Returns:
        The files' names.
    """
    colors = _colors(peers)
    names: list[str] = []
    for verb in ("read", "write"):
        lines = [(peer, points) for peer in peers if (points := _points(found, verb, peer))]
        if lines:
            with _picture(stem, verb, names) as axes:
                _over_sizes(axes, lines, verb, colors)
    for family in ("actors", "store", "engine"):
        bars = [row for row in rows if row.family == family and (row.name, row.yardstick) in found]
        if bars:
            with _picture(stem, family, names) as axes:
                _ratios(axes, found, bars, peers, colors)
    return names


def _colors(peers: Sequence[PeerLibrary]) -> dict[str, str]:
    """A color for each peer; floors get shades of grey."""
    competitors = [peer.name for peer in peers if not peer.floor]
    floors = [peer.name for peer in peers if peer.floor]
    shades = {name: str(0.75 * number / max(len(floors), 1)) for number, name in enumerate(floors)}
    return shades | {name: f"C{number % 10}" for number, name in enumerate(competitors)}


def _points(found: Mapping[tuple[str, str], Figure], verb: str, peer: PeerLibrary) -> list[tuple[int, float]]:
    figures = ((nbytes, found.get((f"{verb}_{size}", peer.name))) for size, nbytes in SIZES.items())
    return [(nbytes, _rate(figure)) for nbytes, figure in figures if figure is not None]


def _rate(figure: Figure) -> float:
    """GB/s, also of rows whose unit is a time."""
    return figure.value if figure.row.is_rate else figure.row.amount / (figure.value * 1e3)


@contextlib.contextmanager
def _picture(stem: Path, name: str, names: list[str]) -> Iterator[Any]:
    # The object interface: no global figure, no display, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(canvas)
    yield canvas.subplots()
    path = stem.with_name(f"{stem.name}_{name}.png")
    canvas.savefig(path, format="png", dpi=110)
    names.append(path.name)


def _over_sizes(
    axes: Any, lines: Sequence[tuple[PeerLibrary, Sequence[tuple[int, float]]]], verb: str, colors: Mapping[str, str]
) -> None:
    for peer, points in lines:
        sizes, rates = zip(*points, strict=True)
        style = "--" if peer.floor else "-"
        width = 3 if peer.name == OURS else 1.5
        axes.plot(sizes, rates, style, marker="o", linewidth=width, color=colors[peer.name], label=peer.title)
    axes.set(xscale="log", yscale="log", xlabel="size", ylabel="GB/s", title=f"one-sided {verb}s within a host")
    axes.set_xticks(list(SIZES.values()), [format_size(nbytes) for nbytes in SIZES.values()])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def _ratios(
    axes: Any,
    found: Mapping[tuple[str, str], Figure],
    rows: Sequence[Row],
    peers: Sequence[PeerLibrary],
    colors: Mapping[str, str],
) -> None:
    """Bars of speed, in units of the yardstick's: more is better in every row."""
    shown = [peer for peer in peers if any((row.name, peer.name) in found for row in rows)]
    width = 0.8 / len(shown)
    for place, peer in enumerate(shown):
        bars = [
            (spot, _speed(found[row.name, peer.name]))
            for spot, row in enumerate(rows)
            if (row.name, peer.name) in found
        ]
        spots = [spot - 0.4 + (place + 0.5) * width for spot, _ in bars]
        axes.bar(spots, [speed for _, speed in bars], width, color=colors[peer.name], label=peer.title)
    axes.axhline(1.0, linestyle="--", color="grey")
    axes.set_xticks(range(len(rows)), [f"{row.name}\n({row.yardstick} = 1)" for row in rows], fontsize="small")
    axes.set(yscale="log", ylabel="speed, in units of the yardstick")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend(fontsize="small")


def _speed(figure: Figure) -> float:
    if figure.ratio is None:
        return 1.0
    return figure.ratio.p50 if figure.row.is_rate else 1 / figure.ratio.p50
