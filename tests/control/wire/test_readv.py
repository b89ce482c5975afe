"""What cannot change is read where it lies: as it was, by whoever may, and never something else that lies there now."""

import ctypes
import gc
import os
import platform
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from skipper.control import ActorMesh, PayloadError, ProcMesh
from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire import readv
from skipper.control.wire.bulk import BULK_NBYTES, Incoming, Loans
from skipper.control.wire.frames import Decoder, encode
from skipper.control.wire.messages import Payload, Reply
from skipper.control.wire.payload import pack, unpack
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.control.wire.test_bulk import BIG, PartOfBytes, same
from tests.reach import needs_cma
from tests.sameness import assert_same

pytestmark = needs_cma


@pytest.fixture(scope="module")
def echo(procs: ProcMesh) -> ActorMesh[Echo]:
    return procs.spawn("echo", Echo)


@pytest.fixture(autouse=True)
def everything_is_given_back(echo: ActorMesh[Echo]) -> Iterator[None]:
    yield
    wait_until(lambda: len(runtime.current().loans) == 0, "the script's loans to end")


def sent(loans: Loans, payload: Payload) -> tuple[bytes, Payload, list[tuple[int, bool]]]:
    """The message that lends a payload to "a", the payload that arrives there, and what "a" gives back."""
    loans.lend(payload, "a")
    (piece,) = encode([Reply(1, payload=payload)])
    loans.complete(payload)
    given: list[tuple[int, bool]] = []
    (message,) = Decoder(lambda number, is_readable: given.append((number, is_readable))).feed(piece)
    return piece, message.payload, given


def known_reader() -> Loans:
    """Loans to "a" which know that "a", that is this process, can read this process."""
    loans = Loans()
    _, payload, given = sent(loans, pack(BIG, lend=True))
    unpack(payload)
    ((number, is_readable),) = given
    loans.give_back(number, "a", is_readable=is_readable)
    return loans


def content(value: Any) -> bytes:
    return bytes(value.part if isinstance(value, PartOfBytes) else value)


@pytest.mark.parametrize("value", [BIG, PartOfBytes(memoryview(BIG * 2)[100 : 100 + BULK_NBYTES])])
def test_bytes_are_copied_for_the_first_reader_and_read_in_place_from_then_on(value: object) -> None:
    loans = Loans()
    lengths = []
    for _ in range(3):
        message, payload, given = sent(loans, pack(value, lend=True))
        lengths.append(len(message))
        arrived = unpack(payload)
        assert_same(content(arrived), content(value))
        ((number, is_readable),) = given
        loans.give_back(number, "a", is_readable=is_readable)
    assert lengths[0] > lengths[1] == lengths[2]  # no handle of a copy travels any more
    assert len(loans) == 0


def test_what_may_change_is_copied_for_every_reader() -> None:
    loans = known_reader()
    value = bytearray(BIG)
    _, payload, _ = sent(loans, pack(value, lend=True))
    value[:] = bytes(len(value))
    assert_same(bytes(unpack(payload)), BIG)
    loans.clear()


def test_a_reader_that_may_not_read_gets_the_copy_that_is_made_for_it() -> None:
    loans = known_reader()
    payload = pack(BIG, lend=True)
    _, in_place, _ = sent(loans, payload)
    loans.lend(payload, "b")  # of which nothing is known
    (piece,) = encode([Reply(1, payload=payload)])
    loans.complete(payload)
    (message,) = Decoder().feed(piece)
    assert_same(unpack(in_place), BIG)
    assert_same(unpack(message.payload), BIG)
    loans.clear()


def test_a_reader_that_has_failed_gets_copies_again() -> None:
    loans = known_reader()
    in_place, _, _ = sent(loans, pack(BIG, lend=True))
    loans.give_back(2, "a", is_readable=False)
    again, _, _ = sent(loans, pack(BIG, lend=True))
    assert len(again) > len(in_place)
    loans.clear()


