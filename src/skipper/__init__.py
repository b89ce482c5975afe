"""One Python script controls a cluster of GPUs; weights move one-sidedly, at the speed of memory.

```python
from skipper import Actor, RDMABuffer, endpoint, this_host, torchstore
```

The names below are imported from their packages when they are first used: `import skipper` loads nothing, and only
`torchstore` and `tensor_engine` load torch. Each package has more than what is listed here: ``from skipper.control
import configure``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipper import benchmarks, control, dataplane, tensor_engine, torchstore
    from skipper.control import (
        Accumulator,
        Actor,
        ActorError,
        ActorMesh,
        Channel,
        ControlError,
        Extent,
        Future,
        HostMesh,
        MeshFailure,
        Point,
        Port,
        PortReceiver,
        ProcMesh,
        Shape,
        SupervisionError,
        ValueMesh,
        attach_to_hosts,
        concurrent_endpoint,
        context,
        current_rank,
        current_size,
        endpoint,
        get_or_spawn_controller,
        shutdown,
        this_host,
        this_proc,
    )
    from skipper.dataplane import DataplaneError, RDMAAction, RDMABuffer

__all__ = [
    # packages
    "control",
    "dataplane",
    "tensor_engine",
    "torchstore",
    "benchmarks",
    # actors
    "Actor",
    "endpoint",
    "concurrent_endpoint",
    "context",
    "current_rank",
    "current_size",
    # meshes
    "this_host",
    "this_proc",
    "attach_to_hosts",
    "HostMesh",
    "ProcMesh",
    "ActorMesh",
    "get_or_spawn_controller",
    "Extent",
    "Point",
    "Shape",
    "ValueMesh",
    # results and messages
    "Future",
    "Accumulator",
    "Channel",
    "Port",
    "PortReceiver",
    # failures
    "ControlError",
    "ActorError",
    "SupervisionError",
    "MeshFailure",
    "shutdown",
    # memory
    "RDMABuffer",
    "RDMAAction",
    "DataplaneError",
]

_ROOMS = frozenset({"control", "dataplane", "tensor_engine", "torchstore", "benchmarks"})
_OF_DATAPLANE = frozenset({"RDMABuffer", "RDMAAction", "DataplaneError"})


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'skipper' has no attribute {name!r}")
    if name in _ROOMS:
        return import_module(f"skipper.{name}")
    room = import_module("skipper.dataplane" if name in _OF_DATAPLANE else "skipper.control")
    value: object = getattr(room, name)
    globals()[name] = value  # the next lookup finds it here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
