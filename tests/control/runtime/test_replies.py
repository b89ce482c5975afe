import os
import pickle
import sys
import threading
import time
import traceback
from typing import Any

import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    FailureKind,
    MeshFailure,
    PayloadError,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    endpoint,
)
from skipper.control.runtime import replies
from skipper.control.runtime.replies import open_chain, pack_chain
from skipper.torchstore.errors import VersionNotFoundError
from tests.control.actors import AsyncEcho, Echo
from tests.control.conftest import PATIENCE_S


class Relay(Actor):
    """Passes a call on to another one as often as it is told to; the last one raises."""

    @concurrent_endpoint
    async def relay(self, relays: ActorMesh["Relay"], depth: int, how: str) -> None:
        if depth == 0:
            raise ValueError("the very first error")
        try:
            await relays.slice(gpus=depth % 2).relay.call_one(relays, depth - 1, how)
        except ActorError as error:
            if how == "from":
                raise RuntimeError(f"hop {depth}") from error
            if how == "group":
                raise ExceptionGroup("of one", [error]) from None
            raise


class AsyncRunner(AsyncEcho):
    @endpoint
    async def run(self, function: Any) -> Any:
        return function()


class HostileError(Exception):
    """Nothing that one does with it works, and all of it raises what no ``except Exception`` catches."""

    def _refuse(self, *args: Any) -> Any:
        raise SystemExit(3)

    __str__ = __repr__ = __reduce__ = __reduce_ex__ = __getattr__ = _refuse  # type: ignore[assignment]
    __class__ = __doc__ = property(_refuse)  # type: ignore[assignment]


