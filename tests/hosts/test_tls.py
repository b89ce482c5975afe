"""With certificates nobody on the way reads what goes between machines, and nobody without one takes part."""

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skipper import control
from skipper.control import ActorMesh
from skipper.control.cluster.hosts import attach_to_hosts, certs, certs_command
from skipper.control.model.errors import CertificateError, HostUnreachableError
from skipper.tensor_engine import RemoteError, inspect, shutdown
from tests.control.conftest import PATIENCE_S
from tests.hosts.actors import Worker
from tests.hosts.conftest import LocalAgents, addresses_of, serve
from tests.hosts.netns import Capture, Network


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certs.make_authority(tmp_path_factory.mktemp("certs") / "authority")


@pytest.fixture
def clear_net(net: Network) -> Iterator[Network]:
    yield net
    control.shutdown()
    for machine in net.machines:
        machine.clear()


def say_something(workers: ActorMesh[Worker], secret: str) -> None:
    """Have a text go between the script and a host, and between two hosts; small and large."""
    for text in (secret, secret * 20_000):
        assert list(workers.echo.call(text).get(PATIENCE_S)) == [text, text]
        assert workers.slice(hosts=0).ask_to_echo.call_one(workers.slice(hosts=1), text).get(PATIENCE_S) == text


def test_packets_between_hosts_show_nothing_with_tls_and_all_without(
    clear_net: Network, authority: Path, tmp_path: Path
) -> None:
    machines, secret = clear_net.machines[:2], secrets.token_hex(32)
    own = certs.issue(authority, tmp_path / "script", [clear_net.address], role="script")
    seen = []
    for options in ({"certs": own}, {"secret_file": own / "secret", "insecure": True}):
        for number, machine in enumerate(machines):
            theirs = tmp_path / f"machine{number}"
            if "certs" in options:
                certs.issue(authority, theirs, [machine.address], role="host")
                serve(machine, "--certs", str(theirs))
            else:
                serve(machine, "--insecure", "--secret-file", str(theirs / "secret"))
        with Capture(machines[1]) as capture:
            hosts = attach_to_hosts(addresses_of(machines), **options)  # type: ignore[arg-type]
            say_something(hosts.spawn_procs().spawn("workers", Worker), secret)
            control.shutdown()
        seen.append(capture.holds(secret.encode()))
        assert capture.nbytes > 3 * 20_000 * len(secret)
        for machine in machines:
            machine.clear()
    assert seen == [False, True]


@pytest.mark.parametrize("is_open", [False, True])
def test_tensors_go_between_hosts_with_tls_where_the_data_plane_is_open(
    clear_net: Network, authority: Path, tmp_path: Path, is_open: bool
) -> None:
    machines = clear_net.machines[:2]
    own = certs.issue(authority, tmp_path / "script", [clear_net.address], role="script")
    for number, machine in enumerate(machines):
        theirs = certs.issue(authority, tmp_path / f"machine{number}", [machine.address], role="host")
        serve(machine, "--certs", str(theirs))
    procs = attach_to_hosts(addresses_of(machines), certs=own, data_plane=is_open).spawn_procs()
    with procs.activate():
        total = torch.ones(3).reduce("hosts")  # type: ignore[attr-defined]
    if is_open:
        assert inspect(total, hosts=1, timeout=2 * PATIENCE_S).tolist() == [2, 2, 2]
    else:
        with pytest.raises(RemoteError, match=r"cannot all reach each other.*with no address for other hosts"):
            inspect(total, timeout=2 * PATIENCE_S)
    shutdown()


def test_who_has_no_certificate_of_the_authority_attaches_nothing(
    local_agent: LocalAgents, authority: Path, tmp_path: Path
) -> None:
    theirs = certs.issue(authority, tmp_path / "theirs", ["127.0.0.2"], role="host")
    address = local_agent("127.0.0.2", "--certs", str(theirs))
    other = certs.make_authority(tmp_path / "other")
    stranger = certs.issue(other, tmp_path / "stranger", ["127.0.0.1"], role="script")
    for options in ({"certs": stranger, "secret_file": theirs / "secret"}, {"secret_file": theirs / "secret"}):
        with pytest.raises(HostUnreachableError, match="no agent answers"):
            attach_to_hosts(address, timeout=1, **options)  # type: ignore[arg-type]
        control.shutdown()


def test_a_certificate_for_another_machine_is_not_taken(
    local_agent: LocalAgents, authority: Path, tmp_path: Path
) -> None:
    theirs = certs.issue(authority, tmp_path / "a", ["127.0.0.7"], role="host")
    address = local_agent("127.0.0.2", "--certs", str(theirs))
    own = certs.issue(authority, tmp_path / "b", ["127.0.0.1"], role="script")
    with pytest.raises(HostUnreachableError, match="no agent answers"):
        attach_to_hosts(address, certs=own, timeout=1)


def test_the_commands_make_folders_that_openssl_verifies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    authority, machine = tmp_path / "authority", tmp_path / "machine"
    assert certs_command.main(["init", str(authority)]) == 0
    names = ["--host", "10.0.0.1", "--host", "node"]
    assert certs_command.main(["issue", str(authority), str(machine), "--role", "host", *names]) == 0
    assert (machine / "key.pem").stat().st_mode & 0o077 == 0
    assert (machine / "secret").read_bytes() == (authority / "secret").read_bytes()
    assert not (machine / "ca-key.pem").exists()
    names = ["-verify_ip", "10.0.0.1"]
    verify = [
        "openssl",
        "verify",
        "-x509_strict",
        "-CAfile",
        str(machine / "ca.pem"),
        *names,
        str(machine / "cert.pem"),
    ]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
    assert certs_command.main(["init", str(authority)]) == 1
    assert "File exists" in capfd.readouterr().err
    by_a_machine = ["issue", str(machine), str(tmp_path / "x"), "--role", "host", "--host", "10.0.0.2"]
    assert certs_command.main(by_a_machine) == 1
    assert certs_command.main([]) == 2


def test_a_folder_that_tls_cannot_use_is_refused(tmp_path: Path, authority: Path) -> None:
    with pytest.raises(CertificateError, match=r"ca\.pem cannot be read"):
        attach_to_hosts("tcp://127.0.0.2:1", certs=tmp_path)
    folder = certs.issue(authority, tmp_path / "folder", ["127.0.0.1"], role="script")
    (folder / "key.pem").chmod(0o644)
    with pytest.raises(CertificateError, match="chmod 600"):
        attach_to_hosts("tcp://127.0.0.2:1", certs=folder)
    (folder / "key.pem").chmod(0o600)
    (folder / "cert.pem").write_text("nothing")
    with pytest.raises(CertificateError, match="is not a PEM file"):
        attach_to_hosts("tcp://127.0.0.2:1", certs=folder)
