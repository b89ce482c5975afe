"""A job's objects for Kubernetes: a headless Service, an Indexed Job and a Secret, as plain dicts.

Field by field this is https://kubernetes.io/docs/reference/kubernetes-api/ for Kubernetes 1.31 and newer.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]

NAME_LABEL = "app.kubernetes.io/instance"
CONTAINER = "agent"
SECRET_FOLDER, OWN_FOLDER = "/etc/skipper", "/run/skipper"
"""Where a pod finds the Secret, and where it keeps, in memory, the files that it makes from it."""

_PULL_POLICIES = (None, "Always", "IfNotPresent", "Never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The description of the pods of a job. Amounts are written as in Kubernetes: ``"64Gi"``, ``"500m"``.

    The example of `KubernetesJob` shows one.

    Attributes:
        image: an image with this library and its ``skipper`` on the PATH, and with the ``hosts`` extra for TLS.
        cpus: cores of each pod.
        memory: memory of each pod, including that of ``/dev/shm``.
        gpus: NVIDIA GPUs of each pod.
        resources: other resources of each pod, such as ``{"rdma/hca": 1}``.
        rdma: let them lock memory, which verbs need. The capability has an effect only for processes of root: set
            ``user=0``, or configure the nodes' container runtime without a limit on locked memory.
        shared_memory: the size of ``/dev/shm``, through which processes of a host exchange tensors.
        env: environment variables.
        user: the uid that they run as; root only if it is 0.
        node_selector: labels of the nodes that they may run on.
        tolerations: tolerations of taints, as in a pod's specification.
        service_account: the service account; None: the namespace's default. They get no token in either case.
        pull_policy: ``Always``, ``IfNotPresent``, ``Never``; None: Kubernetes' own rule.
        pull_secrets: names of Secrets for the image's registry.
        port: the port that the agents listen on.
        idle_timeout_s: a pod ends by itself after this long without a script.
        retries: how many pods may be lost for each rank before the rank counts as failed.
        grace_s: how long a pod has to end.
        keep_s: how long Kubernetes keeps the Job after all of its pods have ended.
        time_limit_s: Kubernetes ends the Job after this long; None: never.
    """

    image: str
    cpus: int | str = 1
    memory: str = "4Gi"
    gpus: int = 0
    resources: Mapping[str, int | str] = field(default_factory=dict)
    rdma: bool = False
    shared_memory: str = "1Gi"
    env: Mapping[str, str] = field(default_factory=dict)
    user: int = 1000
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    service_account: str | None = None
    pull_policy: str | None = None
    pull_secrets: Sequence[str] = ()
    port: int = 7431
    idle_timeout_s: int = 600
    retries: int = 16
    grace_s: int = 30
    keep_s: int = 3600
    time_limit_s: int | None = None

    def __post_init__(self) -> None:
        if not self.image:
            raise ValueError("pods need an image")
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"a port is between 1 and 65535, not {self.port}")
        if self.pull_policy not in _PULL_POLICIES:
            raise ValueError(f"a pull policy is Always, IfNotPresent or Never, not {self.pull_policy!r}")
        if min(self.gpus, self.user, self.retries, self.grace_s, self.keep_s) < 0 or self.idle_timeout_s < 1:
            raise ValueError("numbers of pods, seconds and GPUs are not negative")


def service(name: str, pods: Pods) -> Manifest:
    """The headless Service, which gives pod INDEX the name ``NAME-INDEX.NAME.NAMESPACE.svc``."""
    ports = [{"name": CONTAINER, "port": pods.port, "targetPort": pods.port, "protocol": "TCP"}]
    spec = {"clusterIP": "None", "selector": {NAME_LABEL: name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(name), "spec": spec}


def secret(name: str, files: Mapping[str, bytes]) -> Manifest:
    """The Secret with the files for agents."""
    data = {file: base64.b64encode(content).decode("ascii") for file, content in files.items()}
    head = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(name)}
    return {**head, "type": "Opaque", "immutable": True, "data": data}


