import asyncio
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from skipper.control import Actor, ActorDefinitionError, ActorError, ActorMesh, Future, PayloadError, ProcMesh, endpoint
from skipper.control.model.actor import interface_of
from tests.control.actors import AsyncEcho, Echo, Recorder
from tests.control.conftest import PATIENCE_S


@pytest.fixture(scope="module")
def echoes(procs: ProcMesh) -> ActorMesh[Echo]:
    return procs.spawn("echoes", Echo)


@pytest.fixture(scope="module")
def echo(echoes: ActorMesh[Echo]) -> ActorMesh[Echo]:
    return echoes.slice(gpus=0)


class DefinedHere(Actor):
    """A class of a test file, as pytest has loaded it."""

    @endpoint
    def value(self) -> "Custom":
        return Custom(3)


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        if self.value < 0:
            raise RuntimeError("negative ones stay")
        return (Custom, (self.value,))


class CustomError(Exception):
    def __init__(self, code: int, where: str) -> None:
        super().__init__(code, where)
        self.code = code


class TwoArgumentError(Exception):
    """Cannot be unpickled: its arguments are not those of the constructor."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} {where}")


def test_call_returns_a_value_of_each_member_in_rank_order(echoes: ActorMesh[Echo]) -> None:
    pids = echoes.pid.call().get(PATIENCE_S)
    assert pids.extent == {"gpus": 2}
    assert len({*pids, os.getpid()}) == 3
    assert [echoes.slice(gpus=gpu).pid.call_one().get(PATIENCE_S) for gpu in range(2)] == pids


async def test_futures_can_be_awaited(echo: ActorMesh[Echo]) -> None:
    assert await echo.echo.call_one("x") == "x"
    assert await asyncio.gather(*(wait(echo.echo.call_one(number)) for number in range(50))) == list(range(50))


async def wait(future: Future[Any]) -> Any:
    return await future


async def test_the_future_of_a_call_answers_to_the_names_of_pythons_own(echo: ActorMesh[Echo]) -> None:
    future = echo.echo.call_one("x")
    assert await asyncio.wait_for(future.as_asyncio(), PATIENCE_S) == "x"
    assert (future.result(), future.exception(), future.done()) == ("x", None, True)


def test_call_one_needs_one_actor(echoes: ActorMesh[Echo]) -> None:
    with pytest.raises(ValueError, match="slice it"):
        echoes.echo.call_one(1)


def test_choose_takes_turns(echoes: ActorMesh[Echo]) -> None:
    assert len({echoes.pid.choose().get(PATIENCE_S) for _ in range(4)}) == 2


def test_stream_yields_futures(echoes: ActorMesh[Echo]) -> None:
    stream = echoes.pid.stream()
    assert len(stream) == 2
    assert sorted(future.get(PATIENCE_S) for future in stream) == sorted(echoes.pid.call().get(PATIENCE_S))


async def test_stream_yields_results_in_the_order_of_completion(procs: ProcMesh) -> None:
    class Sleeper(Actor):
        @endpoint
        async def sleep(self, delays: list[float]) -> float:
            from skipper.control import current_rank

            await asyncio.sleep(delays[current_rank().rank])
            return delays[current_rank().rank]

    sleepers = procs.spawn("sleepers", Sleeper)
    assert [delay async for delay in sleepers.sleep.stream([0.2, 0.01])] == [0.01, 0.2]
    await sleepers.stop()


def test_messages_of_one_sender_arrive_in_order_whatever_the_adverb(procs: ProcMesh) -> None:
    recorders = procs.spawn("recorders", Recorder)
    one = recorders.slice(gpus=0)
    for number in range(0, 600, 3):
        one.note.call_one(number)
        recorders.note.broadcast(number + 1)
        recorders.note.call(number + 2)
    assert one.everything.call_one().get(PATIENCE_S) == list(range(600))
    recorders.stop().get(PATIENCE_S)


def test_messages_of_each_of_many_threads_arrive_in_order(procs: ProcMesh) -> None:
    recorder = procs.slice(gpus=0).spawn("recorder", Recorder)

    def send(sender: int) -> None:
        for number in range(300):
            recorder.note.broadcast((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = recorder.everything.call_one().get(PATIENCE_S)
    assert len(seen) == 1800
    for sender in range(6):
        assert [number for who, number in seen if who == sender] == list(range(300))
    recorder.stop().get(PATIENCE_S)


def test_arguments_are_checked_against_the_signature_before_anything_is_sent(echo: ActorMesh[Echo]) -> None:
    signature = echo.signature
    assert signature.call_one(1, 2, 4, c=5, d=6).get(PATIENCE_S) == (1, 2, (4,), 5, {"d": 6})
    assert signature.call_one(1, b=2).get(PATIENCE_S) == (1, 2, (), 3, {})
    for adverb in (signature.call_one, signature.call, signature.broadcast, signature.choose, signature.stream):
        with pytest.raises(TypeError, match=r"signature\(\) missing 1 required positional argument: 'b'"):
            adverb(1)
    with pytest.raises(TypeError):
        echo.echo.call_one()
    with pytest.raises(TypeError, match="unexpected keyword"):
        echo.echo.call_one(1, other=2)


def test_unknown_endpoints_are_attribute_errors(echo: ActorMesh[Echo]) -> None:
    with pytest.raises(AttributeError, match=r"has no endpoint 'ecko'; it has: .*echo"):
        echo.ecko.call_one(1)


def test_unpicklable_arguments_raise_at_the_caller(echoes: ActorMesh[Echo]) -> None:
    for adverb in (echoes.echo.call, echoes.echo.broadcast, echoes.echo.choose, echoes.echo.stream):
        with pytest.raises(PayloadError, match="cannot pickle"):
            adverb(threading.Lock())
    with pytest.raises(TypeError):
        echoes.echo.call(Custom(-1))


def test_unpicklable_results_come_back_as_the_callers_error(echo: ActorMesh[Echo]) -> None:
    with pytest.raises(ActorError, match="cannot pickle") as caught:
        echo.run.call_one(threading.Lock).get(PATIENCE_S)
    assert isinstance(caught.value.cause, PayloadError)
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1


def test_an_exception_reaches_the_caller_with_its_traceback_and_the_actor_lives(echo: ActorMesh[Echo]) -> None:
    with pytest.raises(ActorError) as caught:
        echo.fail.call_one(CustomError(5, "there")).get(PATIENCE_S)
    error = caught.value
    assert isinstance(error.cause, CustomError)
    assert (error.cause.code, error.endpoint, error.__cause__) == (5, "fail", error.cause)
    assert "in fail" in error.remote_traceback
    assert "actors.py" in error.remote_traceback.splitlines()[1]  # not what has called it
    assert "raise error" in str(error)
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1


def test_an_exception_that_cannot_travel_costs_only_the_cause(echo: ActorMesh[Echo]) -> None:
    def fail() -> None:
        raise TwoArgumentError(3, "there")

    with pytest.raises(ActorError, match="TwoArgumentError: 3 there") as caught:
        echo.run.call_one(fail).get(PATIENCE_S)
    assert caught.value.cause is None


def test_one_error_ends_the_call_of_the_whole_mesh_and_stream_tells_them_apart(echoes: ActorMesh[Echo]) -> None:
    with pytest.raises(ActorError):
        echoes.fail.call(ValueError("x")).get(PATIENCE_S)
    for future in echoes.fail.stream(ValueError("x")):
        with pytest.raises(ActorError):
            future.get(PATIENCE_S)


def test_classes_and_functions_of_a_test_file_travel(procs: ProcMesh, echo: ActorMesh[Echo]) -> None:
    here = procs.slice(gpus=0).spawn("here", DefinedHere)
    answer = here.value.call_one().get(PATIENCE_S)
    assert isinstance(answer, Custom)
    assert answer.value == 3
    factor = 4
    assert echo.run.call_one(lambda value: factor * value, 5).get(PATIENCE_S) == 20


def test_large_arrays_travel_both_ways(echo: ActorMesh[Echo]) -> None:
    array = np.random.default_rng(0).integers(0, 255, size=5 << 20, dtype=np.uint8)
    back = echo.echo.call_one(array).get(PATIENCE_S)
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_arguments_may_be_changed_once_the_call_has_returned(echo: ActorMesh[Echo]) -> None:
    array = np.zeros(1 << 20)
    futures = []
    for number in range(4):
        array[:] = number
        futures.append(echo.echo.call_one(array))
    assert [future.get(PATIENCE_S)[-1] for future in futures] == [0, 1, 2, 3]


def test_async_endpoints_run_one_at_a_time_on_one_loop(procs: ProcMesh) -> None:
    actor = procs.slice(gpus=1).spawn("async", AsyncEcho)
    assert [future.get(PATIENCE_S) for future in [actor.overlap.call_one(0.01) for _ in range(5)]] == [1] * 5
    assert actor.rank_after_waiting.call_one().get(PATIENCE_S) == (0, True)
    actor.stop().get(PATIENCE_S)


def test_an_actor_that_waits_does_not_keep_others_of_its_process_waiting(procs: ProcMesh) -> None:
    proc = procs.slice(gpus=0)
    sleeper, other = proc.spawn("sleeper", Echo), proc.spawn("other", AsyncEcho)
    slow = sleeper.sleep.call_one(0.5)
    assert other.echo.call_one(1).get(PATIENCE_S) == 1
    assert not slow.done()
    assert slow.get(PATIENCE_S) == 0.5
    other.stop().get(PATIENCE_S)
    sleeper.stop().get(PATIENCE_S)


def test_sync_endpoints_run_on_one_thread_whose_locals_survive(procs: ProcMesh) -> None:
    recorder = procs.slice(gpus=0).spawn("recorder", Recorder)
    assert all(recorder.thread_is_the_same.call_one().get(PATIENCE_S) for _ in range(3))
    recorder.stop().get(PATIENCE_S)


def test_get_with_a_timeout_ends_in_time_and_the_actor_lives(echo: ActorMesh[Echo]) -> None:
    began = time.monotonic()
    late = echo.sleep.call_one(0.4)
    with pytest.raises(TimeoutError):
        late.get(0.05)
    assert time.monotonic() - began < 0.4
    assert late.get(PATIENCE_S) == 0.4


def test_mixed_endpoints_are_refused_at_spawn_with_the_reason(procs: ProcMesh) -> None:
    class Mixed(Actor):
        @endpoint
        def plain(self) -> None: ...

        @endpoint
        async def asynchronous(self) -> None: ...

    with pytest.raises(ActorDefinitionError, match=r"mixes async endpoints \(asynchronous\) with sync ones \(plain\)"):
        procs.spawn("mixed", Mixed)


def test_other_classes_that_cannot_be_actors_are_refused(procs: ProcMesh) -> None:
    class Hidden(Actor):
        @endpoint
        def slice(self) -> None: ...

    class Selfless(Actor):
        @endpoint
        def nothing() -> None: ...  # type: ignore[misc]

    for cls, reason in (
        (Hidden, "give the endpoint another name"),
        (Selfless, "first parameters"),
        (int, "not a subclass"),
    ):
        with pytest.raises(TypeError, match=reason):
            procs.spawn("refused", cls)  # type: ignore[type-var]


def test_every_attribute_of_a_mesh_is_a_reserved_name() -> None:
    public = {name for name in dir(ActorMesh) if not name.startswith("_")}
    for name in public:
        cls = type("Clashing", (Actor,), {name: endpoint(lambda self: None)})
        with pytest.raises(ActorDefinitionError, match="give the endpoint another name"):
            interface_of(cls)


def test_endpoints_are_inherited_and_plain_methods_within_the_actor(procs: ProcMesh) -> None:
    class Base(Actor):
        @endpoint
        def one(self) -> int:
            return 1

    class Derived(Base):
        @endpoint
        def two(self) -> int:
            return self.one() + 1

    derived = procs.slice(gpus=0).spawn("derived", Derived)
    assert derived.two.call_one().get(PATIENCE_S) == 2
    assert derived.one.call_one().get(PATIENCE_S) == 1
    derived.stop().get(PATIENCE_S)
