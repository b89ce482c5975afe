"""Processes that are forked from one which has imported their modules are like those that are executed."""

import contextlib
import ctypes
import logging
import os
import random
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from skipper import control
from skipper.control import ProcMesh, SupervisionError, this_host
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime.procs import fork_servers, guard, guards
from skipper.control.runtime.procs.fork_servers import ForkServers
from skipper.control.runtime.procs.guards import Guards
from skipper.control.runtime.procs.inheritance import Surroundings
from tests.control import preloaded
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Output, Script, alive, wait_until

MODULES = ["numpy", preloaded.__name__]
PR_GET_PDEATHSIG = 2
IMPORTS_S = 60.0
"""Bound on what waits for an import of torch, on a busy machine."""
EVERY_CPU = {"cpus": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
"""A process that is bound is executed."""

Spawn = Callable[..., ProcMesh]


@pytest.fixture(scope="module", autouse=True)
def preload(leave_nothing_behind: None) -> Iterator[None]:
    before = settings()
    control.configure(preload=MODULES)
    yield
    adopt(before)


@pytest.fixture
def afresh() -> Iterator[Callable[..., None]]:
    """Begins another job with other settings."""
    before = settings()

    def begin(**options: Any) -> None:
        control.shutdown()
        control.configure(**options)

    yield begin
    control.shutdown()
    adopt(before)


@pytest.fixture(scope="module")
def echoes(procs: ProcMesh) -> Any:
    return procs.spawn("echoes", Echo)


def ask(procs: ProcMesh, question: Callable[..., Any], *args: Any) -> Any:
    return procs.spawn("echo", Echo).run.call_one(question, *args).get(IMPORTS_S)


def origin() -> tuple[int, int]:
    """Who has imported the module, and the parent of the keeper: a fork server or a guard."""
    return preloaded.PID, psutil.Process(os.getppid()).ppid()


def server_of(procs: ProcMesh) -> psutil.Process:
    importer, starter = ask(procs, origin)
    assert importer == starter != os.getpid()
    return psutil.Process(starter)


def is_forked(procs: ProcMesh) -> bool:
    importer, starter = ask(procs, origin)
    assert starter == importer or psutil.Process(starter).name() == guard.NAME.decode()
    return bool(starter == importer)


def workers_of(server: psutil.Process) -> list[psutil.Process]:
    """What a server has forked; between it and each of them is a keeper."""
    return [worker for keeper in server.children() for worker in keeper.children()]


def grandparent() -> str:
    return psutil.Process(os.getppid()).parent().name()  # type: ignore[union-attr]


def test_processes_come_from_one_that_has_imported_their_modules(echoes: Any) -> None:
    (importer, starter), other = echoes.run.call(origin).get(PATIENCE_S)
    assert other == (importer, starter)
    assert importer == starter
    server = psutil.Process(starter)
    assert os.getpid() in [ancestor.pid for ancestor in server.parents()]
    assert server.num_threads() == 1
    assert not any("cygrpc" in mapping.path for mapping in server.memory_maps())


OF_THE_MOMENT = ("", "socket:[N]", "anon_inode:[eventfd]")
"""What descriptors lead to that come and go: nothing any more, links to callers, and what gRPC's threads wait at."""


def portrait() -> dict[str, Any]:
    """Whatever a process has from its birth."""
    import __main__

    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    signal_of_parents_death = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(signal_of_parents_death)) == 0
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {
        "main": (__main__.__file__, __main__.__name__),
        "argv": sys.argv,
        "command": [re.sub(r"^\d+$", "N", word) for word in sys.orig_argv],
        "shown": re.sub(r"\0\d+\0\d+\0", r"\0N\0N\0", Path("/proc/self/cmdline").read_text().rstrip("\0")),
        "place": os.getcwd(),
        "path": sys.path,
        "flags": repr(sys.flags),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "open": sorted(kind for kind in map(kind_of, links) if kind not in OF_THE_MOMENT),
        "status": {
            name: status[name]
            for name in status
            if name.startswith(("Sig", "Cap", "Umask", "Groups", "NoNew")) and name != "SigQ"  # of the whole user
        },
        "death signal": signal_of_parents_death.value,
        "limits": [resource.getrlimit(limit) for limit in range(16)],
        "belongs to": (os.getpgrp(), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))),
        "writes": [(out.encoding, out.errors, out.line_buffering) for out in (sys.stdout, sys.stderr)],  # type: ignore[union-attr]
        "main thread": threading.main_thread().native_id == os.getpid(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    }


def kind_of(link: str) -> str:
    """What a descriptor leads to, without the number; empty where it is closed."""
    try:
        return re.sub(r"\d+", "N", os.readlink(link))
    except OSError:
        return ""


