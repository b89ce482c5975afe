"""Tensors that go from one worker to another, or to several, with what is there in place of one when there is none."""

import time
from typing import Any

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import CommunicationError, CommunicationTimeoutError
from skipper.tensor_engine.shared.metadata import metadata
from skipper.tensor_engine.worker.groups import Group
from skipper.tensor_engine.worker.point_to_point import STAGED_FROM_NBYTES, transfer
from tests.tensor_engine.members import PATIENCE_S, Members, members_of, value
from tests.tensor_engine.transfers import table

SMALL, LARGE = 7, STAGED_FROM_NBYTES + 3
"""Elements of any dtype: below and above the size from which tensors go through shared memory."""


@pytest.fixture(scope="module")
def members(four: ProcMesh) -> Members:
    return members_of(four)


def send_all(group: Group, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[Any]:
    found = []
    for shape in shapes:
        for dtype in dtypes:
            mine = value(0, shape, dtype) if group.rank == 0 else None
            got = transfer(group, mine, metadata(shape, dtype))
            found.append(None if got is None else (got.view(-1).view(torch.uint8) if got.ndim else got))
    return found


@pytest.mark.parametrize("numbers", [(0, 1), (3, 1), (2, 0, 1), (1, 3, 2, 0)])
def test_readers_get_what_the_sender_has(members: Members, numbers: tuple[int, ...]) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (SMALL,), (3, SMALL), (LARGE,), (SMALL, LARGE), (2, 0)]
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16]
    sender, *readers = members.run(send_all, shapes, dtypes, members=numbers)
    assert sender == [None] * len(sender)
    wanted = [value(0, shape, dtype) for shape in shapes for dtype in dtypes]
    for got in readers:
        for one, want in zip(got, wanted, strict=True):
            assert torch.equal(one, want.view(-1).view(torch.uint8) if want.ndim else want)


def test_views_are_sent_by_their_elements_and_arrive_contiguous(members: Members) -> None:
    def run(group: Group, n: int) -> Any:
        whole = value(0, (n, 4), torch.complex64)
        views = [whole.t(), whole[::2, 1:3], whole.conj()]
        got = [transfer(group, view if group.rank == 0 else None, metadata(view.shape, view.dtype)) for view in views]
        return group.rank == 0 or all(
            one.is_contiguous() and torch.equal(one, view) for one, view in zip(got, views, strict=True)
        )

    for n in (SMALL, LARGE):
        assert members.run(run, n, members=(0, 1)) == [True, True]


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_sender_goes_on_while_its_reader_is_busy_and_may_change_what_it_has_sent(members: Members, n: int) -> None:
    def send(group: Group) -> float:
        tensor = torch.zeros(n)
        began = time.monotonic()
        for _ in range(2):
            transfer(group, tensor.add_(1), metadata((n,)))
        sent_s = time.monotonic() - began
        tensor.fill_(-1)
        return sent_s

    def read(group: Group) -> list[float]:
        return [float(transfer(group, None, metadata((n,))).unique()) for _ in range(2)]

    def meet(group: Group) -> None:
        transfer(group, torch.zeros(()) if group.rank == 0 else None, metadata(()))

    members.run(meet, members=(0, 1))
    first, second = (members.mesh.slice(**members.mesh.extent.point(rank)) for rank in (0, 1))
    first.run.call_one(send, (0, 1), "main", ()).get(PATIENCE_S)  # before the reader has begun
    assert second.run.call_one(read, (0, 1), "main", ()).get(PATIENCE_S) == [1.0, 2.0]


def test_many_transfers_in_a_row_arrive_in_order_whatever_their_size(members: Members) -> None:
    sizes = [SMALL, LARGE, LARGE, SMALL, LARGE, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, 2 * LARGE, LARGE, LARGE]

    def run(group: Group) -> bool:
        good = True
        for number, n in enumerate(sizes * 3):
            got = transfer(group, torch.full((n,), number) if group.rank == 0 else None, metadata((n,), torch.int64))
            good = good and (group.rank == 0 or bool((got == number).all()))
        return good

    assert members.run(run, members=(0, 1)) == [True] * 2
    assert members.run(run, members=(2, 3, 0, 1)) == [True] * 4


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_what_stands_for_a_tensor_arrives_in_its_place(members: Members, n: int) -> None:
    def run(group: Group) -> list[Any]:
        there = [("reason", 1), torch.ones(n), ("another", 2)]
        return [transfer(group, each if group.rank == 0 else None, metadata((n,))) for each in there]

    sender, *readers = members.run(run)
    assert sender == [None] * 3
    for first, tensor, last in readers:
        assert (first, last) == (("reason", 1), ("another", 2))
        assert torch.equal(tensor, torch.ones(n))


def test_a_value_that_is_not_as_expected_is_an_error_on_both_sides(members: Members) -> None:
    def run(group: Group) -> str:
        with pytest.raises(CommunicationError) as caught:
            transfer(group, torch.zeros(4) if group.rank == 0 else None, metadata((3,)))
        return str(caught.value)

    for text in members.run(run, members=(0, 1)):
        assert "where the script expects float32[3]" in text


def test_both_ways_are_measured_beside_each_other(members: Members) -> None:
    ((size, medians),) = table(members, [4096], 4)
    assert size == 4096
    assert list(medians) == ["memcpy", "gloo", "shared", "reduce, gloo", "reduce, shared", "gloo's own"]
    assert all(taken_s > 0 for taken_s in medians.values())


def test_a_sender_that_does_not_come_in_time_is_an_error(four: ProcMesh) -> None:
    def read(group: Group) -> bool:
        if group.rank == 1:
            with pytest.raises(CommunicationTimeoutError):
                transfer(group, None, metadata((3,)))
        return True

    members = members_of(four, timeout_s=1.0)
    members.run(lambda group: group.rank, members=(0, 1))
    assert members.run(read, members=(0, 1)) == [True, True]
