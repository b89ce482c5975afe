"""The active mesh and stream: tensors that are not made from others belong to them."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import NoActiveMeshError
from skipper.tensor_engine.script.instruction_stream import MAIN, InstructionStream, StreamKey
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.script.streams import Stream, stream_of
from skipper.tensor_engine.script.tensor import Tensor, keep_the_compiler_out, left_to_their_class
from skipper.tensor_engine.script.value import Value

Dispatch = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Runs an operation of torch: called with the overload and its arguments."""


@dataclass(eq=False, slots=True)
class Active:
    """An active mesh.

    Attributes:
        mesh: as it was activated.
        instruction_stream: to its workers, on the active stream.
    """

    mesh: ProcMesh
    instruction_stream: InstructionStream


@dataclass(eq=False, slots=True)
class _Scope:
    """The state within a `with` block. A task inherits the scope in which it was made, and may outlive it.

    Attributes:
        active: the mesh; None if operations run in the script itself.
        stream: the active stream.
        outer: the scope around it; None for the outermost one.
        is_open: whether its block has not ended.
    """

    active: Active | None
    stream: StreamKey
    outer: _Scope | None
    is_open: bool = True


_OUTSIDE = _Scope(None, MAIN, None)


class _Thread:
    """A thread that runs the user's code.

    Attributes:
        scope: of each of its tasks. The variable belongs to the thread, like the mode that intercepts its operations: a
            context that is copied into another thread, as by `asyncio.to_thread`, takes no scope there.
        mode: intercepts its operations while a block of any of its tasks has a mesh active.
        holders: how many such blocks there are.
    """

    def __init__(self) -> None:
        self.scope: ContextVar[_Scope] = ContextVar("scope", default=_OUTSIDE)
        self.mode: _Mode | None = None
        self.holders = 0

    def innermost(self) -> _Scope:
        """The innermost scope of the running task that is open."""
        scope = self.scope.get()
        while not scope.is_open:
            assert scope.outer is not None  # the outermost scope is open
            scope = scope.outer
        return scope

    @contextlib.contextmanager
    def within(self, active: Active | None, stream: StreamKey) -> Iterator[None]:
        """A new scope in the innermost one."""
        outer = self.innermost()
        scope = _Scope(active, stream, outer)
        self._set(scope)
        try:
            yield
        finally:
            scope.is_open = False
            if self.scope.get() is scope:
                self._set(outer)

    def _set(self, scope: _Scope) -> None:
        self.scope.set(scope)
        if self.mode is not None:
            self.mode.scope = scope

    @contextlib.contextmanager
    def intercepted(self, dispatch: Dispatch) -> Iterator[None]:
        """Intercept the operations of the thread. Blocks of several tasks may end in any order."""
        if self.mode is None:
            self.mode = _Mode(dispatch)  # one is enough: a second one would intercept the first one's operations
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        self.holders += 1
        try:
            yield
        finally:
            self.holders -= 1
            if not self.holders and self is _here.thread:  # another thread may end a generator
                self.intercept_no_more()

    def intercept_no_more(self) -> None:
        """Remove the mode from torch's stack, even from below modes of others."""
        mode, self.mode = self.mode, None
        stack = _get_current_dispatch_mode_stack()
        if mode is None or mode not in stack:
            return
        above = [_pop_mode() for _ in stack[stack.index(mode) + 1 :]]
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for each in reversed(above):
            _push_mode(each)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_here = _Threads()


def _in_a_forked_child() -> None:
    """Reset a forked child: it has no engine, and its operations run in it, as in a DataLoader's workers."""
    thread, _here.thread = _here.thread, _Thread()
    thread.intercept_no_more()


os.register_at_fork(after_in_child=_in_a_forked_child)


def current() -> Active | None:
    """The mesh that is active in this task of this thread."""
    return _here.thread.innermost().active


def require_active(what: str) -> Active:
    """The mesh that is active here.

    Raises:
        NoActiveMeshError: there is none.
    """
    active = current()
    if active is None:
        raise NoActiveMeshError(f"{what} needs an active mesh: do it under `with mesh.activate():`")
    return active


def current_stream() -> StreamKey:
    """The stream that is active here."""
    return _here.thread.innermost().stream


def get_active_stream() -> Stream:
    """The stream that is active in this task of this thread."""
    return stream_of(current_stream())


def get_active_mesh() -> ProcMesh:
    """The mesh that is active in this task of this thread.

    Raises:
        NoActiveMeshError: there is none.
    """
    return require_active("get_active_mesh").mesh


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch that its compiler ignores."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch spends seconds on the import of its compiler, only to keep it out


class _Mode(DispatchMode):
    """Intercepts every operation of torch while a mesh is active, even operations without tensors.

    Attributes:
        scope: the thread's latest known scope.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatch = dispatch
        self.scope = _OUTSIDE

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if left_to_their_class and not left_to_their_class.isdisjoint(types):
            return NotImplemented
        thread = _here.thread
        if thread.mode is None:
            return self._lent(thread, func, types, args, kwargs)
        scope = self.scope = thread.innermost()
        if scope.active is None and Tensor not in types:
            return func(*args, **(kwargs or {}))  # under `no_mesh`, or in a task for which nothing is active
        return self._dispatch(func, args, kwargs or {})

    def _lent(
        self, thread: _Thread, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Dispatch in a thread of autograd: it inherits the modes of the waiting thread, but not its scopes."""
        thread.mode = self
        before = thread.scope.set(self.scope)
        try:
            return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            thread.scope.reset(before)
            thread.mode = None


keep_the_compiler_out(_Mode.__torch_dispatch__)


@contextlib.contextmanager
def activate(mesh: ProcMesh, dispatch: Dispatch) -> Iterator[ProcMesh]:
    """Make a mesh, or a slice of one, the active one of this task, and of the tasks that it makes; may be nested.

    Args:
        mesh: the processes. Their workers start with the first use.
        dispatch: runs the operations: see `issue.dispatch`.
    """
    thread = _here.thread
    stream = thread.innermost().stream
    active = Active(mesh, session_of(mesh).instruction_stream(mesh, stream))
    with thread.intercepted(dispatch), thread.within(active, stream):
        yield mesh


def intercepted() -> contextlib.AbstractContextManager[Any]:
    """Intercept operations even while an intercepted one is decomposed into others."""
    mode = _here.thread.mode
    return contextlib.nullcontext() if mode is None else mode


@contextlib.contextmanager
def on_its_own(value: Value, dispatch: Dispatch) -> Iterator[None]:
    """Make the mesh and the stream of a value the active ones, unless they are already."""
    active = current()
    if active is not None and active.instruction_stream is value.instruction_stream:
        yield
        return
    with activate(value.mesh, dispatch), activate_stream(value.instruction_stream.stream):
        yield


@contextlib.contextmanager
def activate_stream(stream: StreamKey) -> Iterator[None]:
    """Make a stream the active one of this task, on the active mesh and on those that are activated within."""
    thread = _here.thread
    active = thread.innermost().active
    if active is not None:
        active = Active(active.mesh, active.instruction_stream.session.instruction_stream(active.mesh, stream))
    with thread.within(active, stream):
        yield


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Run torch's operations in the script itself, within an active mesh."""
    thread = _here.thread
    with thread.within(None, thread.innermost().stream):
        yield


def in_the_script(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run under `no_mesh` if a mesh is active."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return function(*args, **kwargs)
        with no_mesh():
            return function(*args, **kwargs)

    return run
