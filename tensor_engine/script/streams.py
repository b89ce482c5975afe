"""Streams: sequences of operations that run beside each other on the workers."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from skipper.tensor_engine.script import activation
from skipper.tensor_engine.script.instruction_stream import MAIN, StreamKey

if TYPE_CHECKING:
    from skipper.tensor_engine.script.borrow import Borrow

_numbers = itertools.count(1)
_known: dict[int, Stream] = {}


class Stream:
    """A sequence of operations: they run in order, and beside those of other streams.

    >>> loader = Stream("loader")
    >>> with loader.activate():
    ...     batch = torch.rand(64, 128)
    >>> with main.borrow(batch) as x:
    ...     loss = model(x).sum()

    A tensor belongs to the stream on which it was made, and operations on it run there. For another stream it has to be
    borrowed. Each stream is a thread of every worker, made with its first use, and communicates by itself: collectives
    of two streams run beside each other, too.

    Args:
        name: for people.
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
        """How the engine knows it."""
        return self._key

    def activate(self) -> AbstractContextManager[None]:
        """Make it the active one: tensors that are made from nothing belong to it. May be nested."""
        return activation.activate_stream(self._key)

    def borrow(self, tensor: torch.Tensor, *, mutable: bool = False) -> Borrow:
        """Lend this stream a tensor of another one, without a copy. Returns at once.

        The workers' stream waits until the other one has made the tensor; after `Borrow.drop` the other one waits until
        this one is done with it. Whatever is issued in between runs beside each other. Gradients go back to the lender;
        call ``backward`` before the tensor is given back if it was used for what saves it.

        Args:
            tensor: of a mesh; its views are lent with it.
            mutable: this stream may change it, and the other one cannot use it meanwhile. Else both can read it, and
                neither can change it. A remote function is only kept from it as far as its ``propagate`` tells that it
                changes its arguments.

        Returns:
            The borrow, as a context manager of the borrowed tensor, or to be unpacked: ``x, borrow = s.borrow(y)``.

        Raises:
            StreamMismatchError: the tensor belongs to this stream already.
            BorrowedTensorError: it is lent so that this cannot be: changed by another one, or by this one while others
                read it.
            LocalTensorError: this is no tensor of a mesh.
            RuntimeError: it is to be changed, and autograd would not see it.
        """
        from skipper.tensor_engine.script.borrow import Borrow

        return Borrow(self, tensor, mutable=mutable)

    def __repr__(self) -> str:
        return f"<stream {self.name!r}>"


class _Main(Stream):
    def __init__(self) -> None:
        self._key = MAIN
        _known[MAIN.number] = self


main = _Main()
"""The stream that is active where no other one is."""


def get_active_stream() -> Stream:
    """The stream that is active in this thread."""
    return stream_of(activation.current_stream())


def stream_of(key: StreamKey) -> Stream:
    """The stream of a key."""
    return _known[key.number]
