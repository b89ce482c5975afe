"""Which volume a client writes to.

A strategy names volumes (in their processes) and names the volume of a client (in the client's process);
the same name means the same volume. Reading does not ask the strategy: a version knows where its bytes are.
"""

from __future__ import annotations

import os
import socket

from skipper.control import current_rank
from skipper.torchstore.errors import StrategyError
from skipper.torchstore.transport.kinds import TransportType, check_transport


class TorchStoreStrategy:
    """Base class: subclasses say how volumes and clients are named.

    A strategy travels to the store's controller and to every client: keep it picklable.

    Args:
        default_transport_type: For callers of Meta's torchstore: it must be a `TransportType`, but has no effect,
            because the fastest way between two processes is found automatically.

    Raises:
        TypeError: ``default_transport_type`` has another type.

    Example:
        ```python
        from skipper.control import Actor, current_rank, endpoint, this_host
        from skipper.torchstore import TorchStoreStrategy
        from skipper.torchstore import sync as ts

        class ByParity(TorchStoreStrategy):  # one volume for even ranks, one for odd ones
            @classmethod
            def get_volume_id(cls) -> str:
                return str(current_rank().rank % 2)

            @classmethod
            def get_client_id(cls) -> str:
                return str(current_rank().rank % 2)

        class Worker(Actor):
            @endpoint
            async def put(self) -> None:
                from skipper import torchstore

                await torchstore.put(f"rank {current_rank().rank}", 1)

        ts.initialize(2, ByParity())
        workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
        workers.put.call().get(timeout=60)
        print(ts.get("rank 1"))  # 1
        ts.shutdown()
        ```
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        self.default_transport_type = check_transport(default_transport_type)

    @classmethod
    def get_volume_id(cls) -> str:
        """Name the volume of the calling process. Called once, when the volume starts."""
        raise NotImplementedError(f"{cls.__name__} must say how volumes are named")

    @classmethod
    def get_client_id(cls) -> str:
        """Name the volume that the calling client writes to. Called at the client's first put."""
        raise NotImplementedError(f"{cls.__name__} must say which volume a client writes to")

    def choose(self, volumes: tuple[str, ...]) -> str:
        """The volume that the calling process writes to.

        Raises:
            StrategyError: There is no volume of the name that this client has.
        """
        client = self.get_client_id()
        if client not in volumes:
            raise StrategyError(
                f"{type(self).__name__} sends this client to the volume {client!r}, but the volumes are "
                f"{', '.join(map(repr, volumes))}; initialize the store with one volume for each client"
            )
        return client


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume, in the process of the store's controller: the default.

    Example:
        ```python
        from skipper.torchstore import ControllerStorageVolumes
        from skipper.torchstore import sync as ts

        ts.initialize(strategy=ControllerStorageVolumes())
        ts.put("step", 1)
        print(ts.get("step"))  # 1
        ts.shutdown()
        ```
    """

    @classmethod
    def get_volume_id(cls) -> str:
        """The only volume."""
        return "0"

    @classmethod
    def get_client_id(cls) -> str:
        """The only volume."""
        return "0"


class SingletonStrategy(TorchStoreStrategy):
    """One volume, in a process of its own.

    Example:
        ```python
        from skipper.torchstore import SingletonStrategy
        from skipper.torchstore import sync as ts

        ts.initialize(strategy=SingletonStrategy())
        ts.put("step", 1)
        print(ts.get("step"))  # 1
        ts.shutdown()
        ```
    """

    @classmethod
    def get_volume_id(cls) -> str:
        """The only volume."""
        return "Singleton"

    @classmethod
    def get_client_id(cls) -> str:
        """The only volume."""
        return "Singleton"


class HostStrategy(TorchStoreStrategy):
    """One volume for each host, named by HOSTNAME or else by the host's own name.

    Example:
        ```python
        from skipper import torchstore
        from skipper.control import this_host
        from skipper.torchstore import sync as ts

        volumes = this_host().spawn_procs({"hosts": 1})  # one process for the values of each host
        ts.initialize(mesh=volumes, strategy=torchstore.HostStrategy())
        ts.put("step", 1)
        print(ts.get("step"))  # 1
        ts.shutdown()
        ```
    """

    @classmethod
    def get_volume_id(cls) -> str:
        """The host's name."""
        return os.environ.get("HOSTNAME") or socket.gethostname()

    @classmethod
    def get_client_id(cls) -> str:
        """The host's name."""
        return os.environ.get("HOSTNAME") or socket.gethostname()


class LocalRankStrategy(TorchStoreStrategy):
    """One volume for each rank: a client's is named by RANK, or else LOCAL_RANK, or else its actor's rank.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.control import Actor, current_rank, endpoint, this_host
        from skipper.torchstore import LocalRankStrategy
        from skipper.torchstore import sync as ts

        class Worker(Actor):
            @endpoint
            async def put(self) -> None:
                rank = current_rank().rank
                await torchstore.put(f"rank {rank}", torch.full((4,), float(rank)))  # into the volume of this rank

        ts.initialize(2, LocalRankStrategy())
        workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
        workers.put.call().get(timeout=60)
        print(ts.get("rank 1").tolist())  # [1.0, 1.0, 1.0, 1.0]
        ts.shutdown()
        ```
    """

    @classmethod
    def get_volume_id(cls) -> str:
        """The rank of the volume among the volumes."""
        return str(current_rank().rank)

    @classmethod
    def get_client_id(cls) -> str:
        """RANK, or LOCAL_RANK, or the rank of the calling actor in its mesh."""
        return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or str(current_rank().rank)
