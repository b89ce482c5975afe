"""`OpaqueRef`: an object that lives on the workers only; the script holds a reference to it."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

from skipper.tensor_engine.errors import LocalTensorError, PickleError
from skipper.tensor_engine.script.tensor import Value
from skipper.tensor_engine.shared.metadata import Metadata, metadata

_ON_WORKERS_ONLY = object()

_keys = itertools.count(1)

OPAQUE_META: Metadata = metadata((0,), device="meta", offset=1)
"""What the script says of a value that is no tensor; none is like this."""


class OpaqueRef:
    """An object on the workers: each has its own.

    A remote function that returns ``OpaqueRef(thing)`` keeps the thing on its worker; where another one gets the
    reference, ``ref.value`` is the thing. In a ``propagate`` function, ``OpaqueRef()`` says that one is returned. In
    the script it can be passed on, and nothing else; the objects go when the last reference to it has gone.

    Args:
        value: the object, on a worker.
    """

    __slots__ = ("_held", "_key", "_value")

    def __init__(self, value: Any = _ON_WORKERS_ONLY) -> None:
        self._held = value
        self._value: Value | None = None
        self._key = next(_keys)

    @property
    def value(self) -> Any:
        """The object, on a worker.

        Raises:
            LocalTensorError: this is the script.
        """
        if self._held is _ON_WORKERS_ONLY:
            raise LocalTensorError("the object is on the workers: only remote functions can use it")
        return self._held

    def __reduce__(self) -> NoReturn:
        raise PickleError(
            "a reference to objects on the workers cannot be pickled: pass it to a remote function, or to an actor's "
            "endpoint"
        )

    def __repr__(self) -> str:
        if self._value is None:
            return "<OpaqueRef>" if self._held is _ON_WORKERS_ONLY else f"<OpaqueRef to {self._held!r:.60}>"
        return f"<OpaqueRef on {self._value.mesh!r}>"


def refer_to(value: Value) -> OpaqueRef:
    """The script's reference to what the workers have under a number."""
    ref = OpaqueRef()
    ref._value = value
    return ref
