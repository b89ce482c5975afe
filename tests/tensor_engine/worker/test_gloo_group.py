"""How the members of a group meet where not all is well: they are apart, or one of them ends meanwhile."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import pytest
import torch

from skipper.control import ActorError, ProcMesh, this_host
from skipper.tensor_engine import RemoteError, fetch_shard
from skipper.tensor_engine.errors import UnreachableMembersError
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.shared.rendezvous import RendezvousClient
from skipper.tensor_engine.worker.gloo_group import make_gloo
from skipper.tensor_engine.worker.groups import Group
from tests.strangers import needs_root
from tests.tensor_engine.conftest import Failures
from tests.tensor_engine.members import PATIENCE_S, members_of

CLONE_NEWNET = 0x40000000  # sched.h
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h


@pytest.fixture
def procs(end_the_job: None) -> Iterator[ProcMesh]:
    """Two workers of this test alone."""
    mesh = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    yield mesh
    mesh.stop().get(PATIENCE_S)


def meet_from_elsewhere(group: Group) -> None:
    """Make another group of the same, of which the last one is in a network of its own."""
    if group.rank == group.size - 1:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    make_gloo(RendezvousClient(10 * PATIENCE_S), "apart", group.rank, group.members)


@needs_root
def test_members_that_do_not_reach_each_other_are_refused_and_named(procs: ProcMesh) -> None:
    with pytest.raises(ActorError) as caught:
        members_of(procs).run(meet_from_elsewhere)
    error = caught.value.cause
    assert isinstance(error, UnreachableMembersError)
    here = os.stat("/proc/self/ns/net").st_ino
    first, second = error.places
    assert "procs{'gpus': 0}" in first
    assert "procs{'gpus': 1}" in second
    assert f" on {socket.gethostname()}, network namespace {here}, with no address for other hosts" in first
    assert str(here) not in second
    for place in error.places:
        assert place in str(error)


@pytest.mark.parametrize("how", ["die", "die_in_a_group"])
def test_a_worker_that_dies_before_or_while_a_group_connects_is_named_to_the_others_at_once(
    procs: ProcMesh, failures: Failures, how: str
) -> None:
    with procs.activate():
        x = torch.ones(8)
    instruction_stream, meta = x.remote_value.instruction_stream, x.remote_value.meta
    instruction_stream.session.synchronize(PATIENCE_S)
    issue_call(
        f"tests.tensor_engine.on_workers:{how}",
        (x,),
        (meta,),
        instruction_stream=instruction_stream,
        mesh=procs,
        static=1,
    )
    total = x.reduce("gpus")
    with pytest.raises(RemoteError) as caught:
        fetch_shard(total, gpus=0).get(PATIENCE_S)
    assert caught.value.rank == 0
    assert caught.value.summary.startswith("MemberLostError: procs{'gpus': 1} has ended")
    session_of(procs).close(PATIENCE_S)