def test_they_look_like_processes_that_were_executed(procs: ProcMesh, own_procs: Spawn) -> None:
    others = own_procs({"gpus": 2}, name="procs", proc_bind=[EVERY_CPU, EVERY_CPU]).slice(gpus=1)
    assert not is_forked(others)
    forked, executed = ask(procs.slice(gpus=1), portrait), ask(others, portrait)
    assert forked.keys() == executed.keys()
    assert set(executed["status"]["SigBlk"]) == {"0"}
    for aspect, expected in executed.items():
        assert forked[aspect] == expected, aspect


def open_in(pid: int) -> set[str]:
    """The pipes and sockets that a process has open besides the standard streams."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(f"/proc/{pid}/fd/{name}") if int(name) > 2 else "")
    return {link for link in found if link.startswith(("pipe:", "socket:"))}


def test_they_have_no_descriptors_of_the_server_or_of_each_other(procs: ProcMesh) -> None:
    server = server_of(procs.slice(gpus=0))
    one, other = (worker.pid for worker in workers_of(server))
    seen = [open_in(server.pid), open_in(one), open_in(other)]
    assert len(seen[0]) == 1  # to the script
    assert len(seen[1] | seen[2]) == len(seen[1]) + len(seen[2])
    assert not seen[0] & (seen[1] | seen[2])


def draws() -> list[Any]:
    import multiprocessing

    return [
        random.random(),
        float(np.random.random()),
        secrets.token_hex(),
        uuid.uuid4(),
        uuid.uuid1(),
        bytes(multiprocessing.current_process().authkey),
    ]


def test_no_two_draw_the_same_random_numbers(echoes: Any) -> None:
    one, other = echoes.run.call(draws).get(PATIENCE_S)
    assert not set(one) & set(other)


def surroundings() -> tuple[str, str | None, list[str]]:
    print(f"process {os.getpid()} prints")
    print("and complains", file=sys.stderr)
    return os.getcwd(), os.environ.get("SET_LATER"), sys.path


def test_what_the_script_has_changed_since_the_server_began_is_as_it_is_now(
    procs: ProcMesh,
    own_procs: Spawn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: Output,
) -> None:
    server = server_of(procs.slice(gpus=0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATER", "1")
    changed = own_procs()
    assert ask(changed, surroundings) == (str(tmp_path), "1", sys.path)
    assert server_of(changed) == server  # none of this concerns what it has imported
    changed.stop().get(PATIENCE_S)
    assert re.search(r"^\[.*\] process \d+ prints$", output.wait_for(" prints\n"), re.MULTILINE)
    output.wait_for("and complains\n", on_stderr=True)


def see(name: str) -> Any:
    return sys.modules.get(name) or __import__(name).WORD


def test_where_to_import_from_may_change(
    procs: ProcMesh, own_procs: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_a_folder.py").write_text("WORD = 'found'")
    monkeypatch.syspath_prepend(tmp_path)
    other = own_procs()
    assert ask(other, see, "module_of_a_folder") == "found"
    assert server_of(other) != server_of(procs.slice(gpus=0))  # the folder could have hidden something


def mode() -> tuple[str, str | None]:
    return preloaded.MODE, os.environ.get("PRELOADED_MODE")


def test_modules_have_seen_the_environment_of_the_process_that_they_are_in(
    procs: ProcMesh, own_procs: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(procs.slice(gpus=0), mode) == ("", None)
    stated, same = own_procs(env={"PRELOADED_MODE": "stated"}), own_procs(env={"PRELOADED_MODE": "stated"})
    assert ask(stated, mode) == ("stated", "stated")
    assert server_of(same) == server_of(stated) != server_of(procs.slice(gpus=0))
    monkeypatch.setenv("PRELOADED_MODE", "drifted")
    drifted = own_procs()
    assert ask(drifted, mode) == ("drifted", "drifted")
    assert is_forked(drifted)


def test_limits_and_masks_are_those_of_now(own_procs: Spawn) -> None:
    before = os.umask(0o027)
    try:
        procs = own_procs()
        assert ask(procs, portrait)["status"]["Umask"] == "0027"
        assert is_forked(procs)
    finally:
        os.umask(before)


def test_a_script_may_ignore_the_ends_of_its_children(own_procs: Spawn, failures: Failures) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        procs = own_procs()
        assert is_forked(procs)
        assert ask(procs, signal.getsignal, signal.SIGCHLD) == signal.SIG_IGN  # as an executed one has it
        with pytest.raises(SupervisionError, match="exited with code 5"):
            ask(procs, os._exit, 5)
        failures.wait()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_beyond_some_servers_processes_are_executed(
    procs: ProcMesh, own_procs: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_servers, "MOST_SERVERS", 2)
    assert is_forked(procs.slice(gpus=0))
    one, other = (own_procs(env={"NUMBER": number}) for number in "12")
    assert is_forked(one)
    assert not is_forked(other)
    one.stop().get(PATIENCE_S)
    assert is_forked(own_procs(env={"NUMBER": "3"}))  # in the place of a server that has nobody left


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: signal.raise_signal(signal.SIGSEGV), r"was killed by signal 11 \(SIGSEGV\)"),
    ],
)
def test_their_deaths_are_told_with_the_reason(
    own_procs: Spawn, failures: Failures, end: Callable[[], None], reason: str
) -> None:
    procs = own_procs()
    server = server_of(procs)
    with pytest.raises(SupervisionError, match=reason):
        ask(procs, end)
    failures.wait()
    wait_until(lambda: all(alive(child.pid) for child in server.children()), "the server buries its dead")


def test_a_bootstrap_that_raises_is_told(failures: Failures, output: Output) -> None:
    def fail() -> None:
        raise ValueError("no boots")

    with pytest.raises(SupervisionError, match="its bootstrap raised"):
        ask(this_host().spawn_procs(bootstrap=fail), os.getpid)
    failures.wait()
    output.wait_for("ValueError: no boots", on_stderr=True)


def test_those_of_a_server_that_dies_die_with_it_and_others_come(own_procs: Spawn, failures: Failures) -> None:
    procs = own_procs(env={"SERVER": "dies"})
    echo = procs.spawn("echo", Echo)
    server = server_of(procs)
    pid = echo.pid.call_one().get(PATIENCE_S)
    server.kill()
    assert re.search(rf"pid {pid} was killed with the fork server .*{server.pid}", failures.wait().message)
    with pytest.raises(SupervisionError, match="fork server"):
        echo.pid.call_one().get(PATIENCE_S)
    assert not alive(pid)
    successor = server_of(own_procs(env={"SERVER": "dies"}))
    assert successor != server


def test_a_server_that_dies_while_it_is_asked_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers._Server, "has_ended", lambda server: False)  # as if it died a moment later
    hurry = os.eventfd(0)
    starter = Guards(hurry)
    servers = ForkServers(starter, hurry)
    surroundings = Surroundings.now({}, tuple(sys.path))
    parents = []
    with surroundings, open(os.devnull) as pipe:
        for _ in range(2):
            forked = servers.fork(("statistics",), "name", pipe.fileno(), surroundings, PATIENCE_S)
            assert forked is not None
            forked.close()
            assert isinstance(forked.origin, fork_servers._Server)
            parents.append(forked.origin.process.pid)
            forked.origin.process.kill()
    servers.close()
    starter.close()
    os.close(hurry)
    assert len(set(parents)) == 2


def test_nobody_waits_for_a_server_that_is_frozen(
    own_procs: Spawn, failures: Failures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guards, "ANSWER_TIMEOUT_S", 0.2)
    first = own_procs(env={"SERVER": "freezes"})
    server = server_of(first)
    server.suspend()
    try:
        assert not is_forked(own_procs(env={"SERVER": "freezes"}))
        assert "does not answer: it has been stopped" in caplog.text
        assert server_of(own_procs(env={"SERVER": "freezes"})) != server  # there is another one
        with pytest.raises(SupervisionError, match="exited with code 1"):  # its keeper is not frozen
            ask(first, os._exit, 1)
    finally:
        server.resume()
    failures.wait()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "it has nothing to do")


def test_a_server_that_merely_gets_no_processor_is_waited_for(
    own_procs: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = own_procs(env={"SERVER": "starves"})
    server = server_of(first)
    monkeypatch.setattr(guards, "ANSWER_TIMEOUT_S", 1e-6)  # whatever it takes is longer
    monkeypatch.setattr(guards, "REPORT_TIMEOUT_S", 1e-6)
    monkeypatch.setattr(guards, "REPORTS_AWAITED", -1)
    assert server_of(own_procs(env={"SERVER": "starves"})) == server
    assert not caplog.records


def test_what_modules_do_to_the_environment_is_done(
    afresh: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decided.py").write_text("import os; os.environ['DECIDED'] = 'yes'; os.environ.pop('UNWANTED', 0)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNWANTED", "1")
    afresh(preload=["decided"])
    environment = ask(this_host().spawn_procs(), portrait)["environment"]
    assert environment["DECIDED"] == "yes"
    assert "UNWANTED" not in environment


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "1 threads are"),
        ("import grpc", "gRPC has been imported"),
        ("import os; os._exit(0)", "has ended"),
    ],
)
def test_processes_are_executed_where_a_module_cannot_be_preloaded(
    afresh: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: str,
    reason: str,
) -> None:
    (tmp_path / "unfit.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    afresh(preload=["unfit"])
    with caplog.at_level(logging.WARNING):
        assert ask(this_host().spawn_procs(), grandparent) == guard.NAME.decode()
    assert [reason in record.message for record in caplog.records] == [True]


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that takes longer than anybody waits."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    return "slow"


def test_an_import_that_hangs_is_given_up(afresh: Callable[..., None], slow: str) -> None:
    afresh(preload=[slow], connect_timeout_s=10)  # half of it is for this
    assert ask(this_host().spawn_procs(), grandparent) == guard.NAME.decode()


def test_a_script_may_end_while_a_server_is_importing(afresh: Callable[..., None], slow: str) -> None:
    afresh(preload=[slow])
    of_others = set(psutil.Process().children())
    this_host().spawn_procs({"gpus": 2})
    control.shutdown()  # waits 5 s for a process that is to be killed, and then raises
    assert set(psutil.Process().children()) <= of_others


def test_who_finds_its_parent_dead_from_the_start_ends() -> None:
    code = "from skipper.control.runtime.procs.guard import die_with; die_with(1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("frozen", [False, True])
def test_all_end_with_a_script_that_is_killed(script: Callable[[str], Script], frozen: bool) -> None:
    started = script("""
        import os
        from skipper.control import Actor, configure, endpoint, this_host

        class A(Actor):
            @endpoint
            def pids(self):
                return os.getpid(), os.getppid()

        configure(preload=["statistics"])
        procs = this_host().spawn_procs({"gpus": 2})
        for pid, parent in procs.spawn("a", A).pids.call().get(timeout=60):
            print(pid, parent, flush=True)
        input()
    """)
    lines = [started.line().split(), started.line().split()]
    pids = {int(pid) for line in lines for pid in line}
    (server,) = {psutil.Process(int(keeper)).ppid() for _, keeper in lines}
    assert len(pids | {server}) == 5
    assert server != started.process.pid
    if frozen:
        os.kill(server, signal.SIGSTOP)
    started.process.kill()
    started.process.wait(PATIENCE_S)
    for pid in pids | {server}:
        wait_until(lambda pid=pid: not alive(pid), f"{pid} ends")


def test_the_environment_may_name_the_modules_too(afresh: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    afresh()
    adopt(control.Settings())
    monkeypatch.setenv("SKIPPER_PRELOAD", f" {preloaded.__name__},numpy ,")
    procs = this_host().spawn_procs()
    assert is_forked(procs)
    control.shutdown()
    control.configure(preload=[])  # none, whatever the environment says
    assert not is_forked(this_host().spawn_procs())


def test_children_of_forked_processes_are_forked_too(own_procs: Spawn) -> None:
    def offspring() -> tuple[int, int, list[int]]:
        importer, starter = ask(this_host().spawn_procs(), origin)
        return importer, starter, [ancestor.pid for ancestor in psutil.Process(starter).parents()]

    procs = own_procs()
    echo = procs.spawn("echo", Echo)
    importer, starter, ancestors = echo.run.call_one(offspring).get(PATIENCE_S)
    assert importer == starter
    assert echo.pid.call_one().get(PATIENCE_S) in ancestors


def torch_state() -> tuple[int, list[float], int, int, bool]:
    import torch

    threads = len(os.listdir("/proc/self/task"))
    seed, numbers = torch.initial_seed(), torch.rand(4).tolist()
    torch.ones(1 << 20).exp_()
    return (
        seed,
        numbers,
        torch.get_num_threads(),
        len(os.listdir("/proc/self/task")) - threads,
        torch.cuda.is_initialized(),
    )


def test_torch_is_as_if_it_had_been_imported_there(afresh: Callable[..., None]) -> None:
    afresh(preload=["torch"])
    of_others = set(psutil.Process().children())
    forked = this_host().spawn_procs({"gpus": 2})
    one, other = forked.spawn("echoes", Echo).run.call(torch_state).get(IMPORTS_S)
    executed = ask(this_host().spawn_procs(proc_bind=[EVERY_CPU]), torch_state)
    assert len({one[0], other[0], executed[0]}) == 3
    assert not set(one[1]) & set(other[1])
    assert one[2:] == other[2:] == executed[2:]
    (server,) = (child for child in psutil.Process().children() if child not in of_others and child.children())
    assert server.num_threads() == 1


@pytest.mark.parametrize(
    ("names", "error"), [("torch", TypeError), ([1], TypeError), (["to rch"], ValueError), ([""], ValueError)]
)
def test_names_that_are_none_are_refused(names: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="preload"):
        control.configure(preload=names)
    assert settings().preload == tuple(MODULES)
