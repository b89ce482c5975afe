"""A job on attached hosts, and a stranger on another machine who tries everything: ``python -m tests.security.far``.

It needs root, to make network namespaces. The job works meanwhile and checks each of its own results. At the end: how
many rounds were right, how often what was tried, what got through and who was harmed; the exit code is 0 where that is
nothing and nobody.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skipper.control.cluster.hosts import certs
from skipper.control.cluster.hosts import command as host_command
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.model.errors import HostUnreachableError
from skipper.control.wire.certificates import Certificates
from tests.hosts.conftest import PORT, environment, serve
from tests.hosts.netns import REPOSITORY, Machine, Network, NotPermittedError, network
from tests.security.attack import Outcome, _recorder
from tests.security.far_attacker import FarAttacker
from tests.security.target import PATIENCE_S, Target

MACHINES = 3
"""Two of the job, and that of the stranger."""

_HANDSHAKE_S = 0.5


def attack_far(net: Network, folder: Path, *, for_s: float, tls: bool) -> Outcome:
    """Start a job on the first two machines and a stranger on the third, and let them be for a while.

    Args:
        net: the machines.
        folder: for the job's files.
        for_s: seconds; each attack runs once at least.
        tls: whether the hosts have certificates.
    """
    outcome = Outcome()
    hosts, stranger = net.machines[:2], net.machines[2]
    options, credentials = _credentials(folder, net, hosts, tls=tls)
    agents = [serve(machine, *options[machine.name]) for machine in hosts]
    addresses = [f"tcp://{machine.address}:{PORT}" for machine in hosts]
    try:
        with Target(*addresses, *credentials, folder=folder, module="tests.security.far_job") as job:
            target = _describe(job, folder, net, hosts, credentials, tls=tls)
            before = len(job.rounds)
            pipe = subprocess.PIPE
            command = [sys.executable, "-m", "tests.security.far_attacker"]
            attacker = stranger.start(command, cwd=REPOSITORY, env=environment(), stdin=pipe, stdout=pipe)
            _listen_to(attacker, target, outcome, for_s)
            attacker.kill()
            job.wait_for_rounds(2)
            rounds = job.rounds[before:]
            outcome.rounds, outcome.slowest_s = len(rounds), max(one["took_s"] for one in rounds)
            outcome.failed += [what for one in rounds for what in one["failed"]]
            outcome.failed += [
                f"the agent of {machine.address} has ended"
                for machine, agent in zip(hosts, agents, strict=True)
                if agent.poll() is not None
            ]
            secret = job.report["secret"]
            said = job.log.read_bytes()
            if bytes.fromhex(secret) in said or secret.encode() in said:
                outcome.hits.append("a secret stands in a log")
            if job.close() != 0:
                outcome.failed.append(f"the job ended with {job.process.returncode}: {job.log.read_text()[-2000:]}")
    finally:
        for machine in net.machines:
            machine.clear()
    return outcome


def _listen_to(attacker: subprocess.Popen[str], target: dict[str, Any], outcome: Outcome, for_s: float) -> None:
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    attacker.stdin.write(json.dumps(target) + "\n")
    attacker.stdin.flush()
    until = time.monotonic() + for_s
    pending = set(FarAttacker(target).only)
    for line in attacker.stdout:
        report = json.loads(line)
        outcome.tries[report["attack"]] += report["tries"]
        outcome.hits += [f"{report['attack']}: {hit}" for hit in report["hits"]]
        pending.discard(report["attack"])
        if not pending and time.monotonic() > until:
            return
    outcome.failed.append("the attacker has ended")


def _credentials(
    folder: Path, net: Network, hosts: list[Machine], *, tls: bool
) -> tuple[dict[str, list[str]], list[str]]:
    """What agents are started with, by the names of their machines, and what the script is."""
    if not tls:
        path = folder / "secret"
        if host_command.main(["secret", str(path)]) != 0:
            raise RuntimeError("no secret could be made")
        return {machine.name: ["--insecure", "--secret-file", str(path)] for machine in hosts}, [
            "--secret-file",
            str(path),
        ]
    authority = certs.make_authority(folder / "authority", cluster="attacked")
    issued = {
        machine.name: certs.issue(authority, folder / machine.name, [machine.address], role="host") for machine in hosts
    }
    script = certs.issue(authority, folder / "script", [net.address], role="script")
    return {name: ["--certs", str(path)] for name, path in issued.items()}, ["--certs", str(script)]


def _describe(
    job: Target, folder: Path, net: Network, hosts: list[Machine], credentials: list[str], *, tls: bool
) -> dict[str, Any]:
    """What the stranger is told: more than he could find out, and a recording that a wire would have given him."""
    agent = f"{hosts[0].address}:{PORT}"
    with _recorder(socket.AF_INET, (hosts[0].address, PORT)) as (place, heard, said):
        if tls:
            _begin_to_ask(place, credentials[1], lambda: bool(heard and said))
        else:
            asked = ["status", "--address", f"tcp://{place[0]}:{place[1]}", *credentials]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                host_command.main(asked)
    if not heard or not said:
        raise RuntimeError("the attack needs recordings")
    other = certs.make_authority(folder / "other-authority", cluster="attacked")
    stolen = certs.issue(other, folder / "other", [net.machines[2].address], role="script")
    authority = (folder / "authority" / "ca.pem").read_text() if tls else None
    return {
        "pids": [],
        "addresses": {},  # he looks for them himself
        "handles": job.report["handles"],
        "me": "far",
        "recordings": {"agent": bytes(heard).hex(), "agent-answers": bytes(said).hex()},
        "folders": [],
        "secrets": [job.report["secret"]],
        "uid": os.geteuid(),
        "hosts": [machine.address for machine in hosts] + [net.address],
        "agents": [agent, f"{hosts[1].address}:{PORT}"],
        "authority": authority,
        "stolen": [(stolen / name).read_text() for name in ("key.pem", "cert.pem")],
        "victim": job.report["victim"],
    }


def _begin_to_ask(place: tuple[str, int], certificates: str, is_recorded: Callable[[], bool]) -> None:
    """Dial an agent by way of the recorder, until both have said something.

    It ends in the handshake of TLS, since the recorder has no certificate of its own, and a command would try that
    again and again until its time is up.
    """
    until = time.monotonic() + PATIENCE_S
    while not is_recorded() and time.monotonic() < until:
        with (
            contextlib.suppress(HostUnreachableError),
            AgentLink(*place, bytes(32), Certificates(certificates), timeout=_HANDSHAKE_S),
        ):
            raise RuntimeError("the recorder cannot have been taken for the agent")


def say(outcome: Outcome) -> int:
    """Print what came of it; the exit code."""
    tries: collections.Counter[str] = outcome.tries
    for name, count in tries.most_common():
        sys.stdout.write(f"{name:16} {count:10,} attempts\n")
    sys.stdout.write(f"the job meanwhile: {outcome.rounds} rounds, the slowest {outcome.slowest_s:.2f} s\n")
    for what in dict.fromkeys((*outcome.hits, *outcome.failed)):
        sys.stdout.write(f"GOT THROUGH: {what}\n")
    sys.stdout.write(f"got through: {len(outcome.hits)}, harmed: {len(outcome.failed)}\n")
    return 1 if outcome.hits or outcome.failed else 0


def main() -> int:
    """Attack for as long as asked, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.far", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--tls", action="store_true", help="the hosts have certificates")
    given = parser.parse_args()
    try:
        with network(MACHINES) as net, tempfile.TemporaryDirectory(prefix="attacked-") as folder:
            return say(attack_far(net, Path(folder), for_s=60 * given.minutes, tls=given.tls))
    except NotPermittedError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
