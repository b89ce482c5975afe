"""Processes that were not spawned here join a running job: what they may do, and how their ends are noticed."""

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper import control
from skipper.control import (
    ActorMesh,
    Channel,
    FailureKind,
    JobNotFoundError,
    LinkError,
    ProcMesh,
    ServedJob,
    SupervisionError,
    get_or_spawn_controller,
    serve_job,
)
from skipper.control.runtime import current_runtime, join_file
from skipper.control.wire.process_ref import ProcessRef
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until
from tests.freezing import freeze

Guests = Callable[[str], Script]

PREAMBLE = """
import os
import time

from skipper import control
from skipper.control import *
from tests.control.actors import Echo

"""


@pytest.fixture(autouse=True, scope="module")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run")
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def served(runtime_folder: Path) -> Iterator[ServedJob]:
    with serve_job("tests") as served:
        yield served


@pytest.fixture(autouse=True)
def everybody_leaves(served: ServedJob) -> Iterator[None]:
    yield
    wait_until(lambda: served.members() == (), "every process that has joined has left")


@pytest.fixture
def stranger(script: Guests, runtime_folder: Path, everybody_leaves: None) -> Guests:
    """Runs a script that this process has nothing to do with."""

    def run(text: str) -> Script:
        where = f"import os; os.environ['XDG_RUNTIME_DIR'] = {str(runtime_folder)!r}\n"
        return script(where + PREAMBLE + textwrap.dedent(text))

    return run


@pytest.fixture
def guest(stranger: Guests, served: ServedJob) -> Guests:
    """Runs a script that has joined the job of this process."""
    return lambda text: stranger(f"control.join({str(served.path)!r}, name='guest')\n" + textwrap.dedent(text))


def member(served: ServedJob) -> ProcMesh:
    wait_until(lambda: len(served.members()) == 1, "a process has joined")
    return served.members()[0]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ask_pid(echo: ActorMesh[Echo]) -> str:
    try:
        return str(echo.pid.call_one().get(PATIENCE_S))
    except SupervisionError as error:
        return str(error)


def wait_there(echo: ActorMesh[Echo]) -> str:
    try:
        return str(echo.sleep.call_one(60).get(PATIENCE_S))
    except SupervisionError as error:
        return str(error)


def test_a_joined_process_calls_the_actors_of_the_job(guest: Guests) -> None:
    board = get_or_spawn_controller("board", Echo).get(PATIENCE_S)
    assert board.pid.call_one().get(PATIENCE_S) == os.getpid()
    script = guest(
        """
        board = get_or_spawn_controller("board", Echo).get(20)
        print(board.pid.call_one().get(20), context().actor_instance.name)
        print(board.echo.call_one(bytes(1 << 20)).get(20) == bytes(1 << 20))
        """
    )
    assert script.finish() == (0, f"{os.getpid()} joined\nTrue\n", "")


def test_the_owner_of_an_actor_on_a_joined_process_learns_of_its_death(
    guest: Guests, served: ServedJob, failures: Failures
) -> None:
    script = guest("time.sleep(60)")
    echo = member(served).spawn("echo", Echo)
    assert echo.pid.call_one().get(PATIENCE_S) == script.process.pid
    port, receiver = Channel.open()
    port.link(echo)
    waiting = echo.sleep.call_one(60)
    script.process.kill()
    with pytest.raises(SupervisionError, match="process guest is gone"):
        waiting.get(PATIENCE_S)
    with pytest.raises(LinkError):
        receiver.recv().get(PATIENCE_S)
    assert (failures.wait().mesh_name, failures[0].kind) == ("echo", FailureKind.PROCESS)


def test_a_third_process_is_told_at_once_that_a_joined_one_had_died(
    guest: Guests, served: ServedJob, procs: ProcMesh, failures: Failures
) -> None:
    script = guest("time.sleep(60)")
    on_guest = member(served).spawn("echo", Echo)
    assert ask_pid(on_guest) == str(script.process.pid)
    third = procs.slice(gpus=0).spawn("third", Echo)
    script.process.kill()
    failures.wait()
    # Well within the 60 s that a process gets which may still be on its way.
    assert "gone" in third.run.call_one(ask_pid, on_guest).get(PATIENCE_S)


