"""`OpaqueRef`: an object that exists only on the workers; the script holds a reference to it."""

from __future__ import annotations

from typing import Any, NoReturn

from skipper.tensor_engine.errors import LocalTensorError, PickleError
from skipper.tensor_engine.shared.metadata import TensorMetadata, metadata

_ON_WORKERS_ONLY = object()

OPAQUE_META: TensorMetadata = metadata((0,), device="meta", offset=1)
"""The metadata of a value that is not a tensor. No tensor has this metadata."""


class OpaqueRef:
    """An object on the workers: each has its own.

    A remote function that returns ``OpaqueRef(thing)`` keeps the thing on its worker. Another remote function that gets
    the reference finds the thing in ``ref.value``. In a ``propagate`` function, ``OpaqueRef()`` says that the function
    returns one. The script can only pass the reference on. The workers release their objects when the script drops its
    last reference.

    Args:
        value: the object, on a worker.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import OpaqueRef, inspect, remote

        def make_table(size: int) -> OpaqueRef:
            return OpaqueRef({"sum": torch.ones(size)})  # stays on the worker

        def look_up(table: OpaqueRef, key: str) -> torch.Tensor:
            return table.value[key]

        make = remote(make_table, propagate=lambda size: OpaqueRef())
        look = remote(look_up, propagate=lambda table, key: torch.empty(4))
        with this_host().spawn_procs({"gpus": 2}).activate():
            found = look(make(4), "sum")
        print(inspect(found).tolist())  # [1.0, 1.0, 1.0, 1.0]
        ```
    """

    __slots__ = ("_held",)

    def __init__(self, value: Any = _ON_WORKERS_ONLY) -> None:
        self._held = value

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
        return "<OpaqueRef>" if self._held is _ON_WORKERS_ONLY else f"<OpaqueRef to {self._held!r:.60}>"
