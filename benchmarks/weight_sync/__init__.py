"""What it costs to bring a trainer's weights to its generators; ``skipper weight-sync``.

The way through: `command` (arguments, report, table) → `job` (starts the processes) → `sync` (whole models) and
`planning` (plans of large jobs, in one process). `model` says which tensors there are and how each side cuts them;
`actors` runs in the processes.
"""

from skipper.benchmarks.weight_sync.command import main

__all__ = ["main"]
