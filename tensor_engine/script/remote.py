"""Remote functions: user code runs on the workers, in order with the operations."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from skipper.control import Endpoint, ProcMesh
from skipper.tensor_engine.script.activation import in_the_script, no_mesh
from skipper.tensor_engine.script.arguments import OpaqueHandle, PackedArguments
from skipper.tensor_engine.script.by_value import dumps, is_importable
from skipper.tensor_engine.script.expectation import Expected, as_described, expect
from skipper.tensor_engine.script.fetch import Fetched, ask, mesh_rank, open_answer
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.session import EngineSession
from skipper.tensor_engine.shared.opaque_ref import OPAQUE_META
from skipper.tensor_engine.shared.remote_functions import ANSWER, EXPECTED, IGNORED, INPUT, TENSOR, WHOLE, Source, Task
from skipper.tensor_engine.worker.user_code import is_worker, resolve

Propagate = Callable[..., Any] | Literal["cached", "mocked", "inspect"] | None

_WAYS = ("cached", "mocked", "inspect")
_CACHED = 1024
"""For how many kinds of arguments a function caches its results."""


class RemoteFunction:
    """A function that runs on the workers; made by `remote`. Call it like the function itself.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import inspect, remote

        def double(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        on_workers = remote(double, propagate=lambda x: x)
        with this_host().spawn_procs().activate():
            y = on_workers(torch.ones(2))
        print(inspect(y).tolist())  # [2.0, 2.0]
        ```
    """

    def __init__(self, function: Callable[..., Any] | str, propagate: Propagate) -> None:
        self.__remote_function__ = function
        self.propagate = propagate
        self.name = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
        self._source: Source | None = None
        self._cache: dict[tuple[object, ...], Expected] = {}
        if not isinstance(function, str):
            functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on the workers, and return at once (but see ``propagate="inspect"``).

        Within a remote function, on a worker, this calls the function itself.

        Raises:
            LocalTensorError: a tensor of the script is among the arguments.
            MeshMismatchError: its tensors are not all on one mesh.
            StreamMismatchError: its tensors are not all of one stream.
            NoActiveMeshError: it has no tensors, and no mesh is active.
            NotPropagatableError: the script cannot know what it returns.
            TypeError: an argument cannot be pickled.
        """
        if is_worker():
            return resolve(self.__remote_function__)(*args, **kwargs)
        packed = PackedArguments(args, kwargs)
        instruction_stream, mesh = packed.place(self.name)
        if self.propagate is None:
            self._issue(packed, (), instruction_stream, mesh, Task(self.source, IGNORED, (), bool(packed.groups)))
            return None
        if self.propagate == "inspect":
            return self._inspect(packed, instruction_stream, mesh)
        expected = self._expect(packed)
        task = Task(self.source, EXPECTED, expected.kinds, bool(packed.groups))
        made = self._issue(packed, expected.metas, instruction_stream, mesh, task, expected.writes)
        return give(packed, expected, made)

    rref = __call__

    @property
    def source(self) -> Source:
        """The function as it is sent: by its path if workers can import it, else by value.

        Raises:
            TypeError: it cannot be pickled.
        """
        if self._source is None:
            self._source = _source(self.__remote_function__, self)
        return self._source

    def fetch(self, args: Sequence[Any], kwargs: Mapping[str, Any], shard: Mapping[str, int] | None) -> Fetched[Any]:
        """See `call_on_shard_and_fetch`."""
        packed = PackedArguments(args, kwargs)
        instruction_stream, mesh = packed.place(self.name)
        alone, one = packed.place_on_one(mesh_rank(mesh, shard or {}), instruction_stream, mesh)
        task = Task(self.source, ANSWER, (), bool(packed.groups))
        (answer,) = self._issue(packed, (OPAQUE_META,), alone, one, task)
        taken = ask(answer.remote_value, 0, "skipper.tensor_engine.worker.user_code:take")
        return Fetched([taken], functools.partial(_unpickled, instruction_stream.session))

    def _issue(
        self,
        packed: PackedArguments,
        metas: Sequence[Any],
        instruction_stream: InstructionStream,
        mesh: ProcMesh,
        task: Task,
        writes: tuple[int, ...] = (),
    ) -> list[Any]:
        return issue_call(
            "skipper.tensor_engine.worker.user_code:call",
            packed.values,
            metas,
            instruction_stream=instruction_stream,
            mesh=mesh,
            name=self.name,
            static=task,
            constant=packed.data,
            sees_poison=True,
            writes=writes,
        )

    def _expect(self, packed: PackedArguments) -> Expected:
        if callable(self.propagate):
            return expect(self.name, self.propagate, packed, is_real=False)
        run = resolve(self.__remote_function__)
        if self.propagate == "mocked":
            return expect(self.name, run, packed, is_real=True)
        key = packed.pattern()
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _CACHED:
                self._cache.pop(next(iter(self._cache)))
            found = self._cache[key] = expect(self.name, run, packed, is_real=True)
        return found

    def _inspect(self, packed: PackedArguments, instruction_stream: InstructionStream, mesh: ProcMesh) -> Any:
        task = Task(self.source, WHOLE, (), bool(packed.groups))
        (whole,) = self._issue(packed, (OPAQUE_META,), instruction_stream, mesh, task)
        return take_apart(self.name, whole, packed, look_at(whole))

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteFunction, (self.__remote_function__, self.propagate))

    def __repr__(self) -> str:
        return f"<remote function {self.name}>"


def look_at(whole: Any) -> Expected:
    """Wait until the first rank reports the content of a result that the workers keep as a whole.

    Raises:
        RemoteError: the function has failed there.
    """
    value = whole.remote_value
    answer = ask(value, 0, "skipper.tensor_engine.worker.user_code:describe")
    with no_mesh():
        return as_described(pickle.loads(open_answer(value.instruction_stream.session, answer.get())))


def take_apart(name: str, whole: Any, packed: PackedArguments, expected: Expected) -> Any:
    """Make tensors of a result that the workers keep as a whole."""
    value = whole.remote_value
    made = issue_call(
        "skipper.tensor_engine.worker.user_code:parts",
        (value, *packed.values),
        expected.metas,
        instruction_stream=value.instruction_stream,
        mesh=value.mesh,
        name=name,
        static=Task("", EXPECTED, expected.kinds),
    )
    return give(packed, expected, made)


def give(packed: PackedArguments, expected: Expected, made: Sequence[Any]) -> Any:
    """The result for the script: new tensors and references, and arguments that are returned."""
    fresh = iter(made)
    found: list[Any] = []
    for kind, base in expected.kinds:
        if kind == INPUT:
            assert base is not None  # by `Kind`
            found.append(packed.tensors[base])
            continue
        each = next(fresh)
        if kind != TENSOR:
            found.append(OpaqueHandle(each.remote_value))
            continue
        if base is not None:
            each.remote_value.storage = packed.values[base].storage
        found.append(each)
    return expected.assemble(found)


@overload
def remote(function: Callable[..., Any] | str, *, propagate: Propagate = None) -> RemoteFunction: ...
@overload
def remote(*, propagate: Propagate = None) -> Callable[[Callable[..., Any]], RemoteFunction]: ...
def remote(
    function: Callable[..., Any] | str | None = None, *, propagate: Propagate = None
) -> RemoteFunction | Callable[[Callable[..., Any]], RemoteFunction]:
    """Make a function of your own run on the workers: ``remote(f)(x)``, or as a decorator.

    Each worker calls it with its own shards, as plain tensors, in order with the other operations. Tensors of a mesh
    and references to objects on the workers may be anywhere in the arguments, process groups too (`process_group`);
    everything else is pickled. It runs where its tensors are, or on the active mesh if it has none. Gradients do not
    pass through it by themselves: see `grad_function`.

    Workers import a function that they can import, so the globals of its module are state of the worker. Functions of
    the script itself, and lambdas, are sent by value, with a copy of the globals that they use. If the function raises,
    its results are poison, and so are the tensors among its arguments that it has changed.

    Args:
        function: the function, or the path to it: ``"module.name"``.
        propagate: how the script knows what it returns:

            - None: it is run for its side effects, and returns nothing;
            - a function, called in the script with the same arguments, whose tensors are fake ones without data: it
              returns tensors like those that the function returns;
            - ``"cached"``: the function itself is run on fake tensors, once for each kind of arguments;
            - ``"mocked"``: the same at each call;
            - ``"inspect"``: the script waits until the first rank has run it and tells what came out, whose shapes may
              depend on values. They must be the same on all ranks.

            Process groups do nothing in runs on fake tensors.

    Raises:
        TypeError: this is not a function; or ``propagate`` is none of these.
    """
    if propagate is not None and not callable(propagate) and propagate not in _WAYS:
        raise TypeError(f"propagate is a function, None, or one of {', '.join(map(repr, _WAYS))}, not {propagate!r}")
    if function is None:
        return lambda given: remote(given, propagate=propagate)
    if isinstance(function, RemoteFunction):
        return RemoteFunction(function.__remote_function__, propagate)
    if isinstance(function, str):
        if not all(part.isidentifier() for part in function.split(".")) or "." not in function:
            raise TypeError(f'the path of a function is "module.name", not {function!r}')
    elif not callable(function) or isinstance(function, Endpoint):
        raise TypeError(f"remote takes a function or the path to one, not {function!r}")
    return RemoteFunction(function, propagate)


def call_on_shard_and_fetch(
    function: RemoteFunction | Callable[..., Any] | str,
    /,
    *args: Any,
    shard: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> Fetched[Any]:
    """Call a function on one rank only, and bring its result to the script.

    Args:
        function: a remote function, or a function that `remote` accepts.
        *args: as for a remote function.
        shard: coordinates of the rank in the mesh; an axis that is not named counts as 0.
        **kwargs: as for a remote function.

    Returns:
        The future of what it returns, which is pickled; tensors come to the CPU.

    Raises:
        KeyError: the mesh has no such axis.
        IndexError: a coordinate is out of range for its axis.
        MeshMismatchError: a process group among the arguments has more members.
        Exception: as calls of remote functions.
    """
    called = function if isinstance(function, RemoteFunction) else remote(function)
    return called.fetch(args, kwargs, shard)


@in_the_script
def _unpickled(session: EngineSession, found: list[Any]) -> Any:
    return pickle.loads(open_answer(session, found[0]))


def _source(function: Callable[..., Any] | str, known_as: object) -> Source:
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<>")
    if is_importable(module, name, (function, known_as)):
        return f"{module}:{name}"
    return dumps(function, f"the remote function {name}")
