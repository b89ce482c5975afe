"""A word never has the number of an earlier buffer."""

import ctypes
import gc

from skipper.dataplane.epochs import PAGE_BYTES, WORD, EpochTable
from skipper.dataplane.identity import new_owner


def load_word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def test_a_word_holds_its_number_until_it_is_released() -> None:
    table = EpochTable(new_owner())
    epoch = table.acquire()
    assert load_word(epoch.address) == epoch.value
    table.release(epoch)
    assert load_word(epoch.address) != epoch.value


def test_a_word_used_again_has_another_number() -> None:
    table = EpochTable(new_owner())
    seen = set()
    for _ in range(100):
        epoch = table.acquire()
        assert (epoch.page.token, epoch.slot, epoch.value) not in seen
        seen.add((epoch.page.token, epoch.slot, epoch.value))
        table.release(epoch)


def test_live_words_are_different_words_across_pages() -> None:
    table = EpochTable(new_owner())
    count = PAGE_BYTES // WORD + 10
    epochs = [table.acquire() for _ in range(count)]
    assert len({epoch.address for epoch in epochs}) == count
    assert len({epoch.page.token for epoch in epochs}) == 2
    gc.collect()
    assert all(load_word(epoch.address) == epoch.value for epoch in epochs[:: count // 50])


def test_two_processes_begin_at_different_numbers() -> None:
    assert EpochTable(new_owner()).acquire().value != EpochTable(new_owner()).acquire().value
