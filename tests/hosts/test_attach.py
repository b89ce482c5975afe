"""Hosts that are attached, on loopback addresses: each stands for a host of its own, and links between them are TCP."""

import json
import os
from pathlib import Path

import psutil
import pytest

from skipper import control
from skipper.control import ActorMesh, Channel, Progress, on_progress
from skipper.control.cluster.hosts import attach_to_hosts, command, protocol
from skipper.control.model.errors import (
    AuthenticationError,
    HostError,
    HostMismatchError,
    HostUnreachableError,
    InsecureHostError,
    UnsafeFileError,
)
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until
from tests.control.families import Family
from tests.hosts.actors import Worker
from tests.hosts.conftest import LocalAgents


def test_processes_are_spawned_on_hosts_and_call_each_other(local_agent: LocalAgents, secret_file: Path) -> None:
    hosts = attach_to_hosts([local_agent("127.0.0.2"), local_agent("127.0.0.3")], secret_file=secret_file)
    assert hosts.extent == {"hosts": 2}
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    assert procs.extent == {"hosts": 2, "gpus": 2}
    workers = procs.spawn("workers", Worker)
    pids = list(workers.pid.call().get(PATIENCE_S))
    assert len(set(pids)) == 4
    assert workers.slice(hosts=0, gpus=0).ask.call_one(workers.slice(hosts=1)).get(PATIENCE_S) == pids[2:]
    assert workers.slice(hosts=0, gpus=0).ask.call_one(workers.slice(hosts=0, gpus=1)).get(PATIENCE_S) == [pids[1]]
    assert procs.slice(hosts=1).host_mesh.names == hosts.slice(hosts=1).names

    content = os.urandom(1 << 20)
    assert set(workers.echo.call(content).get(PATIENCE_S)) == {content}
    assert all(type(value) is bytes for value in workers.echo.call(content).get(PATIENCE_S))

    port, receiver = Channel.open()
    workers.slice(hosts=1, gpus=1).tell.broadcast(port, "hello")
    assert receiver.recv().get(PATIENCE_S) == "hello"

    below: ActorMesh = workers.slice(hosts=0, gpus=0).spawn_below.call_one().get(PATIENCE_S)
    (pid,) = below.pid.call().get(PATIENCE_S)
    assert workers.slice(hosts=1, gpus=0).ask.call_one(below).get(PATIENCE_S) == [pid]

    at_one: ActorMesh = workers.slice(hosts=0, gpus=1).spawn_at.call_one(procs.slice(hosts=1)).get(PATIENCE_S)
    assert list(at_one.rank.call().get(PATIENCE_S)) == [0]
    procs.stop().get(PATIENCE_S)

    again = hosts.slice(hosts=1).spawn_procs(env={"COLOUR": "blue"}, bootstrap=lambda: None)
    assert again.spawn("again", Worker).rank.call_one().get(PATIENCE_S) == 0
    hosts.stop().get(PATIENCE_S)


def test_who_follows_is_told_of_hosts_and_of_what_is_spawned_there(local_agent: LocalAgents, secret_file: Path) -> None:
    told: list[Progress] = []
    with on_progress(told.append):
        names = [local_agent("127.0.0.2"), local_agent("127.0.0.3")]
        hosts = attach_to_hosts(names, secret_file=secret_file)
        workers = hosts.spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        workers.initialized.get(PATIENCE_S)
        wait_until(lambda: any(each.unit == "actors" and each.state == "finished" for each in told), "the spawn's end")
    begun = next(each for each in told if each.description == "attach hosts")
    assert set(begun.waiting_for) <= set(hosts.names)
    ended = {(each.description, each.unit): each.completed for each in told if each.state == "finished"}
    assert ended["attach hosts", "hosts"] == 2
    assert ended["spawn procs", "processes"] == ended["spawn workers", "actors"] == 4
    hosts.stop().get(PATIENCE_S)


def test_many_receivers_on_several_hosts_get_a_cast_down_a_tree(
    local_agent: LocalAgents, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = control.configure()
    control.configure(tree_threshold=1, tree_fanout=2)
    try:
        hosts = attach_to_hosts([local_agent("127.0.0.2"), local_agent("127.0.0.3")], secret_file=secret_file)
        workers = hosts.spawn_procs(per_host={"gpus": 3}).spawn("workers", Worker)
        for _ in range(3):
            assert list(workers.rank.call().get(PATIENCE_S)) == list(range(6))
    finally:
        control.configure(tree_threshold=before.tree_threshold, tree_fanout=before.tree_fanout)


def test_a_file_or_a_function_may_say_which_hosts(local_agent: LocalAgents, secret_file: Path, tmp_path: Path) -> None:
    address = local_agent()
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"# one machine\n{address}  # the first\n\n")
    for hosts in (hostfile, lambda: [address], address):
        attached = attach_to_hosts(hosts, secret_file=secret_file)
        assert attached.extent == {"hosts": 1}
        attached.stop().get(PATIENCE_S)
        control.shutdown()


