"""Jobs on Kubernetes: the manifests against the published schemas, and the client's side against a fake cluster.

No cluster was at hand. What answers here is a small HTTP server (see `kubernetes_cluster`), and the pods are processes
of this machine; the agents in them, the script and the official client are real. What a real cluster's controllers do
of themselves is not shown by these tests.
"""

import importlib.util
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from skipper import control
from skipper.control import Actor, SupervisionError, endpoint
from skipper.control.cluster.hosts.certs import make_authority
from skipper.control.cluster.jobs import PlaceState, manifests
from skipper.control.cluster.jobs.kubernetes import KubernetesJob
from skipper.control.cluster.jobs.manifests import Pods
from skipper.control.cluster.jobs.pods import INDEX, Pod, failure_of, place_of
from skipper.control.model.errors import CertificateError, JobError, JobFailedError, JobLibraryError
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.jobs.kubernetes_cluster import NAMESPACE, NEWEST, OLDEST, Cluster, ip_of, kubernetes_cluster

PODS = Pods(image="registry.example/skipper:1")
ALL = Pods(
    image="registry.example/skipper:1",
    cpus="7500m",
    memory="64Gi",
    gpus=8,
    resources={"rdma/hca": 1},
    rdma=True,
    shared_memory="16Gi",
    env={"COLOR": "blue"},
    user=0,
    node_selector={"gpu": "yes"},
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
    service_account="trainer",
    pull_policy="Always",
    pull_secrets=["registry"],
    time_limit_s=86400,
)


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        print("asked for its pid", flush=True)
        return os.getpid()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[tuple[Cluster, Callable[..., KubernetesJob]]]:
    """A fake cluster, and what makes jobs for it."""
    with kubernetes_cluster(tmp_path) as (cluster, kubeconfig):

        def job(places: int = 2, pods: Pods = PODS, **options: Any) -> KubernetesJob:
            return KubernetesJob(places, pods, kubeconfig=kubeconfig, **options)

        yield cluster, job
        control.shutdown()


