import pickle
from typing import Any

import numpy
import pytest

from skipper.control import Extent, Point, ProcMesh, Shape, this_host
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S

BOTH = Extent(("hosts", "gpus"), (2, 3))


def test_an_extent_is_a_mapping_equal_to_the_plain_one() -> None:
    assert BOTH == {"hosts": 2, "gpus": 3}
    assert BOTH != {"gpus": 3, "hosts": 2}  # the order of axes is the layout
    assert dict(**BOTH) == {"hosts": 2, "gpus": 3}
    assert repr(BOTH) == "{'hosts': 2, 'gpus': 3}"
    assert BOTH.nelements == 6
    assert Extent().nelements == 1


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"gpus": 0}, ValueError),
        ({"gpus": -1}, ValueError),
        ({"gpus": 1.0}, TypeError),
        ({"": 1}, TypeError),
        ({"gpus": True}, TypeError),
        ({3: 1}, TypeError),
    ],
)
def test_an_extent_refuses_bad_axes(sizes: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        Extent.of(sizes)


def test_points_know_their_rank_and_coordinates() -> None:
    points = list(BOTH.points())
    assert [point.rank for point in points] == list(range(6))
    assert points[4] == {"hosts": 1, "gpus": 1}
    assert all(BOTH.rank_of(point) == point.rank for point in points)
    assert points[4].size == 6
    with pytest.raises(IndexError):
        Point(6, BOTH)
    with pytest.raises(KeyError):
        points[0]["tp"]
    with pytest.raises(KeyError):
        BOTH.rank_of({"gpus": 1})


def test_selecting_keeps_slices_and_drops_indexed_axes() -> None:
    whole = Shape.whole(BOTH)
    assert whole.ranks() == (0, 1, 2, 3, 4, 5)
    assert whole.select({"gpus": 1}).ranks() == (1, 4)
    assert whole.select({"gpus": 1}).extent == {"hosts": 2}
    assert whole.select({"hosts": 1, "gpus": slice(1, 3)}).ranks() == (4, 5)
    assert whole.select({"gpus": slice(None, None, -1)}).ranks() == (2, 1, 0, 5, 4, 3)
    assert whole.select({"gpus": -1, "hosts": -1}).ranks() == (5,)
    assert whole.select({"gpus": -1, "hosts": -1}).extent == {}


@pytest.mark.parametrize(
    ("selection", "error"),
    [
        ({"tp": 0}, KeyError),
        ({"gpus": 3}, IndexError),
        ({"gpus": -4}, IndexError),
        ({"gpus": slice(3, 3)}, IndexError),
        ({"gpus": "1"}, TypeError),
        ({"gpus": True}, TypeError),
    ],
)
def test_selecting_refuses_what_is_not_there(selection: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        Shape.whole(BOTH).select(selection)


def test_flatten_merges_evenly_spaced_members_only() -> None:
    whole = Shape.whole(BOTH)
    assert whole.flatten("rank").ranks() == whole.ranks()
    assert whole.flatten("rank").extent == {"rank": 6}
    assert whole.select({"gpus": 0}).flatten("rank").ranks() == (0, 3)
    with pytest.raises(ValueError, match="evenly spaced"):
        whole.select({"gpus": slice(0, 2)}).flatten("rank")


def test_split_and_rename_keep_the_members() -> None:
    whole = Shape.whole(Extent(("gpus",), (8,)))
    split = whole.split("gpus", {"dp": 2, "tp": 4})
    assert split.extent == {"dp": 2, "tp": 4}
    assert split.ranks() == whole.ranks()
    assert split.select({"tp": 1}).ranks() == (1, 5)
    assert whole.rename({"gpus": "tp"}).extent == {"tp": 8}
    with pytest.raises(ValueError, match="multiply"):
        whole.split("gpus", {"dp": 3, "tp": 2})
    with pytest.raises(KeyError):
        whole.rename({"hosts": "tp"})
    with pytest.raises(ValueError, match="twice"):
        Shape.whole(BOTH).rename({"gpus": "hosts"})


def test_shapes_survive_pickling() -> None:
    shape = Shape.whole(BOTH).select({"gpus": slice(1, 3)})
    assert pickle.loads(pickle.dumps(shape)) == shape
    assert pickle.loads(pickle.dumps(BOTH.point(3))) == BOTH.point(3)


def test_sizes_of_new_axes_may_stand_beside_their_names() -> None:
    parts = Extent.of({"host": 4, "gpus": 6}).parts
    assert parts({"host": ("dp", "pp"), "pp": 2}) == {"host": {"dp": 2, "pp": 2}}
    assert parts({"host": ("dp", "pp"), "gpus": ["tp", "cp"], "pp": 4, "tp": 2}) == {
        "host": {"dp": 1, "pp": 4},
        "gpus": {"tp": 2, "cp": 3},
    }
    assert parts({"gpus": {"a": 2, "b": 3}, "host": ("rows",)}) == {"gpus": {"a": 2, "b": 3}, "host": {"rows": 4}}


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"nodes": ("a", "b"), "a": 2}, KeyError, "no axis 'nodes'"),
        ({"host": ("a", "b")}, ValueError, "the sizes of a and b cannot both be inferred"),
        ({"host": ("a", "b"), "a": 3}, ValueError, "host=4 cannot be divided by {'a': 3}"),
        ({"host": ("a", "b"), "a": 0}, ValueError, "cannot be divided"),
        ({"host": ("a", "a"), "a": 2}, ValueError, "named twice"),
        ({"host": "ab"}, ValueError, "not into 'ab'"),
        ({"host": 2}, ValueError, "not into 2"),
        ({"tp": 2}, ValueError, "tp=2 is the size of no new axis"),
        ({"host": ("a", "b"), "a": 2.0}, TypeError, "must be an int, not 2.0"),
    ],
)
def test_a_split_that_cannot_be_understood_is_refused(
    given: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Extent.of({"host": 4, "gpus": 6}).parts(given)


def test_axes_may_swap_their_names_in_a_split() -> None:
    shape = Shape.whole(BOTH).split_axes({"hosts": {"gpus": 2}, "gpus": {"hosts": 3}})
    assert shape.extent == {"gpus": 2, "hosts": 3}
    with pytest.raises(ValueError, match="twice"):
        Shape.whole(BOTH).split_axes({"hosts": {"gpus": 2}})


def test_sizes_are_numbers_that_know_the_axes() -> None:
    size = BOTH.point(0).size
    assert size == size() == 6
    assert (size("gpus"), size(["hosts", "gpus"]), pickle.loads(pickle.dumps(size))("hosts")) == (3, 6, 2)
    with pytest.raises(KeyError):
        size("tp")


def test_an_extent_may_be_made_of_lists_and_an_index_of_any_integer() -> None:
    assert Extent(["gpus"], [2]) == Extent(("gpus",), (2,))  # type: ignore[arg-type]
    assert hash(Extent(["gpus"], [2])) == hash(Extent(("gpus",), (2,)))  # type: ignore[arg-type]
    assert Shape.whole(BOTH).select({"gpus": numpy.int64(2)}).ranks() == (2, 5)


def test_a_mesh_has_a_length_and_is_sliced_by_a_call(procs: ProcMesh) -> None:
    echoes = procs.spawn("echo", Echo)
    assert (len(this_host()), len(procs), len(echoes), len(echoes(gpus=0))) == (1, 2, 2, 1)
    assert (echoes.size("gpus"), echoes.size(), echoes.sizes) == (2, 2, {"gpus": 2})
    assert echoes(gpus=1) == echoes.slice(gpus=1)
    assert echoes(gpus=1).pid.call_one().get(PATIENCE_S) == echoes.pid.call().get(PATIENCE_S)[1]
    with pytest.raises(KeyError, match="no axis 'tp'"):
        echoes(tp=0)


def test_a_mesh_is_split_by_the_names_of_its_new_axes(procs: ProcMesh) -> None:
    split = procs.split(gpus=("dp", "pp"), pp=2)
    assert split.extent == {"dp": 1, "pp": 2}
    assert split.members == procs.members
    with pytest.raises(ValueError, match="pp=3"):
        procs.split(pp=3)


def test_processes_have_the_axes_of_their_hosts() -> None:
    hosts = this_host().flatten("hosts")
    assert hosts.extent == {"hosts": 1}
    procs = hosts.rename(hosts="nodes").spawn_procs({"gpus": 1})
    try:
        assert procs.extent == {"nodes": 1, "gpus": 1}
        assert procs.spawn("echo", Echo).slice(nodes=0, gpus=0).echo.call_one(7).get(PATIENCE_S) == 7
    finally:
        procs.stop().get(PATIENCE_S)
    with pytest.raises(ValueError, match="'hosts' is the axis of the hosts"):
        hosts.spawn_procs({"hosts": 2})
