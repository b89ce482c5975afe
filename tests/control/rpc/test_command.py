import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.cli.main import main
from skipper.control.cluster.hosts import certs
from skipper.control.rpc import MetadataMapping, MetadataServer, Tls
from tests.control.rpc.parties import PATIENCE_S, REPOSITORY


@pytest.fixture
def served(surroundings: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "skipper.cli.main", "names", "serve"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_names_are_served_until_interrupted_and_listed(
    served: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.stdout is not None
    address = served.stdout.readline().rpartition(" ")[2].strip()
    with MetadataMapping(address, namespace="job") as mapping:
        mapping.register("a", "actor://host:1/a")
        mapping.register("/shared/b", "grpc://host:2/b")
        assert main(["names", "list", "--address", address]) == 0
        assert capsys.readouterr().out == "/job/a  actor://host:1/a\n/shared/b  grpc://host:2/b\n"
        assert main(["names", "list", "/job/", "--port", address.rpartition(":")[2], "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"/job/a": ["actor://host:1/a"]}
    served.send_signal(signal.SIGTERM)
    out, err = served.communicate(timeout=PATIENCE_S)
    assert (served.returncode, out, err) == (0, "", "")


def test_names_of_a_service_with_certificates_are_listed_with_a_folder_of_them(
    surroundings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = certs.make_authority(tmp_path / "authority", cluster="ours")
    served = certs.issue(authority, tmp_path / "server", ["127.0.0.1"], role="host")
    client = certs.issue(authority, tmp_path / "client", ["127.0.0.1"], role="client")
    tls = Tls(*((client / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")))
    with (
        MetadataServer("127.0.0.1", certs=served) as server,
        MetadataMapping(server.address, namespace="job", tls=tls) as mapping,
    ):
        mapping.register("a", "actor://host:1/a")
        listing = ["names", "list", "--address", server.address]
        assert main([*listing, "--certs", str(client)]) == 0
        assert capsys.readouterr().out == "/job/a  actor://host:1/a\n"
        authority_file = str(client / "ca.pem")
        assert main([*listing, "--authority", authority_file]) == 1
        assert main([*listing, "--authority", authority_file, "--certs", str(client)]) == 2
        assert "pass one of them" in capsys.readouterr().err
        assert main([*listing, "--certs", str(tmp_path)]) == 1
        assert "ca.pem cannot be read" in capsys.readouterr().err


def test_what_cannot_be_done_is_said_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (
        ["list"],
        ["list", "--address", "127.0.0.1:1"],
        ["list", "--address", "nowhere"],
        ["list", "--address", "127.0.0.1:1", "--secret-file", str(tmp_path / "missing")],
        ["serve", "--address", "0.0.0.0:0"],
    ):
        assert main(["names", *arguments]) == 1
        err = capsys.readouterr().err
        assert err.startswith("skipper names: ")
        assert len(err.splitlines()) == 1
    bad = ([], ["dance"], ["serve", "--fast"], ["serve", "--key", "missing"], ["list", "--host", "node7"])
    for wrong in (*bad, ["serve", "--address", "127.0.0.1:0", "--port", "1"]):
        assert main(["names", *wrong]) == 2
