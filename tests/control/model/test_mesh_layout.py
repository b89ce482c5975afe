"""Meshes of hosts, processes and actors are laid out in one way; see also `test_shape` and `test_value_mesh`."""

import pytest

from skipper.control import ProcMesh, this_host
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S


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
