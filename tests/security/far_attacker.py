"""A stranger on another machine, who knows the code: ``python -m tests.security.far_attacker``.

He is told what to attack by a line of JSON on his standard input, and reports, as `tests.security.attacker` does.
"""

import contextlib
import errno
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from skipper.control.wire import auth
from skipper.control.wire.frames import encode_process
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION
from tests.security.attacker import ACTORS, LINK, PREFACE, SHORT_S, TALKS, Attacker, Hits, talk

_AT_ONCE = 512
_FLOOD = 400
_TALK_S = 1.0
_SERVING = b"\x08\x01"
"""What gRPC's health service says to everybody where there is no TLS: that there is a server."""

_UCX_S = 3.0
_PROOFS = ("reflected", "zero", "random", "none")
_CALLS = (f"{ACTORS}ListActors", f"{ACTORS}Invoke", "/grpc.health.v1.Health/Check")
_OWN = (("grpc.use_local_subchannel_pool", 1),)


class FarAttacker(Attacker):
    """All attacks that a network allows.

    Args:
        target: as of `Attacker`; besides ``hosts``, IPs of the job's machines, ``agents``, ``IP:PORT`` of their agents,
            ``authority``, PEM of who signs certificates there, ``stolen``, PEM of a certificate and a key that somebody
            else has signed, and ``victim``, what a handle says of a buffer.
    """

    def __init__(self, target: dict[str, Any]) -> None:
        super().__init__(target)
        self.hosts: list[str] = target["hosts"]
        self.agents: list[str] = target["agents"]
        self.authority: str | None = target["authority"]
        self.stolen: list[str] = target["stolen"]
        self.victim: dict[str, Any] = target["victim"]
        self.only = ("ports", "garbage", "recordings", "proofs", "certificates", "floods", "backlogs", "handles", "ucx")

    def try_ports(self) -> Hits:
        """Every port of every host; what is found is attacked from then on."""
        for host in self.hosts:
            ports = iter(range(1, 1 << 16))
            while batch := [port for port, _ in zip(ports, range(_AT_ONCE), strict=False)]:
                for port in self._open(host, batch):
                    self.addresses[f"{host}:{port}"] = f"{host}:{port}"
        if missed := [agent for agent in self.agents if agent not in self.addresses]:
            raise RuntimeError(f"the look at ports has missed {missed}")
        return []

    def _open(self, host: str, ports: list[int]) -> list[int]:  # type: ignore[override]  # ports here, no path
        self.tries += len(ports)
        with contextlib.ExitStack() as stack:
            waiting = {}
            found = []
            poll = select.poll()
            for port in ports:
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                if connection.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                    waiting[connection.fileno()] = connection, port
                    poll.register(connection, select.POLLOUT)
            until = time.monotonic() + SHORT_S
            while waiting and time.monotonic() < until:
                for fd, _ in poll.poll(50):
                    connection, port = waiting.pop(fd)
                    poll.unregister(fd)
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        found.append(port)
            return found

    def try_recordings(self) -> Hits:
        """What a script has said to an agent, once more, to all of them."""
        hits: Hits = []
        recorded = self.recordings["agent"]
        for address in self.agents:
            for content in (recorded, recorded[:-1], recorded + recorded[len(PREFACE) :], recorded * 2):
                self.tries += 1
                answer = talk(socket.AF_INET, _split(address), content)
                hits += self.look_for_needles(answer, "the answer to a recording")
                if self.recordings["agent-answers"] and self.recordings["agent-answers"][-32:] in answer:
                    hits.append("a recording is answered as it was the first time")
        return hits

    def _channels(self) -> list[tuple[str, Any]]:
        found = [("in the clear", None)]
        if self.authority is not None:
            trusted = self.authority.encode()
            found.append(("without a certificate", grpc.ssl_channel_credentials(trusted)))
            key, certificate = (part.encode() for part in self.stolen)
            found.append(("with another's certificate", grpc.ssl_channel_credentials(trusted, key, certificate)))
        return found

    def _on_all_channels(self, attack: Callable[[str, str, Any], Hits], tries: int) -> Hits:
        """Attack every address in every way to connect, side by side: what drops packets answers nobody."""
        ways = [(address, *channel) for address in self.addresses.values() for channel in self._channels()]
        self.tries += tries * len(ways)
        with ThreadPoolExecutor(TALKS) as attacks:
            return [hit for hits in attacks.map(lambda way: attack(*way), ways) for hit in hits]

    def try_proofs(self) -> Hits:
        """The protocol of the link, as it should be but for the secret and the certificate."""
        return self._on_all_channels(self._prove, len(_PROOFS))

    def _prove(self, address: str, how: str, credentials: Any) -> Hits:
        hits: Hits = []
        stranger = encode_process(ProcessRef("stranger", "tcp://10.0.0.1:1", "stranger"))
        metadata = (
            ("skipper-version", self.random.choice((VERSION, VERSION, "0"))),
            ("skipper-process-bin", stranger),
            ("skipper-nonce-bin", self.random.randbytes(auth.NONCE_NBYTES)),
        )
        with _channel(address, credentials) as channel:
            for kind in _PROOFS:
                said: list[bytes] = []
                call = channel.stream_stream(LINK, _registered_method=False)(
                    self._proofs(kind, said), metadata=metadata, timeout=_TALK_S
                )
                with contextlib.suppress(grpc.RpcError):
                    said += [v for k, v in call.initial_metadata() if k == "skipper-proof-bin"]
                    if said and credentials is None and self.authority is not None:
                        hits.append("a server answers without TLS")
                    hits += [f"a {kind} proof {how} opens the link: {message!r}" for message in call]
        return hits

    def try_certificates(self) -> Hits:
        """Calls of gRPC without the certificate that is asked for."""
        return self._on_all_channels(self._call, len(_CALLS))

    def _call(self, address: str, how: str, credentials: Any) -> Hits:
        hits: Hits = []
        with _channel(address, credentials) as channel:
            for method in _CALLS:
                call = channel.unary_unary(method, _registered_method=False)
                with contextlib.suppress(grpc.RpcError):
                    answer = call(b"", timeout=_TALK_S)
                    if self.authority is not None or answer != _SERVING:
                        hits.append(f"{method} answers {answer!r} {how}")
        return hits

    def try_floods(self) -> Hits:
        """Connections one after the other, each ended at once; some with the beginning of something."""
        for address in self.addresses.values():
            for number in range(_FLOOD):
                self.tries += 1
                with socket.socket() as connection, contextlib.suppress(OSError):
                    connection.settimeout(SHORT_S)
                    connection.connect(_split(address))
                    if number % 3:
                        connection.send(PREFACE[: self.random.randrange(1, len(PREFACE))])
        return []

    def try_ucx(self) -> Hits:
        """UCX itself, with the addresses and the keys that a handle says."""
        self.tries += 1
        command = [sys.executable, "-m", "tests.dataplane.stranger", str(_UCX_S), "eth0"]
        done = subprocess.run(
            command, input=json.dumps(self.victim), capture_output=True, text=True, timeout=60, check=False
        )
        said = done.stdout.split()
        if len(said) != 2:
            raise RuntimeError(f"the attack with UCX has failed: {done.stdout} {done.stderr}")
        return [] if said[1] == "0" else [f"UCX has given {said[1]} bytes to a stranger"]


def _channel(address: str, credentials: Any) -> Any:
    if credentials is None:
        return grpc.insecure_channel(address, options=_OWN)
    return grpc.secure_channel(address, credentials, options=_OWN)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main() -> None:
    """Attack until the standard input ends."""
    attacker = FarAttacker(json.loads(sys.stdin.readline()))
    while True:
        for name in attacker.only:
            before, began = attacker.tries, time.monotonic()
            hits = attacker.attacks[name]()
            report = {"attack": name, "tries": attacker.tries - before, "hits": list(dict.fromkeys(hits))[:50]}
            sys.stdout.write(json.dumps(report | {"took_s": round(time.monotonic() - began, 2)}) + "\n")
            sys.stdout.flush()
            if select.select([sys.stdin], [], [], 0)[0]:
                return


if __name__ == "__main__":
    main()
