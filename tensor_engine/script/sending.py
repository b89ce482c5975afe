"""Tensors of a mesh among the arguments of ordinary calls of actors, and of ``spawn``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from skipper.control import Actor, ActorMesh, Endpoint, ProcMesh
from skipper.control.wire.envelope import ProcessRef
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.arguments import PackedArguments
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.rref import is_on_all, new_number, refuse_place, turn
from skipper.tensor_engine.shared.remote_functions import IGNORED, Task
from skipper.tensor_engine.worker import handover


def send(endpoint: Endpoint[..., Any], adverb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """See `control.api.tensor_engine_plugin.TensorEngine.send`.

    Raises:
        MeshMismatchError: the actors are not where the tensors are; one actor may be in one of these processes.
        As calls of remote functions.
    """
    actors, name = endpoint.mesh, f"{endpoint.mesh.name}.{endpoint.spec.name}"
    recording.refuse("a call of an actor's endpoint", "make it beside the compiled function")
    packed = PackedArguments(args, kwargs)
    instruction_stream, mesh = _place(packed, actors.members, f"{name}: the actors {actors!r}")
    run = endpoint.wrapped(handover.as_plain_async if endpoint.spec.is_async else handover.as_plain)
    number = new_number()
    with turn:
        instruction_stream.session.check()
        result = getattr(run, adverb)((instruction_stream.session.number, number), packed.data)
        _tell_workers(packed, actors, instruction_stream, mesh, name, number)
        return result


def spawn(
    procs: ProcMesh, name: str, cls: type[Actor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ActorMesh[Any]:
    """See `control.api.tensor_engine_plugin.TensorEngine.spawn`.

    Raises:
        MeshMismatchError: the processes are not those where the tensors are; one process may be one of these.
        As calls of remote functions.
    """
    recording.refuse("the spawning of actors", "spawn them beside the compiled function")
    packed = PackedArguments(args, kwargs)
    instruction_stream, mesh = _place(packed, procs.members, f"{name}: the processes {procs!r}")
    number = new_number()
    with turn:
        instruction_stream.session.check()
        arguments = functools.partial(handover.arguments, (instruction_stream.session.number, number), packed.data)
        actors = procs.spawn_with(name, cls, arguments)
        _tell_workers(packed, actors, instruction_stream, mesh, f"{name}.__init__", number)
        return actors


def _place(packed: PackedArguments, members: Sequence[ProcessRef], what: str) -> tuple[InstructionStream, ProcMesh]:
    """The instruction stream and mesh of the actors' processes: all where the tensors are, or one of these."""
    instruction_stream, mesh = packed.place(what)
    if is_on_all(instruction_stream, members):
        return instruction_stream, mesh
    ids = [member.id for member in mesh.members]
    if len(members) != 1 or members[0].id not in ids:
        refuse_place(instruction_stream, what)
    one = mesh.slice(**mesh.extent.point(ids.index(members[0].id)))
    alone = instruction_stream.session.instruction_stream(one, instruction_stream.stream)
    for group in packed.groups:
        group.check(alone, one)
    return alone, one


def _tell_workers(
    packed: PackedArguments,
    actors: ActorMesh[Any],
    instruction_stream: InstructionStream,
    mesh: ProcMesh,
    name: str,
    number: int,
) -> None:
    """Have the workers, in their turn, give the tensors to the actors, and go on when these are done with them."""
    issue_call(
        "skipper.tensor_engine.worker.handover:call",
        packed.values,
        (),
        instruction_stream=instruction_stream,
        mesh=mesh,
        name=name,
        static=handover.EndpointTask(actors, Task("", IGNORED)),
        constant=number,
        has_constant=True,
        sees_poison=True,
    )
