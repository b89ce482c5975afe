"""`OwnedMeshes`: the meshes that an actor, or the script, owns."""

from __future__ import annotations

from skipper.control.runtime.interfaces import OwnedMesh


class OwnedMeshes:
    """The meshes of one owner. For any thread.

    Attributes:
        by_number: those that it owns.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, OwnedMesh] = {}
        self._spawned: set[int] = set()
        """Numbers of all meshes that it has ever owned."""
        self._notices: dict[int, int] = {}
        """Where it is told of broadcasts that were not delivered, by the number of the mesh."""

    def add(self, mesh: OwnedMesh) -> None:
        """Take a mesh that has just been spawned."""
        self.by_number[mesh.uid] = mesh
        self._spawned.add(mesh.uid)

    def all(self) -> list[OwnedMesh]:
        """Those that it owns, oldest first."""
        return list(self.by_number.values())

    def has_spawned(self, uid: int) -> bool:
        """Whether it has ever owned this mesh."""
        return uid in self._spawned

    def forget(self, uid: int) -> None:
        """Forget a mesh that has ended."""
        self.by_number.pop(uid, None)

    # Where it is told of broadcasts that were not delivered; they need not be to meshes that it owns

    def notice(self, uid: int) -> int | None:
        """The number of the port for broadcasts to a mesh; None where there is none."""
        return self._notices.get(uid)

    def set_notice(self, uid: int, number: int) -> int:
        """Note the number of a port, unless there is one; which counts."""
        return self._notices.setdefault(uid, number)

    def take_notice(self, uid: int) -> int | None:
        """Forget the port for broadcasts to a mesh; its number, if there was one."""
        return self._notices.pop(uid, None)

    def notices(self) -> list[int]:
        """The numbers of all such ports."""
        return list(self._notices.values())
