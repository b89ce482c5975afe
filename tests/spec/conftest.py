"""The meshes of these tests, which run the forms of the actor guide and of the supervision document."""

from collections.abc import Iterator

import pytest

from skipper.control import ProcMesh, this_host
from tests.control.conftest import failures, leave_nothing_behind, root_failures, script

__all__ = ["failures", "leave_nothing_behind", "root_failures", "script"]


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Four processes on two axes, which the tests of a module share."""
    mesh = this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2})
    yield mesh
    mesh.stop().get(20)


@pytest.fixture(scope="module")
def row(procs: ProcMesh) -> ProcMesh:
    """Two of them, on one axis."""
    return procs.slice(hosts=0)