class QuittingError(Exception):
    """Its unpickling ends the process, or would."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


class QuittingAtLastError(Exception):
    def __reduce__(self) -> Any:
        return os.kill, (0, 0, 0)  # a TypeError


class EndlessError(Exception):
    def __reduce__(self) -> Any:
        return time.sleep, (1000,)


class OwnError(Exception):
    pass


@pytest.fixture(scope="module")
def relays(procs: ProcMesh) -> ActorMesh[Relay]:
    return procs.spawn("relays", Relay)


@pytest.fixture(scope="module", params=[Echo, AsyncRunner])
def echo(procs: ProcMesh, request: pytest.FixtureRequest) -> ActorMesh[Any]:
    return procs.slice(gpus=0).spawn("echo", request.param)


def raised_by(echo: ActorMesh[Any], error: type[BaseException], *args: object) -> ActorError:
    def fail() -> None:
        raise error(*args)

    with pytest.raises(ActorError) as caught:
        echo.run.call_one(fail).get(PATIENCE_S)
    return caught.value


def through(relays: ActorMesh[Relay], depth: int, how: str) -> ActorError:
    with pytest.raises(ActorError) as caught:
        relays.slice(gpus=0).relay.call_one(relays, depth, how).get(PATIENCE_S)
    return caught.value


@pytest.mark.parametrize("how", ["plain", "from", "group"])
def test_what_an_error_takes_grows_by_the_same_with_every_actor_that_passes_it_on(
    relays: ActorMesh[Relay], how: str
) -> None:
    shallow, middle, deep = (through(relays, depth, how) for depth in (1, 5, 9))
    for measure in (str, lambda error: "".join(traceback.format_exception(error)), pickle.dumps):
        sizes = [len(measure(error)) for error in (shallow, middle, deep)]
        assert sizes[2] - sizes[1] < 1.5 * (sizes[1] - sizes[0]), sizes
        assert sizes[2] < 40_000


def test_an_error_that_was_passed_on_shows_each_traceback_once_and_keeps_the_chain(relays: ActorMesh[Relay]) -> None:
    error = through(relays, 3, "plain")
    assert str(error).count("raise ValueError") == 1
    assert str(error).count("await relays.slice") == 3
    assert str(error).splitlines()[0].endswith("raised ValueError: the very first error")
    assert "".join(traceback.format_exception(error)).count("raise ValueError") == 1
    hops = 0
    link: BaseException | None = error
    while isinstance(link, ActorError):
        hops += 1
        assert link.__cause__ is link.cause
        assert "raise ValueError" in link.remote_traceback
        link = link.cause
    assert hops == 4
    assert isinstance(error.cause, ActorError)
    assert isinstance(link, ValueError)
    assert str(through(relays, 3, "from")).count("raise ValueError") == 1
    with pytest.raises(ActorError, match="raise ValueError"):
        raise error.cause


def test_causes_groups_and_notes_arrive_with_an_exception(echo: ActorMesh[Any]) -> None:
    def fail() -> None:
        first = KeyError("first")
        first.add_note("noted")
        try:
            raise first
        except KeyError as error:
            raise ExceptionGroup("both", [ValueError("x"), OSError(5, "y")]) from error

    with pytest.raises(ActorError) as caught:
        echo.run.call_one(fail).get(PATIENCE_S)
    group = caught.value.cause
    assert isinstance(group, ExceptionGroup)
    assert group.message == "both"
    assert [type(member) for member in group.exceptions] == [ValueError, OSError]
    assert isinstance(group.__cause__, KeyError)
    assert group.__cause__.__notes__ == ["noted"]


@pytest.mark.parametrize("kind", [HostileError, QuittingError, QuittingAtLastError])
def test_an_exception_that_resists_is_an_actor_error_and_the_actor_lives(
    echo: ActorMesh[Any], kind: type[Exception]
) -> None:
    error = raised_by(echo, kind)
    assert error.cause is None
    assert kind.__name__ in str(error)
    assert "in fail" in error.remote_traceback
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1


def test_an_exception_whose_unpickling_hangs_is_given_up(echo: ActorMesh[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "OPEN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(time, "sleep", lambda seconds: released.wait(PATIENCE_S))
    released = threading.Event()
    error = raised_by(echo, EndlessError)
    released.set()
    assert error.cause is None
    assert "EndlessError" in error.summary


def test_a_message_of_a_hundred_megabytes_arrives_cut(echo: ActorMesh[Any]) -> None:
    def fail() -> None:
        raise OwnError("x" * 100_000_000)

    with pytest.raises(ActorError) as caught:
        echo.run.call_one(fail).get(PATIENCE_S)
    assert caught.value.cause is None
    assert len(str(caught.value)) < 400_000
    assert "characters are cut here" in caught.value.summary


def test_one_exception_of_a_chain_that_cannot_travel_leaves_its_words() -> None:
    error, between, first = ValueError("last"), QuittingError("between"), KeyError("first")
    error.__cause__, between.__cause__ = between, first
    opened = open_chain(pack_chain(error), "Traceback")
    assert isinstance(opened, ValueError)
    assert isinstance(opened.__cause__, PayloadError)
    assert "QuittingError: between" in str(opened.__cause__)
    assert isinstance(opened.__cause__.__cause__, KeyError)


class _UsersText(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("error", "takes_a_thread"),
    [
        (ValueError("x"), False),
        (SupervisionError("x", MeshFailure("mesh", "actor", None, FailureKind.PROCESS, "died")), False),
        (VersionNotFoundError("key", 3, (1, 2)), False),
        (OwnError("x"), True),
        (ValueError(_UsersText("x")), True),
        (ValueError((1, [_UsersText("x")])), True),
    ],
)
def test_an_exception_that_runs_no_user_code_is_opened_without_a_thread(
    error: Exception, takes_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (threads.append(thread), thread.run()))
    monkeypatch.setattr(threading.Thread, "join", lambda *_: None)
    opened = open_chain(pack_chain(error), "Traceback")
    assert type(opened) is type(error)
    assert str(opened) == str(error)
    assert bool(threads) == takes_a_thread


def test_an_exception_of_this_package_that_is_not_imported_here_is_opened_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The import of the store takes seconds; who waits for a reply does not wait for that for ever."""
    chain = pack_chain(VersionNotFoundError("key", 3, (1, 2)))
    monkeypatch.delitem(sys.modules, VersionNotFoundError.__module__)
    monkeypatch.setattr(replies, "OPEN_TIMEOUT_S", 0.0)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(threading.Thread, "join", lambda *_: None)
    assert open_chain(chain, "Traceback") is None


def test_a_chain_that_bites_its_tail_ends() -> None:
    error, other = ValueError("a"), KeyError("b")
    error.__cause__, other.__cause__ = other, error
    opened = open_chain(pack_chain(error), "Traceback")
    assert isinstance(opened, ValueError)
    assert isinstance(opened.__cause__, KeyError)
    assert opened.__cause__.__cause__ is None


def test_a_result_or_an_argument_whose_unpickling_exits_costs_nobodys_life(echo: ActorMesh[Any]) -> None:
    with pytest.raises(PayloadError, match="SystemExit: 3"):
        echo.run.call_one(QuittingError).get(PATIENCE_S)
    with pytest.raises(ActorError, match="SystemExit: 3") as caught:
        echo.echo.call_one(QuittingError()).get(PATIENCE_S)
    assert isinstance(caught.value.cause, PayloadError)
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1
