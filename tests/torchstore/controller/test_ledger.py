"""The account of arenas that many values share: what is in use, what is given back, when the whole is idle or gone."""

import pytest

from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.algebra.sections import Section, open_section_id, section_id
from skipper.torchstore.controller.ledger import Ledger, SharedArenas
from skipper.torchstore.support.process import ProcessId, this_process

SIZE = 16384


class Account:
    """An account of one arena of some sections, and what it has told the volume."""

    def __init__(self, sections: int) -> None:
        self.freed: list[str] = []
        self.cut: list[str] = []
        self.writer: ProcessId = this_process()
        self.ledger = Ledger(lambda _volume, arena: self.freed.append(arena))
        self.shared = SharedArenas(self.ledger, lambda _volume, names: self.cut.extend(names))
        self.arena = Binding("arena", "snapshot", "0", ())
        self.sections = [Section(self.arena, number * SIZE, SIZE) for number in range(sections)]
        for section in self.sections:
            self.shared.use(self.writer, section)


def test_an_arena_of_which_all_is_overwritten_in_one_step_is_idle_and_whole() -> None:
    account = Account(3)
    for section in account.sections:
        account.shared.idle(account.writer, section)
    account.shared.give_back()
    (retired,) = account.ledger.take_retired(account.writer)
    assert (retired.binding, retired.gone) == ("arena", False)
    assert (account.freed, account.cut) == ([], [])


def test_what_dies_of_an_arena_is_given_back_neighbours_together() -> None:
    account = Account(5)
    for number in (3, 0, 1):
        account.shared.idle(account.writer, account.sections[number])
    assert account.cut == []
    account.shared.give_back()
    assert account.cut == [section_id("arena", 0, 2 * SIZE), section_id("arena", 3 * SIZE, SIZE)]
    assert account.freed == []
    assert account.ledger.take_retired(account.writer) == ()


@pytest.mark.parametrize("deleted", [False, True])
def test_an_arena_with_holes_is_freed_with_its_last_section(deleted: bool) -> None:
    account = Account(2)
    account.shared.idle(account.writer, account.sections[0])
    account.shared.give_back()
    if deleted:
        account.shared.gone([(account.writer, account.sections[1])])
    else:
        account.shared.idle(account.writer, account.sections[1])
    account.shared.give_back()
    assert account.freed == ["arena"]
    (retired,) = account.ledger.take_retired(account.writer)
    assert retired.gone
    assert account.ledger.is_freed(account.arena)


def test_an_arena_whose_last_key_is_deleted_is_freed() -> None:
    account = Account(2)
    account.shared.gone([(account.writer, section) for section in account.sections])
    account.shared.give_back()
    assert (account.freed, account.cut) == (["arena"], [])


def test_a_section_of_tied_values_is_in_use_until_the_last_of_them_goes() -> None:
    account = Account(2)
    account.shared.use(account.writer, account.sections[0])
    account.shared.idle(account.writer, account.sections[0])
    account.shared.give_back()
    assert account.cut == []
    account.shared.idle(account.writer, account.sections[0])
    account.shared.give_back()
    assert account.cut == [section_id("arena", 0, SIZE)]


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_lost_reader_may_still_look_at_stays_until_its_whole_arena_is_dropped(tied: bool) -> None:
    account = Account(3)
    read, other, last = account.sections
    if tied:
        account.shared.use(account.writer, read)
    account.shared.gone([(account.writer, read)], {read.id})
    if tied:
        account.shared.idle(account.writer, read)
    account.shared.idle(account.writer, other)
    account.shared.give_back()
    assert (account.cut, account.freed) == ([other.id], [])
    account.shared.idle(account.writer, last)
    account.shared.give_back()
    assert (account.cut, account.freed) == ([other.id], ["arena"])
    assert [retired.gone for retired in account.ledger.take_retired(account.writer)] == [True]


def test_an_arena_at_which_a_lost_reader_may_still_look_is_not_written_again() -> None:
    account = Account(2)
    account.shared.gone([(account.writer, account.sections[0])], {account.sections[0].id})
    account.shared.idle(account.writer, account.sections[1])
    account.shared.give_back()
    assert (account.cut, account.freed) == ([], ["arena"])


def test_memory_that_is_one_values_alone_goes_straight_to_the_ledger() -> None:
    account = Account(1)
    alone = Binding("alone", "snapshot", "0", ())
    account.shared.idle(account.writer, alone)
    assert [retired.binding for retired in account.ledger.take_retired(account.writer)] == ["alone"]
    account.shared.gone([(account.writer, alone)])
    assert account.freed == ["alone"]


def test_the_ids_of_stretches_and_of_whole_arenas_are_told_apart() -> None:
    assert open_section_id(section_id("ab12", 4096, 8192)) == ("ab12", 4096, 8192)
    assert open_section_id("ab12") == ("ab12", 0, 0)
