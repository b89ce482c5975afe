"""`KubernetesJob`: hosts that are pods of an Indexed Job. `manifests` has the requests to Kubernetes."""

from __future__ import annotations

import os
import re
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path

from skipper.control.cluster.hosts.attach import read_secret
from skipper.control.cluster.jobs import manifests
from skipper.control.cluster.jobs.authority import Authority, own_addresses
from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.cluster.jobs.folder import JobFolder
from skipper.control.cluster.jobs.job import Job
from skipper.control.cluster.jobs.kubernetes_api import Api
from skipper.control.cluster.jobs.manifests import Manifest, Pods
from skipper.control.cluster.jobs.pods import Pod, failure_of, place_of
from skipper.control.model.errors import CertificateError
from skipper.control.wire.certificates import AUTHORITY, AUTHORITY_KEY, SECRET, SIGNER

TIMEOUT_S = 30.0
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, which names of Services follow
_LABEL_NCHARS = 63


class KubernetesJob(Job):
    """Agents in the pods of an Indexed Job. Elastic: if a pod is gone, the Job makes another one of that index.

    The script has to be able to reach the pods, for example because it runs in the cluster. Pods end by themselves, and
    with them the Job, after ``pods.idle_timeout_s`` without a script.

    Pods and script use TLS: the authority is in the job's Secret, and each pod makes a certificate for its IP. So all
    that can read the Secret, and only they, can do in the job what the script can.

    Args:
        places: how many pods.
        pods: the description of the pods.
        name: name of the Job, its Service and its Secret; None: a new one.
        namespace: the namespace in Kubernetes; None: that of this pod, or of the context of the kubeconfig.
        authority: a folder that ``skipper certs init`` made; None: a new authority of this script.
        secret_name: name of an existing Secret with the files of ``authority``, which is then not sent.
        insecure: use no TLS: anyone on the pods' network can read everything and take part in the job.
        kubeconfig: the file that says how to reach the cluster; None: the access of the pod, if this is one, or else
            ``$KUBECONFIG``, or the file in the home folder.
        context: the context in the kubeconfig; None: its current one.
        timeout: seconds for Kubernetes to answer a request.
        address: the IP at which the pods reach this script.
        data_plane: whether the data plane may carry data between hosts; as in `attach_to_hosts`.

    Raises:
        JobLibraryError: (an `ImportError`) the library ``kubernetes`` is not installed; a missing ``cryptography``, for
            TLS, is found later.
        ValueError: ``places`` is below 1, or the name is not valid in Kubernetes, or ``secret_name`` is given without
            the ``authority`` that is in it.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        from skipper.control.cluster.jobs import KubernetesJob, Pods

        kubeconfig = Path(tempfile.mkdtemp(), "config")
        kubeconfig.write_text('''
        apiVersion: v1
        kind: Config
        current-context: here
        clusters: [{name: here, cluster: {server: "https://127.0.0.1:6443"}}]
        users: [{name: me, user: {token: secret}}]
        contexts: [{name: here, context: {cluster: here, user: me, namespace: rl}}]
        ''')
        pods = Pods(image="registry.example/trainer:1", gpus=8, memory="512Gi", shared_memory="64Gi")
        job = KubernetesJob(2, pods, name="trainers", kubeconfig=kubeconfig, insecure=True)
        print([manifest["kind"] for manifest in job.manifests()])  # ['Job', 'Service', 'Secret']
        ```
    """

    engine: KubernetesEngine

    def __init__(
        self,
        places: int,
        pods: Pods,
        *,
        name: str | None = None,
        namespace: str | None = None,
        authority: str | os.PathLike[str] | None = None,
        secret_name: str | None = None,
        insecure: bool = False,
        kubeconfig: str | os.PathLike[str] | None = None,
        context: str | None = None,
        timeout: float = TIMEOUT_S,
        address: str | None = None,
        data_plane: bool | None = None,
    ) -> None:
        name = f"skipper-{secrets.token_hex(4)}" if name is None else name
        if not _LABEL.fullmatch(name) or len(f"{name}-{places - 1}") > _LABEL_NCHARS:
            raise ValueError(f"{name!r} is not a valid name in Kubernetes: use at most 63 of a-z, 0-9 and -")
        if secret_name is not None and authority is None:
            raise ValueError(
                "secret_name= names the authority of the pods: give the script the same one, by authority="
            )
        api = Api(namespace, kubeconfig=kubeconfig, context=context, timeout_s=timeout)
        trust = JobTrust(JobFolder(), authority, address, tls=not insecure)
        engine = KubernetesEngine(api, trust, name, pods, secret_name)
        super().__init__(engine, places, insecure=insecure, address=address, data_plane=data_plane)

    def manifests(self) -> list[Manifest]:
        """The manifests that `start` would apply, as plain dicts, to apply them by other means.

        The Secret is among them, unless ``secret_name`` was given: keep them as confidential as a secret.

        Raises:
            JobError: the folder for the files of the Secret cannot be created.
            CertificateError: ``authority`` is not a folder of an authority.
        """
        return self.engine.manifests(self.size)


