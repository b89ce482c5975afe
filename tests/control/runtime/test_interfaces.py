"""What an owner knows of its meshes when processes end, one after another."""

from skipper.control.model.future import Future
from skipper.control.model.shape import Extent
from skipper.control.runtime.interfaces import OwnedMeshes
from skipper.control.wire.process_ref import ProcessRef


class Some:
    """A mesh of actors in some processes."""

    has_actors = True
    name = "some"

    def __init__(self, uid: int, *ids: str) -> None:
        self.uid = uid
        self.root_extent = Extent(("ranks",), (len(ids),))
        self.root_members = tuple(ProcessRef(each, "", each) for each in ids)

    def stop(self, timeout: float | None = None) -> Future[None]:
        raise AssertionError


def test_the_end_of_a_process_concerns_the_meshes_with_members_there() -> None:
    meshes = OwnedMeshes()
    first, second = Some(1, "a", "b", "c"), Some(2, "c", "c", "d")
    meshes.add(first)
    meshes.add(second)
    assert meshes.with_member_in("c") == [(first, 2), (second, 0)]
    assert meshes.with_member_in("d") == [(second, 2)]
    assert meshes.with_member_in("e") == []


def test_a_mesh_is_forgotten_with_its_last_process() -> None:
    gone: set[str] = set()
    meshes = OwnedMeshes()
    meshes.add(Some(1, *(str(number) for number in range(1000))))
    meshes.add(Some(2, "0"))
    for number in range(1000):
        gone.add(str(number))
        assert {mesh.uid for mesh in meshes.all()} == ({1, 2} if number == 0 else {1})
        meshes.lose(str(number), gone.__contains__)
        if number > 500:
            gone.discard(str(number - 500))  # why a process is gone is not known for ever
    assert meshes.all() == []


def test_a_mesh_on_processes_that_were_gone_before_is_forgotten_with_the_next_end() -> None:
    meshes = OwnedMeshes()
    meshes.add(Some(1, "a"))
    meshes.lose("b", {"a", "b"}.__contains__)
    assert meshes.all() == []


def test_a_mesh_that_takes_the_number_of_another_has_its_own_members() -> None:
    meshes = OwnedMeshes()
    meshes.add(Some(1, "a"))
    assert len(meshes.with_member_in("a")) == 1
    successor = Some(1, "b")
    meshes.add(successor)
    assert meshes.with_member_in("a") == []
    assert meshes.with_member_in("b") == [(successor, 0)]
    meshes.lose("a", {"a"}.__contains__)
    assert meshes.all() == [successor]
