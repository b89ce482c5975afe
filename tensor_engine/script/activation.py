"""The active mesh and stream: they get the tensors that are not made from others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import NoActiveMeshError
from skipper.tensor_engine.script.instruction_stream import MAIN, InstructionStream, StreamKey
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.script.streams import Stream, stream_of
from skipper.tensor_engine.script.tensor import Tensor

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


class _ThreadState(threading.local):
    active: Active | None = None
    mode: _Mode | None = None
    stream: StreamKey = MAIN


_here = _ThreadState()


def current() -> Active | None:
    """What is active in this thread."""
    return _here.active


def require_active(what: str) -> Active:
    """What is active in this thread.

    Raises:
        NoActiveMeshError: nothing is.
    """
    active = _here.active
    if active is None:
        raise NoActiveMeshError(f"{what} needs an active mesh: do it under `with mesh.activate():`")
    return active


def current_stream() -> StreamKey:
    """The stream that is active in this thread."""
    return _here.stream


def get_active_stream() -> Stream:
    """The stream that is active in this thread."""
    return stream_of(_here.stream)


def get_active_mesh() -> ProcMesh:
    """The active mesh.

    Raises:
        NoActiveMeshError: there is none.
    """
    return require_active("get_active_mesh").mesh


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch's that has nothing to do with its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch spends seconds on importing its compiler, only to keep it away


class _Mode(DispatchMode):
    """Intercepts every operation of torch while a mesh is active, also those without tensors.

    Attributes:
        active: what is active in the thread to which the mode belongs.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatch = dispatch
        self.active: Active | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _here.mode is None:
            return self._lent(func, types, args, kwargs)
        if _here.active is None and Tensor not in types:
            return func(*args, **(kwargs or {}))  # under `no_mesh`
        return self._dispatch(func, args, kwargs or {})

    def _lent(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Dispatch in a thread of autograd's: it inherits the modes of the waiting thread, but not its state."""
        _here.active, _here.mode = self.active, self
        try:
            return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            _here.active = _here.mode = None


@contextlib.contextmanager
def activate(mesh: ProcMesh, dispatch: Dispatch) -> Iterator[ProcMesh]:
    """Make a mesh, or a slice of one, the active one of this thread; may be nested.

    Args:
        mesh: the processes. Their workers are started with the first use.
        dispatch: what is done with operations: see `issue.dispatch`.
    """
    before = _here.active
    active = Active(mesh, session_of(mesh).instruction_stream(mesh, _here.stream))
    # One mode is enough. A second one would intercept the operations that the first one runs.
    mode_before = _here.mode
    mode = _here.mode = mode_before or _Mode(dispatch)
    _set(active)
    try:
        with contextlib.nullcontext() if mode is mode_before else mode:
            yield mesh
    finally:
        _set(before)
        _here.mode = mode_before


@contextlib.contextmanager
def activate_stream(stream: StreamKey) -> Iterator[None]:
    """Make a stream the active one of this thread, on the active mesh and on those that are activated within."""
    before, before_stream = _here.active, _here.stream
    if before is not None:
        _set(Active(before.mesh, before.instruction_stream.session.instruction_stream(before.mesh, stream)))
    _here.stream = stream
    try:
        yield
    finally:
        _set(before)
        _here.stream = before_stream


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Have torch work in the script itself within an active mesh."""
    before = _here.active
    _set(None)
    try:
        yield
    finally:
        _set(before)


def _set(active: Active | None) -> None:
    _here.active = active
    if _here.mode is not None:
        _here.mode.active = active
