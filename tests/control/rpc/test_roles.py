"""Whom an actor server with a folder of certificates lets ask: by role and cluster, and until it is revoked."""

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skipper.control.cluster.hosts import certs
from skipper.control.model.errors import AuthenticationError, CertificateError, ResolverError
from skipper.control.rpc import ActorServer, MetadataResolver, MetadataServer, Tls
from skipper.control.rpc.wire.channel import UnreachableError
from tests.control.conftest import wait_until
from tests.control.rpc.conftest import client_of
from tests.control.rpc.parties import Calculator

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certs.make_authority(tmp_path_factory.mktemp("roles") / "authority", cluster="ours")


@pytest.fixture
def served(authority: Path, tmp_path: Path) -> Path:
    """The folder of a server."""
    return certs.issue(authority, tmp_path / "server", [HERE], role="host")


def tls_of(folder: Path) -> Tls:
    return Tls(*((folder / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")))


def add(server: ActorServer, folder: Path) -> object:
    """Ask for 2 + 2, with what is in a folder."""
    with client_of(server.address, Calculator, "calculator", tls=tls_of(folder)) as client:
        return client.add.sync(2)


def test_only_holders_of_the_roles_that_a_server_is_for_may_ask(authority: Path, served: Path, tmp_path: Path) -> None:
    folders = {role: certs.issue(authority, tmp_path / role, [HERE], role=role) for role in ("script", "client")}
    with ActorServer(HERE, 0, certs=served) as server:
        server.register("calculator", Calculator())
        assert [add(server, folder) for folder in (*folders.values(), served)] == [4, 4, 4]
    with ActorServer(HERE, 0, certs=served, roles=("script",)) as server:
        server.register("calculator", Calculator())
        assert add(server, folders["script"]) == 4
        for folder in (folders["client"], served):
            with pytest.raises(AuthenticationError, match="does not have the role of a script"):
                add(server, folder)


def test_who_shows_nothing_or_is_of_another_cluster_may_not_ask(served: Path, authority: Path, tmp_path: Path) -> None:
    other = certs.make_authority(tmp_path / "other", cluster="theirs")
    foreign = tls_of(certs.issue(other, tmp_path / "foreign", [HERE], role="script"))
    trusting = Tls((authority / "ca.pem").read_bytes(), foreign.certificate, foreign.key)
    with ActorServer(HERE, 0, certs=served) as server:
        server.register("calculator", Calculator())
        for tls in (trusting, Tls(trusting.authority), None):
            with pytest.raises(UnreachableError):
                client_of(server.address, Calculator, "calculator", tls=tls).add.sync(1)


def test_what_is_revoked_while_a_server_runs_is_turned_away_and_the_others_are_not(tmp_path: Path) -> None:
    authority = certs.make_authority(tmp_path / "authority", cluster="ours")
    served = certs.issue(authority, tmp_path / "server", [HERE], role="host")
    good, bad = (certs.issue(authority, tmp_path / name, [HERE], role="client", name=name) for name in ("good", "bad"))
    with (
        ActorServer(HERE, 0, certs=served) as server,
        client_of(server.address, Calculator, "calculator", tls=tls_of(bad)) as client,
    ):
        server.register("calculator", Calculator())
        assert client.add.sync(1) == 3
        assert certs.revoke(authority, ["bad"])
        certs.update(authority, [served])

        def is_turned_away() -> bool:
            try:
                client.add.sync(0)
            except AuthenticationError:
                return True
            return False

        wait_until(is_turned_away, "the connection that was there before is of no more use")
        with pytest.raises(AuthenticationError, match="was revoked"):
            add(server, bad)
        assert add(server, good) == 4


def test_who_watches_the_health_of_a_server_is_turned_away_once_it_is_revoked(tmp_path: Path) -> None:
    authority = certs.make_authority(tmp_path / "authority", cluster="ours")
    served = certs.issue(authority, tmp_path / "server", [HERE], role="host")
    good, bad = (certs.issue(authority, tmp_path / name, [HERE], role="client", name=name) for name in ("good", "bad"))
    with ExitStack() as stack:
        server = stack.enter_context(ActorServer(HERE, 0, certs=served))
        watching = {}
        for folder in (good, bad):
            tls = tls_of(folder)
            credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
            channel = stack.enter_context(grpc.secure_channel(server.address, credentials))
            watching[folder] = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert next(watching[folder]).status == health_pb2.HealthCheckResponse.SERVING
        assert certs.revoke(authority, ["bad"])
        certs.update(authority, [served])
        with pytest.raises(grpc.RpcError) as caught:
            next(watching[bad])
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "was revoked" in caught.value.details()
        server.stop()
        assert next(watching[good]).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_folder_that_serves_nothing_is_refused_before_anything_listens(
    authority: Path, served: Path, tmp_path: Path
) -> None:
    client = certs.issue(authority, tmp_path / "client", [HERE], role="client")
    with pytest.raises(CertificateError, match="a client, and a server needs"):
        ActorServer(HERE, 0, certs=client)
    with pytest.raises(ValueError, match="pass one of them"):
        ActorServer(HERE, 0, certs=served, tls=tls_of(served))
    with pytest.raises(ValueError, match="nobody"):
        ActorServer(HERE, 0, certs=served, roles=("nobody",))
    with pytest.raises(CertificateError, match=r"ca\.pem cannot be read"):
        ActorServer("0.0.0.0", 0, certs=tmp_path)


def test_roles_without_certificates_are_refused_before_anything_is_opened(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = set(tmp_path.rglob("*"))
    for tls in (None, tls_of(served)):
        with pytest.raises(ValueError, match="roles= needs certificates: pass certs="):
            ActorServer(HERE, 0, roles=("script",), tls=tls)
    assert set(tmp_path.rglob("*")) == before


def test_the_metadata_service_takes_the_same_look(authority: Path, served: Path, tmp_path: Path) -> None:
    client = certs.issue(authority, tmp_path / "client", [HERE], role="client")
    with MetadataServer(HERE, 0, certs=served) as server:
        assert MetadataResolver(server.address, tls=tls_of(client)).names("/nobody") == {}
        with pytest.raises(ResolverError):
            MetadataResolver(server.address).names("/nobody")
