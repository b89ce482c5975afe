"""Hosts: this one, and others that are attached to the job by their agents."""

from skipper.control.cluster.hosts.attach import attach_to_hosts
from skipper.control.cluster.hosts.data_plane import device_of
from skipper.control.cluster.hosts.mesh import HostMesh, own_address, this_host
from skipper.control.cluster.hosts.shell import shell

__all__ = ["HostMesh", "attach_to_hosts", "device_of", "own_address", "shell", "this_host"]
