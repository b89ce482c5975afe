import pickle

import pytest

from control import Extent, Point, Shape

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
