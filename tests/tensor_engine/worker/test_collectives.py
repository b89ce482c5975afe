"""What workers do together, in four processes, against torch's own reduction of the same values in this one."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import CommunicationError, CommunicationTimeoutError, ReductionError
from skipper.tensor_engine.shared.metadata import metadata
from skipper.tensor_engine.shared.reductions import require
from skipper.tensor_engine.worker import collectives
from skipper.tensor_engine.worker.groups import Group
from tests.tensor_engine.members import Members, members_of, value

SIZE = 4
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = {
    "sum": FLOATS + INTEGERS + COMPLEX,
    "avg": FLOATS + COMPLEX,
    "product": FLOATS + INTEGERS + COMPLEX,
    "min": (*FLOATS, *INTEGERS, torch.bool),
    "max": (*FLOATS, *INTEGERS, torch.bool),
    "band": (*INTEGERS, torch.bool),
    "bor": (*INTEGERS, torch.bool),
    "bxor": (*INTEGERS, torch.bool),
}
LARGE = 100_003
"""Elements that go through shared memory, and that no number of workers divides."""


@pytest.fixture(scope="module")
def members(four: ProcMesh) -> Members:
    return members_of(four)


def expected_reduction(kind: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    rows = torch.stack(list(values))
    # Low precision is accumulated in a higher one by each of these, as torch does it.
    plain: dict[str, Callable[[], torch.Tensor]] = {
        "sum": lambda: rows.sum(0, dtype=rows.dtype),
        "avg": lambda: rows.mean(0),
        "product": lambda: rows.prod(0, dtype=rows.dtype),
        "min": lambda: rows.amin(0),
        "max": lambda: rows.amax(0),
        "band": lambda: functools.reduce(torch.bitwise_and, values),
        "bor": lambda: functools.reduce(torch.bitwise_or, values),
        "bxor": lambda: functools.reduce(torch.bitwise_xor, values),
    }
    return plain[kind]()


def reduce_all(group: Group, work: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
    return [
        collectives.all_reduce(group, value(group.rank, shape, dtype), metadata(shape, dtype), kind)
        for kind, dtype, shape in work
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_every_reduction_of_every_dtype_gives_what_torch_gives_in_one_process(members: Members, size: int) -> None:
    work = [(kind, dtype, (5, 3)) for kind, dtypes in DTYPES.items() for dtype in dtypes]
    found = members.run(reduce_all, work, members=range(size))
    for index, (kind, dtype, shape) in enumerate(work):
        wanted = expected_reduction(kind, [value(rank, shape, dtype) for rank in range(size)])
        for rank in range(size):
            torch.testing.assert_close(found[rank][index], wanted, msg=lambda text, kind=kind: f"{kind}: {text}")
            assert torch.equal(found[rank][index], found[0][index])  # all have the same bits


@pytest.mark.parametrize("size", [2, 4])
def test_shapes_of_all_sizes_are_reduced_and_come_out_contiguous(members: Members, size: int) -> None:
    work = [
        ("sum", dtype, shape)
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
        for shape in ((), (0,), (3, 0, 2), (1,), (7,), (LARGE,), (33, 1001))
    ]
    found = members.run(reduce_all, work, members=range(size))
    for index, (kind, dtype, shape) in enumerate(work):
        wanted = expected_reduction(kind, [value(rank, shape, dtype) for rank in range(size)])
        for rank in range(size):
            assert found[rank][index].is_contiguous()
            torch.testing.assert_close(found[rank][index], wanted)


def reduce_in_pieces(group: Group, n: int) -> torch.Tensor:
    before, collectives.SEGMENT_NBYTES = collectives.SEGMENT_NBYTES, 4096
    try:
        mine = value(group.rank, (n,), torch.float32)
        done = collectives.all_reduce(group, mine, metadata((n,)), "sum")
        scattered = collectives.reduce_scatter(group, mine.repeat(group.size), metadata((n * group.size,)), "sum")
        gathered = collectives.all_gather(group, mine, metadata((n,)))
        crossed = collectives.all_to_all(group, mine.repeat(group.size), metadata((n * group.size,)))
        assert torch.equal(gathered.view(-1), crossed)
        assert torch.equal(scattered, done)
        return done
    finally:
        collectives.SEGMENT_NBYTES = before


@pytest.mark.parametrize("size", [2, 4])
def test_large_values_go_in_pieces_that_fit_together_again(members: Members, size: int) -> None:
    n = 20_001
    wanted = expected_reduction("sum", [value(rank, (n,), torch.float32) for rank in range(size)])
    for found in members.run(reduce_in_pieces, n, members=range(size)):
        torch.testing.assert_close(found, wanted)


def reduce_views(group: Group, n: int) -> list[torch.Tensor]:
    mine = value(group.rank, (n, 6), torch.float32)
    views = [mine.t(), mine[::2, 1:4], mine[:1].expand(n, 6), value(group.rank, (n,), torch.complex64).conj()]
    return [collectives.all_reduce(group, view, metadata(view.shape, view.dtype), "sum") for view in views]


@pytest.mark.parametrize("n", [8, 30_000])
def test_views_are_reduced_by_their_elements(members: Members, n: int) -> None:
    values = [value(rank, (n, 6), torch.float32) for rank in range(SIZE)]
    total = expected_reduction("sum", values)
    conjugated = expected_reduction("sum", [value(rank, (n,), torch.complex64).conj() for rank in range(SIZE)])
    for found in members.run(reduce_views, n):
        for mine, wanted in zip(found, [total.t(), total[::2, 1:4], total[:1].expand(n, 6), conjugated], strict=True):
            torch.testing.assert_close(mine, wanted)


def test_one_nan_makes_minimum_and_maximum_nan_on_all_ranks(members: Members) -> None:
    def reduce(group: Group) -> list[torch.Tensor]:
        mine = torch.tensor([float("nan") if group.rank == 2 else 1.0, float(group.rank)])
        return [collectives.all_reduce(group, mine, metadata((2,)), kind) for kind in ("min", "max")]

    for low, high in members.run(reduce):
        torch.testing.assert_close(low, torch.tensor([float("nan"), 0.0]), equal_nan=True)
        torch.testing.assert_close(high, torch.tensor([float("nan"), 3.0]), equal_nan=True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("columns", [3, 40_000])
def test_scatter_gather_and_all_to_all_of_every_kind_of_element(members: Members, size: int, columns: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
    shape = (2 * size, columns)

    def run(group: Group) -> list[list[torch.Tensor]]:
        found = []
        for dtype in dtypes:
            mine, meta = value(group.rank, shape, dtype), metadata(shape, dtype)
            moved = [collectives.all_gather(group, mine, meta), collectives.all_to_all(group, mine, meta)]
            found.append([each.view(torch.uint8) for each in moved])  # torch cannot pickle float8 tensors
            if dtype in (torch.float32, torch.int16):
                found[-1].append(collectives.reduce_scatter(group, mine, meta, "sum"))
        return found

    results = members.run(run, members=range(size))
    for index, dtype in enumerate(dtypes):
        values = [value(rank, shape, dtype).view(torch.uint8) for rank in range(size)]
        for rank in range(size):
            part = slice(2 * rank, 2 * rank + 2)
            gathered, crossed, *scattered = results[rank][index]
            assert torch.equal(gathered, torch.stack(values))
            assert torch.equal(crossed, torch.cat([each[part] for each in values]))
            for reduced in scattered:
                total = expected_reduction("sum", [value(each, shape, dtype) for each in range(size)])
                torch.testing.assert_close(reduced, total[part])


def test_only_the_ranks_that_need_a_result_get_one(members: Members) -> None:
    def run(group: Group, shape: tuple[int, ...]) -> list[Any]:
        mine, meta = value(group.rank, shape, torch.float32), metadata(shape)
        return [
            collectives.all_reduce(group, mine, meta, "sum", to=[1, 3]),
            collectives.all_gather(group, mine, meta, to=[2]),
        ]

    for shape in ((3,), (LARGE,)):
        values = [value(rank, shape, torch.float32) for rank in range(SIZE)]
        for rank, (reduced, gathered) in enumerate(members.run(run, shape)):
            assert (reduced is None, gathered is None) == (rank not in (1, 3), rank != 2)
            if reduced is not None:
                torch.testing.assert_close(reduced, expected_reduction("sum", values))
            if gathered is not None:
                assert torch.equal(gathered, torch.stack(values))


def test_results_share_no_memory_with_the_values_nor_with_each_other(members: Members) -> None:
    def run(group: Group, n: int) -> bool:
        mine, meta = torch.ones(n), metadata((n,))
        first = collectives.all_reduce(group, mine, meta, "sum")
        second = collectives.all_reduce(group, mine, meta, "max")
        first.zero_()
        alone = collectives.all_reduce(group, mine, meta, "sum")
        return bool((mine == 1).all() and (second == 1).all() and (alone == group.size).all())

    for n in (5, LARGE):
        for size in (1, 2, 4):
            assert all(members.run(run, n, members=range(size)))


@pytest.mark.parametrize("n", [8, LARGE * SIZE])
def test_a_rank_without_a_value_takes_part_and_all_get_what_it_has_in_its_place(members: Members, n: int) -> None:
    def run(group: Group) -> list[Any]:
        meta = metadata((n,))
        # Two have none: what the first of them has counts.
        mine: Any = torch.ones(n) if group.rank in (0, 2) else ("reason", group.rank)
        poisoned = [
            *(collectives.all_reduce(group, mine, meta, kind) for kind in DTYPES),
            collectives.all_reduce(group, mine, meta, "sum", to=[0]),
            collectives.all_gather(group, mine, meta),
            collectives.all_gather(group, mine, meta, to=[3]),
            collectives.reduce_scatter(group, mine, meta, "sum"),
            collectives.all_to_all(group, mine, meta),
        ]
        return [poisoned, collectives.all_reduce(group, torch.ones(n), meta, "sum")]

    for poisoned, healthy in members.run(run):
        assert poisoned == [("reason", 1)] * len(poisoned)
        torch.testing.assert_close(healthy, torch.full((n,), float(SIZE)))  # the group goes on


BUNDLE = [
    metadata((3,)),
    metadata((2, 5)),
    metadata((0,)),
    metadata((LARGE,)),
    metadata((7,), torch.bfloat16),
    metadata((4,), torch.bfloat16),
    metadata((), torch.int64),
]


def reduce_bundle(group: Group, kind: str, missing: int | None, most: int) -> list[list[Any]]:
    """All of `BUNDLE`, twice: into new tensors, and into the values, every second of which is not contiguous."""
    before, collectives.BUNDLE_NBYTES = collectives.BUNDLE_NBYTES, most
    try:
        found = []
        for in_place in (False, True):
            values: list[Any] = [value(group.rank, meta.shape, meta.dtype) for meta in BUNDLE]
            if in_place:
                values = [
                    each if place % 2 else each.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
                    for place, each in enumerate(values)
                ]
            if missing is not None and group.rank == 1:
                values[missing] = ("reason", group.rank)
            into = [each if in_place and isinstance(each, torch.Tensor) else None for each in values]
            results = collectives.all_reduce_together(group, values, BUNDLE, kind, into=into)
            if in_place:
                for target, result in zip(into, results, strict=True):
                    assert not isinstance(result, torch.Tensor) or result.data_ptr() == target.data_ptr()
            found.append(results)
        return found
    finally:
        collectives.BUNDLE_NBYTES = before


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("most", [0, 64, 1 << 22])
def test_values_that_are_reduced_together_give_what_they_give_one_by_one(
    members: Members, size: int, most: int
) -> None:
    for kind in ("sum", "max"):
        for found in members.run(reduce_bundle, kind, None, most, members=range(size)):
            for results in found:
                for meta, result in zip(BUNDLE, results, strict=True):
                    wanted = expected_reduction(kind, [value(rank, meta.shape, meta.dtype) for rank in range(size)])
                    torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("missing", [1, 3])
def test_what_one_rank_lacks_of_those_that_go_together_the_others_lack_alone(members: Members, missing: int) -> None:
    for found in members.run(reduce_bundle, "sum", missing, 1 << 22):
        for results in found:
            assert results[missing] == ("reason", 1)
            for place, (meta, result) in enumerate(zip(BUNDLE, results, strict=True)):
                if place != missing:
                    wanted = expected_reduction("sum", [value(rank, meta.shape, meta.dtype) for rank in range(SIZE)])
                    torch.testing.assert_close(result, wanted)


def test_a_value_that_is_not_as_expected_is_an_error_beside_those_that_are(members: Members) -> None:
    def run(group: Group) -> list[Any]:
        values = [torch.ones(3), torch.zeros(4) if group.rank == 1 else torch.zeros(3), torch.ones(2)]
        expected = [metadata((3,)), metadata((3,)), metadata((2,))]
        return collectives.all_reduce_together(group, values, expected, "sum", into=[None] * 3)

    for first, second, third in members.run(run):
        assert (first.tolist(), third.tolist()) == ([SIZE] * 3, [SIZE] * 2)
        assert isinstance(second, CommunicationError)
        assert "where the script expects float32[3]" in str(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_the_average_of_two_is_that_of_torch_to_the_last_bit(members: Members, dtype: torch.dtype) -> None:
    def run(group: Group) -> torch.Tensor:
        mine = value(group.rank, (1000,), dtype) * (600 if dtype == torch.float16 else 1 / 3)
        return collectives.all_reduce(group, mine, metadata((1000,), dtype), "avg")

    rows = [value(rank, (1000,), dtype) * (600 if dtype == torch.float16 else 1 / 3) for rank in range(2)]
    for found in members.run(run, members=range(2)):
        assert torch.equal(found, torch.stack(rows).mean(0))


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(3, dtype=torch.int32)])
def test_a_value_that_is_not_as_expected_is_an_error_on_all_ranks(members: Members, wrong: torch.Tensor) -> None:
    def run(group: Group) -> tuple[str, float]:
        mine = wrong if group.rank == 1 else torch.zeros(3)
        with pytest.raises(CommunicationError) as caught:
            collectives.all_reduce(group, mine, metadata((3,)), "sum")
        return str(caught.value), float(collectives.all_reduce(group, torch.ones(()), metadata(()), "sum"))

    for text, after in members.run(run):
        assert "where the script expects float32[3]" in text
        assert after == SIZE


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("sum", torch.bool),
        ("avg", torch.int32),
        ("max", torch.complex64),
        ("bor", torch.float32),
        ("product", torch.float8_e4m3fn),
        ("sum", torch.uint16),
    ],
)
def test_a_reduction_that_means_nothing_for_a_dtype_is_refused(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(ReductionError, match=kind):
        require(kind, dtype)


def test_an_unknown_reduction_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match=r"no reduction 'mean'.*avg"):
        require("mean", torch.float32)


def test_streams_have_groups_of_their_own_and_groups_of_different_ranks_do_not_meet(members: Members) -> None:
    def total(group: Group) -> float:
        return float(collectives.all_reduce(group, torch.tensor(float(group.members[group.rank])), metadata(()), "sum"))

    for stream in ("main", "other"):
        assert members.run(total, stream=stream) == [6.0] * 4
        assert members.run(total, members=[1, 3], stream=stream) == [4.0] * 2
        assert members.run(total, members=[2, 0, 1], stream=stream) == [3.0] * 3


def test_a_rank_that_does_not_come_in_time_is_an_error_and_then_the_group_is_closed(four: ProcMesh) -> None:
    def come_late(group: Group) -> list[str]:
        errors = []
        for _ in range(2):
            if group.rank == 0:
                break
            with pytest.raises(CommunicationError) as caught:
                collectives.all_reduce(group, torch.ones(3), metadata((3,)), "sum")
            errors.append(type(caught.value).__name__)
        return errors

    members = members_of(four, timeout_s=1.0)
    members.run(lambda group: group.rank, members=(0, 1))
    began = time.monotonic()
    first, second = members.run(come_late, members=(0, 1))
    assert time.monotonic() - began < 10
    assert (first, second) == ([], [CommunicationTimeoutError.__name__, CommunicationError.__name__])


def test_a_rank_that_fails_in_the_middle_lets_nobody_wait(members: Members) -> None:
    def run(group: Group) -> str:
        def fail(*args: object) -> None:
            raise MemoryError("no room")

        before = collectives.combine
        if group.rank == 2:
            collectives.combine = fail
        try:
            with pytest.raises((CommunicationError, MemoryError)) as caught:
                collectives.all_reduce(group, torch.ones(LARGE), metadata((LARGE,)), "sum")
        finally:
            collectives.combine = before
        return type(caught.value).__name__

    began = time.monotonic()
    found = members.run(run, stream="doomed")
    assert time.monotonic() - began < 10
    assert found == ["CommunicationError", "CommunicationError", "MemoryError", "CommunicationError"]
