"""Hollow hosts: the real protocol of hosts and their processes, with many in one process of the operating system."""

from skipper.control.cluster.hollow.hosts import MAX_HOSTS, HollowHosts, HostsUsage

__all__ = ["MAX_HOSTS", "HollowHosts", "HostsUsage"]
