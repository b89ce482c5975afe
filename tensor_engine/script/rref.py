"""`Endpoint.rref`: endpoints of actors that take tensors of a mesh and return them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from skipper.control import Endpoint
from skipper.control.wire.envelope import ProcessRef
from skipper.tensor_engine.errors import MeshMismatchError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.arguments import PackedArguments
from skipper.tensor_engine.script.expectation import Expected, expect
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.remote import give, look_at, take_apart
from skipper.tensor_engine.shared.opaque_ref import OPAQUE_META
from skipper.tensor_engine.shared.remote_functions import EXPECTED, IGNORED, WHOLE, Task
from skipper.tensor_engine.worker.handover import EndpointTask, in_actor, in_async_actor

_CACHED = 4096
"""Kinds of calls whose results are remembered."""

new_number: Callable[[], int] = itertools.count(1).__next__
"""The number of a call in which workers and actors take part."""

turn = threading.Lock()
"""Held while a call is sent: actors and workers have to see all calls in one order, from any thread."""

_cache: dict[tuple[object, ...], Expected] = {}


def rref(endpoint: Endpoint[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`Endpoint.rref`.

    Raises:
        MeshMismatchError: the tensors are not on the processes of the actors.
        ValueError: the endpoint is ``propagate="mocked"``, which has no meaning without its actor.
        As calls of remote functions.
    """
    recording.refuse("a call of an actor's endpoint", "make it beside the compiled function")
    actors, propagate, name = endpoint.mesh, endpoint.propagate, f"{endpoint.mesh.name}.{endpoint.spec.name}"
    packed = PackedArguments(args, kwargs)
    instruction_stream, mesh = packed.place(name)
    if not is_on_all(instruction_stream, actors.members):
        refuse_place(instruction_stream, f"{name}: the actors {actors!r}")
    if propagate is None:
        _issue(endpoint, packed, instruction_stream, mesh, (), Task("", IGNORED))
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
    mesh: Any,
    expected: Expected,
) -> Any:
    made = _issue(endpoint, packed, instruction_stream, mesh, expected.metas, Task("", EXPECTED, expected.kinds))
    return give(packed, expected, made)


def _issue(
    endpoint: Endpoint[..., Any],
    packed: PackedArguments,
    instruction_stream: InstructionStream,
    mesh: Any,
    metas: Sequence[Any],
    task: Task,
) -> Sequence[Any]:
    """Send the call to the actors, and tell the workers when it is their turn."""
    run = endpoint.wrapped(in_async_actor if endpoint.spec.is_async else in_actor)
    session = instruction_stream.session
    number = new_number()
    with turn:
        session.check()
        run.call((session.number, number), packed.data)
        return issue_call(
            "skipper.tensor_engine.worker.handover:call",
            packed.values,
            metas,
            instruction_stream=instruction_stream,
            mesh=mesh,
            name=f"{endpoint.mesh.name}.{endpoint.spec.name}",
            static=EndpointTask(endpoint.mesh, task),
            constant=number,
            has_constant=True,
            sees_poison=True,
        )


def is_on_all(instruction_stream: InstructionStream, members: Sequence[ProcessRef]) -> bool:
    """Whether these are all the processes of an instruction stream, and no others."""
    everywhere = instruction_stream.session.procs.root_members
    return {everywhere[rank].id for rank in instruction_stream.ranks} == {member.id for member in members}


def refuse_place(instruction_stream: InstructionStream, what: str) -> NoReturn:
    """Raise `MeshMismatchError`: these actors are elsewhere."""
    raise MeshMismatchError(
        f"{what} are not in the processes where the tensors are, or that are active, "
        f"{len(instruction_stream.ranks)} of {instruction_stream.session.procs!r}: take the same slice of both"
    )
