"""Small values that readers find without asking: always the newest, never a mixture, and gone when they are gone."""

import asyncio
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.peers.shm_value_board import PAGE_NBYTES, BoardReader, ValueBoard
from skipper.torchstore.tensors.values import INLINE_BYTES

LIMIT_S = 20.0

LARGE = (64, 96)  # through a volume


async def calls_of_get(key: str) -> tuple[Any, int]:
    """A value, and how many messages it took to get it."""
    value = await ts.get(key)
    record = ts.last_sync()
    assert record is not None
    assert (record.op, record.key) == ("get", key)
    return value, record.control_calls


@pytest.mark.parametrize("value", [torch.arange(16.0), {"step": 7}, torch.ones(0), torch.tensor(3)])
async def test_from_the_third_get_on_nobody_is_asked(store: None, value: Any) -> None:
    await ts.put("k", value)
    # The answer says where the value is posted; then the page is asked for.
    for calls in (1, 1, 0, 0):
        got, counted = await calls_of_get("k")
        assert counted == calls
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value


async def test_other_keys_of_the_page_are_found_after_one_get(store: None) -> None:
    for key in "ab":
        await ts.put(key, key)
    assert [await calls_of_get(key) for key in "aab"] == [("a", 1), ("a", 1), ("b", 1)]
    assert await calls_of_get("b") == ("b", 0)


async def test_what_is_got_is_the_callers_own(store: None) -> None:
    await ts.put("k", torch.zeros(4))
    for _ in range(4):
        (await ts.get("k")).fill_(7)
    into = torch.ones(4)
    assert await ts.get("k", into) is into
    assert torch.equal(into, torch.zeros(4))
    with pytest.raises(ts.DTypeMismatchError):
        await ts.get("k", torch.ones(4, dtype=torch.int64))


async def test_a_get_sees_every_put_that_has_returned(store: None, peers: Any) -> None:
    writer = peers.slice(gpus=0)
    silent = 0
    for number in range(100):
        await writer.put.call_one("k", number)
        got, calls = await calls_of_get("k")
        assert got == number
        silent += not calls
    assert silent >= 98


async def test_what_replaces_a_small_value_is_found(store: None) -> None:
    async def warm(value: torch.Tensor) -> None:
        await ts.put("k", value)
        for _ in range(3):
            assert torch.equal(await ts.get("k"), value)

    await warm(torch.ones(2))
    await warm(torch.ones(INLINE_BYTES // 4 - 64))  # small enough for a message, too large for its place
    await warm(torch.ones(LARGE))
    await warm(torch.zeros(2))
    await ts.delete("k")
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get("k")
    await warm(torch.full((2,), 5.0))


async def test_what_somebody_else_deletes_is_gone(store: None, peers: Any) -> None:
    for key in "ab":
        await ts.put(key, key)
        for _ in range(3):
            await ts.get(key)
    await peers.slice(gpus=0).forget.call_one("a")
    await ts.put("c", "c")
    assert await ts.get("c") == "c"  # where "a" was
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get("a")
    assert [await ts.get("b"), await calls_of_get("b")] == ["b", ("b", 0)]


async def test_a_rollback_is_seen() -> None:
    await ts.initialize(store_name="kept", keep_versions=2)
    for number in (1, 2):
        await ts.put("k", number, "kept")
        assert [await ts.get("k", store_name="kept") for _ in range(3)] == [number] * 3
    await ts.rollback("k", 1, store_name="kept")
    assert await ts.get("k", store_name="kept") == 1
    await ts.shutdown("kept")


async def test_a_store_that_is_initialized_anew_has_a_board_of_its_own() -> None:
    for number in range(3):
        await ts.initialize()
        with pytest.raises(ts.KeyNotFoundError):
            await ts.get("k")
        await ts.put("k", number)
        assert [await ts.get("k") for _ in range(3)] == [number] * 3
        await ts.shutdown()
    with pytest.raises(ts.StoreNotInitializedError):
        await ts.get("k")


async def test_who_polls_leaves_its_loop_to_others(store: None) -> None:
    await ts.put("flag", 0)

    async def poll() -> None:
        while not await ts.get("flag"):
            pass

    async def raise_it() -> None:
        await asyncio.sleep(0.05)
        await ts.put("flag", 1)

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(poll(), raise_it())


async def test_a_value_that_changes_all_the_time_is_never_a_mixture(store: None, peers: Any) -> None:
    await ts.put("k", torch.zeros(2000))
    polling = peers.slice(gpus=1).poll.call_one("k", 2000.0)
    await peers.slice(gpus=0).put_many.call_one("k", 2000, 2000)
    seen = await polling
    assert seen == sorted(seen)
    assert len(set(seen)) > 10


def look(board: ValueBoard, reader: BoardReader, key: str) -> tuple[int, bytes] | None:
    """What a reader finds, with every page that it needs."""
    page = reader.missing_page(key)
    if page is not None:
        reader.add_page(page, board.share(page))
    return reader.look(key)


def test_a_full_board_says_so_and_has_room_again_when_something_goes() -> None:
    board, reader = ValueBoard(), BoardReader()
    value = bytes(PAGE_NBYTES // 2 + 1)
    placed = []
    while (place := board.place(f"{len(placed)}", 1, value)) is not None:
        placed.append(place)
    assert len({(place.page, place.offset) for place in placed}) == len(placed) > 1
    reader.learn("0", placed[0])
    assert look(board, reader, "0") == (1, value)
    board.post("0", 2, b"")
    assert "0" not in board
    new = board.place("new", 5, value)
    assert new is not None
    assert new[:3] == placed[0][:3]
    assert look(board, reader, "0") is None
    reader.learn("new", new)
    assert look(board, reader, "new") == (5, value)
    board.close()
    assert look(board, reader, "new") is None


def test_a_record_that_is_being_written_is_not_taken() -> None:
    board, reader = ValueBoard(), BoardReader()
    place = board.place("k", 1, b"a" * 100)
    assert place is not None
    reader.learn("k", place)
    assert look(board, reader, "k") == (1, b"a" * 100)
    page = board._pages[place.page][0]
    whole = bytes(page[place.offset : place.offset + place.nbytes])
    board.post("k", 2, b"b" * 100)
    page[place.offset + 60 : place.offset + place.nbytes] = whole[60:]  # the second half is still the old one
    assert look(board, reader, "k") is None
    page[place.offset : place.offset + place.nbytes] = whole
    assert look(board, reader, "k") == (1, b"a" * 100)
    board.close()
