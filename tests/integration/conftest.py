"""Examples are scripts of their own whose processes import torch; documents are run as they stand."""

from collections.abc import Iterator

import pytest

from tests.preloading import preloading


@pytest.fixture(scope="package", autouse=True)
def preloaded() -> Iterator[None]:
    with preloading("torch", "skipper.torchstore", "skipper.tensor_engine"):
        yield
