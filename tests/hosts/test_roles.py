"""A certificate is good for one role in one cluster, until it is revoked; what signs it can be replaced meanwhile."""

import datetime
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from skipper import control
from skipper.control import ActorMesh, SupervisionError
from skipper.control.cluster.hosts import attach_to_hosts, certs, certs_command, protocol
from skipper.control.cluster.hosts import command as host_command
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.model.errors import AuthenticationError, CertificateError, ControlError, HostUnreachableError
from skipper.control.rpc import ActorServer, Tls
from skipper.control.rpc.wire.channel import UnreachableError
from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire import addresses, auth
from skipper.control.wire.auth_listener import AuthListener
from skipper.control.wire.certificates import SECRET, Certificates
from skipper.control.wire.frames import encode_process
from skipper.control.wire.grpc_streams import OutgoingStream
from skipper.control.wire.handshake import WELCOME, Dial
from skipper.control.wire.identity import MEMBERS, Role
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until
from tests.control.rpc.conftest import client_of
from tests.control.rpc.parties import Calculator
from tests.hosts.actors import Worker
from tests.hosts.conftest import LocalAgents, environment
from tests.hosts.netns import REPOSITORY, SKIPPER

METHOD = "/skipper.control.v1.Link/Connect"
HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certs.make_authority(tmp_path_factory.mktemp("roles") / "authority", cluster="ours")


@pytest.fixture
def own_authority(tmp_path: Path) -> Path:
    """One of which something is revoked, or which is replaced."""
    return certs.make_authority(tmp_path / "authority", cluster="ours")


@pytest.fixture
def script(authority: Path, tmp_path: Path) -> Path:
    """The folder of the script."""
    return certs.issue(authority, tmp_path / "script", [HERE], role="script")


def host(authority: Path, folder: Path, ip: str, name: str | None = None) -> Path:
    return certs.issue(authority, folder, [ip], role="host", name=name)


