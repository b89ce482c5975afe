"""Tensors of a mesh as arguments of actors: of `Endpoint.rref`, of ordinary calls of endpoints, and of ``spawn``."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from skipper.control import Actor, ActorMesh, Endpoint, ProcMesh
from skipper.control.wire.process_ref import ProcessRef
from skipper.tensor_engine.errors import MeshMismatchError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.arguments import PackedArguments
from skipper.tensor_engine.script.expectation import Expected, expect
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.remote import give, look_at, take_apart
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.opaque_ref import OPAQUE_META
from skipper.tensor_engine.shared.remote_functions import EXPECTED, IGNORED, WHOLE, Task
from skipper.tensor_engine.worker import handover

_CACHED = 4096
"""How many kinds of calls have cached results."""

_new_number: Callable[[], int] = itertools.count(1).__next__
"""Returns the number of a call in which workers and actors take part."""

_turn = threading.Lock()
"""Held while a call is sent: actors and workers must see all calls, from any thread, in one order."""

_NO_RESULT = Task("", IGNORED)

_cache: dict[tuple[object, ...], Expected] = {}


def rref(endpoint: Endpoint[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`Endpoint.rref`.

    Raises:
        MeshMismatchError: the tensors are not on the processes of the actors.
        ValueError: the endpoint is ``propagate="mocked"``, which has no meaning without its actor.
        As calls of remote functions.
    """
    recording.refuse("a call of an actor's endpoint", "make it outside of the compiled function")
    actors, propagate, name = endpoint.mesh, endpoint.propagate, f"{endpoint.mesh.name}.{endpoint.spec.name}"
    packed = PackedArguments(args, kwargs)
    instruction_stream, mesh = packed.place(name)
    if not _is_on_all(instruction_stream, actors.members):
        _refuse_place(instruction_stream, f"{name}: the actors {actors!r}")
    if propagate is None:
        _issue(endpoint, packed, instruction_stream, mesh, (), _NO_RESULT)
        return None
    if callable(propagate):
        return _known(endpoint, packed, instruction_stream, mesh, expect(name, propagate, packed, is_real=False))
    if propagate not in ("cached", "inspect"):
        raise ValueError(
            f"{name} is an endpoint with propagate={propagate!r}: a method needs its actor, and cannot be run in the "
            'script. Give a function, "cached" or "inspect"'
        )
    key = (actors.uid, endpoint.spec.name, *packed.pattern())
    if propagate == "cached" and (expected := _cache.get(key)) is not None:
        return _known(endpoint, packed, instruction_stream, mesh, expected)
    (whole,) = _issue(endpoint, packed, instruction_stream, mesh, (OPAQUE_META,), Task("", WHOLE))
    expected = look_at(whole)
    if propagate == "cached":
        if len(_cache) >= _CACHED:
            _cache.pop(next(iter(_cache)))
        _cache[key] = expected
    return take_apart(name, whole, packed, expected)


def _known(
    endpoint: Endpoint[..., Any],
    packed: PackedArguments,
    instruction_stream: InstructionStream,
    mesh: ProcMesh,
    expected: Expected,
) -> Any:
    made = _issue(endpoint, packed, instruction_stream, mesh, expected.metas, Task("", EXPECTED, expected.kinds))
    return give(packed, expected, made)


def _issue(
    endpoint: Endpoint[..., Any],
    packed: PackedArguments,
    instruction_stream: InstructionStream,
    mesh: ProcMesh,
    metas: Sequence[TensorMetadata],
    task: Task,
) -> Sequence[Any]:
    """Send the call to the actors, and tell the workers when it is their turn."""
    run = endpoint.wrapped(handover.in_async_actor if endpoint.spec.is_async else handover.in_actor)
    session = instruction_stream.session
    number = _new_number()
    with _turn:
        session.check()
        run.call((session.number, number), packed.data)
        name = f"{endpoint.mesh.name}.{endpoint.spec.name}"
        return _tell_workers(packed, endpoint.mesh, instruction_stream, mesh, name, number, metas, task)


def send(endpoint: Endpoint[..., Any], adverb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """See `control.api.tensor_engine_plugin.TensorEngine.send`.

    Raises:
        MeshMismatchError: the actors are not where the tensors are; a single actor may be in one of these processes.
        As calls of remote functions.
    """
    actors, name = endpoint.mesh, f"{endpoint.mesh.name}.{endpoint.spec.name}"
    recording.refuse("a call of an actor's endpoint", "make it outside of the compiled function")
    packed = PackedArguments(args, kwargs)
    instruction_stream, mesh = _place(packed, actors.members, f"{name}: the actors {actors!r}")
    run = endpoint.wrapped(handover.as_plain_async if endpoint.spec.is_async else handover.as_plain)
    number = _new_number()
    with _turn:
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
    recording.refuse("the spawning of actors", "spawn them outside of the compiled function")
    packed = PackedArguments(args, kwargs)
    instruction_stream, mesh = _place(packed, procs.members, f"{name}: the processes {procs!r}")
    number = _new_number()
    with _turn:
        instruction_stream.session.check()
        arguments = functools.partial(handover.arguments, (instruction_stream.session.number, number), packed.data)
        actors = procs.spawn_with(name, cls, arguments)
        _tell_workers(packed, actors, instruction_stream, mesh, f"{name}.__init__", number)
        return actors


def _place(packed: PackedArguments, members: Sequence[ProcessRef], what: str) -> tuple[InstructionStream, ProcMesh]:
    """The instruction stream and mesh of the actors' processes: all processes of the tensors, or one of them."""
    instruction_stream, mesh = packed.place(what)
    if _is_on_all(instruction_stream, members):
        return instruction_stream, mesh
    ids = [member.id for member in mesh.within(instruction_stream.session.procs).members]
    if len(members) != 1 or members[0].id not in ids:
        _refuse_place(instruction_stream, what)
    return packed.place_on_one(ids.index(members[0].id), instruction_stream, mesh)


def _tell_workers(
    packed: PackedArguments,
    actors: ActorMesh[Any],
    instruction_stream: InstructionStream,
    mesh: ProcMesh,
    name: str,
    number: int,
    metas: Sequence[TensorMetadata] = (),
    task: Task = _NO_RESULT,
) -> Sequence[Any]:
    """Make the workers pass the tensors to the actors in turn, and continue when the actors are done with them."""
    return issue_call(
        "skipper.tensor_engine.worker.handover:call",
        packed.values,
        metas,
        instruction_stream=instruction_stream,
        mesh=mesh,
        name=name,
        static=handover.EndpointTask(actors, task, tuple(member.id for member in actors.members)),
        constant=number,
        sees_poison=True,
    )


def _is_on_all(instruction_stream: InstructionStream, members: Sequence[ProcessRef]) -> bool:
    """Whether these are all the processes of an instruction stream, and no others."""
    everywhere = instruction_stream.session.procs.root_members
    return {everywhere[rank].id for rank in instruction_stream.ranks} == {member.id for member in members}


def _refuse_place(instruction_stream: InstructionStream, what: str) -> NoReturn:
    """Raise `MeshMismatchError`: these actors are elsewhere."""
    raise MeshMismatchError(
        f"{what} are not in the processes where the tensors are, or that are active, "
        f"{len(instruction_stream.ranks)} of {instruction_stream.session.procs!r}: take the same slice of both"
    )
