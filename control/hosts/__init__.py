"""Hosts: this one, and others that are attached to the job by their agents."""

from control.hosts.attach import attach_to_hosts
from control.hosts.mesh import HostMesh, this_host

__all__ = ["HostMesh", "attach_to_hosts", "this_host"]
