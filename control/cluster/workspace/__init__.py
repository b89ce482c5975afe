"""`sync_workspace`: a folder of the script on every host of a mesh, by content, moving only what is missing there."""

from skipper.control.cluster.workspace.api import SyncReport, sync_workspace

__all__ = ["SyncReport", "sync_workspace"]
