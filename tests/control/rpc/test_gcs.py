"""Google's own client and transport, on recorded answers from a server of this test."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from skipper.control.model.errors import NameNotFoundError, ResolverError
from skipper.control.rpc import ChainResolver, FixedResolver, GcsResolver

compute_v1 = pytest.importorskip("google.cloud.compute_v1", reason="google-cloud-compute is not installed")


def machine(name: str, ip: str, tags: list[str], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """What the API says of a machine, as far as it matters here and a little beyond."""
    return {
        "kind": "compute#instance",
        "name": name,
        "status": "RUNNING",
        "tags": {"items": tags, "fingerprint": "42WmSpB8rSM="},
        "networkInterfaces": [{"name": "nic0", "networkIP": ip, "accessConfigs": [{"natIP": "203.0.113.7"}]}],
        "metadata": {"items": [{"key": key, "value": value} for key, value in (metadata or {}).items()]},
    }


def zone(name: str, *machines: dict[str, Any]) -> dict[str, Any]:
    warning = {"code": "NO_RESULTS_ON_PAGE", "message": f"There are no results for scope '{name}' on this page."}
    return {f"zones/{name}": {"instances": list(machines)} if machines else {"warning": warning}}


CONTROLLER = {"skipper-service-skipper-controller": "grpc://:10000/controller"}
PAGES = {
    "": {
        "kind": "compute#instanceAggregatedList",
        "nextPageToken": "second",
        "items": zone("us-central1-a", machine("c-0", "10.128.0.2", ["skipper-controller", "web"], CONTROLLER))
        | zone("us-east1-b")
        | zone(
            "europe-west4-a",
            machine("r-0", "10.164.0.5", ["rollout", "typo"], {"skipper-service-typo": "10000/controller"}),
            machine("r-1", "10.164.0.6", ["rollout"]),
        ),
    },
    "second": {
        "kind": "compute#instanceAggregatedList",
        "items": zone("us-west1-c", machine("c-1", "10.138.0.9", ["skipper-controller"], CONTROLLER)),
    },
}


class Recorded(BaseHTTPRequestHandler):
    """Answers as the API did."""

    asked: list[dict[str, str]] = []  # noqa: RUF012  (of the one server of this module)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.asked.append({"path": url.path, **query})
        if url.path != "/compute/v1/projects/a-project/aggregated/instances":
            message = "Required 'compute.instances.list' permission for 'projects/another'"
            self._answer(403, {"error": {"code": 403, "message": message, "errors": [{"reason": "forbidden"}]}})
        else:
            self._answer(200, PAGES[query.get("pageToken", "")])

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.compute_v1.services.instances.transports import InstancesRestTransport

    with ThreadingHTTPServer(("127.0.0.1", 0), Recorded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        transport = InstancesRestTransport(
            credentials=AnonymousCredentials(), host=f"127.0.0.1:{server.server_port}", url_scheme="http"
        )
        with compute_v1.InstancesClient(transport=transport) as client:
            yield client
        server.shutdown()
        thread.join()


def test_machines_with_the_tag_say_where_the_service_is(client: Any) -> None:
    resolver = GcsResolver("a-project", client=client)
    assert resolver.resolve("skipper-controller") == [
        "grpc://10.128.0.2:10000/controller",
        "grpc://10.138.0.9:10000/controller",
    ]
    first, second = Recorded.asked[-2:]
    assert first["filter"] == 'status = "RUNNING"'
    assert "pageToken" not in first
    assert second["pageToken"] == "second"


def test_where_they_do_not_say_the_resolver_may_know(client: Any) -> None:
    assert GcsResolver("a-project", url="actor://:7000/{name}", client=client).resolve("rollout") == [
        "actor://10.164.0.5:7000/rollout",
        "actor://10.164.0.6:7000/rollout",
    ]
    with pytest.raises(NameNotFoundError, match="2 with this tag, none of which says where"):
        GcsResolver("a-project", client=client).resolve("rollout")


def test_a_tag_that_nobody_has_is_told_from_a_failure(client: Any) -> None:
    with pytest.raises(NameNotFoundError, match="none with this tag"):
        GcsResolver("a-project", client=client).resolve("web-2")
    with pytest.raises(ResolverError, match=r"403.*compute\.instances\.list"):
        GcsResolver("another", client=client).resolve("web")
    with pytest.raises(ResolverError, match="r-0 has no URL"):
        GcsResolver("a-project", client=client).resolve("typo")
    chain = ChainResolver(GcsResolver("another", client=client), FixedResolver("grpc://host:1/web"))
    assert chain.resolve("web") == ["grpc://host:1/web"]


def test_a_network_that_is_down_is_a_failure_of_the_resolver() -> None:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.compute_v1.services.instances.transports import InstancesRestTransport

    transport = InstancesRestTransport(credentials=AnonymousCredentials(), host="127.0.0.1:1", url_scheme="http")
    client = compute_v1.InstancesClient(transport=transport)
    with client, pytest.raises(ResolverError, match="cannot be listed"):
        GcsResolver("a-project", client=client, timeout=0.5).resolve("web")


def test_without_credentials_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    with pytest.raises(ResolverError, match=r"missing\.json"):
        GcsResolver().resolve("web")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "google.cloud.compute_v1", None)
    with pytest.raises(ImportError, match=r"skipper-mesh\[gcs\]"):
        GcsResolver("a-project").resolve("web")
