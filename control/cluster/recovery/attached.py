"""`AttachedHosts`: hosts that no engine has placed, as what `ReplaceHost` asks."""

from __future__ import annotations

from skipper.control.api.mesh import HostMesh


class AttachedHosts:
    """Hosts that were attached by their addresses: one that is lost is attached again, once its agent answers.

    ``ReplaceHost(AttachedHosts(hosts), attempts=20)`` waits for a machine that is cut off, or that starts again.

    Args:
        hosts: as `attach_to_hosts` has returned them.

    Raises:
        ValueError: they are this host.
    """

    def __init__(self, hosts: HostMesh) -> None:
        if not hosts.names:
            raise ValueError("this host is not an attached one: it cannot be lost while its script runs")
        self._hosts = hosts

    def replace(self, *, timeout: float) -> HostMesh:
        """Attach those again that are lost.

        Raises:
            HostUnreachableError: the agent of one of them does not answer.
            HostError: its agent refuses.
        """
        return self._hosts.reattach(timeout=timeout)
