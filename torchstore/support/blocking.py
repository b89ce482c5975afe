"""The store for plain functions: they wait for coroutines on one event loop in a thread of this process.

`torchstore.sync`, the engines of other projects (`torchstore.adapters`) and the functions for
`torch.distributed.checkpoint` (`torchstore.dcp`) use it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skipper.control.api.coroutine_thread import CoroutineThread
from skipper.torchstore.errors import BlockingCallError

T = TypeVar("T")

_thread = CoroutineThread("torchstore-sync")


def run(make: Callable[[], Coroutine[Any, Any, T]], *, name: str = "run", begins_job: bool = False) -> T:
    """Run a coroutine to its end, even if the calling thread is inside an event loop, which is then blocked.

    ``make`` is called in this thread, ``name`` is for the error. ``begins_job``: start a job if this process is in
    none.

    Raises:
        BlockingCallError: The caller is in that thread, which would wait for itself.
    """
    if _thread.is_current():
        raise BlockingCallError(name)
    return _thread.run(make, begins_job=begins_job)


def run_soon(function: Callable[[], object]) -> None:
    """Call a function in that thread, soon. For finalizers, which run anywhere, and must take no lock and send nothing.

    It sees the context variables of this thread. Nothing happens if the thread was never started.
    """
    _thread.call_soon(function)
