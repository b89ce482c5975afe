"""Jobs on a real Ray cluster of two nodes, each at a loopback address of this machine."""

import importlib.util
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skipper import control
from skipper.control import Actor, SupervisionError, attach_to_hosts, current_rank, endpoint
from skipper.control.cluster.hosts.certs import issue, make_authority
from skipper.control.cluster.jobs import PlaceState, ray_agent_process, ray_driver
from skipper.control.cluster.jobs.ray import RayJob, bundle
from skipper.control.model.errors import DeadlineError, JobError, JobFailedError, JobLibraryError
from tests.control.conftest import PATIENCE_S, REPOSITORY, Failures, Script, wait_until
from tests.jobs.ray_cluster import HEAD, Cluster, ray_cluster

UP_S = 90.0
"""Bound on the start of actors of Ray, which takes seconds where nothing is wrong."""

SMALL = ["--generators", "1", "--replicas", "1"]
"""Of the RL example: one generator beside its two trainers."""

pytestmark = pytest.mark.timeout(300)  # where the machine is busy, Ray alone takes half a minute to start


class Speaker(Actor):
    @endpoint
    def speak(self, text: str) -> int:
        print(text, current_rank().rank, flush=True)
        return os.getpid()

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as running:
        yield running


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    yield
    control.shutdown()