@pytest.mark.parametrize("end", ["clear", "forget"])
def test_what_was_taken_back_is_an_error_and_never_what_lies_there_now(end: str) -> None:
    loans = known_reader()
    _, payload, given = sent(loans, pack(BIG, lend=True))
    if end == "clear":
        loans.clear()
    else:
        loans.forget("a")
    with pytest.raises(PayloadError, match="released them"):
        unpack(payload)
    ((_, is_readable),) = given
    assert not is_readable


def test_what_cannot_be_read_is_an_error() -> None:
    with subprocess.Popen(["true"]) as process:
        gone = process.pid
    assert not readv.is_whole(gone, 4096, bytes(readv.SEAL_NBYTES))
    with pytest.raises(ProcessLookupError):
        readv.read(gone, 4096, memoryview(bytearray(BULK_NBYTES)))
    with pytest.raises(OSError, match="Bad address"):
        readv.read(os.getpid(), 4096, memoryview(bytearray(BULK_NBYTES)))
    descriptor = struct.pack("<QQ?IQQ16s", 1, BULK_NBYTES, True, gone, 4096, 4096, bytes(16))
    with pytest.raises(PayloadError, match="No such process"):
        Incoming(descriptor, lambda number, is_readable: None).fetch()


def test_memory_is_read_as_it_is() -> None:
    source = os.urandom(BULK_NBYTES + 3)
    memory = bytearray(len(source))
    readv.read(os.getpid(), readv.address_of(memoryview(source)), memoryview(memory))
    assert_same(bytes(memory), source)


def test_a_seal_is_found_until_it_is_destroyed() -> None:
    seal = readv.MemorySeal()
    assert readv.is_whole(os.getpid(), seal.address, seal.content)
    assert not readv.is_whole(os.getpid(), seal.address, bytes(readv.SEAL_NBYTES))
    seal.destroy()
    assert not readv.is_whole(os.getpid(), seal.address, seal.content)


def test_the_callers_bytes_stay_until_they_are_read(echo: ActorMesh[Echo]) -> None:
    one = echo.slice(gpus=0)
    for _ in range(2):
        assert_same(one.echo.call_one(BIG).get(PATIENCE_S), BIG)
    asleep = one.sleep.call_one(0.2)
    answer = one.echo.call_one(b"first" * BULK_NBYTES)
    gc.collect()
    others = [b"later" * BULK_NBYTES for _ in range(3)]  # where the first would have been
    asleep.get(PATIENCE_S)
    assert_same(answer.get(PATIENCE_S), b"first" * BULK_NBYTES)
    assert len(others) == 3


def forbid() -> bool:
    """Have the kernel refuse `process_vm_readv` to this thread, and those that it starts, as containers do."""
    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06
    program = ((load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    head = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    done = prctl(no_new_privileges, 1, 0, 0, 0) == 0 and prctl(seccomp, by_filter, head, 0, 0) == 0
    seal = readv.MemorySeal()
    return done and not readv.is_whole(os.getpid(), seal.address, seal.content)


def test_a_process_that_may_not_read_others_is_sent_copies(
    own_procs: Callable[..., ProcMesh], echo: ActorMesh[Echo]
) -> None:
    mesh = own_procs({"gpus": 2}).spawn("confined", Echo)
    confined = mesh.slice(gpus=0)
    assert confined.run.call_one(forbid).get(PATIENCE_S)
    for _ in range(3):
        assert same(confined.echo.call_one(BIG).get(PATIENCE_S), BIG)
    for _ in range(3):  # the other one may
        assert [same(got, BIG) for got in mesh.echo.call(BIG).get(PATIENCE_S)] == [True, True]


def test_a_value_whose_owner_has_died_is_an_error(own_procs: Callable[..., ProcMesh], failures: Failures) -> None:
    doomed = own_procs({"gpus": 1}).spawn("doomed", Echo)
    pid = doomed.pid.call_one().get(PATIENCE_S)
    for _ in range(2):
        doomed.echo.call_one(BIG).get(PATIENCE_S)
    answer = doomed.echo.call_one(BIG)
    wait_until(answer.done, "the result")
    os.kill(pid, signal.SIGKILL)
    failures.wait()
    with pytest.raises(PayloadError, match="could not be read"):
        answer.get(PATIENCE_S)
