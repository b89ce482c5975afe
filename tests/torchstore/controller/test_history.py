"""The state machine of versions: pure, so no process, no memory and no clock is needed to test it."""

from math import prod

import pytest

from skipper.torchstore.algebra.layout import Layout, Replicate, Shard
from skipper.torchstore.algebra.manifest import Binding, Digests, Manifest, MeshPosition, Mode, TensorItem
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.version import Contribution
from skipper.torchstore.errors import (
    KeyNotFoundError,
    LateShareError,
    PartiallyPublishedError,
    PublisherLostError,
    ShareMismatchError,
    SourceChangedError,
    VersionExistsError,
    VersionNotFoundError,
    VolumeLostError,
)
from skipper.torchstore.protocol.messages import Selector
from skipper.torchstore.protocol.origin import ALONE, Origin, Turn
from skipper.torchstore.support.process import ProcessId

LATEST = Selector()
READER = ProcessId("here", 900, 1)


def process(rank: int, start: int = 1) -> ProcessId:
    return ProcessId("here", 100 + rank, start)


def manifest(layout: Layout, coordinate: tuple[int, ...], *, dtype: str = "torch.float32") -> Manifest:
    part = MeshPosition(coordinate, layout.mesh_shape, layout.sharded_axes())
    item = TensorItem(dtype, layout.global_shape, layout.pieces(coordinate), 0, 0, (4,), 4)
    return Manifest.of("value", part, {"": item}, (), {})


ROWS = Layout((4,), (2,), (Shard(0),))
ONE = Layout((4,), (1,), (Shard(0),))
REPLICATED_ROWS = Layout((4,), (2, 2), (Replicate(), Shard(0)))


def shard(
    rank: int,
    *,
    layout: Layout = ROWS,
    mode: Mode = "snapshot",
    binding: str | None = None,
    start: int = 1,
    dtype: str = "torch.float32",
    step: int = 1,
    group: str = "",
    digests: Digests | None = None,
) -> Contribution:
    """The share of a rank in a group of as many ranks as the mesh has; each process is one session."""
    coordinate = list(layout.coordinates())[rank]
    described = manifest(layout, coordinate, dtype=dtype)
    memory = Binding(binding or f"memory-{rank}", mode, "v0" if mode == "snapshot" else "", ())
    origin = Origin(group, rank, prod(layout.mesh_shape))
    turn = Turn(origin, f"{group} {rank} {start}", step) if origin.size > 1 else ALONE
    part = described.part
    return Contribution(process(rank, start), part, described, memory, turn=turn, digests=digests or {})


def inline(value: bytes = b"x") -> Contribution:
    return Contribution(process(0), MeshPosition(), None, None, inline=value)


def test_a_version_is_visible_only_when_every_shard_is_there() -> None:
    history = History("w")
    first = history.contribute(shard(0), None)
    with pytest.raises(PartiallyPublishedError, match="rank 1 of 2"):
        history.select(LATEST)
    assert history.contribute(shard(1), None) is first
    assert history.select(LATEST) is first


def test_an_old_version_stays_readable_while_the_next_is_staged() -> None:
    history = History("w")
    for rank in (0, 1):
        one = history.contribute(shard(rank, binding=f"a{rank}"), None)
    two = history.contribute(shard(0, binding="b0", step=2), None)
    assert two.number == 2
    assert history.select(LATEST) is one


def test_a_rank_that_runs_ahead_opens_the_next_version_and_others_catch_up_in_order() -> None:
    history = History("w")
    assert [history.contribute(shard(0, step=step), None).number for step in (1, 2, 3)] == [1, 2, 3]
    assert [history.contribute(shard(1, step=step), None).number for step in (1, 2)] == [1, 2]
    assert history.newest is not None
    assert history.newest.number == 2


def test_memory_is_freed_when_the_last_reader_of_a_replaced_version_leaves() -> None:
    history = History("w")
    one = history.contribute(shard(0, binding="a0"), None)
    history.contribute(shard(1, binding="a1"), None)
    lease = history.lease(one, READER)
    for rank in (0, 1):
        history.contribute(shard(rank, binding=f"b{rank}", step=2), None)
    assert history.reap() == []
    history.release(lease)
    assert {binding.id for _, binding in history.reap()} == {"a0", "a1"}


def test_memory_shared_with_the_next_version_is_not_freed() -> None:
    history = History("w")
    for step in (1, 2):
        for rank in (0, 1):
            history.contribute(shard(rank, mode="direct", step=step), None)
    assert history.reap() == []


