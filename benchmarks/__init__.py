"""Measuring Skipper: the bandwidth command line, one report shape, and the statistics behind both.

Run ``skipper bw`` or ``python -m skipper.benchmarks.bandwidth``. `docs/reference/bandwidth.md` explains the output.
"""

if __name__ != "skipper.benchmarks":  # imported by the name of the folder, as a second copy
    raise ImportError("write `from skipper import benchmarks`, or `from skipper.benchmarks import ...`", name=__name__)


from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.report import Reference, Report, Result
from skipper.benchmarks.statistics import Contestant, Samples, Schedule, Summary, interleave, percentile, summarize

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
