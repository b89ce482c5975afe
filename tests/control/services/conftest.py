"""One service for most tests: what they break, it mends by itself."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control.services import Service
from tests.control.conftest import PATIENCE_S, wait_until
from tests.control.services.parties import Worker

REPLICAS = 3


@pytest.fixture(scope="module")
def shared() -> Service[Worker]:
    """Three replicas; it ends with the job of the module."""
    return Worker.options(num_replicas=REPLICAS, stable_s=0.0).as_service("tag", name="workers")


@pytest.fixture
def service(shared: Service[Worker]) -> Service[Worker]:
    """The same, with all replicas up."""
    shared.initialized.get(PATIENCE_S)
    return shared


@pytest.fixture
def gate(tmp_path: Path) -> Iterator["Gate"]:
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


class Gate:
    """A file for which requests wait at their replicas."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._path = path

    def open(self) -> None:
        self._path.touch()

    def waiting(self) -> set[int]:
        """Processes of the replicas in which a request waits."""
        return {int(sign.suffix[1:]) for sign in self._path.parent.glob(f"{self._path.name}.*")}

    def wait(self, count: int) -> set[int]:
        """The same, once there are so many."""
        wait_until(lambda: len(self.waiting()) >= count, f"requests wait in {count} processes")
        return self.waiting()


def outcome(get: Callable[[], object]) -> object:
    """A value, or the error in place of it."""
    try:
        return get()
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        return error
