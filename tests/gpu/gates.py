"""What a test of GPUs needs, in one place: marks that skip with the very thing that is missing.

    pytestmark = needs_gpus()                 # the tests of a file
    @on_gpus(2)                               # one test, and two GPUs

A GPU that is there and does not work is no reason to skip: then the test runs, and fails.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., object])

DRIVER = "libcuda.so.1"


def missing(count: int = 1) -> str | None:
    """Why there are not `count` GPUs that torch can use, in one sentence; None where there are.

    The driver is asked first: a machine without one need not import torch for this, which takes long in a guest.
    """
    return _without_driver() or _without_cuda_in_torch() or _without_gpus(count)


def missing_nccl() -> str | None:
    """Why there is no GPU whose tensors NCCL could move; None where there is."""
    return missing() or _without_nccl()


def needs_gpus(count: int = 1) -> list[pytest.MarkDecorator]:
    """The marks of tests that need so many GPUs, as `pytestmark` takes them."""
    return _marks(missing(count))


def needs_nccl() -> list[pytest.MarkDecorator]:
    """The marks of tests that need a GPU and NCCL."""
    return _marks(missing_nccl())


def on_gpus(count: int = 1) -> Callable[[T], T]:
    """`needs_gpus` for one test."""

    def mark(test: T) -> T:
        for each in needs_gpus(count):
            test = each(test)
        return test

    return mark


def driver_version() -> str:
    """The newest CUDA that the driver knows, such as "13.0"."""
    version = ctypes.c_int()
    ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    major, minor = divmod(version.value, 1000)
    return f"for CUDA {major}.{minor // 10}"


def forget() -> None:
    """Ask anew what is missing."""
    for answer in (_without_driver, _without_cuda_in_torch, _without_gpus):
        answer.cache_clear()


def _marks(why: str | None) -> list[pytest.MarkDecorator]:
    return [pytest.mark.cuda, pytest.mark.skipif(why is not None, reason=f"needs a GPU: {why}")]


@functools.cache
def _without_driver() -> str | None:
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        return f"the driver's library cannot be loaded ({error})"
    return None


@functools.cache
def _without_cuda_in_torch() -> str | None:
    import torch

    return None if torch.version.cuda else f"torch {torch.__version__} was built without CUDA"


@functools.cache
def _without_gpus(count: int) -> str | None:
    import torch

    there = torch.cuda.device_count()
    if there >= count:
        return None
    return f"torch {torch.__version__} sees {there or 'none'}" + (f" of the {count} that it takes" if count > 1 else "")


def _without_nccl() -> str | None:
    import torch
    import torch.distributed as dist

    there = dist.is_available() and dist.is_nccl_available()
    return None if there else f"torch {torch.__version__} was built without NCCL"
