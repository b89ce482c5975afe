"""One line per backend; every test of this folder runs over every line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from tests.conformance.owner import LocalOwner, Owner, RemoteOwner
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.ucx_system import needs_roce
from tests.rdma_guest.ucx_system import settings as roce
from tests.reach import TCP_TOO, needs_cma, needs_filters


@dataclass(frozen=True)
class Case:
    """A way from a reader to an owner.

    Attributes:
        id: For the test's name.
        backend: What `RDMABuffer.backend` must say.
        remote: Whether the owner is another process.
        shared: Whether its memory comes from `dataplane.empty_array`.
        serves_frozen: Whether a stopped owner can be read from.
        first_read_waits: Whether the first use needs an answer of the owner, if it is a read.
        first_write_waits: The same of a write.
        atomics_need_owner: Whether they are done by the owner's CPU, in a thread of the library.
        interruptible: Whether a large transfer can be ended before its end; what a kernel does in one call cannot, as
            a copy between processes, or Soft-RoCE on one CPU.
        far: Whether the reader is to believe that the owner is on another host.
        marks: What the machine must have for it.
        settings: For `dataplane.configure` in the owner.
        modules: Those of this folder whose tests run over it; all of them where it names none.
        reader: The same for the reader, which else keeps its defaults: what two UCX processes use is what both have.
    """

    id: str
    backend: str
    remote: bool
    shared: bool
    serves_frozen: bool
    first_read_waits: bool = False
    first_write_waits: bool = False
    atomics_need_owner: bool = False
    interruptible: bool = True
    far: bool = False
    marks: tuple[pytest.MarkDecorator, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    reader: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()

    def runs(self, module: str) -> bool:
        """Whether a module's tests run over it."""
        return not self.modules or module.rpartition(".")[2] in self.modules

    def start(self) -> Owner:
        if self.remote:
            return RemoteOwner(self.settings, shared=self.shared, far=self.far)
        return LocalOwner(shared=self.shared)


CASES = (
    Case("local", "local", remote=False, shared=False, serves_frozen=True),
    Case("shm", "shm", remote=True, shared=True, serves_frozen=True),
    Case(
        "ucx-cma",
        "ucx",
        remote=True,
        shared=False,
        serves_frozen=True,
        atomics_need_owner=True,
        interruptible=False,
        marks=(needs_cma,),
    ),
    Case(
        "ucx-posix",
        "ucx",
        remote=True,
        shared=False,
        serves_frozen=False,
        first_read_waits=True,
        first_write_waits=True,
        atomics_need_owner=True,
        settings={"backend": "ucx", "ucx": {"TLS": "posix,self", "POSIX_ERROR_HANDLING": "y"}},
    ),
    Case(
        "ucx-far",
        "ucx",
        remote=True,
        shared=False,
        serves_frozen=False,
        first_read_waits=True,
        first_write_waits=True,
        atomics_need_owner=True,
        far=True,
        marks=(needs_filters,),
        settings={"backend": "ucx", "ucx": {"TLS": "tcp,self"}},
    ),
    Case(
        "ucx-tcp",
        "ucx",
        remote=True,
        shared=False,
        serves_frozen=False,
        first_read_waits=True,
        first_write_waits=True,
        atomics_need_owner=True,
        marks=(needs_filters,),
        settings={"backend": "ucx", "ucx": {"TLS": "tcp,self"}},
    ),
    Case(
        "verbs",
        "verbs",
        remote=True,
        shared=False,
        serves_frozen=True,
        first_read_waits=True,
        first_write_waits=True,
        interruptible=False,
        marks=(pytest.mark.verbs, needs_device()),
        settings={"backend": "verbs"},
        reader={"backend": "verbs"},
    ),
    Case(
        "ucx-roce",
        "ucx",
        remote=True,
        shared=False,
        serves_frozen=True,
        first_read_waits=True,
        first_write_waits=True,
        atomics_need_owner=True,
        marks=needs_roce("rxe0"),
        settings=roce("rxe0"),
        reader=roce("rxe0"),
        # UCX 1.13 has left one of four peers that connected at a time without an answer: no tests of crowds.
        modules=("test_transfers", "test_freezes", "test_deaths", "test_drops"),
    ),
)
REMOTE = tuple(case for case in CASES if case.remote)
WAITING = tuple(case for case in CASES if not case.serves_frozen)


CROWD = 4
_CROWDS: dict[str, list[Owner]] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` and `owner` run over every backend, the others over those of a kind."""
    if "waiting_case" in metafunc.fixturenames:
        metafunc.parametrize("waiting_case", _parameters(WAITING, metafunc.module.__name__), scope="session")
    elif "remote_case" in metafunc.fixturenames:
        metafunc.parametrize("remote_case", _parameters(REMOTE, metafunc.module.__name__), scope="session")
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", _parameters(CASES, metafunc.module.__name__), scope="session")


def _parameters(cases: tuple[Case, ...], module: str) -> list[Any]:
    return [pytest.param(case, marks=case.marks, id=case.id) for case in cases if case.runs(module)]


@pytest.fixture(autouse=True)
def _configured_reader(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = getattr(request.node, "callspec", None)
    case = parameters and (parameters.params.get("case") or parameters.params.get("remote_case"))
    if not case or not case.reader:
        yield
        return
    try:
        dataplane.configure(**case.reader)
    except dataplane.ConfigurationError as error:
        pytest.skip(f"choose this case alone (-m verbs): {error}")
    yield
    dataplane.configure(backend="auto")


@pytest.fixture(scope="session")
def owner(case: Case) -> Iterator[Owner]:
    """An owner that tests share; none may harm it."""
    started = case.start()
    yield started
    started.close()


@pytest.fixture(scope="session")
def large(owner: Owner) -> RDMABuffer:
    """A buffer that takes some time: 64 MiB of sevens."""
    _, raw = owner("make_filled", 64 << 20, 7)
    return RDMABuffer.deserialize(raw)


@pytest.fixture(scope="session")
def crowd(case: Case) -> Sequence[Owner]:
    """Visitors of an owner: processes, however they reach it; threads where the owner is this process."""
    kind = case.reader.get("backend", "auto") if case.remote else "local"
    visitors = _CROWDS.get(kind)
    if visitors is None:
        visitors = _CROWDS[kind] = [_visitor(case) for _ in range(CROWD)]
    return visitors


def _visitor(case: Case) -> Owner:
    reader = {"ucx": TCP_TOO, **case.reader}
    return RemoteOwner(reader, shared=False) if case.remote else LocalOwner(shared=False)


@pytest.fixture(scope="session", autouse=True)
def _crowds_go_home() -> Iterator[None]:
    yield
    while _CROWDS:
        for visitor in _CROWDS.popitem()[1]:
            visitor.close()


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
