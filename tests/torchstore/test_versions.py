"""The state machine of versions: pure, so no process, no memory and no clock is needed to test it."""

import pytest

from torchstore.errors import (
    KeyNotFoundError,
    PartiallyPublishedError,
    PublisherLostError,
    SourceChangedError,
    VersionExistsError,
    VersionNotFoundError,
    VolumeLostError,
)
from torchstore.layout import Layout, Replicate, Shard
from torchstore.manifest import Binding, Manifest, Mode, Part, TensorItem
from torchstore.messages import Selector
from torchstore.process import ProcessId
from torchstore.version import Contribution
from torchstore.versions import History

LATEST = Selector()
READER = ProcessId("here", 900, 1)


def process(rank: int, start: int = 1) -> ProcessId:
    return ProcessId("here", 100 + rank, start)


def manifest(layout: Layout, coordinate: tuple[int, ...], *, dtype: str = "torch.float32") -> Manifest:
    part = Part(coordinate, layout.mesh_shape, layout.sharded_axes())
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
) -> Contribution:
    coordinate = list(layout.coordinates())[rank]
    described = manifest(layout, coordinate, dtype=dtype)
    memory = Binding(binding or f"memory-{rank}", mode, "v0" if mode == "snapshot" else "", ())
    return Contribution(process(rank, start), described.part, described, memory)


def inline(value: bytes = b"x") -> Contribution:
    return Contribution(process(0), Part(), None, None, inline=value)


def test_a_version_is_visible_only_when_every_shard_is_there() -> None:
    history = History("w")
    first = history.contribute(shard(0), None)
    with pytest.raises(PartiallyPublishedError, match=r"rank \(1,\)"):
        history.select(LATEST)
    assert history.contribute(shard(1), None) is first
    assert history.select(LATEST) is first


def test_an_old_version_stays_readable_while_the_next_is_staged() -> None:
    history = History("w")
    for rank in (0, 1):
        one = history.contribute(shard(rank, binding=f"a{rank}"), None)
    two = history.contribute(shard(0, binding="b0"), None)
    assert two.number == 2
    assert history.select(LATEST) is one


def test_a_rank_that_runs_ahead_opens_the_next_version_and_others_catch_up_in_order() -> None:
    history = History("w")
    assert [history.contribute(shard(0), None).number for _ in range(3)] == [1, 2, 3]
    assert [history.contribute(shard(1), None).number for _ in range(2)] == [1, 2]
    assert history.newest is not None
    assert history.newest.number == 2


def test_memory_is_freed_when_the_last_reader_of_a_replaced_version_leaves() -> None:
    history = History("w")
    one = history.contribute(shard(0, binding="a0"), None)
    history.contribute(shard(1, binding="a1"), None)
    lease = history.lease(one, READER)
    for rank in (0, 1):
        history.contribute(shard(rank, binding=f"b{rank}"), None)
    assert history.reap() == []
    history.release(lease)
    assert {binding.id for _, binding in history.reap()} == {"a0", "a1"}


def test_memory_shared_with_the_next_version_is_not_freed() -> None:
    history = History("w")
    for _ in range(2):
        for rank in (0, 1):
            history.contribute(shard(rank, mode="direct"), None)
    assert history.reap() == []


def test_replicas_are_not_waited_for_and_join_when_they_come_late() -> None:
    history = History("w")
    for rank in (0, 1):
        one = history.contribute(shard(rank, layout=REPLICATED_ROWS), None)
    assert history.select(LATEST) is one
    for rank in (2, 3):
        assert history.contribute(shard(rank, layout=REPLICATED_ROWS), None) is one
    assert history.contribute(shard(0, layout=REPLICATED_ROWS), None).number == 2


def test_another_dtype_mesh_or_shape_makes_a_new_version_and_never_mixes() -> None:
    history = History("w")
    history.contribute(shard(0), None)
    assert history.contribute(shard(1, dtype="torch.int32"), None).number == 2
    assert history.contribute(shard(1, layout=Layout((6,), (2,), (Shard(0),))), None).number == 3
    assert history.contribute(inline(), None).number == 4
    newest = history.select(LATEST)
    assert newest is not None
    assert newest.number == 4
    assert history.staging == {}


def test_a_restarted_rank_abandons_what_its_predecessor_began() -> None:
    history = History("w")
    history.contribute(shard(0, binding="old"), None)
    history.contribute(shard(0, binding="new", start=2), None)
    assert {binding.id for _, binding in history.reap()} == {"old"}
    version = history.contribute(shard(1), None)
    assert version.number == 2
    assert history.select(LATEST) is version


def test_a_rank_that_dies_before_the_others_have_put_leaves_the_last_version_readable() -> None:
    history = History("w")
    for rank in (0, 1):
        one = history.contribute(shard(rank, binding=f"a{rank}"), None)
    history.contribute(shard(0, binding="b0"), None)
    history.process_died(process(0), "killed")
    assert history.select(LATEST) is one
    assert {binding.id for _, binding in history.reap()} == {"b0"}


def test_versions_given_by_number_are_immutable_and_only_go_up() -> None:
    history = History("w")
    history.contribute(shard(0), 7)
    history.contribute(shard(1), 7)
    for number in (7, 3):
        with pytest.raises(VersionExistsError, match="newest one is 7"):
            history.contribute(shard(0), number)
    assert history.contribute(shard(0), None).number == 8


def test_putting_a_staged_shard_again_replaces_it_and_frees_the_first() -> None:
    history = History("w")
    history.contribute(shard(0, binding="first"), 5)
    history.contribute(shard(0, binding="second"), 5)
    assert [binding.id for _, binding in history.reap()] == ["first"]


def test_older_unfinished_versions_are_dropped_when_a_newer_one_is_ready() -> None:
    history = History("w")
    history.contribute(shard(0, binding="a0"), 1)
    for rank in (0, 1):
        history.contribute(shard(rank, binding=f"b{rank}"), 2)
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
    history.contribute(shard(0, mode="direct"), None)
    assert history.select(LATEST) is None
    with pytest.raises(SourceChangedError, match="taken it back"):
        history.select(Selector(exact=1))
    two = history.contribute(shard(1, mode="direct"), None)
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
