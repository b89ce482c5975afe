"""Hosts that a real Slurm places, whose nodes are daemons of this machine with loopback addresses of their own."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skipper.control import SupervisionError
from skipper.control.cluster.jobs import PlaceState, SlurmJob
from skipper.control.cluster.jobs.slurm import place_of
from skipper.control.model.errors import JobError, JobLibraryError
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until
from tests.integration.example_process import run
from tests.jobs.actors import Worker
from tests.jobs.conftest import greeted
from tests.jobs.slurm_cluster import PARTITION, URGENT, SlurmCluster

WHOLE_NODES = {"exclusive": True}


@pytest.fixture
def make(slurm: SlurmCluster, tmp_path: Path, afresh: None) -> Iterator[Callable[..., SlurmJob]]:
    """Makes jobs, which end with the test."""
    jobs: list[SlurmJob] = []

    def make(places: int = 2, **options: object) -> SlurmJob:
        options = {"folder": tmp_path / "jobs", "insecure": True, "parameters": WHOLE_NODES, **options}
        jobs.append(SlurmJob(places, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.cancel()
    wait_until(lambda: not slurm.jobs(), "Slurm has nothing left of the job")


def test_hosts_are_nodes_of_the_cluster_with_certificates_of_the_job(make: Callable[..., SlurmJob]) -> None:
    job = make(insecure=False, partition=PARTITION)
    hosts = job.hosts(timeout=PATIENCE_S)
    assert len({name.rpartition(":")[0] for name in hosts.names}) == 2
    assert greeted(hosts) == [0, 1]
    assert job.state() is PlaceState.RUNNING
    assert len({place.name.split(" on ")[1] for place in job.places()}) == 2
    assert "serving at tcp://127.0.0." in job.logs(1)
    job.cancel()
    folder = job.engine.secret_file.parent
    assert [entry.name for entry in folder.iterdir()] == ["logs"]

    again = make(1, insecure=False)  # of the same script, whose hosts all have the same authority
    assert greeted(again.hosts(timeout=PATIENCE_S)) == [0]


def test_a_node_is_reached_by_the_device_that_was_named_after_its_setup(make: Callable[..., SlurmJob]) -> None:
    hosts = make(1, interface="lo", setup=["export SKIPPER_TEST_SETUP=done"]).hosts(timeout=PATIENCE_S)
    assert hosts.names[0].startswith("127.0.0.1:")
    procs = hosts.spawn_procs()
    assert procs.spawn("workers", Worker).variable.call_one("SKIPPER_TEST_SETUP").get(PATIENCE_S) == "done"
    procs.stop().get(PATIENCE_S)


def test_two_places_of_one_node_are_told_apart(make: Callable[..., SlurmJob], failures: Failures) -> None:
    job = make(parameters={"nodelist": "node1"})
    hosts = job.hosts(timeout=PATIENCE_S)
    assert [name.rpartition(":")[0] for name in hosts.names] == ["127.0.0.3", "127.0.0.3"]
    workers = hosts.spawn_procs().spawn("workers", Worker)
    assert list(workers.rank.call().get(PATIENCE_S)) == [0, 1]
    first, second = workers.host_pid.call().get(PATIENCE_S)
    assert first != second
    os.kill(first, signal.SIGKILL)
    assert failures.wait().rank == {"hosts": 0}
    with pytest.raises(SupervisionError, match="'hosts': 0"):
        workers.slice(hosts=0).rank.call_one().get(PATIENCE_S)
    assert workers.slice(hosts=1).rank.call_one().get(PATIENCE_S) == 1
    assert greeted(job.replace(timeout=PATIENCE_S)) == [0, 1]


def test_a_place_that_somebody_cancels_is_replaced(
    make: Callable[..., SlurmJob], slurm: SlurmCluster, failures: Failures
) -> None:
    job = make()
    hosts = job.hosts(timeout=PATIENCE_S)
    workers = hosts.spawn_procs().spawn("workers", Worker)
    workers.rank.call().get(PATIENCE_S)
    slurm.run("scancel", job.places()[1].name.split()[0])
    assert failures.wait().rank == {"hosts": 1}
    with pytest.raises(SupervisionError, match="'hosts': 1"):
        workers.slice(hosts=1).rank.call_one().get(PATIENCE_S)
    wait_until(lambda: job.places()[1].state is PlaceState.ENDED, "Slurm says so")
    assert job.places()[0].state is PlaceState.RUNNING

    again = job.replace(timeout=PATIENCE_S)
    assert again.names[0] == hosts.names[0]
    assert greeted(again) == [0, 1]
    assert job.state() is PlaceState.RUNNING


def test_a_place_that_is_preempted_says_so_and_is_replaced(
    make: Callable[..., SlurmJob], slurm: SlurmCluster, failures: Failures
) -> None:
    job = make(1)
    job.hosts(timeout=PATIENCE_S).spawn_procs().spawn("workers", Worker).rank.call().get(PATIENCE_S)
    everything = ("--exclusive", f"--nodes={len(slurm.nodes)}", "--output=/dev/null")
    slurm.run("sbatch", f"--partition={URGENT}", *everything, "--wrap", "sleep 600")
    try:
        assert failures.wait().rank == {"hosts": 0}
        wait_until(lambda: job.state() is PlaceState.FAILED, "Slurm says so")
        assert "preempted" in job.places()[0].reason
    finally:
        slurm.run("scancel", f"--partition={URGENT}")
    assert greeted(job.replace(timeout=PATIENCE_S)) == [0]


def test_the_place_of_a_node_that_fails_goes_to_another_node(
    make: Callable[..., SlurmJob], slurm: SlurmCluster, failures: Failures
) -> None:
    job = make()
    hosts = job.hosts(timeout=PATIENCE_S)
    hosts.spawn_procs().spawn("workers", Worker).rank.call().get(PATIENCE_S)
    node = job.places()[0].name.split(" on ")[1]
    slurm.kill(node)
    try:
        assert failures.wait().rank == {"hosts": 0}
        again = job.replace(timeout=PATIENCE_S)
        assert greeted(again) == [0, 1]
        assert node not in job.places()[0].name
    finally:
        slurm.start_node(node)
    job.cancel()
    wait_until(lambda: slurm.states() == {"idle"}, "the node is back", timeout=120)


def test_a_place_in_the_queue_says_what_it_waits_for(make: Callable[..., SlurmJob]) -> None:
    job = make(4)
    with pytest.raises(TimeoutError, match=r"3 is pending \(PENDING: \w+\)"):
        job.hosts(timeout=5.0)
    assert job.state() is PlaceState.PENDING


def test_what_slurm_refuses_is_an_error_in_its_words(make: Callable[..., SlurmJob]) -> None:
    job = make(partition="nowhere")
    with pytest.raises(JobError, match="invalid partition"):
        job.start()
    assert not job.engine.secret_file.exists()
    with pytest.raises(JobError, match="this job has ended"):
        job.start()
    with pytest.raises(ValueError, match="Unavailable parameter"):
        make(parameters={"colour": "red"}).start()
    with pytest.raises(ValueError, match="positive"):
        make(time_min=0)


def test_a_task_that_cannot_serve_fails_the_job(make: Callable[..., SlurmJob]) -> None:
    job = make(1, interface="ib7")
    with pytest.raises(JobError, match="no network device 'ib7'"):
        job.hosts(timeout=PATIENCE_S)
    wait_until(lambda: job.state() is PlaceState.FAILED, "Slurm says so")


def test_without_its_controller_the_job_fails_and_says_so(
    make: Callable[..., SlurmJob], slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipper.control.cluster.jobs.slurm.PATIENCE_S", 0.0)
    monkeypatch.setattr("skipper.control.cluster.jobs.slurm.LOOK_S", 0.0)
    impatient = tmp_path / "slurm.conf"
    impatient.write_text(slurm.config.read_text().replace("MessageTimeout=5", "MessageTimeout=1"))
    job = make(1)
    job.hosts(timeout=PATIENCE_S)
    slurm.stop_controller()
    try:
        with monkeypatch.context() as patch:
            patch.setenv("SLURM_CONF", str(impatient))  # of its commands, which would try for longer
            with pytest.raises(JobError, match="Unable to contact slurm controller"):
                job.places()
            with pytest.raises(JobError, match=r"rejected the job.*Unable to contact slurm controller"):
                make(1).start()
    finally:
        slurm.start_controller()
    wait_until(lambda: bool(slurm.jobs()), "the controller is back")


RUNS = """
    import os, signal
    os.environ["SLURM_CONF"] = {config!r}
    from skipper.control.cluster.jobs import SlurmJob

    job = SlurmJob({places}, folder={folder!r}, insecure=True, idle_timeout_s=2.0, parameters={{"exclusive": True}})
    job.start()
    if {attach}:
        job.hosts(timeout=20)
    print("is there", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("attach", [False, True], ids=["while it pends", "while it runs"])
def test_nothing_stays_of_a_script_that_is_killed(
    slurm: SlurmCluster, script: Callable[[str], Script], tmp_path: Path, attach: bool
) -> None:
    places = 2 if attach else 4  # one more than there are nodes
    killed = script(RUNS.format(config=str(slurm.config), places=places, folder=str(tmp_path), attach=attach))
    assert killed.line() == "is there"
    assert slurm.jobs()
    killed.process.kill()
    wait_until(lambda: not slurm.jobs(), "the agents have ended", timeout=60)
    agents = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())]
    assert agents == []


