"""`rejoin` and `restore`: a mesh continues with processes that have replaced others.

The values of a dead rank are lost. Between two steps the script gives its place to another process, which starts with
poison in place of all values of the rank. Then the script restores what training needs, from a rank with the same
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.optim.optimizer import Optimizer

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import BorrowedTensorError, MisuseError, RestoreError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.guards import all_objects
from skipper.tensor_engine.script.instruction_stream import StreamKey
from skipper.tensor_engine.script.issue import issue_call, ship
from skipper.tensor_engine.script.plans import mesh_axes, plan_restoration
from skipper.tensor_engine.script.session import EngineSession, known_session
from skipper.tensor_engine.script.tensor import Tensor, refuse_mixture, value_of
from skipper.tensor_engine.script.value import Value


def rejoin(mesh: ProcMesh) -> tuple[int, ...]:
    """Continue with a mesh after some of its processes were replaced (see `ProcMesh.with_successors`).

    Call it between two steps, after a step has failed because a process died. Returns at once; the new workers start in
    the background.

    * Tensors stay valid, and the remaining ranks keep their values. On a new rank every value is poison: what depends
      on it raises `RespawnedError`, until `restore` brings the value there, or until it is created again.
    * Older references to the mesh and its slices stay valid, too: for the engine they are the mesh as it is now.
    * Failures of operations that were issued before count as seen.
    * Compiled functions are traced again. Create process groups with a new rank again.

    Args:
        mesh: the mesh, or a slice of it, with the new processes.

    Returns:
        The ranks of the new processes in the whole mesh; empty if the engine does not run on the mesh.

    Raises:
        BorrowedTensorError: (a `ValueError`) a tensor of the mesh is lent to another stream: give it back first.
        EngineClosedError: a remaining worker lacks instructions, because there was no room for them.
    """
    recording.refuse("a rejoin", "do it outside of the compiled function")
    session = known_session(mesh)
    if session is None:
        return ()
    with session.lock:
        values = _values_of(session)
        if any(value.storage.lent for value in values):
            raise BorrowedTensorError("a tensor of this mesh is lent to another stream: give it back before a rejoin")

        def lost(rank: int, stream: StreamKey) -> list[int]:
            return [
                value.ref
                for value in values
                if value.instruction_stream.stream == stream and rank in value.instruction_stream.members
            ]

        return session.rejoin(mesh.root, lost)


def restore(what: Any, axes: str | Sequence[str] | None = None, *, source: Any = None) -> None:
    """Bring tensors to the ranks that have lost them in a `rejoin`. Returns at once.

    Either from other ranks: along ``axes`` all ranks have the same values, like replicas in data-parallel training. A
    new rank gets them from the rank that has existed longest. Ranks that have a value keep theirs.

    Or from ``source``, a copy: all ranks get it, including those that have a value.

    Views of a tensor that were made before the rejoin stay lost on the new ranks; make them again. Gradients are not
    restored.

    Args:
        what: a tensor of a mesh, a module, an optimizer (its state is restored), or lists, tuples and dictionaries of
            them. Tensors of the script in it stay as they are.
        axes: the axes along which all ranks have the same values.
        source: the same structure as ``what``, with tensors of the script, or of the mesh and stream of those in
            ``what``.

    Raises:
        RestoreError: along ``axes`` no rank is left that has the values.
        KeyError: the mesh has no such axis.
        MisuseError: (a `ValueError`) ``what`` and ``source`` differ in their structure, or in a shape or a dtype; or
            both or neither of ``axes`` and ``source`` are given.
        MeshMismatchError: (a `ValueError`) tensors of ``source`` are of another mesh.
        StreamMismatchError: (a `ValueError`) they are of another stream.
        BorrowedTensorError: (a `ValueError`) a tensor is lent to another stream.
    """
    recording.refuse("restoring tensors", "do it outside of the compiled function")
    if (axes is None) == (source is None):
        raise MisuseError("restore takes either axes, along which ranks have the same, or source=, a copy")
    if source is not None:
        mine, theirs = list(_tensors_in(what)), list(_tensors_in(source))
        if len(mine) != len(theirs):
            raise MisuseError(f"there are {len(mine)} tensors to restore, and {len(theirs)} in source")
        pairs = [(one, two) for one, two in zip(mine, theirs, strict=True) if isinstance(one, Tensor)]
        for one, two in pairs:
            _check_pair(one, two)
        for one, two in pairs:
            _overwrite(one, two)
        return
    assert axes is not None  # by the check above
    values = {id(value): value for value in map(value_of, filter(_is_there, _tensors_in(what)))}
    plans = []
    for value in values.values():
        names = mesh_axes(value.mesh, axes)
        plan, alone = plan_restoration(value.instruction_stream.session.numbers, value.mesh, names, value.meta)
        if alone:
            raise RestoreError(alone, names)
        plans.append((value, plan))
    for value, plan in plans:
        if plan.groups:
            (made,) = issue_call(
                "skipper.tensor_engine.worker.communication:restore",
                (value,),
                (value.meta,),
                instruction_stream=value.instruction_stream,
                mesh=value.mesh,
                static=plan,
                sees_poison=True,
            )
            _take(value, made)


def _is_there(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, Tensor)


def _values_of(session: EngineSession) -> list[Value]:
    """The script's values on the workers of a session. They are not recorded when they are made, which is often."""
    return [found for found in all_objects() if type(found) is Value and found.instruction_stream.session is session]


def _tensors_in(what: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(what):
        if isinstance(leaf, torch.nn.Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
        elif isinstance(leaf, Optimizer):
            state = leaf.state_dict()["state"]
            yield from (each for each in pytree.tree_leaves(state) if isinstance(each, torch.Tensor))
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _check_pair(tensor: Tensor, source: torch.Tensor) -> None:
    value = value_of(tensor)
    value.storage.refuse_change()
    if tensor.shape != source.shape or tensor.dtype != source.dtype:
        raise MisuseError(
            f"a tensor of {value.meta!r} cannot be restored from {source.dtype} {list(source.shape)}: source is a copy"
        )
    if isinstance(source, Tensor) and value_of(source).instruction_stream is not value.instruction_stream:
        refuse_mixture("restore: tensors", value, value_of(source))


def _overwrite(tensor: Tensor, source: torch.Tensor) -> None:
    value = value_of(tensor)
    given = (
        source
        if isinstance(source, Tensor)
        else ship(source, instruction_stream=value.instruction_stream, mesh=value.mesh)
    )
    (made,) = issue_call(
        "skipper.tensor_engine.worker.communication:overwrite",
        (value, given),
        (value.meta,),
        instruction_stream=value.instruction_stream,
        mesh=value.mesh,
        name="restore",
        sees_poison=True,
        writes=(0,),
    )
    _take(value, made)
    torch.autograd.graph.increment_version(tensor)  # autograd must not use the version that it has saved


def _take(value: Value, made: Tensor) -> None:
    """Point a value, and with it every tensor of the script that has it, to its replacement."""
    other = made.remote_value
    value.ref, other.ref = other.ref, value.ref
