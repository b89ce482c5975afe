"""A picture of rates over sizes: what was measured above, its ratio to the reference below."""

from __future__ import annotations

from collections.abc import Sequence

from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.report import Result
from skipper.benchmarks.sizes import format_size

__all__ = ["check_can_plot", "plot_rates"]


def check_can_plot() -> None:
    """Find out before a long run that no picture could be drawn after it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as _matplotlib  # noqa: F401 - only its presence matters here
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'skipper-mesh[plot]'") from error


def plot_rates(results: Sequence[Result], path: str, *, title: str) -> None:
    """Draw every series of rates over its sizes into a PNG file.

    Args:
        results: Rows with an ``nbytes`` parameter and one unit in common; rows of one name form a line.
        path: File to write.
        title: Heading of the picture.

    Raises:
        ValueError: No row has an ``nbytes`` parameter.
    """
    # The object interface: no global figure, no display, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[int, Result]]] = {}
    for result in results:
        nbytes = result.parameters.get("nbytes")
        if isinstance(nbytes, int):
            series.setdefault(result.name, []).append((nbytes, result))
    if not series:
        raise ValueError("nothing to draw: no row says how many bytes it moved")

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    rates, ratios = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    references: dict[str, dict[int, float]] = {}
    for name, points in series.items():
        points.sort(key=lambda point: point[0])
        sizes = [nbytes for nbytes, _ in points]
        (line,) = rates.plot(sizes, [result.value for _, result in points], marker="o", label=name)
        rates.fill_between(
            sizes, [result.min for _, result in points], [result.max for _, result in points], alpha=0.15
        )
        held = {nbytes: result.ratio for nbytes, result in points if result.ratio is not None}
        ratios.plot(list(held), list(held.values()), marker="o", color=line.get_color())
        for nbytes, result in points:
            if result.reference is not None:
                references.setdefault(result.reference.name, {})[nbytes] = result.reference.value
    for name, values in references.items():
        rates.plot(sorted(values), [values[n] for n in sorted(values)], "--", color="grey", label=name)

    every_size = sorted({nbytes for points in series.values() for nbytes, _ in points})
    unit = next(iter(series.values()))[0][1].unit
    rates.set(title=title, ylabel=f"{unit} (median; band: all samples)", xscale="log", ylim=(0, None))
    rates.legend()
    ratios.axhline(1.0, linestyle="--", color="grey")
    ratios.set(xlabel="size", ylabel="ratio to the reference", ylim=(0, None))
    ratios.set_xticks(every_size, [format_size(n) for n in every_size], rotation=45)
    ratios.minorticks_off()
    for axes in (rates, ratios):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