def job(name: str, places: int, pods: Pods, *, secret_name: str, tls: bool) -> Manifest:
    """The Job, with one pod per place; a pod's index is its rank.

    Args:
        name: of the Job, and of its Service.
        places: how many pods.
        pods: their description.
        secret_name: the Secret with the agents' secret, and for TLS the authority that signs each pod's certificate.
        tls: whether to use TLS.
    """
    spec: Manifest = {
        "completions": places,
        "parallelism": places,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": pods.retries,
        # A deleted pod is replaced when its end begins: on a lost node the end may never come.
        "podReplacementPolicy": "TerminatingOrFailed",
        "ttlSecondsAfterFinished": pods.keep_s,
        "template": {"metadata": {"labels": _labels(name)}, "spec": _pod(name, pods, secret_name, tls)},
    }
    if pods.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = pods.time_limit_s
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(name), "spec": spec}


def owned_by(manifest: Manifest, owner: Mapping[str, str]) -> Manifest:
    """The same object, but owned by a Job: Kubernetes removes it with the Job.

    Args:
        manifest: the object.
        owner: name and uid of the Job.
    """
    reference = {"apiVersion": "batch/v1", "kind": "Job", "blockOwnerDeletion": False, "controller": False, **owner}
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "skipper", NAME_LABEL: name}


def _metadata(name: str) -> Manifest:
    return {"name": name, "labels": _labels(name)}


def _pod(name: str, pods: Pods, secret_name: str, tls: bool) -> Manifest:
    spec: Manifest = {
        "restartPolicy": "Never",  # the Job replaces a failed pod, perhaps on another node
        "subdomain": name,
        "terminationGracePeriodSeconds": pods.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": pods.user != 0,
            "runAsUser": pods.user,
            "runAsGroup": pods.user,
            "fsGroup": pods.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(pods, tls)],
        "volumes": [
            # 0400; for users other than root, Kubernetes adds read permission for the pod's own group.
            {"name": "secret", "secret": {"secretName": secret_name, "defaultMode": 0o400}},
            {"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}},
        ],
    }
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    if pods.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in pods.tolerations]
    if pods.service_account is not None:
        spec["serviceAccountName"] = pods.service_account
    if pods.pull_secrets:
        spec["imagePullSecrets"] = [{"name": one} for one in pods.pull_secrets]
    return spec


def _container(pods: Pods, tls: bool) -> Manifest:
    resources: dict[str, int | str] = {"cpu": pods.cpus, "memory": pods.memory, **pods.resources}
    if pods.gpus:
        resources["nvidia.com/gpu"] = pods.gpus
    amounts = {name: str(amount) for name, amount in resources.items()}
    capabilities: dict[str, list[str]] = {"drop": ["ALL"]}
    if pods.rdma:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "name": CONTAINER,
        "image": pods.image,
        **({} if pods.pull_policy is None else {"imagePullPolicy": pods.pull_policy}),
        "command": ["/bin/sh", "-c", _command(pods, tls)],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": value} for name, value in pods.env.items()),
        ],
        "ports": [{"name": CONTAINER, "containerPort": pods.port, "protocol": "TCP"}],
        # Requests equal to limits: pods with less are evicted first.
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "readinessProbe": {"tcpSocket": {"port": pods.port}, "periodSeconds": 2},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": [
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "own", "mountPath": OWN_FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _command(pods: Pods, tls: bool) -> str:
    """The command of a pod.

    A pod's certificate is for its IP, which is unknown before it starts: so the pod makes its certificate itself. Only
    the owner may be able to read an agent's secret, but the group can read a Secret's file: so the pod copies it.
    """
    serve = f'exec skipper host serve --address "tcp://[$POD_IP]:{pods.port}" --idle-timeout {pods.idle_timeout_s}'
    if tls:
        certs = f"{OWN_FOLDER}/certs"
        return f'skipper certs issue {SECRET_FOLDER} {certs} --role host --host "$POD_IP" && {serve} --certs {certs}'
    copy = f"umask 077 && cat {SECRET_FOLDER}/secret > {OWN_FOLDER}/secret"
    return f"{copy} && {serve} --secret-file {OWN_FOLDER}/secret --insecure"
