"""Bytes arrive, all of them and nowhere else; what cannot be done is refused before anything moves."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from skipper.dataplane import RDMABuffer
from tests.conformance.conftest import Case
from tests.sameness import assert_same

Owner = Any
SIZES = (1, 7, 4096, 100_003, (1 << 20) + 1, 9 << 20)


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def handle_to(owner: Owner, content: bytes, *, writable: bool = True) -> tuple[int, RDMABuffer]:
    name, raw = owner("make", content, writable)
    return name, RDMABuffer.deserialize(raw)


def test_a_handle_uses_the_backend_that_it_was_made_for(case: Case, owner: Owner) -> None:
    _, buffer = handle_to(owner, b"abc")
    assert buffer.backend == case.backend
    assert buffer.nbytes == buffer.size() == 3
    assert buffer.writable


@pytest.mark.parametrize("nbytes", SIZES)
def test_read_brings_every_byte(owner: Owner, nbytes: int) -> None:
    content = pattern(nbytes)
    _, buffer = handle_to(owner, content)
    framed = np.full(nbytes + 128, 0xA5, np.uint8)
    for stream in (False, True):
        framed[:] = 0xA5
        buffer.read_into(framed[64:-64], stream=stream).get()
        assert_same(framed[64:-64].tobytes(), content)
        assert (framed[:64] == 0xA5).all()
        assert (framed[-64:] == 0xA5).all()


@pytest.mark.parametrize("nbytes", SIZES)
def test_write_brings_every_byte(owner: Owner, nbytes: int) -> None:
    name, buffer = handle_to(owner, bytes(nbytes))
    content = pattern(nbytes, 1)
    buffer.write_from(content).get()
    assert_same(owner("content", name), content)


def test_a_part_is_that_part(owner: Owner) -> None:
    content = pattern(5000)
    name, buffer = handle_to(owner, content)
    into = bytearray(300)
    buffer.at(1000, 3000).at(500, 300).read_into(into).get()
    assert_same(into, content[1500:1800])
    buffer.at(4999, 1).write_from(b"\x01").get()
    buffer.at(0, 2).write_from(b"\x02\x03").get()
    assert_same(owner("content", name), b"\x02\x03" + content[2:4999] + b"\x01")


def test_parts_travel_as_handles_of_their_own(owner: Owner) -> None:
    content = pattern(5000)
    _, buffer = handle_to(owner, content)
    part = RDMABuffer.deserialize(buffer.at(123, 45).serialize())
    into = bytearray(45)
    part.read_into(into).get()
    assert_same(into, content[123:168])


@pytest.mark.parametrize("nbytes", [64, 3 << 20])
def test_an_operation_can_be_awaited(owner: Owner, nbytes: int) -> None:
    content = pattern(nbytes)
    name, buffer = handle_to(owner, content)

    async def both_ways() -> bytearray:
        into = bytearray(nbytes)
        await buffer.read_into(into)
        await buffer.write_from(into[::-1])
        return into

    assert_same(asyncio.run(both_ways()), content)
    assert_same(owner("content", name), content[::-1])


@pytest.mark.parametrize("nbytes", [64, 3 << 20])
def test_a_callback_hears_of_the_end_once(owner: Owner, nbytes: int) -> None:
    _, buffer = handle_to(owner, bytes(nbytes))
    heard = threading.Event()
    calls = []
    operation = buffer.read_into(bytearray(nbytes))
    operation.add_done_callback(lambda done: (calls.append(done), heard.set()))  # type: ignore[func-returns-value]
    assert heard.wait(10)
    operation.get()
    assert calls == [operation]
    assert operation.done()


def test_torch_dtypes_are_moved_as_they_are(owner: Owner) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64, torch.bool):
        source = torch.arange(60, dtype=torch.float32).to(dtype).reshape(5, 12)
        raw = bytes(source.view(torch.uint8).numpy().tobytes())
        name, buffer = handle_to(owner, raw)
        into = torch.zeros(5, 12, dtype=dtype)
        buffer.read_into(into).get()
        assert into.view(torch.uint8).equal(source.view(torch.uint8)), dtype
        owner("fill", name, 0)
        buffer.write_from(into).get()
        assert_same(owner("content", name), raw, f"bytes of {dtype}")


def test_misfits_are_refused_before_anything_moves(owner: Owner) -> None:
    content = pattern(100)
    name, buffer = handle_to(owner, content)
    readonly = np.zeros(100, np.uint8)
    readonly.flags.writeable = False
    for wrong in (bytearray(99), bytearray(101), bytearray(0), np.zeros(200, np.uint8)[::2], readonly, bytes(100)):
        with pytest.raises(ValueError, match=r"bytes|contiguous|read-only"):
            buffer.read_into(wrong)
    for wrong_source in (b"", bytes(99), np.zeros((20, 10), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match=r"bytes|contiguous"):
            buffer.write_from(wrong_source)
    for strange in ([0] * 100, "x" * 100, None, 7):
        with pytest.raises(TypeError):
            buffer.read_into(strange)
    for offset, nbytes in ((0, 0), (-1, 5), (0, 101), (100, 1), (99, 2), (5, -1), (1 << 63, 1)):
        with pytest.raises(ValueError, match="range"):
            buffer.at(offset, nbytes)
    with pytest.raises(TypeError):
        buffer.at(0.0, 1)  # type: ignore[arg-type]
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            buffer.read_into(bytearray(100), timeout=timeout)
    assert_same(owner("content", name), content)


def test_read_only_buffers_can_only_be_read(owner: Owner) -> None:
    content = pattern(100)
    name, buffer = handle_to(owner, content, writable=False)
    assert not buffer.writable
    with pytest.raises(ValueError, match="read-only"):
        buffer.write_from(bytes(100))
    with pytest.raises(ValueError, match="read-only"):
        buffer.at(3, 4).write_from(bytes(4))
    into = bytearray(100)
    buffer.read_into(into).get()
    assert_same(owner("content", name), content)
    assert_same(into, content)


def test_many_readers_at_once_all_read_right(owner: Owner) -> None:
    content = pattern(2 << 20)
    _, buffer = handle_to(owner, content)
    wrong = []

    def reader(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(40):
            begin, end = sorted(int(n) for n in random.integers(0, len(content), 2))
            end = max(end, begin + 1)
            into = bytearray(end - begin)
            buffer.at(begin, end - begin).read_into(into).get()
            if into != content[begin:end]:
                wrong.append((begin, end))

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
