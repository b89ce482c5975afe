"""The interface of jobs, with agents that are processes of this machine."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from skipper import control
from skipper.control import ActorMesh, DeadlineError, HostUnreachableError, SupervisionError
from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.jobs import Job, LocalJob, Place, PlaceState, local
from skipper.control.cluster.jobs.folder import JobFolder
from skipper.control.cluster.jobs.local import LocalEngine
from skipper.control.model.errors import JobError, JobFailedError, NotElasticError
from tests.control.conftest import PATIENCE_S, Failures, Script, alive, wait_until
from tests.jobs.actors import Worker
from tests.jobs.conftest import greeted


@pytest.fixture
def job() -> Iterator[LocalJob]:
    """Two hosts."""
    with LocalJob(2) as job:
        yield job


def agents(job: Job) -> list[int]:
    """The processes of the agents."""
    return [int(place.name.removeprefix("pid ")) for place in job.places()]


def workers_on(job: Job) -> ActorMesh[Worker]:
    workers = job.hosts(timeout=PATIENCE_S).spawn_procs().spawn("workers", Worker)
    workers.rank.call().get(PATIENCE_S)
    return workers


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a program of the test run in place of the agent; ``FILE`` is where that would announce itself."""

    def be(program: str) -> None:
        path = tmp_path / "agent.py"
        path.write_text(f"import sys, time\nFILE = sys.argv[sys.argv.index('--announce') + 1]\n{program}\n")
        monkeypatch.setattr(local, "AGENT", path)

    return be


class Hesitant(LocalEngine):
    """An engine whose second place is in the queue until it is let go on; and not an elastic one."""

    is_elastic = False
    holds = True

    def poll(self) -> Sequence[Place]:
        first, second = super().poll()
        return [first, Place(PlaceState.PENDING, reason="in the queue") if self.holds else second]


def test_hosts_come_in_rank_order_and_stay_the_same(job: LocalJob) -> None:
    hosts = job.hosts(timeout=PATIENCE_S)
    assert hosts.extent == {"hosts": 2}
    assert [f"tcp://{name}" for name in hosts.names] == [place.address for place in job.places()]
    assert greeted(hosts) == [0, 1]
    assert job.start().hosts() is hosts
    assert job.state() is PlaceState.RUNNING


def test_what_is_asked_too_early_or_too_late_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one place, not 0"):
        LocalJob(0)
    job = LocalJob(1)
    for ask in (job.places, job.state, job.logs):
        with pytest.raises(JobError, match="has not been started"):
            ask()
    job.cancel()
    job.cancel()
    with pytest.raises(JobError, match="this job has ended"):
        job.hosts()


def test_the_secret_is_for_the_user_alone_and_ends_with_the_job(tmp_path: Path) -> None:
    with LocalJob(1, folder=tmp_path) as job:
        job.hosts(timeout=PATIENCE_S)
        path = job.engine.secret_file
        assert [stat.S_IMODE(entry.stat().st_mode) for entry in (path, path.parent)] == [0o600, 0o700]
        secret = path.read_text().strip()
        process = psutil.Process(agents(job)[0])
        for one in [process, *process.children(recursive=True)]:
            assert secret not in " ".join(one.cmdline())
            assert secret not in " ".join(one.environ().values())
        assert secret not in job.logs()
    assert [entry.name for entry in path.parent.iterdir()] == ["logs"]


def test_a_place_that_ends_before_its_agent_listens_fails_the_job_at_once(agent: Callable[[str], None]) -> None:
    agent("print('no such device'); sys.exit(3)")
    with LocalJob(2) as job, pytest.raises(JobFailedError, match=r"exited with code 3\n.*\nno such device") as error:
        job.hosts(timeout=PATIENCE_S)
    assert error.value.rank in (0, 1)
    assert "no such device" in error.value.log


@pytest.mark.parametrize("garbage", ["", "{", "[]", "{'address': 'tcp://127.0.0.2:0', 'pid': 1}", "\\0" * 9000])
def test_garbage_in_an_announcement_fails_the_place(agent: Callable[[str], None], garbage: str) -> None:
    agent(f'open(FILE, "w").write("{garbage}"); time.sleep(600)')
    with LocalJob(1) as job, pytest.raises(JobFailedError, match="not what an agent announces"):
        job.hosts(timeout=PATIENCE_S)


