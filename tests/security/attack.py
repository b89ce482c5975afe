"""A job, and another user who tries everything that this code knows to get at it: ``python -m tests.security.attack``.

It needs root, to be two users. The job works meanwhile and checks each of its own results. At the end: how often what
was tried, and what it brought; the exit code is 0 where that is nothing, and nobody was harmed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from skipper.control.rpc import FixedResolver, RpcClient, use_namespace
from skipper.control.wire import auth
from skipper.control.wire.frames import encode_process
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION
from tests.security.attacker import LINK
from tests.security.job import Calculator
from tests.security.target import PATIENCE_S, ROOT, Target

STRANGER = 54_321
"""A uid that nobody has."""

_JOIN = """
import sys
from skipper import control
try:
    control.join(sys.argv[1])
    print("joined")
except control.ControlError as error:
    print("refused:", type(error).__name__, error)
"""


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        tries: attempts of each attack.
        hits: what the attacker got, in words.
        rounds: how often the job went round meanwhile, with all results right.
        slowest_s: the longest of these rounds.
        failed: what went wrong in the job.
    """

    tries: collections.Counter[str] = field(default_factory=collections.Counter)
    hits: list[str] = field(default_factory=list)
    rounds: int = 0
    slowest_s: float = 0.0
    failed: list[str] = field(default_factory=list)


def attack(folder: Path, *, for_s: float, uid: int = STRANGER, only: Sequence[str] | None = None) -> Outcome:
    """Start a job and an attacker, and let them be for a while.

    Args:
        folder: for the job's files; made to be one for everybody, as /tmp is.
        for_s: seconds; each attack runs once at least.
        uid: of the attacker.
        only: these attacks; None: all.
    """
    folder.chmod(0o1777)
    outcome = Outcome()
    with Target("--servers", "--page", folder=folder) as job, _attacker(uid) as stranger:
        target = _describe(job, folder)
        pids = target["pids"]
        impostor = target["impostor"]
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        before = len(job.rounds)
        stranger.stdin.write(json.dumps(target | {"only": only, "seed": secrets.randbits(32)}) + "\n")
        stranger.stdin.flush()
        until = time.monotonic() + for_s
        pending = set(only or _names())
        for line in stranger.stdout:
            report = json.loads(line)
            outcome.tries[report["attack"]] += report["tries"]
            outcome.hits += [f"{report['attack']}: {hit}" for hit in report["hits"]]
            pending.discard(report["attack"])
            if not pending and time.monotonic() > until:
                break
        else:
            outcome.failed.append("the attacker has ended")
        outcome.failed += _deceive(job, folder, impostor)
        stranger.kill()
        job.wait_for_rounds(2)
        rounds = job.rounds[before:]
        outcome.rounds, outcome.slowest_s = len(rounds), max(one["took_s"] for one in rounds)
        outcome.failed += [what for one in rounds for what in one["failed"]]
        gone = set(pids) - set(job.pids())
        outcome.failed += [f"process {pid} has ended" for pid in sorted(gone)]
        notes = _call(folder, job, "noted")
        outcome.hits += [] if notes == 1 else [f"a recorded call was carried out again: {notes}"]
        said = job.log.read_bytes()
        for pid in pids:
            said += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        for secret in target["secrets"]:
            if bytes.fromhex(secret) in said or secret.encode() in said:
                outcome.hits.append("a secret stands in a log, an argument or a variable")
        if job.close() != 0:
            outcome.failed.append(f"the job ended with {job.process.returncode}: {job.log.read_text()[-2000:]}")
    return outcome


def _names() -> list[str]:
    from tests.security.attacker import Attacker

    return [name.removeprefix("try_") for name in dir(Attacker) if name.startswith("try_")]


@contextlib.contextmanager
def _attacker(uid: int) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.security.attacker", str(uid)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def _describe(job: Target, folder: Path) -> dict[str, Any]:
    """What the attacker is told: more than it could find out, and recordings that a wire would have given it."""
    own = folder / f"skipper-{os.geteuid()}"
    connection = json.loads((own / f"attacked-{job.pid}.json").read_text())
    recordings: dict[str, str] = {}
    root = ProcessRef(connection["root"]["id"], connection["root"]["address"], connection["root"]["name"])
    with _recorder(socket.AF_UNIX, f"\0skipper-{root.id}") as (address, heard, said):
        _open_link(f"unix-abstract:{address[1:]}", root, bytes.fromhex(job.report["secret"]))
    recordings |= {"link": bytes(heard).hex(), "link-answers": bytes(said).hex()}
    with _recorder(socket.AF_INET, _split(job.report["addresses"]["actors"])) as (address, heard, said):
        assert _call(folder, job, "note", f"{address[0]}:{address[1]}") == 1
    assert all((heard, said, *recordings.values())), "the attack needs recordings"
    recordings |= {"actors": bytes(heard).hex(), "actors-answers": bytes(said).hex()}
    return {
        "pids": job.pids(),
        "addresses": job.report["addresses"],
        "handles": job.report["handles"],
        "me": job.report["me"],
        "recordings": recordings,
        "folders": [str(folder)],
        "secrets": [job.report["secret"], _secret_of_servers(folder).hex()],
        "uid": os.geteuid(),
        "impostor": f"impostor-{secrets.token_hex(8)}",
    }


