"""Using the store from plain functions, as the engines of other projects are written."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where the calling thread is inside an event loop (which stands still)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    here = contextvars.copy_context()  # the actor whose code this is, if it is one's
    with ThreadPoolExecutor(1, thread_name_prefix="torchstore-adapter") as beside:
        return beside.submit(here.run, asyncio.run, coroutine).result()
