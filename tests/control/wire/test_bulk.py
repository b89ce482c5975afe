"""Large values go by reference: they arrive whole, as what they were, and their memory is given back."""

import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from skipper.control import ActorMesh, PayloadError, ProcMesh, SupervisionError, this_proc
from skipper.control.model.errors import ProtocolError
from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire.bulk import BULK_NBYTES, Incoming, Loans, Outgoing
from skipper.control.wire.frames import Decoder, encode
from skipper.control.wire.messages import Kind, Reply
from skipper.control.wire.payload import pack, unpack
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until

BIG = bytes(range(256)) * (BULK_NBYTES // 256) + b"tail"
VALUES = {
    "bytes": BIG,
    "bytearray": bytearray(BIG),
    "array": np.arange(BULK_NBYTES, dtype=np.int32).reshape(64, -1),
    "columns": np.asfortranarray(np.arange(BULK_NBYTES, dtype=np.int16).reshape(64, -1)),
    "strided": np.arange(BULK_NBYTES, dtype=np.int64)[::2],
    "many": [np.full(BULK_NBYTES, number, dtype=np.uint8) for number in range(3)],
    "pickle": list(range(BULK_NBYTES)),
    "text": "ü" * BULK_NBYTES,
    "huge": bytes(9 << 20),
}


@pytest.fixture(scope="module")
def echo(procs: ProcMesh) -> ActorMesh[Echo]:
    return procs.spawn("echo", Echo)


@pytest.fixture(autouse=True)
def everything_is_given_back(echo: ActorMesh[Echo]) -> Iterator[None]:
    yield
    wait_until(lambda: len(runtime.current().loans) == 0, "the script's loans to end")
    for lent in (echo.slice(gpus=rank).run for rank in range(2)):
        wait_until(lambda lent=lent: lent.call_one(count_loans).get(PATIENCE_S) == 0, "a worker's loans to end")


def count_loans() -> int:
    return len(runtime.current().loans)


def same(got: Any, sent: Any) -> bool:
    if isinstance(sent, np.ndarray):
        return bool((got == sent).all()) and got.dtype == sent.dtype and got.flags.writeable
    if isinstance(sent, list) and isinstance(sent[0], np.ndarray):
        return all(map(same, got, sent))
    return type(got) is type(sent) and got == sent


@pytest.mark.parametrize("kind", VALUES)
def test_large_values_arrive_as_what_they_were_and_so_do_results(echo: ActorMesh[Echo], kind: str) -> None:
    value = VALUES[kind]
    one = echo.slice(gpus=0)
    assert same(one.echo.call_one(value).get(PATIENCE_S), value)
    assert same(one.echo.call_one(value=value).get(PATIENCE_S), value)
    here = this_proc().spawn("here", Echo)
    assert same(here.echo.call_one(value).get(PATIENCE_S), value)
    here.stop().get(PATIENCE_S)


def test_arguments_may_be_changed_once_the_call_has_returned(echo: ActorMesh[Echo]) -> None:
    array = np.zeros(BULK_NBYTES)
    answer = echo.slice(gpus=0).echo.call_one(array)
    array[:] = 1
    assert not answer.get(PATIENCE_S).any()


class PartOfBytes:
    """Pickles a part of a ``bytes`` object as a buffer, as array libraries do."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PartOfBytes, (pickle.PickleBuffer(memoryview(self.part)),)


def test_a_view_of_a_part_of_bytes_arrives_as_that_part() -> None:
    part = memoryview(BIG * 2)[100 : 100 + BULK_NBYTES]
    arrived = unpack(pack(PartOfBytes(part), lend=True)).part
    assert memoryview(arrived) == part
    assert memoryview(arrived).readonly


def test_a_cast_lends_once_to_many(echo: ActorMesh[Echo]) -> None:
    for _ in range(3):
        assert [same(got, BIG) for got in echo.echo.call(BIG).get(PATIENCE_S)] == [True, True]


def test_what_nobody_reads_is_given_back(procs: ProcMesh, echo: ActorMesh[Echo]) -> None:
    stopped = procs.slice(gpus=0).spawn("stopped", Echo)
    stopped.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        stopped.echo.call_one(BIG).get(PATIENCE_S)
    unread = echo.slice(gpus=1).echo.call_one(BIG)
    wait_until(unread.done, "the result")
    del unread


def test_loans_to_a_process_end_with_it(
    own_procs: Callable[..., ProcMesh], echo: ActorMesh[Echo], failures: Failures
) -> None:
    doomed = own_procs({"gpus": 1}).spawn("doomed", Echo)
    pid = doomed.pid.call_one().get(PATIENCE_S)
    asleep = doomed.sleep.call_one(60)
    unread = doomed.echo.call_one(BIG)
    assert len(runtime.current().loans) == 1
    os.kill(pid, signal.SIGKILL)
    for answer in (asleep, unread):
        with pytest.raises(SupervisionError):
            answer.get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        doomed.echo.call_one(BIG).get(PATIENCE_S)
    failures.wait()


def test_a_result_whose_owner_has_died_is_an_error(own_procs: Callable[..., ProcMesh], failures: Failures) -> None:
    doomed = own_procs({"gpus": 1}).spawn("doomed", Echo)
    pid = doomed.pid.call_one().get(PATIENCE_S)
    answer = doomed.echo.call_one(BIG)
    wait_until(answer.done, "the result")
    os.kill(pid, signal.SIGKILL)
    failures.wait()
    with pytest.raises(PayloadError, match="could not be read"):
        answer.get(PATIENCE_S)


def test_small_values_and_plain_payloads_are_not_lent() -> None:
    assert not any(isinstance(segment, Outgoing) for segment in pack(BIG[: BULK_NBYTES - 100], lend=True))
    assert not any(isinstance(segment, Outgoing) for segment in pack(bytearray(BIG)))
    assert unpack(pack(BIG, lend=True)) == BIG


def test_a_segment_is_read_once_and_given_back_once() -> None:
    loans = Loans()
    payload = pack(BIG, lend=True)
    loans.lend(payload, "a")
    loans.lend(payload, "b")
    loans.complete(payload)
    given: list[int] = []
    (piece,) = encode([Reply(1, payload=payload)])
    assert len(piece) < 4096
    (message,) = Decoder(lambda number, is_readable: given.append(number)).feed(piece)
    assert unpack(message.payload) == BIG
    with pytest.raises(PayloadError, match="already read"):
        unpack(message.payload)
    with pytest.raises(TypeError, match="passed on unread"):
        list(encode([message]))
    del message
    assert len(given) == 1
    loans.give_back(given[0], "a", is_readable=False)
    assert len(loans) == 1
    loans.forget("b")
    assert len(loans) == 0
    loans.give_back(given[0], "a", is_readable=False)  # late, and void


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_receiver_reads_behind_the_sender(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    loans = Loans()
    value = os.urandom(7 << 20)
    payload = pack(value, lend=True)
    loans.lend(payload, "a")
    (piece,) = encode([Reply(1, payload=payload)])
    (message,) = Decoder().feed(piece)
    has_begun, arrived = threading.Event(), []
    sleep = time.sleep

    def caught_up(seconds: float) -> None:
        has_begun.set()
        sleep(seconds)

    def read() -> None:
        try:
            arrived.append(unpack(message.payload))
        except PayloadError as error:
            arrived.append(error)

    monkeypatch.setattr(time, "sleep", caught_up)
    reader = threading.Thread(target=read)
    reader.start()
    assert has_begun.wait(PATIENCE_S)  # and found nothing
    if interrupted:
        outgoing = next(part for part in payload if isinstance(part, Outgoing))
        monkeypatch.setattr(Outgoing, "_copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            outgoing.complete()
    else:
        loans.complete(payload)
    reader.join(PATIENCE_S)
    (end,) = arrived
    assert isinstance(end, PayloadError) if interrupted else end == value
    loans.clear()


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_descriptor_that_is_none_is_a_protocol_error() -> None:
    lent = 1 << 63
    for descriptor in (b"", b"short", struct.pack("<QQ?IQQ16s", 1, 2**64 - 1, True, 1, 0, 0, b"")):
        header = struct.pack("<BIQQHHIQ", Kind.REPLY, 0, 1, 0, 0, 0, 1, len(descriptor) | lent)
        with pytest.raises(ProtocolError):
            Decoder().feed(b"\x00" + header + descriptor)
    descriptor = struct.pack("<QQ?IQQ16s", 1, 5, True, 1, 0, 0, b"")
    assert len(Incoming(descriptor, lambda number, is_readable: None)) == 5


def test_dataplane_comes_with_the_first_large_value(script: Callable[[str], Script]) -> None:
    running = script(
        """
import sys
from skipper.control import Actor, endpoint, this_host


class Worker(Actor):
    @endpoint
    def measure(self, value: bytes) -> tuple[int, bool, bool]:
        return len(value), "skipper.dataplane" in sys.modules, "torch" in sys.modules


worker = this_host().spawn_procs().spawn("worker", Worker)
print(worker.measure.call_one(b"x").get(20), worker.measure.call_one(bytes(1 << 20)).get(20))
"""
    )
    assert running.finish() == (0, "(1, False, False) (1048576, True, False)\n", "")