def test_the_secret_is_on_no_command_line_and_in_no_environment(make: Callable[..., SlurmJob]) -> None:
    job = make(1, insecure=False)
    job.hosts(timeout=PATIENCE_S)
    secret = job.engine.secret_file.read_text().strip()
    for process in psutil.process_iter(["cmdline", "environ"]):
        assert secret not in " ".join(process.info["cmdline"] or ())
        assert secret not in " ".join((process.info["environ"] or {}).values())
    written = [path for path in job.engine.secret_file.parent.rglob("*") if path.is_file()]
    assert [path.name for path in written if secret.encode() in path.read_bytes()] == ["secret"]
    assert {path.stat().st_mode & 0o077 for path in written if path.name.endswith("key.pem")} == {0}


def test_the_hello_example_runs_on_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    example = run(
        "-m", "examples.hello_job", "--job", f"slurm:2,cpus_per_task=2,folder={tmp_path}", "--data-plane", timeout=60.0
    )
    assert example.process.returncode == 0, example.stderr
    assert example.stdout.splitlines()[-1] == "rank 0 reads from rank 1: [1.0, 1.0, 1.0, 1.0]"
    wait_until(lambda: not slurm.jobs(), "Slurm has nothing left of the job")


def test_the_rl_example_runs_on_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = f"slurm:2,cpus_per_task=2,folder={tmp_path},insecure=True"
    options = (
        "--generators",
        "1",
        "--replicas",
        "1",
        "--steps",
        "3",
        "--verify",
        "--json",
        "-",
        "--png",
        str(tmp_path / "curves.png"),
    )
    example = run("-m", "examples.rl_weight_sync", "--job", job, *options, timeout=100.0)
    assert example.process.returncode == 0, example.stderr
    report = json.loads(example.stdout)
    assert report["mismatched_tensors"] == 0
    assert report["compared_tensors"] > 0
    assert report["errors"] == []
    wait_until(lambda: not slurm.jobs(), "Slurm has nothing left of the job")


def test_without_submitit_the_extra_is_named(make: Callable[..., SlurmJob], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(JobLibraryError, match=r"skipper-mesh\[slurm\]"):
        make().start()


def test_without_slurm_there_is_no_job(make: Callable[..., SlurmJob], monkeypatch: pytest.MonkeyPatch) -> None:
    job = make()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(JobError, match="belongs to no Slurm cluster"):
            job.start()


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ("PENDING", PlaceState.PENDING),
        ("CONFIGURING", PlaceState.PENDING),
        ("RUNNING", PlaceState.RUNNING),
        ("CANCELLED", PlaceState.ENDED),
        ("COMPLETED", PlaceState.ENDED),
        ("TIMEOUT", PlaceState.FAILED),
        ("PREEMPTED", PlaceState.FAILED),
        ("NODE_FAIL", PlaceState.FAILED),
        ("OUT_OF_MEMORY", PlaceState.FAILED),
    ],
)
def test_states_of_slurm_are_states_of_places(state: str, place: PlaceState) -> None:
    found = place_of(state, "node1", "Priority")
    assert (found.state, found.name) == (place, "node1")
    assert (place is PlaceState.RUNNING) is (not found.reason)
