"""Measuring Skipper: the bandwidth command line, one report shape, and the statistics behind both.

Run ``skipper bw`` or ``python -m benchmarks.bandwidth``; `docs/benchmarks.md` says how to read the output.
"""

from benchmarks.errors import BenchmarkError
from benchmarks.report import Reference, Report, Result
from benchmarks.statistics import Contestant, Samples, Schedule, Summary, interleave, percentile, summarize

__all__ = [
    # what a benchmark prints
    "Report",
    "Result",
    "Reference",
    # how it measures
    "Contestant",
    "Schedule",
    "Samples",
    "Summary",
    "interleave",
    "percentile",
    "summarize",
    # how it fails
    "BenchmarkError",
]