def test_a_third_process_is_told_of_the_death_of_a_joined_one_that_it_waits_for(
    guest: Guests, served: ServedJob, procs: ProcMesh, failures: Failures
) -> None:
    script = guest("time.sleep(60)")
    on_guest = member(served).spawn("echo", Echo)
    third = procs.slice(gpus=0).spawn("third", Echo)
    assert third.run.call_one(ask_pid, on_guest).get(PATIENCE_S) == str(script.process.pid)
    waiting = third.run.call_one(wait_there, on_guest)
    script.process.kill()
    assert "gone" in waiting.get(PATIENCE_S)
    failures.wait()


def test_what_a_joined_process_has_spawned_ends_with_it(guest: Guests) -> None:
    script = guest(
        """
        own = this_host().spawn_procs(name="own").spawn("own", Echo)
        print(own.pid.call_one().get(20), flush=True)
        time.sleep(60)
        """
    )
    pid = int(script.line())
    script.process.kill()
    wait_until(lambda: not is_running(pid), "its child has ended")


def test_what_a_joined_process_has_spawned_is_part_of_the_job(guest: Guests) -> None:
    script = guest(
        """
        def ask(mesh):
            return mesh.pid.call_one().get(20)

        board = get_or_spawn_controller("board", Echo).get(20)
        own = this_host().spawn_procs(name="own").spawn("own", Echo)
        print(own.run.call_one(ask, board).get(20), board.run.call_one(ask, own).get(20) == ask(own))
        """
    )
    assert script.finish() == (0, f"{os.getpid()} True\n", "")


def test_leaving_is_no_failure_and_stops_what_the_process_had_spawned(guest: Guests) -> None:
    script = guest(
        """
        own = this_host().spawn_procs(name="own").spawn("own", Echo)
        pid = own.pid.call_one().get(20)
        control.shutdown()
        print(os.path.exists(f"/proc/{pid}"))
        """
    )
    assert script.finish() == (0, "False\n", "")


def test_a_joined_process_whose_own_mesh_fails_unhandled_ends_like_a_script(guest: Guests) -> None:
    script = guest(
        """
        this_host().spawn_procs(name="own").spawn("own", Echo).die.broadcast()
        time.sleep(60)
        """
    )
    code, _, err = script.finish()
    assert code == 1
    assert "unhandled failure" in err


def test_the_death_of_the_root_ends_the_calls_of_a_joined_process_and_not_the_process(stranger: Guests) -> None:
    root = stranger("print(serve_job('doomed').path, flush=True); time.sleep(60)")
    path = root.line()
    script = stranger(
        f"""
        control.join({path!r})
        waiting = get_or_spawn_controller("board", Echo).get(20).sleep.call_one(60)
        print("waits", flush=True)
        for call in (lambda: waiting.get(20), lambda: get_or_spawn_controller("board", Echo).get(20)):
            try:
                call()
            except SupervisionError as error:
                print("script is gone" in str(error))
        control.shutdown()
        try:
            control.join("doomed")
        except JobNotFoundError as error:
            print(error)
        print(this_proc().spawn("echo", Echo).echo.call_one("a job of its own").get(20))
        """
    )
    assert script.line() == "waits"
    root.process.kill()
    assert script.finish() == (0, "True\nTrue\nthe job 'doomed' has ended\na job of its own\n", "")
    assert Path(path).exists()
    serve_job("sweeper").close()
    assert not Path(path).exists()


def test_a_job_takes_its_file_along_when_it_ends(stranger: Guests) -> None:
    script = stranger(
        """
        first = serve_job("passing").path
        control.shutdown()
        print(first.exists(), serve_job("passing").path == first, first.exists())
        """
    )
    assert script.finish()[:2] == (0, "False True True\n")
    with pytest.raises(JobNotFoundError):
        control.api.join.find("passing")