@pytest.mark.parametrize("insecure", [False, True])
def test_pods_become_hosts_with_tls_unless_it_is_not_wanted(
    here: tuple[Cluster, Callable[..., KubernetesJob]], insecure: bool
) -> None:
    cluster, new = here
    with new(name="trainers", insecure=insecure) as job:
        hosts = job.hosts(timeout=PATIENCE_S)
        assert hosts.names == (f"{ip_of(0)}:7431", f"{ip_of(1)}:7431")
        assert {kind for kind, _ in cluster.objects} == {"jobs", "services", "secrets"}
        files = set(cluster.objects["secrets", "trainers"]["data"])
        assert files == ({"secret"} if insecure else {"secret", "ca.pem", "ca-key.pem", "signer.pem"})
        uid = cluster.objects["jobs", "trainers"]["metadata"]["uid"]
        for kind in ("services", "secrets"):
            (owner,) = cluster.objects[kind, "trainers"]["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "trainers", uid)
        workers = hosts.spawn_procs({"gpus": 2}).spawn("workers", Worker)
        assert len(set(workers.pid.call().get(PATIENCE_S))) == 4
        wait_until(lambda: job.logs(1).count("asked for its pid") == 2, "its processes' output is in a pod's log")
        assert (job.engine.certs is None) is insecure
    assert not cluster.objects
    assert not cluster.pods
    assert job.state() is PlaceState.ENDED
    assert job.logs() == ""
    assert not job.engine.secret_file.exists()


def test_a_pod_that_is_lost_is_replaced(here: tuple[Cluster, Callable[..., KubernetesJob]], failures: Failures) -> None:
    cluster, new = here
    with new() as job:
        hosts = job.hosts(timeout=PATIENCE_S)
        workers = hosts.spawn_procs().spawn("workers", Worker)
        workers.pid.call().get(PATIENCE_S)
        lost = next(pod for pod in cluster.pods.values() if pod.index == 1)
        assert lost.popen is not None
        lost.popen.kill()
        lost.popen.wait()
        assert job.places()[1].state is PlaceState.FAILED
        assert job.places()[1].reason == "Error with status -9"
        with pytest.raises(SupervisionError):
            workers.slice(hosts=1).pid.call_one().get(PATIENCE_S)
        failures.wait()
        again = job.replace(timeout=PATIENCE_S)
        assert again.names == (hosts.names[0], f"{ip_of(2)}:7431")
        assert lost.name not in cluster.pods
        assert len(again.spawn_procs().spawn("others", Worker).pid.call().get(PATIENCE_S)) == 2

        job.engine.replace(1)  # that pod, which is well, is given up as well
        cluster.most_pods = 0
        job.engine.replace(1)
        assert job.places()[1].state is PlaceState.FAILED
        assert "gave up this index" in job.places()[1].reason
        failures.clear()


def test_a_pod_that_ends_before_it_is_a_host_fails_the_job_with_its_log(
    here: tuple[Cluster, Callable[..., KubernetesJob]], tmp_path: Path
) -> None:
    _, new = here
    authority = make_authority(tmp_path / "authority")
    (authority / "secret").write_text("0" * 64)
    with new(authority=authority, pods=Pods(image="a", env={"POD_IP": "nonsense"})) as job:
        with pytest.raises(JobFailedError, match=r"(?s)with status 1.*nonsense") as raised:
            job.hosts(timeout=PATIENCE_S)
        assert raised.value.rank in (0, 1)


def test_what_the_cluster_refuses_is_an_error_and_nothing_stays(
    here: tuple[Cluster, Callable[..., KubernetesJob]],
) -> None:
    cluster, new = here
    cluster.refused = {"secrets"}
    with pytest.raises(JobError, match="403 secrets is forbidden: the user has not the right"):
        new(name="poor").start()
    assert not cluster.objects
    cluster.refused = set()
    with new(name="rich", insecure=True):
        with pytest.raises(JobError, match='409 jobs "rich" already exists'):
            new(name="rich").start()
        assert len(cluster.objects) == 3  # those of the first one


def test_where_there_is_no_cluster_the_error_says_so(
    here: tuple[Cluster, Callable[..., KubernetesJob]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(JobError, match="cannot connect to a Kubernetes cluster"):
        KubernetesJob(1, PODS, kubeconfig=tmp_path / "nowhere").start()
    text = (tmp_path / "kubeconfig").read_text()
    (tmp_path / "closed").write_text(text.replace("127.0.0.1:", "127.0.0.9:"))
    with pytest.raises(JobError, match="cannot be reached"):
        KubernetesJob(1, PODS, kubeconfig=tmp_path / "closed").start()
    (tmp_path / "stranger").write_text(text.replace("token-of", "another-token-of"))
    with pytest.raises(JobError, match="401 Unauthorized"):
        KubernetesJob(1, PODS, kubeconfig=tmp_path / "stranger").start()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("pods", [PODS, ALL])
def test_manifests_are_what_the_published_schemas_ask_for(version: str, pods: Pods) -> None:
    with_tls = KubernetesJob(4, pods, name="trainers").manifests()
    assert [one["kind"] for one in with_tls] == ["Job", "Service", "Secret"]
    for manifest in with_tls + KubernetesJob(4, pods, insecure=True).manifests():
        kubernetes_validate.validate(manifest, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**manifest, "speck": {}}, version, strict=True)


def test_pods_have_what_was_asked_for_and_no_rights_beyond_that() -> None:
    job = manifests.job("trainers", 4, ALL, secret_name="s", tls=True)
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (4, "Indexed")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    expected = {"cpu": "7500m", "memory": "64Gi", "nvidia.com/gpu": "8", "rdma/hca": "1"}
    assert container["resources"]["limits"] == container["resources"]["requests"] == expected
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    assert container["securityContext"] == rights
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    assert pod["volumes"][0]["secret"] == {"secretName": "s", "defaultMode": 0o400}
    assert "--insecure" not in container["command"][2]

    plain = manifests.job("trainers", 4, PODS, secret_name="s", tls=False)["spec"]["template"]["spec"]
    assert plain["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert plain["securityContext"]["runAsNonRoot"] is True
    assert "--insecure" in plain["containers"][0]["command"][2]


def test_a_secret_that_is_there_already_is_referred_to_and_sent_nowhere(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "authority")
    job = KubernetesJob(2, PODS, authority=authority, secret_name="of-the-team")
    found = {one["kind"]: one for one in job.manifests()}
    assert set(found) == {"Job", "Service"}
    volumes = found["Job"]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["secret"]["secretName"] == "of-the-team"
    with pytest.raises(ValueError, match="give the script the same one"):
        KubernetesJob(2, PODS, secret_name="of-the-team")
    made = KubernetesJob(2, PODS)
    assert made.manifests()
    folder = made.engine.secret_file.parent
    assert folder.exists()
    del made
    assert not folder.exists()  # though the job was never started
    (authority / "ca-key.pem").unlink()
    with pytest.raises(CertificateError, match=r"ca-key\.pem"):
        KubernetesJob(2, PODS, authority=authority).manifests()


def test_names_and_amounts_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Upper", "1st", "a_b", "a-", "x" * 63):
        with pytest.raises(ValueError, match="is not a valid name in Kubernetes"):
            KubernetesJob(2, PODS, name=name)
    for options in ({"image": ""}, {"port": 0}, {"pull_policy": "Sometimes"}, {"gpus": -1}, {"idle_timeout_s": 0}):
        with pytest.raises(ValueError, match=r"image|port|policy|negative"):
            Pods(**{"image": "a", **options})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobLibraryError, match=r"pip install 'skipper-mesh\[kubernetes\]'"):
        KubernetesJob(2, PODS)


def a_pod(**status: object) -> Pod:
    metadata = {"name": "p", "uid": "u", "annotations": {INDEX: "3"}, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return Pod.of({"metadata": metadata, "status": status})


def waiting(reason: str) -> dict[str, object]:
    return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": reason, "message": "so"}}}]}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        ({}, PlaceState.PENDING, "does not listen yet"),
        ({"phase": "Pending", "conditions": [UNSCHEDULABLE]}, PlaceState.PENDING, "Unschedulable: 0/3 nodes"),
        (waiting("ImagePullBackOff"), PlaceState.PENDING, "ImagePullBackOff: so"),
        (waiting("InvalidImageName"), PlaceState.FAILED, "InvalidImageName: so"),
        ({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}, PlaceState.PENDING, "listen"),
        ({"phase": "Succeeded"}, PlaceState.ENDED, "its agent has ended"),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, PlaceState.FAILED, "Evicted: disk"),
        ({"phase": "Failed"}, PlaceState.FAILED, "the pod has failed"),
    ],
)
def test_the_status_of_a_pod_says_what_has_become_of_a_place(
    status: dict[str, object], state: PlaceState, reason: str
) -> None:
    place = place_of(a_pod(**status), 7431)
    assert (place.state, place.address) == (state, None)
    assert reason in place.reason


def test_a_pod_that_is_ready_is_reached_at_its_ip() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    assert place_of(a_pod(phase="Running", conditions=ready, podIP="10.1.2.3"), 7431).address == "tcp://10.1.2.3:7431"
    assert place_of(a_pod(phase="Running", conditions=ready, podIP="fd00::3"), 7431).address == "tcp://[fd00::3]:7431"
    assert place_of(None, 7431).state is PlaceState.PENDING


def test_a_job_that_gives_up_says_for_which_pods() -> None:
    assert [index for index in range(8) if failure_of({"failedIndexes": "1,3-5"}, index)] == [1, 3, 4, 5]
    assert failure_of({"failedIndexes": f"2-{1 << 60}"}, 1 << 59)
    failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "late"}]}
    assert failure_of(failed, 0) == "the Job has failed: DeadlineExceeded: late"
    assert failure_of({}, 0) == ""


def test_what_the_script_keeps_of_the_job_is_its_own_alone(here: tuple[Cluster, Callable[..., KubernetesJob]]) -> None:
    _, new = here
    with new(places=1) as job:
        for path in (job.engine.secret_file, job.engine.secret_file.parent):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert job.engine._api._namespace == NAMESPACE
