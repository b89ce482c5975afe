"""References to large meshes: small, cheap to send on, and equal where they arrive."""

import pickle

import pytest

from skipper.control import Actor, ActorMesh, endpoint
from skipper.control.api.mesh import HostMesh, ProcMesh
from skipper.control.model.actor import interface_of
from skipper.control.model.shape import Extent, Shape
from skipper.control.wire.packed_members import PackedMembers
from skipper.control.wire.process_ref import ProcessRef

MANY, FEW = 512, 8
SCRIPT = ProcessRef("job-script", "10.0.0.1:4000", "script")


class Worker(Actor):
    @endpoint
    def echo(self) -> None: ...


def workers(count: int) -> ActorMesh[Worker]:
    members = tuple(ProcessRef(f"job-{n:x}", f"10.0.{n}.1:4000", f"host {n}", SCRIPT) for n in range(count))
    extent = Extent(("hosts",), (count,))
    return ActorMesh(7, "workers", members, extent, Shape.whole(extent), interface_of(Worker))


def details(mesh: ActorMesh[Worker] | ProcMesh) -> list[tuple[object, ...]]:
    return [(each.id, each.address, each.name, each.launcher) for each in mesh.members]


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_reference_has_the_same_members_where_it_arrives_and_sent_on_from_there(count: int) -> None:
    mesh = workers(count)
    for sent in (mesh, mesh.slice(hosts=slice(2, 5))):
        there = pickle.loads(pickle.dumps(sent))
        assert there == sent
        assert details(there) == details(sent)
        assert details(pickle.loads(pickle.dumps(there))) == details(sent)
        assert details(there.slice(hosts=1)) == details(sent.slice(hosts=1))
        assert there.root_members == sent.root_members


def test_a_large_reference_is_packed_once_and_opened_where_it_is_used() -> None:
    mesh = workers(MANY)
    data = pickle.dumps(mesh)
    assert len(data) < 50 * MANY, "an address, an id and two names take more than that"
    there = pickle.loads(data)
    assert isinstance(there._all, PackedMembers)
    part = there.slice(hosts=slice(0, 10))
    assert pickle.loads(pickle.dumps(part)) == mesh.slice(hosts=slice(0, 10))
    assert there._all._refs is None, "to slice it and to send it on needs no member"
    assert part.members[9].address == "10.0.9.1:4000"
    assert there._all.refs is part.root_members, "slices share what was opened"


def test_processes_and_hosts_travel_like_actors() -> None:
    members = tuple(workers(MANY).members)
    extent = Extent(("hosts",), (MANY,))
    procs, hosts = ProcMesh(7, "procs", members, extent, Shape.whole(extent), SCRIPT), HostMesh(members)
    assert max(len(pickle.dumps(procs)), len(pickle.dumps(hosts))) < 50 * MANY
    there = pickle.loads(pickle.dumps(procs))
    assert (there, details(there)) == (procs, details(procs))
    assert pickle.loads(pickle.dumps(hosts)).slice(hosts=slice(3, 9)).names == hosts.slice(hosts=slice(3, 9)).names
    assert pickle.loads(pickle.dumps(HostMesh())).names == ()
