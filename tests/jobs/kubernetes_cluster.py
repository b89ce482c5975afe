"""What stands in for a Kubernetes cluster, since none can be had here: a small HTTP server, and real agents.

The server is a fake: it speaks the paths of Kubernetes' API that a job uses, holds what is posted against the published
schemas, and does the least of what a Job's controller and a kubelet do. A "pod" is what its manifest says that it runs,
as a process of this machine at a loopback address of its own, with the files of its Secret in a folder.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

from skipper.control.cluster.jobs.manifests import OWN_FOLDER, SECRET_FOLDER

NAMESPACE = "team"
TOKEN = "token-of-the-tests"
OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()
_INDEX = "batch.kubernetes.io/job-completion-index"
_PATH = re.compile(rf"/(?:api/v1|apis/batch/v1)/namespaces/{NAMESPACE}/(\w+)(?:/([-.\w]+))?(/log)?")


def ip_of(number: int) -> str:
    """The IP of the pod that was made as the so-many-th; no other run of these tests has the same."""
    return f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.{number + 1}"


class Pod:
    """A pod, and the process that it is."""

    def __init__(self, manifest: Mapping[str, Any], index: int, number: int, folder: Path) -> None:
        self.name = f"{manifest['metadata']['name']}-{index}-{number:05}"
        self.uid = str(uuid.uuid4())
        self.index = index
        self.number = number
        self.ip = ip_of(number)
        self.folder = folder / self.name
        self.template = manifest["spec"]["template"]
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self, secret: Mapping[str, str]) -> None:
        """Do what a kubelet does once the Secret is there."""
        for name in ("secret", "own"):
            (self.folder / name).mkdir(parents=True)
        for name, content in secret.items():
            path = self.folder / "secret" / name
            path.write_bytes(base64.b64decode(content))
            path.chmod(0o440)  # as Kubernetes does it where there is an fsGroup
        container = self.template["spec"]["containers"][0]
        moved = {SECRET_FOLDER: str(self.folder / "secret"), OWN_FOLDER: str(self.folder / "own")}
        command = [re.sub("|".join(moved), lambda found: moved[found[0]], part) for part in container["command"]]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {one["name"]: one.get("value", self.ip) for one in container["env"]}
        with (self.folder / "log").open("wb") as log:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PATH": path, **given}
            )

    def end(self) -> None:
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()

    def described(self) -> dict[str, Any]:
        metadata = {
            "name": self.name,
            "uid": self.uid,
            "labels": self.template["metadata"]["labels"],
            "annotations": {_INDEX: str(self.index)},
            "creationTimestamp": f"2026-01-01T00:{self.number // 60:02}:{self.number % 60:02}Z",
        }
        return {"kind": "Pod", "metadata": metadata, "status": self._status()}

    def _status(self) -> dict[str, Any]:
        if self.popen is None:
            waiting = {"reason": "ContainerCreating"}
            return {"phase": "Pending", "containerStatuses": [{"name": "agent", "state": {"waiting": waiting}}]}
        if (status := self.popen.poll()) is not None:
            terminated = {"exitCode": status, "reason": "Error" if status else "Completed"}
            state = {"name": "agent", "state": {"terminated": terminated}}
            return {"phase": "Failed" if status else "Succeeded", "containerStatuses": [state]}
        ready = {"type": "Ready", "status": str(self._probe())}
        return {"phase": "Running", "podIP": self.ip, "conditions": [ready], "containerStatuses": None}

    def _probe(self) -> bool:
        """The readiness probe of the manifest."""
        port = self.template["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
        with contextlib.suppress(OSError), socket.create_connection((self.ip, port), 1):
            return True
        return False


class Cluster:
    """The objects that were posted, and what a cluster makes of them.

    Attributes:
        objects: by kind, in the plural, and name.
        pods: by name.
        refused: kinds that may not be made, as for who has not the rights.
        most_pods: for each index; then it has failed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, Pod] = {}
        self.refused: set[str] = set()
        self.most_pods = 16
        self._made = 0
        self._lock = threading.RLock()

    def do(self, verb: str, target: str, body: Any) -> tuple[int, Any]:
        """Answer a request."""
        url = urlsplit(target)
        found = _PATH.fullmatch(url.path)
        if found is None:
            return 404, _failure(f"no such path: {url.path}")
        kind, name, log = found.groups()
        with self._lock:
            if kind in self.refused and verb != "GET":
                return 403, _failure(f"{kind} is forbidden: the user has not the right to do that")
            if verb == "POST":
                return self._create(kind, body)
            if verb == "DELETE":
                return self._delete(kind, name)
            if log:
                return self._log(name)
            if kind == "pods":
                label, _, value = parse_qs(url.query)["labelSelector"][0].partition("=")
                pods = [pod.described() for pod in self.pods.values()]
                return 200, {"items": [pod for pod in pods if pod["metadata"]["labels"].get(label) == value]}
            if (kind, name) not in self.objects:
                return 404, _failure(f"{kind} {name} not found")
            return 200, {**self.objects[kind, name], "status": self._status_of_job(name)}

    def close(self) -> None:
        with self._lock:
            for pod in self.pods.values():
                pod.end()
            self.pods.clear()

    def _create(self, kind: str, body: dict[str, Any]) -> tuple[int, Any]:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(body, version, strict=True)
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            return 409, _failure(f'{kind} "{name}" already exists')
        body["metadata"]["uid"] = str(uuid.uuid4())
        self.objects[kind, name] = body
        self._control()
        return 201, body

    def _delete(self, kind: str, name: str) -> tuple[int, Any]:
        if kind == "pods" and name in self.pods:
            self.pods.pop(name).end()
            self._control()
            return 200, {}
        if self.objects.pop((kind, name), None) is None:
            return 404, _failure(f"{kind} {name} not found")
        if kind == "jobs":
            for pod in [pod for pod in self.pods.values() if pod.name.startswith(f"{name}-")]:
                self.pods.pop(pod.name).end()
        return 200, {}

    def _control(self) -> None:
        """What a Job's controller does about pods that are missing, and a kubelet about pods that wait."""
        for (kind, name), job in self.objects.items():
            for index in range(job["spec"]["completions"]) if kind == "jobs" else ():
                mine = [pod for pod in self.pods.values() if pod.name.startswith(f"{name}-{index}-")]
                if not mine and self._made < self.most_pods:
                    pod = Pod(job, index, self._made, self.folder)
                    self._made += 1
                    self.pods[pod.name] = pod
        for pod in self.pods.values():
            secret = pod.template["spec"]["volumes"][0]["secret"]["secretName"]
            if pod.popen is None and ("secrets", secret) in self.objects:
                pod.start(self.objects["secrets", secret]["data"])

    def _status_of_job(self, name: str) -> dict[str, Any]:
        there = {pod.index for pod in self.pods.values() if pod.name.startswith(f"{name}-")}
        missing = set(range(self.objects["jobs", name]["spec"]["completions"])) - there
        return {"failedIndexes": ",".join(map(str, sorted(missing)))}

    def _log(self, name: str) -> tuple[int, Any]:
        if name not in self.pods:
            return 404, _failure(f"pods {name} not found")
        if self.pods[name].popen is None:
            return 400, _failure("container is waiting to start: ContainerCreating")
        return 200, (self.pods[name].folder / "log").read_bytes()


def _failure(message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "message": message}


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, content = 401, _failure("Unauthorized")
        else:
            status, content = self.cluster.do(self.command, self.path, json.loads(body) if body else None)
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815  # as http.server calls them

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def kubernetes_cluster(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """The cluster, and the kubeconfig to reach it with."""
    cluster = Cluster(folder / "pods")
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        config = {
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}}],
            "current-context": "here",
        }
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(config))  # which is YAML, too
        try:
            yield cluster, kubeconfig
        finally:
            cluster.close()
            server.shutdown()
            thread.join()
            shutil.rmtree(cluster.folder, ignore_errors=True)