def of_this_process() -> list[object]:
    """What Ray would change of a process that it is used in."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    return [dict(os.environ), list(sys.path), sys.excepthook, "ray" in sys.modules, *handlers]


def drivers() -> list[psutil.Process]:
    """The processes of this one that talk to Ray."""
    known = {child: child.as_dict(["cmdline"])["cmdline"] or () for child in psutil.Process().children()}
    return [child for child, arguments in known.items() if any("ray_driver.py" in one for one in arguments)]


def ips(job: RayJob) -> set[str]:
    return {(place.address or "").removeprefix("tcp://").partition(":")[0] for place in job.places()}


def test_a_place_on_each_node_is_a_host_and_cancel_leaves_nothing_there(cluster: Cluster) -> None:
    before = of_this_process()
    with RayJob(2, address=cluster.address, env={"COLOR": "blue"}) as job:
        hosts = job.hosts(timeout=UP_S)
        assert ips(job) == {"127.0.0.2", "127.0.0.3"}
        assert job.state() is PlaceState.RUNNING
        speakers = hosts.spawn_procs({"gpus": 2}).spawn("speakers", Speaker)
        assert len(set(speakers.speak.call("this is").get(PATIENCE_S))) == 4
        assert set(speakers.variable.call("COLOR").get(PATIENCE_S)) == {"blue"}
        assert not any(str(value).startswith("ray") for value in speakers.variable.call("PYTHONBREAKPOINT").get(20))
        wait_until(lambda: "this is 3" in job.logs(1), "the output of the last process is in the log of its place")
        assert "this is 3" not in job.logs(0)
        assert len(cluster.folders_of_agents()) == 2
        assert all((folder / "certs" / "cert.pem").exists() for folder in cluster.folders_of_agents())
    assert job.state() is PlaceState.ENDED
    assert "this is 3" in job.logs(1)  # as it was when the job was cancelled
    wait_until(lambda: not cluster.agents(), "the agents and all that they have started end")
    wait_until(lambda: not cluster.folders_of_agents(), "what they knew of the job is removed")
    assert of_this_process() == before
    job.cancel()  # again does nothing
    with pytest.raises(JobError, match="this job has ended"):
        job.start()


def test_places_on_one_node_have_ports_of_their_own_and_the_certificates_that_nodes_have(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("certs")
    authority, reached = make_authority(folder / "authority"), ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    certs = issue(authority, folder / "script", reached, role="script")
    node_certs = issue(authority, folder / "nodes", reached, role="host")
    with RayJob(2, address=cluster.address, strategy="STRICT_PACK", certs=certs, node_certs=node_certs) as job:
        speakers = job.hosts(timeout=UP_S).spawn_procs().spawn("speakers", Speaker)
        assert len(ips(job)) == 1
        assert len(set(speakers.speak.call("here is").get(PATIENCE_S))) == 2
    control.shutdown()
    job = RayJob(1, address=cluster.address, certs=certs, node_certs=folder / "nowhere")
    with job, pytest.raises(JobFailedError, match=r"ca\.pem cannot be read"):
        job.hosts(timeout=UP_S)


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        ("hello_job", [], "rank 0 reads from rank 1: [1.0, 1.0, 1.0, 1.0]"),
        ("rl_weight_sync", [*SMALL, "--steps", "3", "--verify", "--png", "curves.png"], "curves: curves.png"),
    ],
)
def test_examples_run_on_the_nodes_of_a_cluster(
    cluster: Cluster, tmp_path: Path, example: str, options: list[str], said: str
) -> None:
    command = [sys.executable, "-m", f"examples.{example}", *options, "--job", "ray:2", "--data-plane"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    wait_until(lambda: not cluster.agents() and not cluster.folders_of_agents(), "nothing of it is left on the nodes")


def test_a_script_that_is_killed_leaves_no_agents(
    cluster: Cluster, script: Callable[[str], Script], tmp_path: Path
) -> None:
    started = script(f"""
        import signal, tempfile
        tempfile.tempdir = {str(tmp_path)!r}
        from skipper.control.cluster.jobs.ray import RayJob
        job = RayJob(2, address={cluster.address!r})
        print(job.hosts(timeout={UP_S}).size, flush=True)
        signal.pause()
        """)
    assert started.line() == "2"
    (driver,) = psutil.Process(started.process.pid).children()
    assert len(cluster.folders_of_agents()) == 2
    started.process.kill()
    wait_until(lambda: not cluster.agents() and not cluster.folders_of_agents(), "the agents end", timeout=UP_S)
    wait_until(lambda: not driver.is_running(), "the driver ends")


def test_without_the_driver_the_job_is_over_and_says_so(cluster: Cluster) -> None:
    job = RayJob(1, address=cluster.address)
    job.hosts(timeout=UP_S)
    (driver,) = drivers()
    driver.kill()
    with pytest.raises(JobError, match="the process that talks to Ray has ended"):
        job.places()
    with pytest.raises(JobError, match="so the job is lost"):
        job.logs(0)
    job.cancel()
    wait_until(lambda: not cluster.agents(), "the agents end", timeout=UP_S)


def test_what_the_cluster_has_no_room_for_waits_and_can_be_cancelled(cluster: Cluster) -> None:
    with RayJob(3, address=cluster.address) as job:  # each on a node of its own, of which there are two
        with pytest.raises(DeadlineError, match=r"0 is pending \(Ray has not placed it"):
            job.hosts(timeout=0.5)
        assert job.logs() == ""


def test_what_is_lost_is_replaced_on_its_node_or_on_one_that_comes(cluster: Cluster, failures: Failures) -> None:
    with RayJob(2, address=cluster.address) as job:
        hosts = job.hosts(timeout=UP_S)
        first, last = sorted(range(2), key=lambda rank: not hosts.names[rank].startswith(HEAD))
        speakers = hosts.spawn_procs().spawn("speakers", Speaker)
        speakers.speak.call("before").get(PATIENCE_S)
        wait_until(lambda: "before" in job.logs(last), "the output is known")

        _agent_on(cluster, HEAD).kill()
        wait_until(lambda: job.places()[first].state is PlaceState.FAILED, "the death of the agent is known")
        assert "its agent ended with status -9" in job.places()[first].reason
        failures.wait()  # what the agent has launched ends a moment after it
        with pytest.raises(SupervisionError):
            speakers.slice(hosts=first).speak.call_one("gone").get(PATIENCE_S)
        again = job.replace(timeout=UP_S)
        assert again.names[first].startswith(f"{HEAD}:")
        assert again.names[first] != hosts.names[first]
        assert again.names[last] == hosts.names[last]

        cluster.nodes.pop("127.0.0.3").close()
        cluster.add("127.0.0.4")
        wait_until(lambda: job.places()[last].state is PlaceState.FAILED, "the loss is known", timeout=UP_S)
        assert "before" in job.logs(last)  # though its node is gone
        third = job.replace(timeout=UP_S)
        assert third.names[last].startswith("127.0.0.4:")
        assert third.names[first] == again.names[first]
        assert len(third.spawn_procs().spawn("others", Speaker).speak.call("after").get(PATIENCE_S)) == 2


def test_of_an_agents_output_the_last_is_kept_and_its_files_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_agent_process, "MOST_LOG_NBYTES", 1000)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0" * 64)
    agent = ray_agent_process.AgentProcess("127.0.0.2", {"secret": secret.read_bytes()}, [], {"COLOR": "blue"})
    wait_until(lambda: agent.report(0)["address"] is not None, "the agent listens")
    (folder,) = tmp_path.glob("skipper-agent-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first = agent.report(0)["written"]
    speaker = attach_to_hosts(agent.report(0)["address"], secret_file=secret).spawn_procs().spawn("speaker", Speaker)
    speaker.speak.call("x" * 3000).get(PATIENCE_S)
    wait_until(lambda: agent.report(0)["written"] > first + 3000, "the output is there")
    report = agent.report(first)
    assert len(report["output"]) == 1000
    assert agent.report(report["written"] - 7)["output"] == report["output"][-7:]
    assert agent.report(report["written"])["output"] == b""
    control.shutdown()
    agent._agent.stdin.close()  # as where the actor's process ends
    wait_until(lambda: agent.report(0)["status"] == 0, "the agent ends in good order")
    wait_until(lambda: not folder.exists(), "its folder is removed")


def test_where_there_is_no_cluster_the_error_says_so_at_once() -> None:
    job = RayJob(1, address=f"{HEAD}:1")
    begin = time.monotonic()
    with pytest.raises(JobError, match=r"nothing answers at 127\.0\.0\.2:1"):
        job.start()
    assert time.monotonic() - begin < UP_S
    job.cancel()


def test_a_driver_that_does_not_answer_is_given_up() -> None:
    job = RayJob(1, address=f"{HEAD}:1", timeout=0.05)
    with pytest.raises(JobError, match=r"did not answer within 0\.05 s"):
        job.start()
    with pytest.raises(JobError, match="this job has ended"):
        job.start()
    assert not drivers()


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobLibraryError, match=r"pip install 'skipper-mesh\[ray\]'"):
        RayJob(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ANYHOW"}, "not 'ANYHOW'"),
        ({"cpus": -1}, "negative"),
        ({"cpus": 0}, "without resources"),
        ({"resources": {"GPU": 1}}, "with cpus= and gpus="),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayJob(1, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one place"):
        RayJob(0)
    with pytest.raises(TypeError):
        RayJob(1, init={"logging_level": object()})


def test_resources_have_the_names_that_ray_knows() -> None:
    assert bundle(2, 1, {"rdma": 1, "none": 0}) == {"CPU": 2, "GPU": 1, "rdma": 1}


def test_an_error_of_a_request_is_an_answer() -> None:
    assert ray_driver._answer(lambda: 1 / 0, []) == {"error": "ZeroDivisionError: division by zero"}


def _agent_on(cluster: Cluster, ip: str) -> psutil.Process:
    return next(process for process in cluster.agents() if ip in process.cmdline())
