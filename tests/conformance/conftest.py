"""One line per backend; every test of this folder runs over every line."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import dataplane
from tests.conformance.owner import LocalOwner, RemoteOwner
from tests.rdma_guest.gates import needs_device


@dataclass(frozen=True)
class Case:
    """A way from a reader to an owner.

    Attributes:
        id: For the test's name.
        backend: What `RDMABuffer.backend` must say.
        remote: Whether the owner is another process.
        shared: Whether its memory comes from `dataplane.empty_array`.
        serves_frozen: Whether a stopped owner can be read from.
        far: Whether the reader is to believe that the owner is on another host.
        marks: What the machine must have for it.
        settings: For `dataplane.configure` in the owner. The reader keeps its defaults: what two UCX processes use is
            what both have.
        reader_backend: What the reader is told to use and to export for.
    """

    id: str
    backend: str
    remote: bool
    shared: bool
    serves_frozen: bool
    far: bool = False
    marks: tuple[pytest.MarkDecorator, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    reader_backend: str = "auto"

    def start(self) -> "LocalOwner | RemoteOwner":
        if self.remote:
            return RemoteOwner(self.settings, shared=self.shared, far=self.far)
        return LocalOwner(shared=self.shared)


CASES = (
    Case("local", "local", remote=False, shared=False, serves_frozen=True),
    Case("shm", "shm", remote=True, shared=True, serves_frozen=True),
    Case("ucx-cma", "ucx", remote=True, shared=False, serves_frozen=True),
    Case(
        "ucx-far",
        "ucx",
        remote=True,
        shared=False,
        serves_frozen=False,
        far=True,
        settings={"backend": "ucx", "ucx": {"TLS": "tcp,self"}},
    ),
    Case(
        "ucx-tcp",
        "ucx",
        remote=True,
        shared=False,
        serves_frozen=False,
        settings={"backend": "ucx", "ucx": {"TLS": "tcp,self"}},
    ),
    Case(
        "verbs",
        "verbs",
        remote=True,
        shared=False,
        serves_frozen=True,
        marks=(pytest.mark.verbs, needs_device()),
        settings={"backend": "verbs"},
        reader_backend="verbs",
    ),
)
REMOTE = tuple(case for case in CASES if case.remote)
WAITING = tuple(case for case in CASES if not case.serves_frozen)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` and `owner` run over every backend, the others over those of a kind."""
    if "waiting_case" in metafunc.fixturenames:
        metafunc.parametrize("waiting_case", WAITING, ids=lambda case: case.id, scope="session")
    elif "remote_case" in metafunc.fixturenames:
        metafunc.parametrize("remote_case", _parameters(REMOTE), scope="session")
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", _parameters(CASES), scope="session")


def _parameters(cases: tuple[Case, ...]) -> list[Any]:
    return [pytest.param(case, marks=case.marks, id=case.id) for case in cases]


@pytest.fixture(autouse=True)
def _configured_reader(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = getattr(request.node, "callspec", None)
    case = parameters and (parameters.params.get("case") or parameters.params.get("remote_case"))
    if not case or case.reader_backend == "auto":
        yield
        return
    dataplane.configure(backend=case.reader_backend)
    yield
    dataplane.configure(backend="auto")


@pytest.fixture(scope="session")
def owner(case: Case) -> Iterator[LocalOwner | RemoteOwner]:
    """An owner that tests share; none may harm it."""
    started = case.start()
    yield started
    started.close()


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[], RemoteOwner]]:
    """Starts owners that the test may kill or freeze."""
    started: list[RemoteOwner] = []
    parameters = request.node.callspec.params
    case = parameters["waiting_case"] if "waiting_case" in parameters else parameters["remote_case"]

    def one() -> RemoteOwner:
        owner = case.start()
        assert isinstance(owner, RemoteOwner)
        started.append(owner)
        return owner

    yield one
    for owner in started:
        owner.close()
