"""The order of the store's work with the caller's CUDA streams.

The store reads and writes tensors in its own threads, whose streams are not the caller's. So a put or get begins when
the caller's current streams have finished their earlier work, and ends when its own kernels, such as those of a cast,
have finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from skipper.torchstore.errors import StoreTimeoutError

T = TypeVar("T")

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 500e-6
_NONE: frozenset[torch.device] = frozenset()


async def in_stream_order(work: Coroutine[Any, Any, T], gpus: Collection[torch.device], timeout: float) -> T:
    """A block with work of the store on tensors of these GPUs.

    Raises:
        StoreTimeoutError: A GPU has not finished its earlier work within ``timeout`` seconds.
    """
    try:
        await _reached([torch.cuda.current_stream(gpu) for gpu in gpus], timeout)
    except BaseException:
        work.close()
        raise
    result = await work
    # The store's threads submit work to the default stream of a GPU.
    await _reached([torch.cuda.default_stream(gpu) for gpu in gpus], timeout)
    return result


def settle(values: object) -> None:
    """Wait in this thread until its current streams have finished their work on the GPUs of the tensors in ``values``.

    For calls that run in another thread, which has its own current streams. The GIL is not held.
    """
    for gpu in gpus_of(values):
        torch.cuda.current_stream(gpu).synchronize()


def gpus_of(values: object) -> Collection[torch.device]:
    """The GPUs of the tensors in ``values``: in dicts, lists and tuples, at any depth."""
    # A process that has not initialized CUDA has no tensor there, and must not initialize it because of us.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _NONE
    return {tensor.device for tensor in _tensors(values) if tensor.is_cuda}


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


async def _reached(streams: Sequence[torch.cuda.Stream], timeout: float) -> None:
    # Events, because the streams may get more work during this wait.
    marks = [stream.record_event() for stream in streams if not stream.query()]
    deadline, pause_s = time.monotonic() + timeout, _SHORTEST_WAIT_S
    for mark in marks:
        while not mark.query():
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"the GPU has not finished the earlier work of its stream within {timeout:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
