import pickle

import pytest

from skipper.control import Extent, Shape, ValueMesh

MESH = ValueMesh({"hosts": 2, "gpus": 2}, "abcd")


def test_it_reads_as_the_list_of_its_values() -> None:
    assert MESH == ["a", "b", "c", "d"]
    assert list(MESH) == ["a", "b", "c", "d"]
    assert repr(MESH) == "['a', 'b', 'c', 'd']"
    assert (MESH[1], MESH[-1], MESH[1:3], len(MESH)) == ("b", "d", ["b", "c"], 4)
    assert MESH.values() == ["a", "b", "c", "d"]


def test_values_are_found_by_coordinates_and_points() -> None:
    assert MESH.item(hosts=1, gpus=0) == "c"
    assert [(dict(point), value) for point, value in MESH.items()][3] == ({"hosts": 1, "gpus": 1}, "d")
    assert MESH[Extent.of({"hosts": 2, "gpus": 2}).point(2)] == "c"
    assert MESH.slice(gpus=1) == ["b", "d"]
    assert MESH.slice(gpus=1).extent == {"hosts": 2}
    assert MESH.slice(gpus=1, hosts=0).item() == "b"


def test_both_spellings_make_the_same_mesh() -> None:
    assert ValueMesh.from_list([1, 2], extent={"gpus": 2}) == ValueMesh(Shape.whole(Extent(("gpus",), (2,))), [1, 2])
    assert pickle.loads(pickle.dumps(MESH)) == MESH


def test_wrong_numbers_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="2 members, got 3"):
        ValueMesh({"gpus": 2}, [1, 2, 3])
    with pytest.raises(KeyError):
        MESH.item(gpus=0)
    with pytest.raises(ValueError, match="needs one value"):
        MESH.item()
    with pytest.raises(IndexError):
        MESH.item(hosts=2, gpus=0)


def test_values_are_laid_out_anew_as_meshes_are() -> None:
    flat = MESH.flatten("rank")
    assert flat == ["a", "b", "c", "d"]
    assert [(point["rank"], value) for point, value in flat.items()] == list(enumerate("abcd"))
    assert MESH.slice(hosts=1).flatten("rank") == ["c", "d"]
    assert flat.split(rank=("row", "column"), row=2).item(row=1, column=0) == "c"
    assert MESH.rename(gpus="tp").extent == {"hosts": 2, "tp": 2}
    assert MESH(gpus=1) == ["b", "d"]
    assert MESH.size("gpus") == 2
