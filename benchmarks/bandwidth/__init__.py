"""``skipper bw``: bandwidth and latency of one-sided reads and writes between two processes.

The way through, top down: `command` (what is printed and which exit code) → `options` (what was asked for)
→ `session` (the client's run: each size proved, then timed) → `integrity` and `timing` → `side` (memory of
one end, and transfers from it). The other end is the same `side`, in the `child` process that `server` starts
for each client, at the far end of a `channel` that carries the `messages`. Beside that way: `pairs` drives many
clients at once, each a `pair`; `atomics` times operations on one word; `compare` reads two reports.
"""

from skipper.benchmarks.bandwidth.command import main

__all__ = ["main"]
