"""Hosts: this one, and others that are attached to the job by their agents."""

from control.hosts.attach import attach_to_hosts
from control.hosts.data_plane import device_of
from control.hosts.mesh import HostMesh, own_address, this_host
from control.hosts.shell import shell

__all__ = ["HostMesh", "attach_to_hosts", "device_of", "own_address", "shell", "this_host"]
