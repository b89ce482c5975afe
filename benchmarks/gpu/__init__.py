"""Memory of GPUs, between two processes of a host, compared with the hardware and UCX themselves.

`command` (arguments, table, report) → `transfers` (our reads and writes, in turns with CUDA's own copies) and
`perftest` (UCX's own benchmark). `owner` runs in the other process.
"""

from skipper.benchmarks.gpu.command import main

__all__ = ["main"]
