"""Servers and clients for these tests; secrets lie in a folder of the test run."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skipper.control.rpc import ActorServer, FixedResolver, MetadataServer, RpcClient, RpcOptions
from tests.control.conftest import failures, leave_nothing_behind, root_failures, script
from tests.control.rpc.parties import PATIENCE_S, Calculator, Host

__all__ = ["failures", "leave_nothing_behind", "root_failures", "script"]

OPTIONS = RpcOptions(timeout=PATIENCE_S)


@pytest.fixture(autouse=True, scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SKIPPER_")]:
            patch.delenv(name)
        folder = tmp_path_factory.mktemp("run")
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def server(surroundings: Path) -> Iterator[ActorServer]:
    """One server of this process, with a calculator, for a whole module."""
    with ActorServer("127.0.0.1", 0) as server:
        server.register("calculator", Calculator())
        yield server


@pytest.fixture(scope="module")
def client(server: ActorServer) -> Iterator[RpcClient[Calculator]]:
    with client_of(server.address, Calculator, "calculator") as client:
        yield client


@pytest.fixture(scope="module")
def metadata(surroundings: Path) -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    """Starts processes that serve."""
    hosts: list[Host] = []

    def start(**config: Any) -> Host:
        hosts.append(Host(**config))
        return hosts[-1]

    yield start
    for started in hosts:
        started.kill()


def client_of(address: str, cls: type, name: str, options: RpcOptions = OPTIONS, **kwargs: Any) -> RpcClient[Any]:
    """A client of the actor ``name`` of one server."""
    return RpcClient(FixedResolver(f"actor://{address}/{name}"), cls, options, name=name, **kwargs)


def self_signed() -> tuple[bytes, bytes, bytes]:
    """A certificate for ``localhost`` that signs itself, twice, and its key: an authority, a certificate and a key."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    pem = signed.public_bytes(encoding)
    return pem, pem, key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
