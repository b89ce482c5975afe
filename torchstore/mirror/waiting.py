"""Work on many files concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]], *, most: int) -> list[T]:
    """Do all the work, with limited concurrency; the first error ends the rest.

    Returns:
        The results, in the order of the work.
    """
    results: dict[int, T] = {}
    numbered = enumerate(work)

    async def some() -> None:
        for number, each in numbered:  # shared: each worker takes the next item
            results[number] = await each

    tasks = [asyncio.ensure_future(some()) for _ in range(most)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[number] for number in range(len(results))]
