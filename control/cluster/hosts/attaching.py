"""How one host is attached: what its agent is asked, and how the process is met that stands for the job there."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.cluster.hosts.mesh import NAME
from skipper.control.model.errors import ControlError, HostUnreachableError
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.requests import PING
from skipper.control.wire.addresses import at
from skipper.control.wire.certificates import Certificates
from skipper.control.wire.envelope import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process


@dataclass(frozen=True, slots=True)
class Options:
    """How a host is attached.

    Attributes:
        host: its IP.
        port: that of its agent.
        secret: the agent's.
        certificates: for TLS; None: none.
        open_data_plane: whether the data plane, which does not encrypt, may be used with other hosts.
    """

    host: str
    port: int
    secret: bytes
    certificates: Certificates | None
    open_data_plane: bool

    def __repr__(self) -> str:
        return f"<{at(self.host, self.port)}>"  # never the secret


def attach_one(process: Process, link: AgentLink, options: Options, timeout: float) -> ProcessRef:
    """Have an agent start a process for the job, and meet that.

    Raises:
        HostError: it cannot be reached, or the agent refuses.
    """
    deadline = time.monotonic() + timeout
    me = runtime.new_process_ref(f"{NAME}{at(options.host, options.port)}", process.me)
    nonce = protocol.new_nonce()
    content = {
        "versions": protocol.versions(),
        "me": {"id": me.id, "name": me.name, "host": options.host},
        "root": {"id": process.me.id, "address": process.me.address, "name": process.me.name},
        "nonce": nonce.hex(),
        "masked_secret": protocol.mask(process.secret, options.secret, nonce).hex(),
        "settings": dataclasses.asdict(process.settings),
        "sys_path": [os.path.abspath(entry) for entry in sys.path],
        "open_data_plane": options.open_data_plane,
    }
    there = link.ask("attach", content, timeout=max(deadline - time.monotonic(), 0))
    host = ProcessRef(me.id, str(there["address"]), me.name, process.me)
    process.remote_launch.attached(host)
    try:
        process.request(host, PING).get(max(deadline - time.monotonic(), 0))
        if process.redirection is not None and process.redirection.sink:
            from skipper.control.observe.job_query import ask_below

            ask_below(process, host, "logs", process.redirection, timeout=max(deadline - time.monotonic(), 0))
    except ControlError as error:
        raise HostUnreachableError(f"the job's process on {options!r} cannot be reached: {error}") from error
    return host
