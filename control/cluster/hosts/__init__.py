"""Hosts: this one, and others that are attached to the job by their agents."""

from skipper.control.api.mesh import HostMesh, own_address, this_host
from skipper.control.cluster.hosts.attach import attach_to_hosts
from skipper.control.cluster.hosts.shell import shell
from skipper.control.wire.addresses import device_of

__all__ = ["HostMesh", "attach_to_hosts", "device_of", "own_address", "shell", "this_host"]
