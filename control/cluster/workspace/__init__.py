"""`sync_workspace`: copies a folder of the script to every host of a mesh, by content; only missing parts are sent."""

from skipper.control.cluster.workspace.api import SyncReport, sync_workspace

__all__ = ["SyncReport", "sync_workspace"]
