"""Streams: sequences of operations that run concurrently on the workers, and lend each other tensors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from skipper.tensor_engine.errors import BorrowedTensorError, CompileError
from skipper.tensor_engine.script import methods
from skipper.tensor_engine.script.instruction_stream import MAIN, StreamKey
from skipper.tensor_engine.shared.stacks import line_of_script

if TYPE_CHECKING:
    from skipper.tensor_engine.script.tensor import Tensor

_numbers = itertools.count(1)
_known: dict[int, Stream] = {}


class Stream:
    """A sequence of operations: they run in order, and concurrently with those of other streams.

    A tensor belongs to the stream on which it was made, and operations on it run there. Another stream has to borrow
    it. Each stream is a thread of every worker, created at its first use, and has its own communication: collectives of
    two streams run concurrently as well.

    Args:
        name: a name for error messages and traces.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import Borrow, Stream, get_active_stream, inspect

        with this_host().spawn_procs().activate():
            main, loader = get_active_stream(), Stream("loader")
            with loader.activate():
                batch = torch.ones(4)  # made beside what the main stream does
            borrow: Borrow = main.borrow(batch)
            total = borrow.tensor.sum()
            borrow.drop()
        print(inspect(total))  # tensor(4.)
        ```
    """

    def __init__(self, name: str) -> None:
        self._key = StreamKey(next(_numbers), name)
        _known[self._key.number] = self

    @property
    def name(self) -> str:
        """As given."""
        return self._key.name

    @property
    def key(self) -> StreamKey:
        """The key by which the engine identifies it."""
        return self._key

    def activate(self) -> AbstractContextManager[None]:
        """Make it the active stream: new tensors that are not made from others belong to it. May be nested."""
        return methods.wired.activate_stream(self._key)

    def borrow(self, tensor: torch.Tensor, *, mutable: bool = False) -> Borrow:
        """Lend this stream a tensor of another one, without a copy. Returns at once.

        On the workers this stream waits until the other one has made the tensor. After `Borrow.drop` the other one
        waits until this one is done with it. Operations of the two in between run concurrently. Gradients go back to
        the lender. If autograd saves the borrowed tensor, call ``backward`` before the tensor is given back. A compiled
        function may borrow, if it also ends the borrow; each of its replays does both.

        Args:
            tensor: a tensor of a mesh; its views are lent with it.
            mutable: True: this stream may change it, and the other one cannot use it until it is given back. False:
                both can read it, and neither can change it. A remote function is only prevented from changing it if its
                ``propagate`` says that it changes its arguments.

        Returns:
            The borrow, as a context manager of the borrowed tensor, or to unpack: ``x, borrow = s.borrow(y)``.

        Raises:
            StreamMismatchError: the tensor belongs to this stream already.
            BorrowedTensorError: it is lent already, and the two borrows exclude each other: one of them changes it.
            LocalTensorError: this is not a tensor of a mesh.
            RuntimeError: ``mutable`` is true, and autograd would not see the changes.
        """
        return methods.wired.borrow(self._key, tensor, mutable=mutable)

    def __repr__(self) -> str:
        return f"<stream {self.name!r}>"


class _Main(Stream):
    def __init__(self) -> None:
        self._key = MAIN
        _known[MAIN.number] = self


main = _Main()
"""The stream that is active if no other one is."""


def stream_of(key: StreamKey) -> Stream:
    """The stream of a key."""
    return _known[key.number]


class Borrow:
    """A tensor that a stream has borrowed; made by `Stream.borrow`.

    The example of `Stream` shows one.

    Args:
        tensor: as below.
        lender: name of the stream that lends it.
        give_back: called by the first `drop`, and again by later ones if it has raised `BorrowedTensorError` or
            `CompileError`, with how the borrow ends, and on which line of the script.

    Attributes:
        tensor: the borrowed tensor, of the borrowing stream; it and its views cannot be used after `drop`.
    """

    def __init__(self, tensor: Tensor, lender: str, give_back: Callable[[str], None]) -> None:
        self.tensor = tensor
        self._lender = lender
        self._give_back: Callable[[str], None] | None = give_back

    def drop(self) -> None:
        """Give the tensor back. It may be called again.

        Raises:
            BorrowedTensorError: this stream has itself lent it to another stream.
            CompileError: a function is being compiled, and the borrow began outside of it.
        """
        if self._give_back is not None:
            self._end(f"by drop() at {line_of_script()}")

    def _end(self, how: str) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is None:
            return
        try:
            give_back(how)
        except (BorrowedTensorError, CompileError):
            self._give_back = give_back  # it has not been given back
            raise

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *exc_info: object) -> None:
        if self._give_back is not None:
            self._end(f"at the end of the block of `with` at {line_of_script()}")

    def __iter__(self) -> Iterator[Any]:
        return iter((self.tensor, self))

    def __del__(self) -> None:
        if self._give_back is not None:
            warnings.warn(
                f"a tensor of the stream {self._lender!r} was borrowed and never given back: it stays lent. Use `with "
                "stream.borrow(tensor) as x:`, or call drop()",
                ResourceWarning,
                stacklevel=2,
            )