def _deceive(job: Target, folder: Path, impostor: str) -> list[str]:
    """Have a process of the job's user dial the attacker, who answers as the job has answered before."""
    own = folder / f"skipper-{os.geteuid()}"
    connection = json.loads((own / f"attacked-{job.pid}.json").read_text())
    root = {"id": impostor, "address": f"unix-abstract:skipper-{impostor}", "name": connection["root"]["name"]}
    path = own / "deceived.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(connection | {"root": root}))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _JOIN, str(path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    path.unlink()
    said = done.stdout + done.stderr
    return [] if said.startswith("refused: ") else [f"a process believes recorded answers: {said!r}"]


def _open_link(address: str, root: ProcessRef, secret: bytes) -> None:
    """Speak with the script as who knows the secret, and hang up."""
    me, nonce = encode_process(ProcessRef("recorded", "unix-abstract:recorded", "recorded")), auth.new_nonce()
    metadata = (("skipper-version", VERSION), ("skipper-process-bin", me), ("skipper-nonce-bin", nonce))
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with grpc.insecure_channel(address) as channel:
        method = channel.stream_stream(LINK, _registered_method=False)
        call = method(iter(outgoing.get, b""), metadata=metadata, timeout=PATIENCE_S)
        theirs = dict(call.initial_metadata())["skipper-nonce-bin"]
        said = (VERSION.encode(), nonce, VERSION.encode(), theirs)
        outgoing.put(auth.client_proof(secret, *said, me, root.id.encode()))
        assert next(call) == b"\x01"
        outgoing.put(b"")
        call.cancel()


def _secret_of_servers(folder: Path) -> bytes:
    return (folder / f"skipper-{os.geteuid()}" / "actors.secret").read_bytes()


def _call(folder: Path, job: Target, method: str, address: str = "") -> int:
    where = address or job.report["addresses"]["actors"]
    resolver = FixedResolver(f"actor://{where}/calculator")
    with (
        use_namespace(job.report["namespace"]),
        RpcClient(resolver, Calculator, name="calculator", secret=_secret_of_servers(folder)) as client,
    ):
        answer: int = getattr(client.with_options(timeout=PATIENCE_S), method).sync()
    return answer


@contextlib.contextmanager
def _recorder(family: int, real: Any) -> Iterator[tuple[Any, bytearray, bytearray]]:
    """A listener that hands everything on and keeps what the first client and its server say."""
    heard, said = bytearray(), bytearray()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        listener.bind(f"\0recorder-{secrets.token_hex(8)}" if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        name = listener.getsockname()
        threads: list[threading.Thread] = []

        def hand_on(client: socket.socket, server: socket.socket) -> None:
            back = threading.Thread(target=_copy, args=(server, client, said))
            with client, server:
                back.start()
                _copy(client, server, heard)
                back.join()

        def serve() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    client, _ = listener.accept()
                    server = socket.socket(family)
                    server.connect(real)
                    threads.append(threading.Thread(target=hand_on, args=(client, server)))
                    threads[-1].start()

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        yield name.decode() if isinstance(name, bytes) else name, heard, said
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(PATIENCE_S)


def _copy(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            kept += chunk
            sink.sendall(chunk)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main() -> int:
    """Attack for as long as asked, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    given = parser.parse_args()
    if os.geteuid():
        parser.error("only root can be two users")
    with tempfile.TemporaryDirectory(prefix="attacked-") as folder:
        outcome = attack(Path(folder), for_s=60 * given.minutes)
    for name, tries in outcome.tries.most_common():
        sys.stdout.write(f"{name:16} {tries:10,} attempts\n")
    sys.stdout.write(f"the job meanwhile: {outcome.rounds} rounds, the slowest {outcome.slowest_s:.2f} s\n")
    for what in dict.fromkeys((*outcome.hits, *outcome.failed)):
        sys.stdout.write(f"GOT THROUGH: {what}\n")
    sys.stdout.write(f"got through: {len(outcome.hits)}, harmed: {len(outcome.failed)}\n")
    return 1 if outcome.hits or outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
