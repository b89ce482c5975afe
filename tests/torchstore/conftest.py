"""A store for each test, and processes that are shared by the tests of a module."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from skipper import control
from skipper import torchstore as ts
from skipper.control import this_host
from tests.preloading import preloading
from tests.torchstore.actors import Peer


@pytest.fixture(scope="package", autouse=True)
def _runtime() -> Iterator[None]:
    with preloading("torch", "tests.torchstore.actors"):
        yield
        control.shutdown()


@pytest.fixture
async def store() -> AsyncIterator[None]:
    """The default store, with its one volume beside the controller."""
    await ts.initialize()
    yield
    await ts.shutdown()


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    """Two actors in processes of their own."""
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    yield procs.spawn("peers", Peer)
    procs.stop().get(timeout=20)