def test_a_wrong_secret_is_refused_and_no_secret_is_shown(stranger: Guests, served: ServedJob) -> None:
    environment = served.environment(inline=True)
    secret = current_runtime.current().secret.hex()
    assert secret in environment["SKIPPER_JOB"]
    for given, expected in (("ab" * 32, "AuthenticationError the job 'tests' has another secret"), (secret, "joined")):
        content = environment["SKIPPER_JOB"].replace(secret, given)
        script = stranger(
            f"""
            os.environ["SKIPPER_JOB"] = {content!r}
            try:
                control.join()
                print("joined")
            except AuthenticationError as error:
                print(type(error).__name__, error)
            control.shutdown()
            control.configure(heartbeat_s=5)
            print(this_proc().size)
            """
        )
        code, out, err = script.finish()
        assert (code, out.splitlines()) == (0, [expected, "1"])
        assert given not in out + err


def test_the_environment_or_the_only_job_says_what_to_join(stranger: Guests, served: ServedJob) -> None:
    script = stranger(
        f"""
        control.join(name="first")
        control.shutdown()
        os.environ.update({served.environment()!r})
        control.join()
        print(get_or_spawn_controller("board", Echo).get(20).pid.call_one().get(20))
        """
    )
    assert script.finish() == (0, f"{os.getpid()}\n", "")


def test_a_process_is_in_one_job_at_a_time(stranger: Guests, served: ServedJob, procs: ProcMesh) -> None:
    spawned = procs.slice(gpus=0).spawn("spawned", Echo)
    assert spawned.run.call_one(try_to_serve).get(PATIENCE_S) == "AlreadyInJobError"
    assert spawned.run.call_one(control.join, served.path).get(PATIENCE_S) is False  # it is in that job
    assert control.join(served.path) is False
    script = stranger(
        f"""
        print(control.join({str(served.path)!r}), control.join({str(served.path)!r}))
        control.shutdown()
        this_proc()
        try:
            control.join({str(served.path)!r})
        except AlreadyInJobError as error:
            print(error)
        """
    )
    assert script.finish() == (0, "True False\nthis process already belongs to a job, as 'script'\n", "")


def try_to_serve() -> str:
    try:
        control.serve_job()
    except control.JoinError as error:
        return type(error).__name__
    return "went well"


def test_a_joined_process_that_stands_still_counts_as_dead_and_stays_out(stranger: Guests) -> None:
    root = stranger(
        """
        control.configure(heartbeat_s=0.4)
        control.unhandled_fault_hook = lambda failure: print(failure.kind.value, flush=True)
        served = serve_job("impatient")
        while not served.members():
            time.sleep(0.005)
        echo = served.members()[0].spawn("echo", Echo)
        print(echo.pid.call_one().get(20), flush=True)
        time.sleep(60)
        """
    )
    script = stranger(
        """
        while True:
            try:
                control.join("impatient")
                break
            except JobNotFoundError:
                time.sleep(0.005)
        try:
            get_or_spawn_controller("board", Echo).get(20).sleep.call_one(60).get(20)
        except SupervisionError as error:
            print(error)
        """
    )
    pid = int(root.line())
    assert pid == script.process.pid
    freeze(pid)
    assert root.line() == "unreachable"
    os.kill(pid, signal.SIGCONT)
    code, out, _ = script.finish()
    assert code == 0
    assert "is gone" in out


def test_a_script_whose_queue_of_connections_is_full_is_there(served: ServedJob) -> None:
    root = ProcessRef("test-busy", "unix-abstract:skipper-test-busy", "busy")
    connection = dataclasses.replace(join_file.read(served.path), root=root)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as held:
        listener.bind("\0skipper-test-busy")
        listener.listen(0)
        answer = 0
        while not answer:
            other = held.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            answer = other.connect_ex("\0skipper-test-busy")
        assert answer == errno.EAGAIN
        connection.check_reachable()
