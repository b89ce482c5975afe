"""`Api`: the requests of a job to a Kubernetes cluster, with the official client, in plain dicts.

No other file knows that client; one function turns its errors into `JobError`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skipper.control.cluster.jobs.manifests import NAME_LABEL, Manifest
from skipper.control.model.errors import JobError, JobLibraryError

_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in every pod
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MOST_LINES = 20_000
_GONE, _NOT_YET = 404, 400


class Api:
    """A namespace of a cluster.

    Args:
        namespace: its name; None: that of this pod, or of the context of the kubeconfig.
        kubeconfig: the file that says how to reach the cluster; None: the pod's access, or the usual files.
        context: the context in the kubeconfig; None: its current one.
        timeout_s: seconds to wait for an answer.

    Raises:
        JobLibraryError: the client is not installed.
    """

    def __init__(
        self, namespace: str | None, *, kubeconfig: str | os.PathLike[str] | None, context: str | None, timeout_s: float
    ) -> None:
        if importlib.util.find_spec("kubernetes") is None:
            raise JobLibraryError("a KubernetesJob needs Kubernetes' client: pip install 'skipper-mesh[kubernetes]'")
        self._namespace = namespace
        self._kubeconfig = None if kubeconfig is None else os.fspath(kubeconfig)
        self._context = context
        self._timeout_s = timeout_s
        self._client: Any = None

    def create(self, manifest: Manifest) -> str:
        """Make an object; returns its uid.

        Raises:
            JobError: Kubernetes refuses, or cannot be reached.
        """
        answer = self._ask(manifest["kind"], "create", manifest)
        return str(json.loads(answer)["metadata"]["uid"])

    def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object and its dependents, without waiting for their end; it may be gone already.

        Raises:
            JobError: Kubernetes refuses, or cannot be reached.
        """
        options = {"propagation_policy": "Background"} | ({} if grace_s is None else {"grace_period_seconds": grace_s})
        self._ask(kind, "delete", name, missing=b"", **options)

    def pods(self, job: str) -> list[Manifest]:
        """The pods of a Job.

        Raises:
            JobError: Kubernetes refuses, or cannot be reached.
        """
        found: list[Manifest] = json.loads(self._ask("Pod", "list", label_selector=f"{NAME_LABEL}={job}"))["items"]
        return found

    def job_status(self, name: str) -> Manifest:
        """The status of a Job; a deleted one counts as failed.

        Raises:
            JobError: Kubernetes refuses, or cannot be reached.
        """
        gone = b'{"status": {"conditions": [{"type": "Failed", "status": "True", "message": "it was deleted"}]}}'
        status: Manifest = json.loads(self._ask("Job", "read", name, missing=gone)).get("status", {})
        return status

    def log(self, pod: str, container: str) -> str:
        """The end of the output of a pod; empty if there is none.

        Raises:
            JobError: Kubernetes refuses, or cannot be reached.
        """
        from kubernetes.client import CoreV1Api
        from kubernetes.client.exceptions import ApiException

        with _translated():
            read = CoreV1Api(self._connected()).read_namespaced_pod_log
            try:
                answer = read(pod, self._in(), container=container, tail_lines=_MOST_LINES, **self._options())
                return bytes(answer.data).decode(errors="replace")
            except ApiException as error:
                if error.status in (_GONE, _NOT_YET):
                    return ""
                raise

    def _ask(self, kind: str, verb: str, *arguments: object, missing: bytes | None = None, **options: object) -> bytes:
        from kubernetes.client import BatchV1Api, CoreV1Api
        from kubernetes.client.exceptions import ApiException

        with _translated():
            group = (BatchV1Api if kind == "Job" else CoreV1Api)(self._connected())
            method = getattr(group, f"{verb}_namespaced_{kind.lower()}")
            before, after = ((), (self._in(), *arguments)) if verb == "create" else (arguments, (self._in(),))
            try:
                return bytes(method(*before, *after, **options, **self._options()).data)
            except ApiException as error:
                if error.status == _GONE and missing is not None:
                    return missing
                raise

    def _options(self) -> dict[str, object]:
        # Answers are parsed here: the client's classes refuse answers of newer or older clusters with missing fields.
        return {"_preload_content": False, "_request_timeout": self._timeout_s}

    def _in(self) -> str:
        return self._namespace or "default"

    def _connected(self) -> Any:
        """The client, made at the first request, so that a job can be described without a cluster."""
        if self._client is None:
            from kubernetes import config
            from kubernetes.client import ApiClient, Configuration

            given = Configuration()
            if self._kubeconfig is None and _IN_CLUSTER in os.environ:
                config.load_incluster_config(given)
                here = _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else None
            else:
                config.load_kube_config(self._kubeconfig, self._context, given)
                contexts, current = config.list_kube_config_contexts(self._kubeconfig)
                chosen = next((one for one in contexts if one["name"] == self._context), current)
                here = chosen["context"].get("namespace")
            self._namespace = self._namespace or here
            self._client = ApiClient(given)
        return self._client


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of the client as `JobError`."""
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise JobError(f"Kubernetes refuses: {error.status} {_message(error.body) or error.reason}") from error
    except HTTPError as error:
        raise JobError(f"Kubernetes cannot be reached: {error}") from error
    except (ConfigException, OSError) as error:
        raise JobError(f"cannot connect to a Kubernetes cluster: {error}") from error


def _message(body: object) -> str:
    """Kubernetes' message in the answer to a refused request."""
    try:
        return str(json.loads(body)["message"])  # type: ignore[arg-type]  # what it is not is caught
    except (ValueError, TypeError, KeyError):
        return ""
