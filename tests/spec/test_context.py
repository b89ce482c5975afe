"""The guide's "Actor Context" and "ActorMesh": where code runs, meshes with axes, references passed on."""

import os
from typing import Any

from skipper.control import Actor, ActorMesh, ProcMesh, ValueMesh, context, endpoint, this_host, this_proc

TIMEOUT_S = 20.0


class Surveyor(Actor):
    """Reports what `context` tells."""

    @endpoint
    def info(self) -> dict[str, Any]:
        here = context()
        instance = here.actor_instance
        return {
            "message_rank": here.message_rank,
            "rank": instance.rank,
            "actor_id": instance.actor_id,
            "proc_id": instance.proc_id,
            "name": instance.name,
            "proc": here.proc,
            "proc_of_instance": instance.proc,
        }

    @endpoint
    def first_of_its_axis(self) -> bool:
        rank = context().message_rank
        return rank["gpus"] == 0

    @endpoint
    def beside(self) -> ActorMesh[Any]:
        proc = context().proc
        return proc.spawn("beside", Neighbour)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Neighbour(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def creator(self) -> Any:
        return context().actor_instance.creator


class Server(Actor):
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @endpoint
    def serve(self) -> str:
        return f"{self.prefix} of {dict(context().actor_instance.rank)}"


class Client(Actor):
    def __init__(self, server: ActorMesh[Server]) -> None:
        rank = context().actor_instance.rank
        self.server = server.slice(**rank)

    @endpoint
    def fetch(self) -> str:
        return self.server.serve.call_one().get()


def test_context_tells_rank_instance_and_process(procs: ProcMesh) -> None:
    surveyors = procs.spawn("surveyors", Surveyor)
    infos = surveyors.info.call().get(TIMEOUT_S)
    assert isinstance(infos, ValueMesh)
    for point, info in infos.items():
        assert info["rank"] == info["message_rank"] == point == dict(point)
        assert info["name"] == "surveyors"
        assert info["proc"] == info["proc_of_instance"]
        assert info["proc"].host_mesh.extent == {}
    assert len({info["actor_id"] for info in infos}) == len({info["proc_id"] for info in infos}) == 4
    surveyors.stop().get(TIMEOUT_S)


def test_a_process_taken_from_the_context_can_be_used_elsewhere(procs: ProcMesh) -> None:
    surveyor = procs.slice(hosts=1, gpus=0).spawn("surveyor", Surveyor)
    proc = surveyor.info.call_one().get(TIMEOUT_S)["proc"]
    assert proc.spawn("n", Neighbour).pid.call_one().get(TIMEOUT_S) == surveyor.pid.call_one().get(TIMEOUT_S)


def test_message_rank_is_a_mapping_by_axis(procs: ProcMesh) -> None:
    surveyors = procs.spawn("surveyors", Surveyor)
    assert surveyors.first_of_its_axis.call().get(TIMEOUT_S) == [True, False, True, False]
    surveyors.stop().get(TIMEOUT_S)


def test_the_rank_of_a_message_differs_from_that_of_the_actor_when_a_slice_is_called(procs: ProcMesh) -> None:
    surveyors = procs.spawn("surveyors", Surveyor)
    infos = surveyors.slice(gpus=slice(1, 2)).info.call().get(TIMEOUT_S)
    assert [info["rank"] for info in infos] == [{"hosts": 0, "gpus": 1}, {"hosts": 1, "gpus": 1}]
    assert [info["message_rank"] for info in infos] == [{"hosts": 0, "gpus": 0}, {"hosts": 1, "gpus": 0}]
    surveyors.stop().get(TIMEOUT_S)


def test_an_actor_spawns_a_sibling_on_its_own_process(procs: ProcMesh) -> None:
    surveyor = procs.slice(hosts=0, gpus=1).spawn("surveyor", Surveyor)
    sibling = surveyor.beside.call_one().get(TIMEOUT_S)
    assert sibling.pid.call_one().get(TIMEOUT_S) == surveyor.pid.call_one().get(TIMEOUT_S) != os.getpid()
    creator = sibling.creator.call_one().get(TIMEOUT_S)
    assert creator.name == "surveyor"
    assert creator.actor_id == surveyor.info.call_one().get(TIMEOUT_S)["actor_id"]
    assert creator.creator.name == "root"
    assert creator.creator.creator is None
    surveyor.stop().get(TIMEOUT_S)


def test_a_mesh_of_actors_has_the_axes_of_its_processes() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    actors = procs.spawn("servers", Server, prefix="value")
    assert type(actors) is ActorMesh
    assert actors.extent == {"gpus": 2}
    assert str(actors.extent) == "{'gpus': 2}"
    procs.stop().get(TIMEOUT_S)


def test_slices_pick_an_actor_a_range_and_parts_of_several_axes(procs: ProcMesh) -> None:
    servers = procs.spawn("servers", Server, "a")
    everyone = servers.serve.call().get(TIMEOUT_S)
    assert servers.slice(gpus=0).serve.call().get(TIMEOUT_S) == [everyone[0], everyone[2]]  # the first of each host
    assert servers.slice(gpus=slice(0, 2)).serve.call().get(TIMEOUT_S) == everyone
    assert servers.slice(hosts=slice(0, 1), gpus=slice(0, 2)).serve.call().get(TIMEOUT_S) == everyone[:2]
    assert servers.slice(hosts=1, gpus=1).serve.call_one().get(TIMEOUT_S) == everyone[3]
    servers.stop().get(TIMEOUT_S)


def test_flatten_split_and_rename_change_the_names_and_not_the_actors(procs: ProcMesh) -> None:
    servers = procs.spawn("servers", Server, "a")
    everyone = servers.serve.call().get(TIMEOUT_S)
    flat = servers.flatten("rank")
    again = flat.split(rank={"hosts": 2, "gpus": 2}).rename(gpus="tp")
    assert (flat.extent, again.extent) == ({"rank": 4}, {"hosts": 2, "tp": 2})
    assert flat.slice(rank=2).serve.call_one().get(TIMEOUT_S) == everyone[2]
    assert again.slice(tp=1).serve.call().get(TIMEOUT_S) == [everyone[1], everyone[3]]
    servers.stop().get(TIMEOUT_S)


def test_references_to_meshes_are_passed_to_actors_who_slice_and_call_them(procs: ProcMesh) -> None:
    servers = procs.slice(hosts=0).spawn("servers", Server, "data")
    clients = procs.slice(hosts=1).spawn("clients", Client, servers)
    assert clients.fetch.call().get(TIMEOUT_S) == ["data of {'gpus': 0}", "data of {'gpus': 1}"]
    clients.stop().get(TIMEOUT_S)
    servers.stop().get(TIMEOUT_S)


def test_quick_reference_keyword_arguments_and_context_of_the_script() -> None:
    server = this_proc().spawn("name", Server, prefix="p")
    assert server.serve.call_one().get(TIMEOUT_S) == "p of {}"
    here = context()
    assert here.message_rank == {}
    assert here.actor_instance.creator is None
    assert here.proc == this_proc()
