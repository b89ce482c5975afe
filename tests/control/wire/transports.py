"""Transports beside that of this process, which share its secret and its loop."""

from skipper.control.model.future import Future
from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire._poller import Poller
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.sockets import Sockets
from skipper.control.wire.transport import Transport


def transport_of(me: ProcessRef, poller: Poller | None = None) -> Transport:
    """One for a process of this reference, not started, which delivers nothing; with the poller, or one of its own."""
    process = runtime.current()
    return Transport(
        me,
        process.secret,
        process.loop,
        deliver=lambda peer, message: None,
        on_lost=lambda peer, reason: None,
        on_connected=lambda peer: None,
        on_dial=lambda peer: None,
        find_address=lambda peer: Future.of(peer.address),
        home=lambda: "",
        heartbeat_s=10.0,
        unresponsive_s=100.0,
        connect_timeout_s=10.0,
        network=Sockets(me, process.secret, process.loop, poller),
    )
