"""Which group a process publishes in, and which put it is."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skipper import torchstore as ts
from skipper.torchstore.clients.membership import Membership, PutCounts, dismiss, enrol, holds_all, membership
from skipper.torchstore.protocol.messages import Published
from skipper.torchstore.protocol.origin import (
    ALONE,
    SOLE,
    Origin,
    Turn,
    read_publisher,
)
from tests.torchstore.tensors.test_local_tensors import rank_of


@pytest.fixture
def roster() -> Iterator[None]:
    enrol("spmd here", 1, 4)
    yield
    dismiss()


def test_a_process_without_a_group_publishes_alone() -> None:
    assert membership().origin == SOLE


@pytest.mark.usefixtures("roster")
def test_the_process_group_goes_before_the_ranks_of_spmd() -> None:
    assert membership().origin == Origin("spmd here", 1, 4)
    with rank_of(2, 8):
        assert (membership().origin.rank, membership().origin.size) == (2, 8)
    assert membership().origin == Origin("spmd here", 1, 4)
    dismiss()
    assert membership().origin == SOLE


def test_what_a_process_publishes_alone_travels_by_name() -> None:
    assert pickle.loads(pickle.dumps(ALONE)) is ALONE
    turn = Turn(Origin("group", 1, 2), "session", 3, alone=None, refused=None)
    assert pickle.loads(pickle.dumps(turn)) == turn


def test_a_group_of_one_is_none() -> None:
    with rank_of(0, 1):
        assert membership().origin == SOLE


def test_members_agree_on_a_name_and_another_group_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    for store in (dist.HashStore(), dist.HashStore()):
        for rank in (0, 1):  # in turn, as two processes over the same store
            with rank_of(rank, 2):
                monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
                names.append(membership().origin.group)
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert names[0] != names[2]


def test_a_process_group_that_is_made_anew_counts_anew() -> None:
    found: list[Membership] = []
    for _ in range(2):
        with rank_of(1, 2):
            found += [membership(), membership()]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0].entered != found[2].entered


@pytest.mark.parametrize("publisher", [(2, 2), (-1, 2), (0,), 3, ("0", 1), (0, 1, 2)])
def test_an_impossible_publisher_is_refused(publisher: Any) -> None:
    with pytest.raises(ValueError, match="publisher is"):
        read_publisher(publisher)


def test_an_origin_says_the_group_too_and_is_checked_as_well() -> None:
    assert read_publisher(Origin("second try", 1, 2)) == Origin("second try", 1, 2)
    assert read_publisher((1, 2)) == Origin("", 1, 2)
    with pytest.raises(ValueError, match="publisher is"):
        Origin("g", 2, 2)
    with pytest.raises(ValueError, match="name of a group"):
        Origin(3, 0, 2)  # type: ignore[arg-type]


def test_puts_are_counted_by_key_and_group() -> None:
    sequences = PutCounts()
    here, there = Membership(Origin("a", 1, 2)), Membership(Origin("b", 1, 2))
    turns = [sequences.next(key, member, None, alone=True) for key, member in [("k", here), ("k", here), ("j", here)]]
    assert [turn.number for turn in turns] == [1, 2, 1]
    assert turns[0].session == turns[1].session
    assert sequences.next("k", there, None, alone=True).number == 1
    assert sequences.next("k", Membership(SOLE), None, alone=True) is ALONE


def test_after_a_failure_only_a_version_says_which_step_it_is() -> None:
    sequences, member = PutCounts(), Membership(Origin("a", 0, 2))
    turn = sequences.next("k", member, None, alone=False)
    sequences.failed("k", member, turn, ts.LateShareError("k", 0, 2, 1, "given up"))  # the controller knows of it
    turn = sequences.next("k", member, None, alone=False)
    sequences.failed("k", member, turn, ts.StoreTimeoutError("after 1 s"))
    with pytest.raises(ts.OutOfStepError, match="put 2 of rank 0 of 2 failed"):
        sequences.next("k", member, None, alone=False)
    turn = sequences.next("k", member, 7, alone=False)
    sequences.settled("k", member, Published(7, ready=True, step=5))
    assert sequences.next("k", member, None, alone=False).number == 6


def test_a_state_dict_without_dtensors_holds_all() -> None:
    assert holds_all({"w": torch.ones(2), "step": 3}) is True
    assert holds_all({}) is None
