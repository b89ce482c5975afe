"""The two ends of the handshake that begins every stream: `Dial` and `Guest`. See `auth` for what it proves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from skipper.control.model.errors import CertificateError, ProtocolError
from skipper.control.wire import auth
from skipper.control.wire.addresses import dialed, within_host
from skipper.control.wire.certificates import Certificates
from skipper.control.wire.frames import decode_process, encode_process
from skipper.control.wire.identity import Identity, Role
from skipper.control.wire.message_stream import DialedStream, DialingStream, MessageStream, Metadata, Status, User
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION, obstacle

WELCOME = b"\x01"

_VERSION_KEY, _PROCESS_KEY, _NONCE_KEY, _PROOF_KEY, _SHOWN_KEY, _SIGNATURE_KEY = (
    "skipper-version",
    "skipper-process-bin",
    "skipper-nonce-bin",
    "skipper-proof-bin",
    "skipper-certificate-bin",
    "skipper-signature-bin",
)


class Dial:
    """The dialing end: proves itself to a listener that has proven that it knows the secret.

    Args:
        me: this process.
        peer: the process that is dialed.
        secret: the job's secret.
        on_open: takes the stream once both sides have accepted; it must then set the stream's user.
        on_failure: called with the reason why there is no stream, in words and as gRPC's status.
        address: the gRPC target to dial; None: the target within this host.
        connect: makes a stream without gRPC; it sends the given metadata, and reports to the user.
        certificates: for TLS; None: no TLS.
        roles: with TLS: those of which the other end has to have one.

    Attributes:
        stream: the stream of the handshake, which begins with its `DialingStream.start`.
        identity: with TLS: what the certificate of the other end says, once the stream is open.

    Raises:
        OSError: from ``connect``.
    """

    def __init__(
        self,
        me: ProcessRef,
        peer: ProcessRef,
        secret: bytes,
        *,
        on_open: Callable[[MessageStream], None],
        on_failure: Callable[[str, Status], None],
        address: str | None = None,
        connect: Callable[[Metadata, User], DialingStream] | None = None,
        certificates: Certificates | None = None,
        roles: Collection[Role] = (),
    ) -> None:
        self.identity: Identity | None = None
        self._certificates, self._roles = certificates, roles
        self._secret = secret
        self._on_open = on_open
        self._on_failure = on_failure
        self._nonce = auth.new_nonce()
        self._me, self._peer = encode_process(me), peer.id.encode()
        self._missing = {"sent", "welcome"}
        self._reason = ""
        metadata = ((_VERSION_KEY, VERSION), (_PROCESS_KEY, self._me), (_NONCE_KEY, self._nonce))
        self._target = address or within_host(peer.id)
        self.stream: DialingStream
        if connect is None:
            from skipper.control.wire.grpc_streams import OutgoingStream  # gRPC is imported where it is needed

            self.stream = OutgoingStream(self._target, metadata, self, certificates)
        else:
            self.stream = connect(metadata, self)

    def give_up(self, reason: str) -> None:
        """End the dial, unless it has succeeded; from any thread."""
        if self._missing:
            self._reason = self._reason or reason
            self.stream.end()

    def opened(self, metadata: dict[str, Any]) -> None:
        """Take the metadata, by which the other side identifies itself."""
        theirs, version = metadata.get(_NONCE_KEY), metadata.get(_VERSION_KEY)
        if not isinstance(theirs, bytes) or len(theirs) != auth.NONCE_NBYTES:
            return  # it refuses: the reason follows
        if (why := obstacle(version)) is not None:
            self.give_up(why)
            return
        transcript = (VERSION.encode(), self._nonce, str(version).encode(), theirs, self._me, self._peer)
        if not auth.verify(auth.server_proof(self._secret, *transcript), metadata.get(_PROOF_KEY)):
            self.give_up(auth.NOT_OUR_SECRET)
            return
        if self._certificates is not None:
            shown, signature = metadata.get(_SHOWN_KEY), metadata.get(_SIGNATURE_KEY)
            try:
                self.identity = self._certificates.check(
                    shown, signature, transcript, dialed(self._target), self._roles
                )
            except CertificateError as error:
                self.give_up(f"{auth.NOT_ADMITTED}: {error}")
                return
        is_out = self.stream.send(auth.client_proof(self._secret, *transcript))
        self.stream.receive()
        if is_out:
            self.sent()

    def received(self, message: bytes) -> bool:
        """Take the answer: the other side has accepted, or is unknown."""
        if message != WELCOME:
            self.give_up("it gave an answer that this version does not know")
        else:
            self._done("welcome")
        return False

    def sent(self) -> None:
        """Note that the proof is sent."""
        self._done("sent")

    def ended(self, status: Status) -> None:
        """Note that there will be no stream."""
        self._on_failure(self._reason or f"turned away: {status.details}", status)

    def _done(self, step: str) -> None:
        self._missing.discard(step)
        if not self._missing:
            self._on_open(self.stream)
            self.stream.receive()  # not earlier: later messages are for the next user


class Guest:
    """The end that was dialed: a peer without the secret gets no further than the comparison of 32 bytes.

    Args:
        stream: the incoming stream.
        name: the id of this process, or another name by which it is dialed.
        secret: the job's secret.
        on_proven: takes the stream and the process at its other end, once that has proven itself.
        on_gone: called when the peer has left without a proof.
        certificates: for a stream that may use TLS; None: it cannot.
        roles: with TLS: those of which the other end has to have one.

    Attributes:
        identity: with TLS: what the certificate of the other end says, once it is known.
    """

    def __init__(
        self,
        stream: DialedStream,
        name: str,
        secret: bytes,
        *,
        on_proven: Callable[[Guest, ProcessRef], None],
        on_gone: Callable[[Guest], None],
        certificates: Certificates | None = None,
        roles: Collection[Role] = (),
    ) -> None:
        self.stream = stream
        self.identity: Identity | None = None
        self._certificates, self._roles = certificates, roles
        self._on_proven = on_proven
        self._on_gone = on_gone
        self._secret = secret
        self._me = name.encode()
        self._transcript: tuple[bytes, ...] = ()
        self._encoded: bytes = stream.metadata.get(_PROCESS_KEY, b"")
        stream.user = self

    def receive(self) -> bool:
        """Read its metadata; False if it was turned away at once."""
        metadata = self.stream.metadata
        nonce, version = metadata.get(_NONCE_KEY, b""), metadata.get(_VERSION_KEY)
        if (why := obstacle(version)) is not None:
            self.stream.turn_away("failed_precondition", why)
        elif len(nonce) != auth.NONCE_NBYTES:
            self.stream.turn_away("unauthenticated", "no nonce")
        else:
            ours = auth.new_nonce()
            said = (str(version).encode(), nonce, VERSION.encode(), ours)
            self._transcript = (*said, self._encoded, self._me)
            proof = auth.server_proof(self._secret, *self._transcript)
            answer = ((_VERSION_KEY, VERSION), (_NONCE_KEY, ours), (_PROOF_KEY, proof))
            try:
                self.stream.answer((*answer, *self._admit()))
            except CertificateError as error:
                self.stream.turn_away("permission_denied", f"{auth.NOT_ADMITTED}: {error}")
                return False
            return True
        return False

    def _admit(self) -> tuple[tuple[str, bytes], ...]:
        """Check the certificate of the other end; returns the metadata with this end's. Does nothing without TLS.

        Raises:
            CertificateError: the certificate is not accepted here.
        """
        if self._certificates is None or (shown := self.stream.shown()) is None:
            return ()  # it has come through a socket within this host
        self.identity = self._certificates.admit(shown, self._roles)
        ours, signature = self._certificates.sign(*self._transcript)
        return (_SHOWN_KEY, ours), (_SIGNATURE_KEY, signature)

    def opened(self, metadata: dict[str, Any]) -> None:
        """Do nothing: the other side dials."""

    def received(self, message: bytes) -> bool:
        """Check its proof."""
        if not auth.verify(auth.client_proof(self._secret, *self._transcript), message):
            self.stream.turn_away("unauthenticated", "wrong proof")
            return False
        try:
            peer = decode_process(self._encoded)
        except ProtocolError as error:
            self.stream.turn_away("invalid_argument", str(error))
            return False
        self._on_proven(self, peer)
        return self.stream.user is not self

    def sent(self) -> None:
        """Do nothing: nothing is sent before the proof."""

    def ended(self, status: Status) -> None:
        """Note that it has left, or closed its side, without a proof."""
        self.stream.turn_away("unauthenticated", "no proof came")
        self._on_gone(self)
