"""Examples are scripts of their own whose processes import torch; documents are run as they stand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.built_site import build
from tests.preloading import preloading


@pytest.fixture(scope="package", autouse=True)
def preloaded() -> Iterator[None]:
    with preloading("torch", "skipper.torchstore", "skipper.tensor_engine"):
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as a site."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder
