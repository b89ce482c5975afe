"""``skipper bw``: bandwidth and latency of one-sided reads and writes between two processes.

The code, top down: `command` (what is printed and which exit code) → `options` (the command line) → `session`
(the client's run: each size proved, then timed; or an atomic operation timed) → `integrity` and `timing` → `side` (the
memory of one end, and its transfers). The other end is the same `side`, in the `child` process that `server` starts for
each client; the client reaches it by the `messages` on a `channel`. In addition, `pairs` drives many clients at
once, `compare` reads two reports, and `ceiling` finds what the kernel and the wire allow.
"""

from skipper.benchmarks.bandwidth.command import main

__all__ = ["main"]
