"""What a job's status says of busy, failed, frozen, dead and restarted parts, to the script and to the command."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skipper.control import ActorError, ActorMesh, ProcMesh, ServedJob, this_host
from skipper.control.observe import (
    JobStatus,
    ProcessStatus,
    Table,
    Transfers,
    job_status,
    metrics_text,
    report_figures,
    report_table,
)
from skipper.control.observe.status_command import duration, nbytes
from skipper.control.runtime import status_providers
from skipper.control.runtime.history import KEPT_ERRORS
from tests.control.actors import AsyncEcho, Echo, Manager
from tests.control.conftest import PATIENCE_S, REPOSITORY, Failures, Script, wait_until
from tests.control.observe.conftest import Skipper
from tests.prometheus import parse


def named(status: JobStatus, name: str) -> ProcessStatus:
    (process,) = [process for process in status.processes if process.name == name]
    return process


def test_an_idle_job_is_shown_as_it_is(workers: ProcMesh, echoes: ActorMesh[Echo]) -> None:
    pids = echoes.pid.call().get(PATIENCE_S)
    status = job_status(timeout=PATIENCE_S)
    assert status.is_healthy
    script, *others = status.processes
    assert (script.name, script.pid, script.parent_id, script.state) == ("script", os.getpid(), "", "up")
    mine = [process for process in others if process.name.startswith("workers")]
    assert [process.id for process in mine] == [member.id for member in workers.root_members]
    assert [process.pid for process in mine] == list(pids)
    assert {process.parent_id for process in mine} == {script.id}
    (actor,) = mine[1].report.actors if mine[1].report else ()
    assert (actor.label, actor.class_name, actor.state, actor.queued) == ("echoes{'gpus': 1}", "Echo", "idle", 0)
    assert status.hosts == (os.uname().nodename,)


def test_a_busy_actor_shows_what_it_does_and_how_many_wait(blocked: ActorMesh[Echo]) -> None:
    waiting = [blocked.echo.call_one(1) for _ in range(3)]

    def shown() -> bool:
        (actor,) = [actor for actor in job_status().actors if actor.label == "echoes{'gpus': 1}"]
        doing = [doing.endpoint for doing in actor.doing]
        return (actor.state, doing, actor.queued) == ("busy", ["run"], 3) and actor.doing[0].for_s > 0

    wait_until(shown, "the actor is shown as busy, with three messages behind")
    assert not any(future.done() for future in waiting)


def test_concurrent_endpoints_are_shown_side_by_side(workers: ProcMesh) -> None:
    mesh = workers.slice(gpus=0).spawn("async", AsyncEcho)
    mesh.initialized.get(PATIENCE_S)
    mesh.wait_for.broadcast(60)
    wait_until(
        lambda: [d.endpoint for a in job_status().actors if a.name == "async" for d in a.doing] == ["wait_for"],
        "an async endpoint is shown",
    )


def test_the_last_error_is_known_and_counted(echoes: ActorMesh[Echo]) -> None:
    failing = echoes.slice(gpus=0)
    for text in ("the first", "the second"):
        with pytest.raises(ActorError):
            failing.fail.call_one(ValueError(text)).get(PATIENCE_S)
    status = job_status()
    (actor,) = [actor for actor in status.actors if actor.label == "echoes{'gpus': 0}"]
    assert actor.errors == 2
    assert status.last_error is not None
    assert (status.last_error.who, status.last_error.message) == ("echoes{'gpus': 0}.fail", "ValueError: the second")


def test_a_frozen_process_is_silent_and_the_others_answer(frozen: int) -> None:
    status = job_status(timeout=2.0)
    silent = named(status, "workers{'gpus': 0}")
    assert (silent.state, silent.pid, silent.report) == ("silent", frozen, None)
    assert "no answer within" in silent.problem
    assert not status.is_healthy
    assert named(status, "workers{'gpus': 1}").state == "up"


def test_a_death_and_the_restart_after_it_are_counted(failures: Failures) -> None:
    def spawn() -> int:
        mesh = this_host().spawn_procs(name="mortal")
        return int(mesh.spawn("mortal", Echo).pid.call_one().get(PATIENCE_S))

    before = job_status().deaths_total
    os.kill(spawn(), signal.SIGKILL)
    failures.wait()
    second = spawn()
    status = job_status()
    assert (named(status, "mortal").pid, named(status, "mortal").restarts) == (second, 1)
    assert status.deaths_total == before + 1
    (death,) = [death for death in status.processes[0].report.deaths if death.who == "mortal"]  # type: ignore[union-attr]
    assert "SIGKILL" in death.message


def test_a_process_that_is_told_to_end_is_no_death(own_procs: Callable[..., ProcMesh]) -> None:
    before = job_status().deaths_total
    own_procs(name="orderly").stop().get(PATIENCE_S)
    assert job_status().deaths_total == before


def test_processes_of_an_actor_stand_below_its_own(workers: ProcMesh) -> None:
    manager = workers.slice(gpus=0).spawn("manager", Manager)
    manager.grow.call_one(2).get(PATIENCE_S).pid.call().get(PATIENCE_S)
    status = job_status()
    grown = [process for process in status.processes if process.name.startswith("grown")]
    assert [process.state for process in grown] == ["up", "up"]
    assert {process.parent_id for process in grown} == {workers.root_members[0].id}
    manager.stop().get(PATIENCE_S)


def test_other_parts_report_figures_and_one_that_fails_hides_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_providers._figures, "_by_part", {})
    report_figures("good", lambda: {"eggs": 3})
    report_figures("bad", lambda: {"eggs": 1 / 0})
    report = job_status().processes[0].report
    assert report is not None
    assert report.figures["good"] == {"eggs": 3}
    assert "bad" not in report.figures
    assert "cannot read the figures of bad" in caplog.text


def read_own_memory(nbytes: int) -> None:
    """Runs in an actor: one transfer of the data plane that ends well, and one that does not."""
    import numpy

    from skipper.dataplane import BufferDroppedError, RDMABuffer

    buffer = RDMABuffer(numpy.zeros(nbytes, "u1"))
    buffer.read_into(numpy.zeros(nbytes, "u1")).get()
    buffer.drop()
    with contextlib.suppress(BufferDroppedError):
        buffer.read_into(numpy.zeros(nbytes, "u1")).get()


def test_transfers_of_the_data_plane_are_counted_where_they_are_begun(
    own_procs: Callable[..., ProcMesh], here: Skipper
) -> None:
    mover = own_procs(name="mover").spawn("mover", Echo)
    mover.pid.call_one().get(PATIENCE_S)
    before = named(job_status(), "mover").report
    assert before is not None
    mover.run.call_one(read_own_memory, 3 << 20).get(PATIENCE_S)
    after = named(job_status(), "mover").report
    assert after is not None
    assert after.transfers == Transfers(in_flight=0, done=1, failed=1, read_nbytes=3 << 20, written_nbytes=0)
    assert after.heard_messages > before.heard_messages
    shown = here("status").stdout
    assert re.search(r"^ *mover .* 3\.0 MiB$", shown, re.MULTILINE)
    assert "mover: 0 transfers in flight, 1 done, 1 failed" in shown
    figures = parse(metrics_text(job_status()))
    of_mover = {labels: value for labels, value in figures["skipper_transfer_bytes_total"].items() if "mover" in labels}
    assert sorted(of_mover.values()) == [0, 3 << 20]


def test_the_latest_errors_are_kept_and_no_more(workers: ProcMesh) -> None:
    failing = workers.slice(gpus=1).spawn("failing", Echo)
    for number in range(KEPT_ERRORS + 1):
        with pytest.raises(ActorError):
            failing.fail.call_one(ValueError(number)).get(PATIENCE_S)
    report = named(job_status(), "workers{'gpus': 1}").report
    assert report is not None
    assert [error.message for error in report.errors] == [f"ValueError: {n}" for n in range(1, KEPT_ERRORS + 1)]
    assert report.last_error == report.errors[-1]
    failing.stop().get(PATIENCE_S)


def test_tables_are_told_to_those_who_ask_for_them_and_cut(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_providers._tables, "_by_part", {})
    report_table("long", lambda: Table("Long", ("number",), [(n,) for n in range(status_providers.MAX_ROWS + 2)], 3))
    report_table("empty", lambda: None)
    report_table("bad", lambda: Table("Bad", (), [1 / 0]))  # type: ignore[list-item]
    (long,) = status_providers.tables_now()
    assert (len(long.rows), long.left_out) == (status_providers.MAX_ROWS, 5)
    assert "cannot read the table of bad" in caplog.text
    report = job_status().processes[0].report
    assert report is not None
    assert report.tables == ()
    report_table("long", None)
    assert status_providers.tables_now() == []


def test_the_command_prints_the_job_of_another_process(
    skipper: Skipper, served: ServedJob, blocked: ActorMesh[Echo]
) -> None:
    done = skipper("status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert shown["healthy"] is True
    names = [process["name"] for process in shown["processes"]]
    assert {"script", "workers{'gpus': 0}", "workers{'gpus': 1}"} <= set(names)
    assert not any("visitor" in name for name in names)
    assert served.members() == ()
    text = skipper("status").stdout
    assert "echoes{'gpus': 1} Echo" in text
    assert "busy run" in text


def test_the_command_says_who_is_silent_by_its_exit_code(here: Skipper, frozen: int) -> None:
    done = here("status", "--timeout", "0.8")
    assert done.returncode == 1
    assert "workers{'gpus': 0}: no answer within" in done.stdout


def test_the_command_looks_as_often_as_it_is_told(here: Skipper, echoes: ActorMesh[Echo]) -> None:
    done = here("status", "--watch", "0.05", "-n", "3", "--json")
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 3
    assert looks[0]["taken_s"] < looks[1]["taken_s"] < looks[2]["taken_s"]


def test_the_command_says_that_there_is_no_such_job(here: Skipper) -> None:
    done = here("status", job="nobody")
    assert (done.returncode, done.stdout) == (3, "")
    assert "there is no job to join" in done.stderr
    assert here("status", "--timeout", "-1").returncode == 2


def test_watching_ends_with_the_job(script: Callable[[str], Script], runtime_folder: Path) -> None:
    running = script(
        f"""
        import os, time
        os.environ["XDG_RUNTIME_DIR"] = {str(runtime_folder)!r}
        from skipper import control
        control.serve_job("brief")
        print("served", flush=True)
        time.sleep(60)
        """
    )
    assert running.line() == "served"
    command = [sys.executable, "-m", "skipper.cli.main", "status", "--job", "brief", "--watch", "0.1", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["healthy"] is True
        running.process.kill()
        _, err = watching.communicate(timeout=PATIENCE_S)
    assert (watching.returncode, err) == (0, "the job has ended\n")


def test_the_environment_has_a_job_served_from_its_beginning(
    script: Callable[[str], Script], runtime_folder: Path
) -> None:
    running = script(
        f"""
        import os, time
        os.environ.update(XDG_RUNTIME_DIR={str(runtime_folder)!r}, SKIPPER_SERVE="unchanged")
        from skipper.control import this_host
        this_host().spawn_procs(name="below").initialized.get(20)
        print("up", flush=True)
        time.sleep(60)
        """
    )
    assert running.line() == "up"
    with open(runtime_folder / "skipper" / "unchanged.json", encoding="utf-8") as file:
        assert json.load(file)["name"] == "unchanged"
    taken = script(
        f"""
        import os
        os.environ.update(XDG_RUNTIME_DIR={str(runtime_folder)!r}, SKIPPER_SERVE="unchanged")
        from skipper import control
        control.this_proc()
        """
    )
    code, _, err = taken.finish()
    assert (code, "SKIPPER_SERVE=unchanged asks to serve this job, which is not possible" in err) == (0, True)


def test_a_script_that_a_served_script_starts_is_not_told_that_the_name_is_taken(
    script: Callable[[str], Script], runtime_folder: Path
) -> None:
    running = script(
        f"""
        import os, subprocess, sys
        os.environ.update(XDG_RUNTIME_DIR={str(runtime_folder)!r}, SKIPPER_SERVE="inherited")
        from skipper.control import Actor, endpoint, this_host

        TOOL = "from skipper import control; control.this_proc(); print('ran', flush=True)"

        class Runner(Actor):
            @endpoint
            def run_tool(self):
                done = subprocess.run([sys.executable, "-c", TOOL], capture_output=True, text=True, timeout=30)
                return done.returncode, done.stdout, done.stderr

        print(this_host().spawn_procs(name="below").spawn("runner", Runner).run_tool.call_one().get(30))
        done = subprocess.run([sys.executable, "-c", TOOL], capture_output=True, text=True, timeout=30)
        print((done.returncode, done.stdout, done.stderr))
        """
    )
    code, out, err = running.finish()
    assert (code, out.splitlines(), err) == (0, ["(0, 'ran\\n', '')"] * 2, "")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.44, "0.4 s"), (12.9, "12 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (-1, "0.0 s")]
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (48 << 20, "48 MiB")])
def test_sizes_are_short(size: int, shown: str) -> None:
    assert nbytes(size) == shown
