"""A job of its own process that is looked at and attacked from outside."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.security.target import Target


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Callable[..., Target]]:
    """Starts jobs that end with the test."""
    started: list[Target] = []

    def start(*arguments: str) -> Target:
        started.append(Target(*arguments, folder=tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()
