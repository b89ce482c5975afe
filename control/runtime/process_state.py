"""`ProcessState`: what a process knows of itself and of its job. The parts of its runtime share one such object."""

from __future__ import annotations

from dataclasses import dataclass

from skipper.control.model.settings import Settings
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.wire.process_ref import ProcessRef


@dataclass(slots=True, eq=False)
class ProcessState:
    """What the parts of one runtime share.

    Attributes:
        me: this process. Its address changes once, when other hosts are to reach it.
        root: the script; the same as ``me`` there.
        secret: the job's secret.
        settings: the bounds that hold for what this process does.
        certs: the folder of the certificates for TLS with other hosts; None: none.
        data_plane_is_open: whether the data plane may be used with other hosts.
        uid: the number of the process among its actors.
        closing: whether the process ends.
        redirection: where the processes that this one launches write their output; None: where this one does.
    """

    me: ProcessRef
    root: ProcessRef
    secret: bytes
    settings: Settings
    certs: str | None
    data_plane_is_open: bool
    uid: int
    closing: bool = False
    redirection: Redirection | None = None

    def __repr__(self) -> str:
        return f"ProcessState(me={self.me!r})"  # never the secret