class JobTrust:
    """The credentials by which the pods and the script of a job authenticate each other.

    ``authority`` is a folder with an authority and a secret; None: the job makes them. ``address`` is the IP at which
    this script is reached; None: any that it has.
    """

    def __init__(
        self, folder: JobFolder, authority: str | os.PathLike[str] | None, address: str | None, *, tls: bool
    ) -> None:
        self._folder = folder
        self._given = None if authority is None else Path(authority)
        self._address = address
        self._own = Authority(folder, address)
        self.tls = tls
        self.close = weakref.finalize(self, folder.close)
        """Remove what was made; this also happens if a job is described but never started."""

    @property
    def secret_file(self) -> Path:
        """The agents' secret."""
        return self._folder.secret_file if self._given is None else self._given / SECRET

    @property
    def certs(self) -> Path | None:
        """The folder with the certificates of this machine; None: no TLS."""
        if not self.tls or self._given is None:
            return self._own.certs if self.tls else None
        made = self._folder.path / "certs"
        if not made.exists():
            from skipper.control.cluster.hosts.certs import issue

            issue(self._given, made, own_addresses(self._address), role="script")
        return made

    def files(self) -> dict[str, bytes]:
        """The files for the pods: with TLS also an authority that signs only for hosts.

        Raises:
            CertificateError: it does not exist.
        """
        found = {SECRET: read_secret(self.secret_file)}
        folder = self._signs_for_pods() if self.tls else Path()
        for name in (AUTHORITY, AUTHORITY_KEY, SIGNER) if self.tls else ():
            try:
                found[name] = (folder / name).read_bytes()
            except OSError as error:
                raise CertificateError(f"{folder / name} cannot be read: {error.strerror}") from error
        return found

    def _signs_for_pods(self) -> Path:
        if self._given is None:
            return self._own.path
        made = self._folder.path / "pods"
        if not made.exists():
            from skipper.control.cluster.hosts.certs import delegate

            delegate(self._given, made, role="host")
        return made


class KubernetesEngine:
    """Pods as places; see `Engine`. The Secret ``secret_name`` contains the files of ``trust``; None: it makes one."""

    is_elastic = True

    def __init__(self, api: Api, trust: JobTrust, name: str, pods: Pods, secret_name: str | None) -> None:
        self._api = api
        self._trust = trust
        self._name = name
        self._pods = pods
        self._secret_name = secret_name
        self._places = 0
        self._is_over = False
        self._made: list[str] = []
        self._seen: dict[int, str] = {}

    @property
    def secret_file(self) -> Path:
        """See `Engine`."""
        return self._trust.secret_file

    @property
    def certs(self) -> Path | None:
        """See `Engine`."""
        return self._trust.certs

    def manifests(self, places: int) -> list[Manifest]:
        """See `KubernetesJob.manifests`; the Job comes first."""
        secret_name = self._secret_name or self._name
        job = manifests.job(self._name, places, self._pods, secret_name=secret_name, tls=self._trust.tls)
        service = manifests.service(self._name, self._pods)
        if self._secret_name is not None:
            return [job, service]
        return [job, service, manifests.secret(self._name, self._trust.files())]

    def submit(self, places: int) -> None:
        """Make the Job, and then the objects that its pods wait for, as parts of it: they are deleted with the Job."""
        job, *others = self.manifests(places)
        self._places = places
        uid = self._create(job)
        for other in others:
            self._create(manifests.owned_by(other, {"name": self._name, "uid": uid}))

    def poll(self) -> Sequence[Place]:
        """The places from the pods' statuses, and from the Job's status for indices that it has given up."""
        if self._is_over:
            return [Place(PlaceState.ENDED, reason="the job was cancelled")] * self._places
        newest = {pod.index: pod for pod in self._all_pods() if not pod.is_leaving}
        places = [place_of(newest.get(rank), self._pods.port) for rank in range(self._places)]
        self._seen |= {rank: newest[rank].uid for rank, place in enumerate(places) if place.state is PlaceState.RUNNING}
        if len(newest) < self._places:
            status = self._api.job_status(self._name)
            for rank in set(range(self._places)) - set(newest):
                if reason := failure_of(status, rank):
                    places[rank] = Place(PlaceState.FAILED, reason=reason)
        return places

    def replace(self, rank: int) -> None:
        """Delete the pod without waiting for its end; a newer pod of the Job stays."""
        pods = [pod for pod in self._all_pods() if pod.index == rank and not pod.is_leaving]
        used = [pod for pod in pods if pod.uid == self._seen.get(rank) or pod.is_over]
        for pod in used or pods[-1:]:
            self._api.delete("Pod", pod.name, grace_s=0)

    def log(self, rank: int) -> str:
        """The end of the output of the rank's newest pod."""
        pods = [] if self._is_over else [pod for pod in self._all_pods() if pod.index == rank]
        return self._api.log(pods[-1].name, manifests.CONTAINER) if pods else ""

    def cancel(self) -> None:
        """Delete the Job with its pods, the Service and the Secret."""
        try:
            self._is_over = True
            self._delete()
        finally:
            self._trust.close()

    def _create(self, manifest: Manifest) -> str:
        uid = self._api.create(manifest)
        self._made.append(manifest["kind"])
        return uid

    def _delete(self) -> None:
        """Delete the objects of this job, and no objects of others with the same name."""
        while self._made:
            self._api.delete(self._made[0], self._name)
            del self._made[0]

    def _all_pods(self) -> list[Pod]:
        """All pods of the Job, oldest first."""
        return sorted(map(Pod.of, self._api.pods(self._name)), key=lambda pod: pod.created)