def test_a_step_of_sharded_tensors_is_whole_when_all_ranks_have_put_replicas_too() -> None:
    history = History("w")
    for rank in (0, 1, 3):
        history.contribute(shard(rank, layout=REPLICATED_ROWS), None)
    with pytest.raises(PartiallyPublishedError, match="rank 2 of 4"):
        history.select(LATEST)
    one = history.contribute(shard(2, layout=REPLICATED_ROWS), None)
    assert history.select(LATEST) is one
    assert history.contribute(shard(0, layout=REPLICATED_ROWS, step=2), None).number == 2


def test_another_dtype_or_shape_is_refused_and_the_step_given_up() -> None:
    history = History("w")
    for step, (other, said) in enumerate(
        [
            (shard(1, dtype="torch.int32"), r"rank 1 put int32\[4\] and not float32\[4\] as rank 0 did"),
            (
                shard(1, layout=Layout((6,), (2,), (Shard(0),)), step=2),
                r"rank 1 put float32\[6\] and not float32\[4\] .* shape=",
            ),
        ],
        1,
    ):
        history.contribute(shard(0, step=step), None)
        with pytest.raises(ShareMismatchError, match=said):
            history.contribute(other, None)
        assert history.staging == {}
    assert history.contribute(inline(), None).number == 3
    newest = history.select(LATEST)
    assert newest is not None
    assert newest.number == 3


def test_a_restarted_rank_abandons_what_its_predecessor_began() -> None:
    history = History("w")
    history.contribute(shard(0, binding="old"), None)
    history.contribute(shard(0, binding="new", start=2), None)
    assert {binding.id for _, binding in history.reap()} == {"old"}
    version = history.contribute(shard(1), None)
    assert version.number == 2
    assert history.select(LATEST) is version


def test_a_rank_that_dies_before_it_has_put_leaves_the_last_version_readable() -> None:
    history = History("w")
    for rank in (0, 1):
        one = history.contribute(shard(rank, binding=f"a{rank}"), None)
    history.contribute(shard(0, binding="b0", step=2), None)
    history.process_died(process(1), "killed")
    assert history.select(LATEST) is one
    assert {binding.id for _, binding in history.reap()} == {"b0"}
    with pytest.raises(LateShareError, match="rank 1 of 2 is gone: killed"):
        history.contribute(shard(0, binding="b0", step=3), None)


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
def test_what_a_rank_has_put_outlives_it_if_it_is_in_a_volume(mode: Mode) -> None:
    history = History("w")
    history.contribute(shard(0, mode=mode), None)
    history.process_died(process(0), "killed")
    if mode == "snapshot":
        assert history.contribute(shard(1, mode=mode), None) is history.select(LATEST)
    else:
        with pytest.raises(LateShareError, match="killed"):
            history.contribute(shard(1, mode=mode), None)


def test_versions_given_by_number_are_immutable_and_only_go_up() -> None:
    history = History("w")
    history.contribute(shard(0), 7)
    history.contribute(shard(1), 7)
    for number in (7, 3):
        with pytest.raises(VersionExistsError, match="newest one is 7"):
            history.contribute(shard(0, step=2), number)
    assert history.contribute(shard(0, step=2), None).number == 8


def test_putting_a_staged_shard_again_replaces_it_and_frees_the_first() -> None:
    history = History("w")
    history.contribute(shard(0, binding="first"), 5)
    history.contribute(shard(0, binding="second", step=2), 5)
    assert [binding.id for _, binding in history.reap()] == ["first"]


def test_older_unfinished_versions_are_dropped_when_a_newer_one_is_ready() -> None:
    history = History("w")
    history.contribute(shard(0, binding="a0"), 1)
    for rank in (0, 1):
        history.contribute(shard(rank, binding=f"b{rank}", step=2), 2)
    assert history.staging == {}
    assert [binding.id for _, binding in history.reap()] == ["a0"]


def test_selectors_name_exact_newest_and_next_versions() -> None:
    history = History("w", keep=2)
    for _ in range(3):
        history.contribute(inline(), None)
    exact, after = history.select(Selector(exact=2)), history.select(Selector(newer_than=2))
    assert exact is not None
    assert after is not None
    assert (exact.number, after.number) == (2, 3)
    assert history.select(Selector(newer_than=3)) is None
    with pytest.raises(VersionNotFoundError, match="ready versions: 2, 3"):
        history.select(Selector(exact=1))
    with pytest.raises(KeyNotFoundError):
        History("w").select(LATEST)


