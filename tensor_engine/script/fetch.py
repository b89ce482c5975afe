"""Fetching: the values of one rank come to the script, once everything that they depend on has run there."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from skipper.control import Future, ProcMesh
from skipper.dataplane import RDMABuffer
from skipper.dataplane import empty as shared_empty
from skipper.tensor_engine.errors import EngineClosedError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.activation import in_the_script, no_mesh
from skipper.tensor_engine.script.session import EngineSession, home_of
from skipper.tensor_engine.script.tensor import Tensor, local_of, value_of
from skipper.tensor_engine.script.value import Value
from skipper.tensor_engine.worker.data import tensor_of
from skipper.tensor_engine.worker.heap import Poison

T = TypeVar("T")

_LARGE_NBYTES = 256 << 10
"""From this size on the worker writes into the script's memory. Smaller values come with the worker's answer."""
_SMALL = "skipper.tensor_engine.worker.data:small"


class Fetched(Generic[T]):
    """The result of a fetch. Wait for it with `get` or ``await``.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import Fetched, fetch_shard

        procs = this_host().spawn_procs({"gpus": 2})
        with procs.activate():
            x = torch.ones(2) * procs.rank_tensor("gpus")
        later: Fetched[torch.Tensor] = fetch_shard(x, gpus=1)
        x.add_(5)  # the fetch has the value from before
        print(later.get(timeout=60).tolist())  # [1.0, 1.0]
        ```
    """

    def __init__(self, answers: list[Future[Any]], open_answers: Callable[[list[Any]], T]) -> None:
        self._answers = answers
        self._open = open_answers
        self._result: list[T] = []

    @staticmethod
    def of_all(fetched: Sequence[Fetched[Any]], put_together: Callable[[list[Any]], T]) -> Fetched[T]:
        """The results of several fetches, combined when all of them are there."""

        def open_answers(found: list[Any]) -> T:
            left = iter(found)
            return put_together([each._open(list(itertools.islice(left, len(each._answers)))) for each in fetched])

        return Fetched([answer for each in fetched for answer in each._answers], open_answers)

    def done(self) -> bool:
        """Whether `get` returns at once."""
        return all(answer.done() for answer in self._answers)

    def get(self, timeout: float | None = None) -> T:
        """Wait for it in this thread.

        Args:
            timeout: seconds; None waits without limit, but at most until a worker is found dead.

        Raises:
            RemoteError: the operation that makes it failed, or one that it depends on.
            DeadlineError: (a `TimeoutError`) it did not come in time.
            SupervisionError: the worker is gone.
        """
        if not self._result:
            self._result.append(self._open([answer.get(timeout) for answer in self._answers]))
        return self._result[0]

    result = get

    def __await__(self) -> Generator[Any, None, T]:
        for answer in self._answers:
            yield from answer.__await__()
        return self.get()


@overload
def fetch_shard(
    tensor: torch.Tensor, shard: Mapping[str, int] | None = None, *, strict: bool = False, **coordinates: int
) -> Fetched[torch.Tensor]: ...


@overload
def fetch_shard(
    tensor: T, shard: Mapping[str, int] | None = None, *, strict: bool = False, **coordinates: int
) -> Fetched[T]: ...


def fetch_shard(
    tensor: Any, shard: Mapping[str, int] | None = None, *, strict: bool = False, **coordinates: int
) -> Fetched[Any]:
    """Bring one rank's shard of a tensor to the script.

    It is the tensor as it is at this point of the program. Returns at once.

    Args:
        tensor: a tensor of a mesh; or a `DTensor` of one, whose local tensor is fetched; or a pytree of them, such as a
            state dict, in which everything else stays as it is.
        shard: coordinates in its mesh; an axis that is not named counts as 0.
        strict: wait until every rank of the mesh has reached this point, and raise if any of them has no value; else
            wait only for the rank that is fetched from.
        **coordinates: the same as ``shard``, by name: ``fetch_shard(t, gpus=1)``.

    Returns:
        The future of a tensor in the script's own memory, on the CPU; for a pytree, of one of the same structure.

    Raises:
        LocalTensorError: this is not a tensor of a mesh.
        KeyError: the mesh has no such axis.
        IndexError: a coordinate is out of range for its axis.
    """
    place = {**(shard or {}), **coordinates}
    if isinstance(tensor, list | tuple | dict):
        return _fetch_tree(tensor, place, strict=strict)
    value = value_of(local_of(tensor))
    return _fetch(value, mesh_rank(value.mesh, place), strict=strict)


@overload
def inspect(
    tensor: torch.Tensor,
    shard: Mapping[str, int] | None = None,
    *,
    strict: bool = False,
    timeout: float | None = None,
    **coordinates: int,
) -> torch.Tensor: ...


@overload
def inspect(
    tensor: T,
    shard: Mapping[str, int] | None = None,
    *,
    strict: bool = False,
    timeout: float | None = None,
    **coordinates: int,
) -> T: ...


def inspect(
    tensor: Any,
    shard: Mapping[str, int] | None = None,
    *,
    strict: bool = False,
    timeout: float | None = None,
    **coordinates: int,
) -> Any:
    """`fetch_shard`, and wait for it."""
    if type(tensor) is Tensor and not (strict or shard or coordinates):  # the shortest way, for most
        return _fetch_now(value_of(tensor), 0, timeout)
    if strict or isinstance(tensor, list | tuple | dict):
        return fetch_shard(tensor, shard, strict=strict, **coordinates).get(timeout)
    value = value_of(local_of(tensor))
    return _fetch_now(value, mesh_rank(value.mesh, {**(shard or {}), **coordinates}), timeout)


def show(
    tensor: torch.Tensor, shard: Mapping[str, int] | None = None, *, timeout: float | None = None, **coordinates: int
) -> None:
    """Print one rank's shard, with its coordinates."""
    value = value_of(local_of(tensor))
    place = {**(shard or {}), **coordinates}
    rank = mesh_rank(value.mesh, place)
    found = inspect(tensor, place, timeout=timeout)
    sys.stdout.write(f"{value.mesh.extent.point(rank)!r}: {found}\n")


def fetch_first(value: Value) -> torch.Tensor:
    """The shard of the first rank."""
    value.check()
    return _fetch_now(value, 0)


def ask(value: Value, rank: int, function: str, argument: object = None) -> Future[Any]:
    """Ask a worker about a value that it has, once all earlier instructions have run there (see `Worker.ask`).

    Args:
        value: the value.
        rank: in the mesh of the value.
        function: ``module:name``, called there as ``function(interpreter, value, argument)``.
        argument: the argument.
    """
    if recording.current is not None:
        recording.refuse(
            "a fetch of values, as by inspect() or .item(),",
            "return the tensor and fetch it outside (of torch's optimizers, those with fused=True, or on GPUs with "
            "capturable=True, read no values)",
        )
    instruction_stream = value.instruction_stream
    order = instruction_stream.session.order
    with order.lock:
        if order.newest is not instruction_stream:
            order.turn_to(instruction_stream)
        instruction_stream.flush(is_last=True)
        answer: Future[Any] = instruction_stream.one(rank).ask.call_one(function, value.ref, argument)
        return answer


def open_answer(session: EngineSession, answer: Any) -> Any:
    """The value of a worker's answer.

    Raises:
        RemoteError: the answer is poison.
    """
    if type(answer) is Poison:
        raise home_of(answer, session).failures.error(answer)
    return answer


def _fetch_tree(tree: Any, place: Mapping[str, int], *, strict: bool) -> Fetched[Any]:
    leaves, structure = tree_flatten(tree)
    there = [index for index, leaf in enumerate(leaves) if isinstance(local_of(leaf), Tensor)]

    def put_together(found: list[torch.Tensor]) -> Any:
        for index, shard in zip(there, found, strict=True):
            leaves[index] = shard
        return tree_unflatten(leaves, structure)

    return Fetched.of_all([fetch_shard(leaves[index], place, strict=strict) for index in there], put_together)


def _fetch(value: Value, rank: int, *, strict: bool) -> Fetched[torch.Tensor]:
    meta = value.meta
    into: tuple[torch.Tensor, RDMABuffer] | None = None
    if meta.nbytes >= _LARGE_NBYTES:
        with no_mesh():
            memory = shared_empty(meta.shape, meta.dtype)
        into = memory, RDMABuffer(memory)
        answers = [ask(value, rank, "skipper.tensor_engine.worker.data:large", into[1])]
    else:
        answers = [ask(value, rank, _SMALL)]
    if strict:
        answers += [
            ask(value, other, "skipper.tensor_engine.worker.data:is_there")
            for other in range(len(value.instruction_stream.ranks))
            if other != rank
        ]
    return Fetched(answers, functools.partial(_open_shard, value, rank, into))


def _fetch_now(value: Value, rank: int, timeout: float | None = None) -> torch.Tensor:
    """The shard of a rank; a small one in the fewest steps, since each counts next to the message's time."""
    meta = value.meta
    if meta.nbytes >= _LARGE_NBYTES:
        return _fetch(value, rank, strict=False).get(timeout)
    answer = ask(value, rank, _SMALL).get(timeout)
    if type(answer) is bytes:
        return tensor_of(answer, meta.dtype, meta.shape)
    shard: torch.Tensor = _open_shard(value, rank, None, [answer])
    return shard


@in_the_script
def _open_shard(
    value: Value, rank: int, into: tuple[torch.Tensor, RDMABuffer] | None, found: list[Any]
) -> torch.Tensor:
    """The shard: from the workers' answer, or from the memory into which one of them was to write."""
    if into is not None:
        into[1].drop()
    for answer in found:
        open_answer(value.instruction_stream.session, answer)
    first = found[0]
    if not isinstance(first, bytes):
        raise EngineClosedError(f"rank {value.instruction_stream.ranks[rank]} has no such tensor any more")
    return into[0] if into is not None else tensor_of(first, value.meta.dtype, value.meta.shape)


def mesh_rank(mesh: ProcMesh, coordinates: Mapping[str, int]) -> int:
    """The rank in a mesh at some coordinates; a missing axis counts as 0.

    Raises:
        KeyError: the mesh has no such axis.
        IndexError: a coordinate is out of range for its axis.
    """
    if not coordinates:
        return 0
    extent = mesh.extent
    for axis in coordinates:
        if axis not in extent:
            raise KeyError(f"no axis {axis!r} in {extent!r}")
    return extent.rank_of({axis: coordinates.get(axis, 0) for axis in extent})
