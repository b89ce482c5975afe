"""`control.monarch`: Monarch's names, and what scripts written for it rely on."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from skipper import control
from skipper.control import monarch

PATIENCE_S = 60


class Ranked(monarch.Actor):
    """Written as for Monarch."""

    @monarch.endpoint
    async def rank(self, add: int = 0) -> int:
        return monarch.current_rank().rank + add

    @monarch.concurrent_endpoint
    async def beside(self) -> int:
        return monarch.current_rank().rank

    @monarch.endpoint(explicit_response_port=True)
    async def through(self, port: Any) -> None:
        port.send(monarch.current_rank().rank)

    @control.endpoint
    async def ours(self) -> int:
        return monarch.current_rank().rank


@pytest.fixture(scope="module")
def procs() -> Iterator[control.ProcMesh]:
    procs = monarch.this_host().spawn_procs({"gpus": 3})
    yield procs
    procs.stop().get(PATIENCE_S)


@pytest.fixture(scope="module")
def mesh(procs: control.ProcMesh) -> Any:
    return procs.spawn("ranked", Ranked)


@pytest.mark.parametrize("name", ["rank", "beside", "through"])
def test_results_are_iterated_in_pairs_of_point_and_value(mesh: Any, name: str) -> None:
    results = getattr(mesh, name).call().get(PATIENCE_S)
    assert isinstance(results, monarch.ValueMesh)
    assert [(point.rank, value) for point, value in results] == [(0, 0), (1, 1), (2, 2)]
    assert [point["gpus"] for point, _ in results] == [0, 1, 2]


def test_all_else_of_a_value_mesh_is_as_ever(mesh: Any) -> None:
    results = mesh.rank.call(10).get(PATIENCE_S)
    assert results.values() == [10, 11, 12]
    assert results.item(gpus=1) == results[1] == 11
    assert 12 in results
    assert len(results) == 3
    assert [value for _, value in results.slice(gpus=slice(1, 3))] == [11, 12]
    assert list(results.items()) == list(results)


def test_endpoints_of_both_kinds_live_in_one_actor(mesh: Any) -> None:
    assert list(mesh.ours.call().get(PATIENCE_S)) == [0, 1, 2]


def test_a_reference_that_was_sent_gives_pairs_as_well(procs: control.ProcMesh, mesh: Any) -> None:
    class Caller(monarch.Actor):
        @monarch.endpoint
        async def call(self, mesh: Any) -> list[tuple[int, int]]:
            return [(point.rank, value) for point, value in await mesh.rank.call()]

    caller = procs.slice(gpus=0).spawn("caller", Caller)
    assert caller.call.call_one(mesh).get(PATIENCE_S) == [(0, 0), (1, 1), (2, 2)]


def test_proc_mesh_starts_processes_with_a_setup_and_an_environment() -> None:
    def setup() -> None:
        os.environ["FROM_SETUP"] = "1"

    class Looks(monarch.Actor):
        @monarch.endpoint
        def look(self) -> tuple[str, str]:
            return os.environ["FROM_SETUP"], os.environ["FROM_ENV"]

    procs = monarch.proc_mesh(gpus=2, env={"FROM_ENV": "2"}, setup=setup)
    try:
        assert procs.sizes == {"hosts": 1, "gpus": 2}
        looks: Any = procs.spawn("looks", Looks)
        assert [value for _, value in looks.look.call().get(PATIENCE_S)] == [("1", "2")] * 2
    finally:
        procs.stop().get(PATIENCE_S)
    with pytest.raises(ValueError, match="attach_to_hosts"):
        monarch.proc_mesh(hosts=2)


def test_transports_are_checked_and_nothing_else() -> None:
    for transport in ("tcp", "ipc", "tcp://127.0.0.1:0"):
        monarch.enable_transport(transport)
    with pytest.raises(ValueError, match="no transport is called 'pigeon'"):
        monarch.enable_transport("pigeon")


def test_names_that_both_have_are_the_same_things() -> None:
    changed = {"ValueMesh", "concurrent_endpoint", "endpoint"}
    for name in monarch.__all__:
        if name in control.__all__ and name not in changed:
            assert getattr(monarch, name) is getattr(control, name)
        assert hasattr(monarch, name)