def test_another_machine_is_attached_without_tls_only_if_that_is_said(secret_file: Path) -> None:
    with pytest.raises(InsecureHostError, match=r"10\.1\.2\.3 is another machine"):
        attach_to_hosts(["tcp://10.1.2.3:7000"], secret_file=secret_file)


def test_who_has_another_secret_attaches_nothing(local_agent: LocalAgents, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert command.main(["secret", str(other)]) == 0
    with pytest.raises(AuthenticationError, match="has another secret"):
        attach_to_hosts(local_agent(), secret_file=other)


def test_an_agent_of_other_versions_is_refused_with_both_named(
    local_agent: LocalAgents, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {**protocol.versions(), "python": "3.99"}
    monkeypatch.setattr(protocol, "versions", lambda: ours)
    with pytest.raises(HostMismatchError, match=r"python 3\.99 there and 3\.\d+ on the host 127\.0\.0\.2"):
        attach_to_hosts(local_agent(), secret_file=secret_file)


def test_where_no_agent_listens_the_error_says_so_in_time(secret_file: Path) -> None:
    with pytest.raises(HostUnreachableError, match=r"no agent answers at 127\.0\.0\.9:1 within 0\.3 s"):
        attach_to_hosts("tcp://127.0.0.9:1", secret_file=secret_file, timeout=0.3)


def test_a_drained_agent_takes_no_new_job_and_ends_with_its_last(
    local_agent: LocalAgents, secret_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = local_agent()
    options = ["--address", address, "--secret-file", str(secret_file)]
    hosts = attach_to_hosts(address, secret_file=secret_file)
    worker = hosts.spawn_procs().spawn("worker", Worker)
    assert command.main(["drain", *options]) == 0
    assert command.main(["status", *options]) == 0
    printed = capfd.readouterr().out
    assert "1 jobs are left" in printed
    assert "jobs: 1" in printed
    assert worker.slice(hosts=0).rank.call_one().get(PATIENCE_S) == 0
    hosts.stop().get(PATIENCE_S)
    with pytest.raises(HostError):
        attach_to_hosts(address, secret_file=secret_file, timeout=2)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "there are no hosts"),
        (["tcp://127.0.0.2"], "tcp://HOST:PORT"),
        (["tcp://127.0.0.2:7000", "tcp://127.0.0.2:7000"], "listed twice"),
        ("/nowhere/at/all", "neither tcp://HOST:PORT nor a file"),
    ],
)
def test_wrong_addresses_are_refused(hosts: object, message: str, secret_file: Path) -> None:
    with pytest.raises(ValueError, match=message):
        attach_to_hosts(hosts, secret_file=secret_file)  # type: ignore[arg-type]


def test_a_secret_that_others_can_read_is_not_used(secret_file: Path, tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.write_bytes(secret_file.read_bytes())
    loose.chmod(0o644)
    with pytest.raises(UnsafeFileError, match="0644"):
        attach_to_hosts("tcp://127.0.0.2:7000", secret_file=loose)


def test_an_agent_says_what_is_wrong_and_ends(secret_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["serve", "--address", "tcp://10.1.2.3:0", "--secret-file", str(secret_file)]) == 1
    assert "pass --certs for TLS" in capfd.readouterr().err
    assert command.main(["serve", "--address", "tcp://127.0.0.2:0"]) == 2
    assert "--secret-file" in capfd.readouterr().err
    assert command.main([]) == 2


def test_what_travels_to_an_agent_does_not_hold_the_secret_of_the_job() -> None:
    secret, agents, nonce = os.urandom(32), os.urandom(32), os.urandom(32)
    masked = protocol.mask(secret, agents, nonce)
    assert masked != secret
    assert protocol.mask(masked, agents, nonce) == secret
    assert secret.hex() not in json.dumps({"masked_secret": masked.hex()})


def test_what_actors_have_made_ends_with_the_hosts_process_for_the_job(
    local_agent: LocalAgents, secret_file: Path, failures: Failures
) -> None:
    hosts = attach_to_hosts([local_agent()], secret_file=secret_file)
    worker, pids = hosts.spawn_procs().spawn("family", Family).make.call_one().get(PATIENCE_S)
    _, _, _, member, *_ = psutil.Process(worker).parents()  # above the keeper, the guard and the watcher
    member.kill()
    failures.wait()
    for pid in (worker, *pids):
        wait_until(lambda pid=pid: not alive(pid), f"{pid} ends")  # type: ignore[misc]
