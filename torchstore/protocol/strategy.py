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
        default_transport_type: For callers of Meta's torchstore: seen to be a `TransportType`, and not needed, since
            what is fastest between two processes is found out.

    Raises:
        TypeError: It is something else.
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
    """One volume, in the process of the store's controller: the default."""

    @classmethod
    def get_volume_id(cls) -> str:
        """There is only one."""
        return "0"

    @classmethod
    def get_client_id(cls) -> str:
        """There is only one."""
        return "0"


class SingletonStrategy(TorchStoreStrategy):
    """One volume, in a process of its own."""

    @classmethod
    def get_volume_id(cls) -> str:
        """There is only one."""
        return "Singleton"

    @classmethod
    def get_client_id(cls) -> str:
        """There is only one."""
        return "Singleton"


class HostStrategy(TorchStoreStrategy):
    """One volume for each host, named by HOSTNAME or else by what the host calls itself.

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
    """One volume for each rank: a client's is named by RANK, or else LOCAL_RANK, or else its actor's rank."""

    @classmethod
    def get_volume_id(cls) -> str:
        """The rank of the volume among the volumes."""
        return str(current_rank().rank)

    @classmethod
    def get_client_id(cls) -> str:
        """RANK, or LOCAL_RANK, or the rank of the calling actor in its mesh."""
        return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or str(current_rank().rank)
