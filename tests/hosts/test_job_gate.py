"""A job that is served at an address, and processes that join it from there: who gets in, what is refused and why.

Addresses of the loopback stand for hosts: what joins an address is on 127.0.0.1, and links to 127.0.0.2 are TCP.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper import control
from skipper.control import (
    Actor,
    AlreadyInJobError,
    CertificateError,
    HostError,
    InsecureHostError,
    JobNotFoundError,
    ServedJob,
    endpoint,
    get_or_spawn_controller,
    serve_job,
)
from skipper.control.cluster.hosts import certs as certificates
from skipper.control.cluster.hosts import command as host_command
from skipper.control.cluster.hosts.job_gate import GateAddress, introduced
from skipper.control.runtime import current_runtime
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until

Joins = Callable[..., Script]


class Asker(Actor):
    """Calls another actor, on whichever host that is."""

    @endpoint
    def ask(self, other: control.ActorMesh[Echo]) -> int:
        return other.pid.call_one().get(PATIENCE_S)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("SKIPPER_CERTS", "SKIPPER_SECRET_FILE", "SKIPPER_INSECURE", "SKIPPER_JOB"):
        monkeypatch.delenv(name, raising=False)
    yield
    control.shutdown()


@pytest.fixture
def served(secret_file: Path) -> Iterator[ServedJob]:
    with serve_job("far", address="tcp://127.0.0.2:0", secret_file=secret_file) as served:
        yield served


@pytest.fixture
def guest(script: Callable[..., Script], secret_file: Path) -> Joins:
    """Runs a script that has joined a job at an address."""

    def run(address: str | None, text: str, **options: object) -> Script:
        given = {"secret_file": str(secret_file), **options}
        return script(
            "import os, time\nfrom skipper import control\nfrom skipper.control import *\n"
            "from tests.control.actors import Echo\n"
            f"control.join({address!r}, name='guest', **{given!r})\n{text}"
        )

    return run


def test_a_process_that_has_joined_by_an_address_calls_and_is_called_and_spawns(
    served: ServedJob, guest: Joins, failures: Failures
) -> None:
    assert served.address is not None
    board = get_or_spawn_controller("board", Echo).get(PATIENCE_S)
    here = board.pid.call_one().get(PATIENCE_S)
    script = guest(
        served.address,
        "board = get_or_spawn_controller('board', Echo).get(20)\n"
        "print(os.getpid(), board.pid.call_one().get(20), len(board.echo.call_one(bytes(1 << 22)).get(20)))\n"
        "own = this_host().spawn_procs(name='own').spawn('own', Echo)\n"
        "print(board.run.call_one(lambda mesh: mesh.pid.call_one().get(20), own).get(20) != os.getpid(), flush=True)\n"
        "time.sleep(60)\n",
    )
    pid, asked, nbytes = map(int, script.line().split())
    assert (pid, asked, nbytes) == (script.process.pid, here, 1 << 22)
    assert script.line() == "True"
    (member,) = served.members()
    there = member.spawn("there", Echo)
    assert there.pid.call_one().get(PATIENCE_S) == pid
    script.process.kill()
    assert "gone" in str(failures.wait())
    wait_until(lambda: served.members() == (), "the one that was killed has left")


def test_two_processes_that_have_joined_by_an_address_reach_each_other(served: ServedJob, guest: Joins) -> None:
    scripts = [guest(served.address, "time.sleep(60)") for _ in range(2)]
    wait_until(lambda: len(served.members()) == 2, "both have joined")
    first, second = served.members()
    pids = sorted(script.process.pid for script in scripts)
    asker, asked = first.spawn("asker", Asker), second.spawn("asked", Echo)
    assert asker.ask.call_one(asked).get(PATIENCE_S) in pids
    for actors in (asker, asked):
        actors.stop().get(PATIENCE_S)


def test_processes_of_the_scripts_host_that_join_by_the_file_are_reached_from_others(
    served: ServedJob, guest: Joins, script: Callable[..., Script]
) -> None:
    assert current_runtime.current().me.address.startswith("127.0.0.2:")
    near = script(
        f"import time\nfrom skipper import control\ncontrol.join({str(served.path)!r}, name='near')\ntime.sleep(60)\n"
    )
    wait_until(lambda: len(served.members()) == 1, "the near one has joined")
    guest(served.address, "time.sleep(60)")
    wait_until(lambda: len(served.members()) == 2, "the far one has joined")
    beside, far = served.members()
    asked = beside.spawn("asked", Echo)
    asker = far.spawn("asker", Asker)
    assert asker.ask.call_one(asked).get(PATIENCE_S) == near.process.pid
    for actors in (asker, asked):
        actors.stop().get(PATIENCE_S)


def test_a_job_takes_nobody_in_once_it_is_closed_and_keeps_who_is_there(served: ServedJob, guest: Joins) -> None:
    script = guest(served.address, "print('in', flush=True); time.sleep(60)")
    assert script.line() == "in"
    served.close()
    served.close()
    late = guest(served.address, "", timeout=3)
    code, _, err = late.finish()
    assert code == 1
    assert "JobNotFoundError: there is no job to join at tcp://127.0.0.2:" in err
    assert len(served.members()) == 1


def test_another_secret_is_refused_by_name(served: ServedJob, guest: Joins, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert host_command.main(["secret", str(other)]) == 0
    _, _, err = guest(served.address, "", secret_file=str(other)).finish()
    assert "AuthenticationError: the script of 127.0.0.2:" in err
    assert other.read_text().strip() not in err
    assert served.members() == ()


def test_with_certificates_the_role_of_a_client_is_turned_away_and_that_of_a_host_let_in(
    guest: Joins, tmp_path: Path
) -> None:
    authority = certificates.make_authority(tmp_path / "authority")
    own = certificates.issue(authority, tmp_path / "script", ["127.0.0.2"], role="script")
    folders = {
        role: str(certificates.issue(authority, tmp_path / role, ["127.0.0.1"], role=role))
        for role in ("host", "client")
    }
    with pytest.raises(CertificateError, match="needs that of a script"):
        serve_job(address="tcp://127.0.0.1:0", certs=folders["host"])
    with serve_job(address="tcp://127.0.0.2:0", certs=own) as served:
        host = guest(
            served.address,
            "print(get_or_spawn_controller('e', Echo).get(20).pid.call_one().get(20))",
            secret_file=None,
            certs=folders["host"],
        )
        code, out, err = host.finish()
        assert (code, out.strip().isdecimal()) == (0, True), err
        _, _, err = guest(served.address, "", secret_file=str(own / "secret"), certs=folders["client"]).finish()
        assert "CertificateError" in err


def test_the_environment_says_what_is_not_passed(
    served: ServedJob, script: Callable[..., Script], secret_file: Path
) -> None:
    run = script(
        f"import os\nos.environ.update(SKIPPER_JOB={served.address!r}, SKIPPER_SECRET_FILE={str(secret_file)!r})\n"
        "from skipper import control\nprint(control.join(), control.join())\n"
    )
    assert run.finish() == (0, "True False\n", "")


def test_what_is_not_safe_or_makes_no_sense_is_refused_before_anything_listens(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, error, words in (
        ({"address": "tcp://192.0.2.7:0", "secret_file": secret_file}, InsecureHostError, "insecure=True"),
        ({"address": "tcp://127.0.0.2:0"}, ValueError, "skipper host secret makes one"),
        ({"address": "127.0.0.2"}, ValueError, "tcp://HOST:PORT"),
        ({"secret_file": secret_file}, ValueError, "need an address"),
        ({"name": "two words", "address": "tcp://127.0.0.2:0", "secret_file": secret_file}, ValueError, "a job's name"),
    ):
        with pytest.raises(error, match=words):
            serve_job(**options)  # type: ignore[arg-type]
    assert not current_runtime.current().me.address.startswith("127.")
    with pytest.raises(InsecureHostError):
        control.join("tcp://192.0.2.7:7433", secret_file=secret_file)
    with pytest.raises(ValueError, match="skipper host secret makes one"):
        control.join("192.0.2.7:7433")
    monkeypatch.setenv("SKIPPER_INSECURE", "perhaps")
    with pytest.raises(ValueError, match="SKIPPER_INSECURE must be 1"):
        control.join("tcp://127.0.0.2:7433", secret_file=secret_file)


def test_an_address_at_which_no_job_is_served_is_told(secret_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(JobNotFoundError, match=f"no job to join at {address}"):
            control.join(address, secret_file=secret_file, timeout=1)


def test_a_script_does_not_join_by_an_address_and_its_own_is_that_very_job(
    served: ServedJob, secret_file: Path, guest: Joins
) -> None:
    assert served.address is not None
    assert control.join(served.address, secret_file=secret_file) is False
    other = guest(
        served.address,
        "control.shutdown()\nprint(serve_job(address='tcp://127.0.0.3:0',"
        f" secret_file={str(secret_file)!r}).address, flush=True)\ntime.sleep(60)",
    )
    with pytest.raises(AlreadyInJobError, match="as 'script'"):
        control.join(other.line(), secret_file=secret_file)


def test_an_answer_that_is_none_is_told(secret_file: Path) -> None:
    gate = GateAddress.of("tcp://127.0.0.2:1", secret_file, None, insecure=False)
    for answer in ({}, {"root": {"id": "a", "address": "127.0.0.2:0", "name": "a"}}, {"root": 1, "nonce": 2}):
        with pytest.raises(HostError, match="runs another version of the protocol"):
            introduced(answer, gate)