def knock(address: str, folder: Path | None, trusted: Path) -> tuple[grpc.StatusCode, str]:
    """What an agent says to somebody who is not bound by what this library checks on its own side.

    Args:
        address: of the agent.
        folder: with what is shown; None: nothing.
        trusted: a folder with who has signed the agent's certificate.
    """
    shown = (None, None) if folder is None else ((folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes())
    credentials = grpc.ssl_channel_credentials((trusted / "ca.pem").read_bytes(), *shown)
    hello = (
        ("skipper-version", VERSION),
        ("skipper-process-bin", encode_process(ProcessRef("stranger", "", "stranger"))),
        ("skipper-nonce-bin", auth.new_nonce()),
    )
    with grpc.secure_channel(address.removeprefix("tcp://"), credentials) as channel:
        ended = threading.Event()
        call = channel.stream_stream(METHOD, _registered_method=False)(
            iter(lambda: ended.wait(PATIENCE_S) and b"", b""), metadata=hello, timeout=PATIENCE_S
        )
        try:
            said = dict(call.initial_metadata())
            if "skipper-proof-bin" in said:
                return grpc.StatusCode.OK, ""
            return call.code(), call.details()
        finally:
            ended.set()
            call.cancel()


def ask(address: str, folder: Path, method: str = "status", timeout: float = PATIENCE_S) -> dict[str, object]:
    """What an agent answers to somebody with these certificates and the agents' secret."""
    ip, port = addresses.parse(address)
    secret = (folder / SECRET).read_bytes().strip()
    with AgentLink(ip, port, secret, Certificates(folder), timeout=timeout) as link:
        return link.ask(method, {}, timeout=timeout)


# Roles


def test_an_agent_does_what_a_script_asks_and_nothing_for_another_host_or_a_client(
    local_agent: LocalAgents, authority: Path, script: Path, tmp_path: Path
) -> None:
    """So a host's folder that was stolen, with the agents' secret in it, starts and ends nothing on other hosts."""
    address = local_agent("127.0.0.2", "--certs", str(host(authority, tmp_path / "a", "127.0.0.2")))
    assert ask(address, script)["jobs"] == []
    stolen = host(authority, tmp_path / "b", "127.0.0.3")
    client = certs.issue(authority, tmp_path / "c", [], role="client", name="dashboard")
    assert not (client / SECRET).exists()
    shutil.copyfile(authority / SECRET, client / SECRET)  # and even if it had that
    for folder, who in ((stolen, "host '127.0.0.3'"), (client, "client 'dashboard'")):
        for method in ("attach", "drain", "status"):
            with pytest.raises(
                AuthenticationError, match=f"{who} of the cluster 'ours' does not have the role of a script"
            ):
                ask(address, folder, method)
        code, _ = knock(address, folder, script)
        assert code is grpc.StatusCode.PERMISSION_DENIED
    assert knock(address, script, script)[0] is grpc.StatusCode.OK
    assert ask(address, script)["jobs"] == []


def test_whoever_has_no_valid_certificate_of_the_cluster_gets_nowhere(
    local_agent: LocalAgents, authority: Path, script: Path, tmp_path: Path
) -> None:
    address = local_agent("127.0.0.2", "--certs", str(host(authority, tmp_path / "a", "127.0.0.2")))
    other = certs.make_authority(tmp_path / "other", cluster="ours")
    expired = certs.issue(authority, tmp_path / "expired", [HERE], role="script", days=0)
    for folder in (None, expired, certs.issue(other, tmp_path / "d", [HERE], role="script"), self_signed(tmp_path)):
        assert knock(address, folder, script)[0] is grpc.StatusCode.UNAVAILABLE  # by TLS itself
    with pytest.raises(CertificateError, match="has expired"):
        attach_to_hosts(address, certs=expired)

    foreign = forge(authority, tmp_path / "foreign", "spiffe://theirs/script/me")
    code, words = knock(address, foreign, script)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "script 'me' of the cluster 'theirs' does not belong to the cluster 'ours'" in words
    with pytest.raises(AuthenticationError, match="does not belong to the cluster"):
        attach_to_hosts(address, certs=foreign)
    control.shutdown()


def test_a_certificate_of_before_there_were_roles_is_refused_with_what_to_do(
    local_agent: LocalAgents, authority: Path, script: Path, tmp_path: Path
) -> None:
    address = local_agent("127.0.0.2", "--certs", str(host(authority, tmp_path / "a", "127.0.0.2")))
    old = without_role(authority, tmp_path / "old")
    code, words = knock(address, old, script)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "skipper certs issue --role" in words
    with pytest.raises(CertificateError, match=r"cert\.pem: the certificate has no role.*skipper certs issue --role"):
        attach_to_hosts(address, certs=old)
    assert "skipper certs issue --role" in serve_in_vain("127.0.0.3", old)


def test_each_side_looks_at_its_own_certificate_before_anything_is_sent(
    authority: Path, script: Path, tmp_path: Path
) -> None:
    mine = host(authority, tmp_path / "mine", HERE)
    with pytest.raises(
        CertificateError, match=r"of a host, and attach_to_hosts needs that of a script: .*--role script"
    ):
        attach_to_hosts("tcp://127.0.0.2:1", certs=mine)
    assert "an agent needs that of a host: skipper certs issue --role host" in serve_in_vain("127.0.0.2", script)


def test_a_script_attaches_nothing_but_hosts(authority: Path, script: Path, tmp_path: Path) -> None:
    """Whoever listens where an agent should be, and knows the agents' secret."""
    secret = (authority / SECRET).read_bytes().strip()
    for role, error, words in (
        ("script", AuthenticationError, "script 'fake' of the cluster 'ours' does not have the role of a host"),
        ("client", HostUnreachableError, "no agent answers"),  # TLS has it that a client is no server
    ):
        fake = certs.issue(authority, tmp_path / f"fake-{role}", ["127.0.0.2"], role=role, name="fake")
        with Listening("127.0.0.2", Certificates(fake), secret) as port, pytest.raises(error, match=words):
            attach_to_hosts(f"tcp://127.0.0.2:{port}", certs=script, timeout=2)
        control.shutdown()
    plain = host(authority, tmp_path / "host", "127.0.0.2")
    with Listening("127.0.0.2", Certificates(plain), secret) as port:
        ip, theirs = "127.0.0.2", Certificates(script)
        AgentLink(ip, port, secret, theirs, timeout=PATIENCE_S).close()  # nor is it the place that was refused


def test_within_a_job_a_client_has_no_links_and_a_host_is_not_taken_for_the_script(
    local_agent: LocalAgents, authority: Path, script: Path, tmp_path: Path
) -> None:
    """Also with the secret of the job, which all of its hosts know."""
    stolen = host(authority, tmp_path / "b", "127.0.0.3")
    client = certs.issue(authority, tmp_path / "c", ["127.0.0.3"], role="client")
    address = local_agent("127.0.0.2", "--certs", str(host(authority, tmp_path / "a", "127.0.0.2")))
    hosts = attach_to_hosts(address, certs=script)
    (member,) = hosts._members()
    me = runtime.current().me
    assert "does not have the role" in dial(me, member, client)
    assert "does not have the role" in dial(member, me, client)
    assert "is not the script of this job" in dial(me, member, stolen)
    assert "there is already a stream" in dial(member, me, stolen)  # see docs/reference/hosts.md


def test_a_client_calls_actor_servers_and_cannot_be_one(authority: Path, tmp_path: Path) -> None:
    served = tls_of(host(authority, tmp_path / "server", HERE))
    client = tls_of(certs.issue(authority, tmp_path / "client", [HERE], role="client"))
    with ActorServer(HERE, 0, tls=served) as server:
        server.register("calculator", Calculator())
        assert client_of(server.address, Calculator, "calculator", tls=client).add.sync(1) == 3
    with ActorServer(HERE, 0, tls=client) as server:
        server.register("calculator", Calculator())
        with pytest.raises(UnreachableError):
            client_of(server.address, Calculator, "calculator", tls=client).add.sync(1)


# Authorities below others


def test_an_authority_for_one_role_signs_for_no_other_and_is_revoked_with_what_it_has_signed(
    local_agent: LocalAgents, own_authority: Path, tmp_path: Path
) -> None:
    authority = own_authority
    script = certs.issue(authority, tmp_path / "script", [HERE], role="script")
    below = certs.delegate(authority, tmp_path / "below", role="host")
    address = local_agent("127.0.0.2", "--certs", str(host(below, tmp_path / "a", "127.0.0.2")))
    attach_to_hosts(address, certs=script).stop().get(PATIENCE_S)
    control.shutdown()
    with pytest.raises(CertificateError, match="does not sign for that role"):
        certs.issue(below, tmp_path / "x", [HERE], role="script")
    with pytest.raises(CertificateError, match="which cannot sign other authorities"):
        certs.delegate(below, tmp_path / "y", role="script")

    # Who has its key can sign by other means, but what comes of that is worth nothing.
    forged = forge(below, tmp_path / "forged", "spiffe://ours/script/me")
    code, words = knock(address, forged, script)
    assert (code, "does not sign for that role" in words) == (grpc.StatusCode.PERMISSION_DENIED, True)

    with pytest.raises(CertificateError, match="revoke it with the authority that has signed it"):
        certs.revoke(authority, [str(tmp_path / "a")])
    assert not (authority / "revoked.pem").exists()
    (words,) = certs.revoke(authority, [str(below)])
    assert words.startswith("ours authority for the role host")
    certs.update(authority, [script])
    with pytest.raises(AuthenticationError, match=r"the certificate of host '127\.0\.0\.2' .* was revoked"):
        ask(address, script)


# Revocation


def test_a_host_whose_certificate_is_revoked_leaves_the_running_job(
    local_agent: LocalAgents, own_authority: Path, tmp_path: Path, failures: Failures
) -> None:
    script = certs.issue(own_authority, tmp_path / "script", [HERE], role="script")
    folders = [host(own_authority, tmp_path / ip, ip) for ip in ("127.0.0.2", "127.0.0.3")]
    agents = [local_agent(folder.name, "--certs", str(folder)) for folder in folders]
    hosts = attach_to_hosts(agents, certs=script)
    workers = hosts.spawn_procs().spawn("workers", Worker)
    stays, goes = workers.pid.call().get(PATIENCE_S)
    assert workers.slice(hosts=0).ask.call_one(workers.slice(hosts=1)).get(PATIENCE_S) == [goes]

    # Only those that stay are told; the one that was taken over would not look.
    revoke = ["revoke", str(own_authority), "host/127.0.0.3", "--update", str(script), str(folders[0])]
    assert certs_command.main(revoke) == 0
    assert "the certificate of host '127.0.0.3' of the cluster 'ours' was revoked" in str(failures.wait())
    with pytest.raises(SupervisionError, match="was revoked"):
        workers.slice(hosts=1).pid.call_one().get(PATIENCE_S)
    wait_until(lambda: not alive(goes), "its agent ends what the script does not want any more")
    assert workers.slice(hosts=0).pid.call_one().get(PATIENCE_S) == stays
    assert hosts.lost(timeout=PATIENCE_S) == (1,)
    with pytest.raises(AuthenticationError, match="was revoked"):
        ask(agents[1], script)
    # It is refused by the other host, too.
    assert knock(agents[0], folders[1], script)[0] is grpc.StatusCode.PERMISSION_DENIED
    failures.clear()


def test_a_script_whose_certificate_is_revoked_loses_its_job_and_gets_no_other(
    local_agent: LocalAgents, own_authority: Path, tmp_path: Path, failures: Failures
) -> None:
    script = certs.issue(own_authority, tmp_path / "script", [HERE], role="script", name="ada")
    heir = certs.issue(own_authority, tmp_path / "heir", [HERE], role="script", name="bob")
    folder = host(own_authority, tmp_path / "host", "127.0.0.2")
    address = local_agent("127.0.0.2", "--certs", str(folder))
    workers = attach_to_hosts(address, certs=script).spawn_procs().spawn("workers", Worker)
    pid = workers.pid.call_one().get(PATIENCE_S)
    assert certs.revoke(own_authority, ["ada"]) == ["script 'ada' of the cluster 'ours'"]
    certs.update(own_authority, [folder])
    wait_until(lambda: not alive(pid), "the agent ends its job")
    failures.wait()
    control.shutdown()
    failures.clear()
    with pytest.raises(AuthenticationError, match=r"the certificate of script 'ada' .* was revoked"):
        attach_to_hosts(address, certs=script)
    control.shutdown()
    assert ask(address, heir)["jobs"] == []


def test_what_is_revoked_is_named_by_name_role_or_file(own_authority: Path, tmp_path: Path) -> None:
    for role in ("script", "host"):
        certs.issue(own_authority, tmp_path / role, [HERE], role=role, name="node1")
    machine = Certificates(certs.issue(own_authority, tmp_path / "watcher", [HERE], role="host"))
    identities = {role: Certificates(tmp_path / role).identity for role in ("script", "host")}

    def revoked() -> set[str]:
        certs.update(own_authority, [tmp_path / "watcher"])
        found = Certificates(tmp_path / "watcher")
        return {role for role, identity in identities.items() if found.is_revoked(identity)}

    with pytest.raises(CertificateError, match="no certificate has been issued to 'node2'"):
        certs.revoke(own_authority, ["node2"])
    assert revoked() == set()
    certs.revoke(own_authority, ["script/node1"])
    assert revoked() == {"script"}
    certs.revoke(own_authority, [str(tmp_path / "host")])
    assert revoked() == {"script", "host"}
    wait_until(lambda: machine.is_revoked(identities["host"]), "a process that has the folder open sees it")
    (tmp_path / "watcher" / "revoked.pem").unlink()
    wait_until(lambda: machine._now() is not None and machine._seen[-1] is None, "it looks again")
    assert machine.is_revoked(identities["host"])  # a list that is lost frees nobody
    check = ["openssl", "verify", "-crl_check", "-CAfile", own_authority / "ca.pem"]
    check += ["-CRLfile", own_authority / "revoked.pem", tmp_path / "host" / "cert.pem"]
    assert b"certificate revoked" in subprocess.run(check, capture_output=True, check=False).stderr


def test_files_that_do_not_go_together_change_nothing(
    own_authority: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = host(own_authority, tmp_path / "host", HERE)
    found = Certificates(folder)
    before = found.pems()
    other = certs.make_authority(tmp_path / "other", cluster="ours")
    certs.issue(other, tmp_path / "foreign", [HERE], role="host")
    certs.revoke(other, [str(tmp_path / "foreign")])
    pieces = {
        "cert.pem": (tmp_path / "foreign" / "cert.pem").read_bytes(),  # not of this authority, nor of this key
        "key.pem": b"-----BEGIN PRIVATE KEY-----\nhalf of it",
        "revoked.pem": (other / "revoked.pem").read_bytes(),  # signed by nobody who is trusted
        "ca.pem": b"",
    }
    cut_off = (other / "revoked.pem").read_bytes()[:-10]
    for name, content in [*pieces.items(), ("revoked.pem", cut_off)]:
        caplog.clear()
        kept = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_bytes(content)
        wait_until(lambda: found.pems() == before and bool(caplog.records), f"a bad {name} is noticed")
        assert "were not reloaded" in caplog.text
        with pytest.raises(CertificateError):
            Certificates(folder)  # who begins with it is told
        (folder / name).unlink() if kept is None else (folder / name).write_bytes(kept)
    assert Certificates(folder).pems() == before


# Rotation


def test_the_authority_is_replaced_under_a_running_job(
    local_agent: LocalAgents, own_authority: Path, tmp_path: Path
) -> None:
    script = certs.issue(own_authority, tmp_path / "script", [HERE], role="script")
    folders = [host(own_authority, tmp_path / ip, ip) for ip in ("127.0.0.2", "127.0.0.3")]
    agents = [local_agent(folder.name, "--certs", str(folder)) for folder in folders]
    everybody = [str(script), *map(str, folders)]
    workers = attach_to_hosts(agents, certs=script).spawn_procs().spawn("workers", Worker)
    pids = list(workers.pid.call().get(PATIENCE_S))
    old = shutil.copytree(script, tmp_path / "old")

    with Calling(workers, pids) as calls:
        assert certs_command.main(["rotate", str(own_authority), "--update", *everybody]) == 0
        assert certs_command.main(["rotate", str(own_authority)]) == 1  # one at a time
        calls.go_on()
        wait_until(lambda: knock(agents[0], old, script)[0] is grpc.StatusCode.OK, "both are trusted meanwhile")
        assert certs_command.main(["renew", str(own_authority), *everybody]) == 0
        calls.go_on()
        assert ask(agents[0], script)["jobs"] == ["script"]  # by the new one
        assert certs_command.main(["rotate", str(own_authority), "--finish", "--update", *everybody]) == 0
        refused = grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: knock(agents[0], old, script)[0] is refused, "the old one is trusted no more")
        assert ask(agents[1], script)["jobs"] == ["script"]
        calls.go_on()

        # What is new in the job meets by the new certificates: a host, and links between processes of all hosts.
        third = local_agent("127.0.0.4", "--certs", str(host(own_authority, tmp_path / "c", "127.0.0.4")))
        more = attach_to_hosts(third, certs=script).spawn_procs().spawn("more", Worker)
        assert more.ask.call_one(workers).get(PATIENCE_S) == pids
        calls.go_on()
    assert not (own_authority / certs.OLD_AUTHORITY_KEY).exists()


class Calling:
    """Calls all the time, and notes what fails."""

    def __init__(self, workers: ActorMesh[Worker], pids: Sequence[int]) -> None:
        self._workers, self._pids = workers, list(pids)
        self._over = threading.Event()
        self._count = 0
        self._failed: list[object] = []
        self._thread = threading.Thread(target=self._call)

    def go_on(self) -> None:
        """Wait until some more calls have been answered."""
        until = self._count + 20
        wait_until(lambda: self._count > until or bool(self._failed), "calls are answered")
        assert not self._failed

    def _call(self) -> None:
        while not (self._over.is_set() or self._failed):
            try:
                found = list(self._workers.pid.call().get(PATIENCE_S))
            except ControlError as error:
                self._failed.append(error)
            else:
                self._failed += [] if found == self._pids else [found]
            self._count += 1

    def __enter__(self) -> "Calling":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        assert not self._failed


# Without TLS


def test_the_part_of_a_secret_that_a_host_has_is_good_for_that_host_alone(
    local_agent: LocalAgents, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "script"
    assert host_command.main(["secret", str(whole), "--per-host"]) == 0
    parts = {}
    for ip in ("127.0.0.2", "127.0.0.3"):
        parts[ip] = tmp_path / ip
        assert host_command.main(["secret", str(parts[ip]), "--of", str(whole), "--host", ip]) == 0
        assert parts[ip].stat().st_mode & 0o777 == 0o600
    agents = [local_agent(ip, "--secret-file", str(part)) for ip, part in parts.items()]
    hosts = attach_to_hosts(agents, secret_file=whole)
    assert list(hosts.spawn_procs().spawn("workers", Worker).rank.call().get(PATIENCE_S)) == [0, 1]
    control.shutdown()
    with pytest.raises(AuthenticationError, match="has another secret"):
        attach_to_hosts(agents[1], secret_file=parts["127.0.0.2"])
    control.shutdown()
    for address, file, status in ((agents[1], parts["127.0.0.2"], 1), (agents[1], whole, 0)):
        assert host_command.main(["status", "--address", address, "--secret-file", str(file)]) == status

    for status, *wrong in (
        (1, "secret", str(tmp_path / "x"), "--of", str(parts["127.0.0.2"]), "--host", "127.0.0.3"),
        (2, "secret", str(tmp_path / "x"), "--of", str(whole)),
        (1, "secret", str(tmp_path / "x"), "--of", str(whole), "--host", "node1"),
        (1, "serve", "--address", "tcp://127.0.0.4:0", "--secret-file", str(whole)),
    ):
        assert host_command.main(wrong) == status
    assert "this is the secret of scripts" in capfd.readouterr().err
    assert not (tmp_path / "x").exists()


# Files


def test_what_others_could_have_read_or_written_is_not_used(authority: Path, tmp_path: Path) -> None:
    folder = host(authority, tmp_path / "host", HERE)
    assert [(folder / name).stat().st_mode & 0o777 for name in ("key.pem", "secret")] == [0o600, 0o600]
    for name, mode, words in (
        ("key.pem", 0o640, "chmod 600"),
        ("ca.pem", 0o664, "chmod go-w"),
        ("cert.pem", 0o646, "chmod go-w"),
    ):
        before = (folder / name).stat().st_mode
        (folder / name).chmod(mode)
        with pytest.raises(CertificateError, match=words):
            Certificates(folder)
        (folder / name).chmod(before)
    if os.geteuid() == 0:
        os.chown(folder / "key.pem", 12345, 12345)
        with pytest.raises(CertificateError, match="does not belong to this user"):
            Certificates(folder)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_files_are_issued_with_their_modes_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        authority = certs.make_authority(tmp_path / "authority")
        folder = host(authority, tmp_path / "host", HERE)
        certs.revoke(authority, [HERE])
        certs.rotate(authority)
        certs.renew(authority, folder)
    finally:
        os.umask(before)
    private = {"ca-key.pem", "old-ca-key.pem", "key.pem", "secret"}
    for where in (authority, folder, authority / "issued"):
        assert where.stat().st_mode & 0o777 == 0o700
        for path in where.iterdir():
            if path.is_file():
                assert path.stat().st_mode & 0o777 == (0o600 if path.name in private else 0o644), path


def test_names_that_would_mean_something_else_are_refused(authority: Path, tmp_path: Path) -> None:
    for options in ({"name": "a/b"}, {"name": ".."}, {"role": "root"}):
        with pytest.raises(CertificateError):
            certs.issue(authority, tmp_path / "x", [HERE], **{"role": "host", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
    for cluster in ("", "Ours", "a/script"):
        with pytest.raises(CertificateError):
            certs.make_authority(tmp_path / "y", cluster=cluster)
    assert certs_command.main(["issue", str(authority), str(tmp_path / "x"), "--role", "host"]) == 1


# Strangers


def dial(me: ProcessRef, peer: ProcessRef, folder: Path) -> str:
    """Why a process of the job does not take somebody with these certificates who says that it is another."""
    reasons: list[str] = []
    over = threading.Event()

    def failed(reason: str, status: object) -> None:
        reasons.append(reason)
        over.set()

    there = Dial(
        me,
        peer,
        runtime.current().secret,
        on_open=lambda stream: over.set(),
        on_failure=failed,
        address=addresses.target(peer.address),
        certificates=Certificates(folder),
        roles=MEMBERS,
    )
    assert isinstance(there.stream, OutgoingStream)
    thread = threading.Thread(target=there.stream.run)
    thread.start()
    assert over.wait(PATIENCE_S)
    there.stream.end()
    thread.join(PATIENCE_S)
    return " ".join(reasons)


class Listening:
    """Somebody who listens as an agent does, with a certificate of any role."""

    def __init__(self, ip: str, certificates: Certificates, secret: bytes) -> None:
        self._gone = threading.Event()
        self._auth_listener = AuthListener(
            [(addresses.at(ip, 0), certificates)],
            protocol.AGENT,
            secret,
            on_proven=lambda guest, peer: guest.stream.send(WELCOME),
            on_closed=self._gone.set,
            roles=tuple(Role),
        )

    def __enter__(self) -> int:
        return self._auth_listener.ports[0]

    def __exit__(self, *exception: object) -> None:
        self._auth_listener.close()
        self._auth_listener.cut()
        assert self._gone.wait(PATIENCE_S)


def tls_of(folder: Path) -> Tls:
    return Tls(*((folder / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")))


def serve_in_vain(ip: str, folder: Path) -> str:
    """What an agent says that does not start with these certificates."""
    command = [*SKIPPER, "host", "serve", "--address", f"tcp://{ip}:0", "--certs", str(folder)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    return done.stderr


def without_role(authority: Path, folder: Path) -> Path:
    """A folder as Skipper 0.1 made it."""
    return forge(authority, folder, None)


def self_signed(tmp_path: Path) -> Path:
    return forge(None, tmp_path / "self-signed", "spiffe://ours/script/me")


def forge(authority: Path | None, folder: Path, uri: str | None) -> Path:
    """What somebody makes who has the key of an authority, or none, and other tools."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    me = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HERE)])
    signs, issuer, above = key, me, b""
    if authority is not None:
        above = (authority / "signer.pem").read_bytes() if (authority / "signer.pem").exists() else b""
        issuer = x509.load_pem_x509_certificates(above or (authority / "ca.pem").read_bytes())[0].subject
        signs = load_pem_private_key((authority / "ca-key.pem").read_bytes(), None)  # type: ignore[assignment]
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(me)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName(names + ([] if uri is None else [x509.UniformResourceIdentifier(uri)])), False
        )
        .sign(signs, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM) + above)
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "key.pem").chmod(0o600)
    if authority is not None:
        shutil.copyfile(authority / "ca.pem", folder / "ca.pem")
        shutil.copyfile(authority / SECRET, folder / SECRET)
        (folder / SECRET).chmod(0o600)
    return folder