def test_direct_memory_that_is_put_again_closes_the_version_that_lay_in_it() -> None:
    history = History("w")
    for rank in (0, 1):
        history.contribute(shard(rank, mode="direct"), None)
    history.contribute(shard(0, mode="direct", step=2), None)
    assert history.select(LATEST) is None
    with pytest.raises(SourceChangedError, match="withdrawn it"):
        history.select(Selector(exact=1))
    two = history.contribute(shard(1, mode="direct", step=2), None)
    assert history.select(LATEST) is two


def test_a_fence_waits_for_the_readers_of_that_publisher_only() -> None:
    history = History("w")
    for rank in (0, 1):
        version = history.contribute(shard(rank, mode="direct"), None)
    lease = history.lease(version, READER)
    history.close(process(0))
    assert history.select(LATEST) is None
    assert history.readers(process(0)) == (READER,)
    assert history.is_drained(process(5))
    history.release(lease)
    assert history.is_drained(process(0))


def test_a_dead_reader_holds_nothing() -> None:
    history = History("w")
    for rank in (0, 1):
        version = history.contribute(shard(rank, mode="direct"), None)
    history.lease(version, READER)
    history.process_died(READER, "killed")
    assert history.is_drained(process(0))
    assert history.select(LATEST) is version


def test_a_dead_publisher_or_volume_is_named_in_the_readers_error() -> None:
    direct, snapshot = History("w"), History("w")
    for rank in (0, 1):
        direct.contribute(shard(rank, mode="direct"), None)
        snapshot.contribute(shard(rank), None)
    direct.process_died(process(1), "killed")
    with pytest.raises(PublisherLostError, match="version 1"):
        direct.select(LATEST)
    snapshot.process_died(process(1), "killed")
    assert snapshot.select(LATEST) is not None
    snapshot.volume_died("v0", "killed")
    with pytest.raises(VolumeLostError, match="v0"):
        snapshot.select(LATEST)


def test_delete_frees_everything_once_it_is_unread() -> None:
    history = History("w")
    for rank in (0, 1):
        version = history.contribute(shard(rank, binding=f"a{rank}"), None)
    lease = history.lease(version, READER)
    history.delete()
    assert history.reap() == []
    history.release(lease)
    assert len(history.reap()) == 2


def test_kept_versions_stay_readable_until_as_many_newer_ones_are_ready() -> None:
    history = History("w", keep=3)
    for number in range(1, 5):
        history.contribute(shard(0, layout=ONE, binding=f"m{number}"), None)
    assert history.readable() == (2, 3, 4)
    assert [binding.id for _, binding in history.reap()] == ["m1"]


def test_a_version_that_is_read_is_kept_beyond_its_number() -> None:
    history = History("w", keep=1)
    one = history.contribute(shard(0, layout=ONE, binding="m1"), None)
    lease = history.lease(one, READER)
    history.contribute(shard(0, layout=ONE, binding="m2"), None)
    assert history.reap() == []
    history.release(lease)
    assert [binding.id for _, binding in history.reap()] == ["m1"]


def test_overwritten_direct_memory_counts_for_no_kept_version() -> None:
    history = History("w", keep=3)
    for _ in range(4):
        history.contribute(shard(0, layout=ONE, mode="direct"), None)
    assert history.readable() == (4,)
    assert set(history.ready) == {4}


def test_rollback_forgets_newer_versions_and_never_reuses_their_numbers() -> None:
    history = History("w", keep=3)
    two = [history.contribute(shard(0, layout=ONE, binding=f"m{number}"), None) for number in (1, 2, 3)][1]
    lease = history.lease(history.ready[3], READER)
    history.contribute(shard(0, binding="staged"), None)
    history.rollback(2)
    assert history.select(LATEST) is two
    assert {binding.id for _, binding in history.reap()} == {"staged"}
    history.release(lease)
    assert [binding.id for _, binding in history.reap()] == ["m3"]
    assert history.contribute(shard(0, layout=ONE, binding="m5"), None).number == 5


@pytest.mark.parametrize("number", [1, 7])
def test_rollback_to_a_version_that_is_not_kept_changes_nothing(number: int) -> None:
    history = History("w", keep=2)
    for version in (1, 2, 3):
        history.contribute(shard(0, layout=ONE, binding=f"m{version}"), None)
    with pytest.raises(VersionNotFoundError, match="ready versions: 2, 3"):
        history.rollback(number)
    assert history.readable() == (2, 3)
