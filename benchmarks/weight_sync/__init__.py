"""``python -m skipper.benchmarks.weight_sync``: what it costs to bring a trainer's weights to its generators.

The way through: `command` (arguments, report, table) → `job` (starts the processes) → `sync` (whole models), `small`
(64 bytes, and waking up) and `planning` (plans of large jobs, in one process). `model` says which tensors there are
and how each side cuts them, `actors` is what runs in the processes.
"""

from skipper.benchmarks.weight_sync.command import main

__all__ = ["main"]