def test_an_announcement_of_another_program_does_not_get_the_job(
    agent: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipper.control.cluster.jobs.job.ATTACH_S", 1.0)
    agent("""
import json, os, socket
with socket.create_server(("127.0.0.2", 0)) as server:
    json.dump({"address": "tcp://127.0.0.2:%d" % server.getsockname()[1], "pid": os.getpid()}, open(FILE, "w"))
    while True:
        server.accept()[0].close()""")
    with LocalJob(1) as job, pytest.raises(HostUnreachableError, match=r"127\.0\.0\.2"):
        job.hosts(timeout=2.0)


def test_a_time_out_says_what_the_places_wait_for() -> None:
    engine = Hesitant(JobFolder())
    with Job(engine, 2) as job:
        wait_for_the_first(job)
        assert job.state() is PlaceState.PENDING
        with pytest.raises(DeadlineError, match=r"in time: 1 is pending \(in the queue\)"):
            job.hosts(timeout=0.1)
        engine.holds = False
        assert greeted(job.hosts(timeout=PATIENCE_S)) == [0, 1]


def wait_for_the_first(job: Job) -> None:
    """It is attached as soon as it is there, so that its agent does not take itself for forgotten."""

    def is_attached() -> bool:
        with pytest.raises(DeadlineError):
            job.hosts(timeout=0.5)
        return "attached this host" in job.logs(0)

    wait_until(is_attached, "the first place is attached")


def test_a_lost_host_is_replaced_by_another(job: LocalJob, failures: Failures) -> None:
    workers = workers_on(job)
    before, first = job.hosts(), agents(job)
    os.kill(first[1], signal.SIGKILL)
    assert failures.wait().rank == {"hosts": 1}
    with pytest.raises(SupervisionError, match="'hosts': 1"):
        workers.slice(hosts=1).rank.call_one().get(PATIENCE_S)
    wait_until(lambda: job.state() is PlaceState.FAILED, "the engine knows, which hears of it from somebody else")
    assert "SIGKILL" in job.places()[1].reason

    hosts = job.replace(timeout=PATIENCE_S)
    assert hosts.names[0] == before.names[0]
    assert hosts.names[1] != before.names[1]
    assert agents(job)[0] == first[0]
    assert job.hosts() is hosts
    assert greeted(hosts) == [0, 1]
    assert before.reattach().names == hosts.names
    assert workers.slice(hosts=0).rank.call_one().get(PATIENCE_S) == 0


def test_a_host_whose_agent_lives_is_attached_again(job: LocalJob, failures: Failures) -> None:
    workers = workers_on(job)
    first = agents(job)
    os.kill(workers.slice(hosts=1).host_pid.call_one().get(PATIENCE_S), signal.SIGKILL)
    failures.wait()
    assert greeted(job.replace(timeout=PATIENCE_S)) == [0, 1]
    assert agents(job) == first


def test_nothing_is_replaced_where_nothing_is_lost(job: LocalJob) -> None:
    hosts = job.hosts(timeout=PATIENCE_S)
    assert job.replace(timeout=PATIENCE_S) is hosts


def test_a_host_that_is_lost_while_others_come_up_is_told(job: LocalJob) -> None:
    engine = Hesitant(JobFolder())
    with Job(engine, 2) as job:
        wait_for_the_first(job)
        os.kill(agents_of(engine)[0], signal.SIGKILL)
        engine.holds = False
        with pytest.raises(JobFailedError, match=r"place 0 .*SIGKILL"):
            job.hosts(timeout=PATIENCE_S)


def agents_of(engine: LocalEngine) -> list[int]:
    return [int(place.name.removeprefix("pid ")) for place in engine.poll() if place.name]


def test_an_engine_that_is_not_elastic_says_so(failures: Failures) -> None:
    engine = Hesitant(JobFolder())
    engine.holds = False
    with Job(engine, 2) as job:
        workers_on(job)
        os.kill(agents_of(engine)[1], signal.SIGKILL)
        failures.wait()
        wait_until(lambda: job.state() is PlaceState.FAILED, "the engine says so")
        with pytest.raises(NotElasticError, match=r"place 1 .*SIGKILL"):
            job.replace(timeout=PATIENCE_S)


def test_logs_hold_what_agents_and_actors_write(job: LocalJob) -> None:
    workers_on(job).slice(hosts=1).say.call_one("a word from there").get(PATIENCE_S)
    wait_until(lambda: "a word from there" in job.logs(1), "the word is in the log")
    assert all(line.startswith(("[0] ", "[1] ")) for line in job.logs().splitlines())
    assert "serving at tcp://127.0.0.2:" in job.logs(0)
    assert "serving at tcp://127.0.0.3:" in job.logs(1)
    with pytest.raises(IndexError, match="2 places, and none of rank 2"):
        job.logs(2)


STARTS = """
    from skipper.control.cluster.jobs import LocalJob
    from tests.jobs.actors import Worker

    job = LocalJob(1{folder})
    workers = job.hosts(timeout=20).spawn_procs().spawn("workers", Worker)
    print(job.places()[0].name.split()[1])
    print(*workers.host_pid.call().get(timeout=20), *workers.pid.call().get(timeout=20))
    print(job.engine.secret_file.parent, flush=True)
"""


def started(script: Script) -> tuple[list[int], Path]:
    """The processes of its job, and the folder."""
    agent, others = script.line(), script.line()
    return [int(agent), *map(int, others.split())], Path(script.line())


def test_a_script_that_just_ends_leaves_nothing_of_its_job(script: Callable[[str], Script]) -> None:
    ends = script(STARTS.format(folder=""))
    processes, folder = started(ends)
    assert ends.finish() == (0, "", "")
    wait_until(lambda: not any(map(alive, processes)), "all that the kernel ends with the agent has ended")
    assert not folder.exists()


def test_a_script_that_ends_by_a_failure_leaves_nothing_of_its_job(script: Callable[[str], Script]) -> None:
    fails = script(STARTS.format(folder="") + "    workers.die.broadcast()\n    import signal\n    signal.pause()\n")
    processes, folder = started(fails)
    code, _, err = fails.finish()
    assert (code, "unhandled failure" in err) == (1, True)
    wait_until(lambda: not any(map(alive, processes)), "all that the kernel ends with the agent has ended")
    assert not folder.exists()


def test_a_job_ends_with_a_shutdown() -> None:
    with LocalJob(1) as job:
        agent = agents(job)[0]
        control.shutdown()
        assert not alive(agent)
        with pytest.raises(JobError, match="this job has ended"):
            job.hosts()


def test_a_script_that_is_killed_leaves_no_process(script: Callable[[str], Script], tmp_path: Path) -> None:
    killed = script(STARTS.format(folder=f", folder={str(tmp_path)!r}") + "    import signal\n    signal.pause()\n")
    processes, _ = started(killed)
    killed.process.kill()
    wait_until(lambda: not any(map(alive, processes)), "the agent ends with its script, and all that it has started")


def test_an_announcement_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    assert protocol.announced(path) is None
    for port in range(1, 200):
        protocol.announce(path, f"tcp://127.0.0.1:{port}")
        assert protocol.announced(path) == f"tcp://127.0.0.1:{port}"
        assert json.loads(path.read_bytes())["pid"] == os.getpid()
    assert [entry.name for entry in tmp_path.iterdir()] == ["agent"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_agent_without_a_job_ends_after_its_bound(job: LocalJob, tmp_path: Path) -> None:
    path = tmp_path / "agent"
    command = [sys.executable, str(local.AGENT), "serve", "--address", "tcp://127.0.0.4:0", "--announce", str(path)]
    command += ["--secret-file", str(job.engine.secret_file), "--idle-timeout", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert "no job has attached this host for 0.5 s" in done.stderr


def test_a_replacement_that_fails_can_be_tried_again(
    job: LocalJob, failures: Failures, agent: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = workers_on(job)
    pids = agents(job)
    os.kill(workers.slice(hosts=0).host_pid.call_one().get(PATIENCE_S), signal.SIGKILL)  # is attached again
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: len(failures) == 2, "both hosts are lost")
    good = local.AGENT
    agent("sys.exit('no room')")
    with pytest.raises(JobFailedError, match="no room"):
        job.replace(timeout=PATIENCE_S)
    agent("time.sleep(600)")
    with pytest.raises(DeadlineError, match="1 is pending"):
        job.replace(timeout=1.0)
    monkeypatch.setattr(local, "AGENT", good)
    os.kill(agents(job)[1], signal.SIGKILL)
    wait_until(lambda: job.state() is PlaceState.FAILED, "the engine says so")
    assert greeted(job.replace(timeout=PATIENCE_S)) == [0, 1]
    assert agents(job)[0] == pids[0]
