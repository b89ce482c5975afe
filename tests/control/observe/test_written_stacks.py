"""Processes that write their stacks themselves: no look harms them, and what is said of them is true."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skipper.control.observe import stacks
from skipper.control.runtime.procs import stack_file
from tests.control.conftest import PATIENCE_S, Script, wait_until
from tests.freezing import freeze

Run = Callable[[str], Script]

BUSY = """
    import sys, threading
    from skipper.control.runtime.procs import stack_file

    def dive(depth):
        return 1 + dive(depth - 1) if depth else 0

    def generated(depth):
        if depth:
            yield depth
            yield from generated(depth - 1)

    def work(seed):
        everybody.wait()
        while True:
            for depth in range(seed, 200 + seed, 7):
                dive(depth)
                sum(generated(depth // 4))

    stack_file.offer()
    count = 3
    everybody = threading.Barrier(count + 1)
    for number in range(count):
        threading.Thread(target=work, args=(number,), daemon=True, name=f"worker {number}").start()
    everybody.wait()
    print("busy", flush=True)
    sys.stdin.read()
"""

IDLE = """
    import sys
    from skipper.control.runtime.procs import stack_file

    def wait_for_the_end():
        print("idle", flush=True)
        sys.stdin.read()

    stack_file.offer()
    wait_for_the_end()
"""

HUNG = """
    import ctypes
    from skipper.control.runtime.procs import stack_file

    def hold_the_lock():
        ctypes.PyDLL(None).sleep(600)

    stack_file.offer()
    print("hung", flush=True)
    hold_the_lock()
"""

WRITTEN = "py-spy is not installed, so it wrote this itself"


@pytest.fixture(autouse=True)
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)


def started(script: Run, text: str, says: str) -> int:
    running = script(text)
    assert running.line() == says
    return running.process.pid


@pytest.fixture
def hung(script: Run) -> int:
    """The pid of a process whose main thread holds the interpreter lock."""
    pid = started(script, HUNG, "hung")
    wait_until(lambda: "in hold_the_lock" in stacks.look(pid), "it holds the lock")
    return pid


def pipe_of(pid: int) -> int:
    """The pipe in which a process is asked, opened to write."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        if (link := os.readlink(f"/proc/{pid}/fd/{number}")).startswith(f"/memfd:{stack_file.ANSWERS}-{pid}-"):
            inode = link.split("-")[-1].split()[0]
    for number in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(path := f"/proc/{pid}/fd/{number}") == f"pipe:[{inode}]":
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    raise AssertionError("there is no pipe")


def test_a_busy_process_lives_however_often_it_is_looked_at(script: Run) -> None:
    running = script(BUSY)
    assert running.line() == "busy"
    for _ in range(300):
        text = stacks.look(running.process.pid)
        assert text.splitlines()[0].endswith(WRITTEN), text
        assert text.count("[worker ") == 3
        assert "in work" in text
    assert running.process.poll() is None


def test_a_process_of_many_busy_threads_is_not_taken_for_a_hung_one(script: Run) -> None:
    running = script(BUSY.replace("count = 3", "count = 100"))
    assert running.line() == "busy"
    assert " at a signal" not in stacks.look(running.process.pid)
    assert running.process.poll() is None


def test_several_who_ask_at_once_are_all_answered(script: Run) -> None:
    pid = started(script, BUSY, "busy")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: stacks.look(pid), range(80)))
    assert [text for text in texts if WRITTEN not in text or text.count("[worker ") != 3] == []


def test_what_a_process_wrote_for_others_stays_no_larger(script: Run) -> None:
    pid = started(script, IDLE, "idle")
    descriptor = next(
        path
        for number in os.listdir(f"/proc/{pid}/fd")
        if f"memfd:{stack_file.ANSWERS}" in os.readlink(path := f"/proc/{pid}/fd/{number}")
    )
    for _ in range(300):
        text = stacks.look(pid)
    most = len(text) + 300 * (stack_file.QUESTION_NBYTES + 1)
    assert os.stat(descriptor).st_size < most


def test_who_asks_and_goes_away_leaves_the_process_as_it_was(script: Run) -> None:
    pid = started(script, IDLE, "idle")
    for question in (b"x" * stack_file.QUESTION_NBYTES, b"half"):
        pipe = pipe_of(pid)
        os.write(pipe, question)
        os.close(pipe)
    assert "in wait_for_the_end" in stacks.look(pid)


def test_a_process_that_holds_its_interpreter_lock_gets_the_signal(hung: int) -> None:
    for _ in range(2):
        text = stacks.look(hung)
        assert f"{WRITTEN} at a signal, since its interpreter lock is held" in text
        assert text.count("in hold_the_lock") == 1


def test_several_who_look_at_a_hung_process_each_see_its_stacks_once(hung: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: stacks.look(hung), range(4)))
    assert [text.count("in hold_the_lock") for text in texts] == [1, 1, 1, 1]


def test_a_hung_process_whose_pipe_is_full_gets_the_signal(hung: int) -> None:
    pipe = pipe_of(hung)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * stack_file.QUESTION_NBYTES)
    os.close(pipe)
    assert "in hold_the_lock" in stacks.look(hung)


def test_a_process_that_goes_on_answers_again(script: Run) -> None:
    running = script(
        """
        import ctypes, os, sys
        from skipper.control.runtime.procs import stack_file

        def wait_for_the_end():
            sys.stdin.read()

        stack_file.offer()
        reader, writer = os.pipe()
        print(writer, flush=True)
        ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
        wait_for_the_end()
        """
    )
    pid, writer = running.process.pid, running.line()
    wait_until(lambda: " at a signal" in stacks.look(pid), "it holds the lock")
    Path(f"/proc/{pid}/fd/{writer}").write_text("x")
    wait_until(lambda: "in wait_for_the_end" in (text := stacks.look(pid)) and " at a signal" not in text, "it answers")


def test_a_process_that_computes_in_c_gets_the_signal_in_the_thread_that_does(script: Run) -> None:
    pid = started(
        script,
        """
        import re, sys, threading
        from skipper.control.runtime.procs import stack_file

        def compute():
            print("computes", flush=True)
            re.match("(a+)+$", "a" * 60 + "b")

        stack_file.offer()
        threading.Thread(target=compute, daemon=True).start()
        sys.stdin.read()
        """,
        "computes",
    )
    # On a machine that is short of CPU time it gets no signal.
    wait_until(lambda: "in compute" in (text := stacks.look(pid)) and " at a signal" in text, "a look", timeout=90)


def test_a_stopped_process_answers_once_it_continues(script: Run) -> None:
    pid = started(script, IDLE, "idle")
    freeze(pid)
    assert stacks.look(pid).endswith("it handles no signal while it is stopped")
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "in wait_for_the_end" in stacks.look(pid), "it answers")


def test_a_process_of_an_earlier_version_is_not_sent_the_signal(script: Run) -> None:
    running = script(
        f"""
        import faulthandler, os, sys
        file = os.memfd_create({stack_file.NAME!r})
        faulthandler.register({int(stack_file.SIGNAL)}, file=file, all_threads=True)
        print("runs", flush=True)
        sys.stdin.read()
        print(os.fstat(file).st_size)
        """
    )
    assert running.line() == "runs"
    assert "it runs an earlier version of this library" in stacks.look(running.process.pid)
    assert running.finish() == (0, "0\n", "")


def test_forked_copies_have_nothing_of_their_parent(script: Run) -> None:
    running = script(
        """
        import ctypes, os, sys
        from skipper.control.runtime.procs import stack_file

        def in_the_child():
            print("child", os.getpid(), flush=True)
            sys.stdin.read()

        def in_the_copy():
            print("copy", os.getpid(), flush=True)
            sys.stdin.read()

        def in_the_parent():
            print("parent", os.getpid(), flush=True)
            sys.stdin.read()

        stack_file.offer()
        if (child := os.fork()) == 0:
            if (grandchild := os.fork()) == 0:
                stack_file.offer()
            in_the_child()
            os._exit(0)
        if (copy := ctypes.PyDLL(None).fork()) == 0:  # as C code does
            in_the_copy()
            os._exit(0)
        in_the_parent()
        """
    )
    lines = [running.line().split() for _ in range(4)]
    said: dict[str, list[str]] = {}
    for who, pid in lines:
        said.setdefault(who, []).append(stacks.look(int(pid)))
    (parent,) = said["parent"]
    assert "in in_the_parent" in parent
    assert sorted("in in_the_child" in text for text in said["child"]) == [False, True]
    assert sorted("it has not been prepared" in text for text in said["child"]) == [False, True]
    assert [f"it is a copy of process {running.process.pid}" in text for text in said["copy"]] == [True]
    for process in (int(pid) for who, pid in lines if who != "parent"):
        os.kill(process, signal.SIGKILL)


def test_programs_that_a_process_starts_have_nothing_of_it(script: Run) -> None:
    code, out, err = script(
        """
        import subprocess
        from skipper.control.runtime.procs import stack_file
        before = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
        stack_file.offer()
        after = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
        print(before == after)
        """
    ).finish()
    assert (code, out, err) == (0, "True\n", "")


def test_files_of_a_process_that_closed_all_descriptors_stay_untouched(script: Run, tmp_path: Path) -> None:
    running = script(
        f"""
        import os, sys
        from skipper.control.runtime.procs import stack_file
        stack_file.offer()
        os.closerange(3, 100)
        files = [os.open({str(tmp_path)!r} + f"/file{{n}}", os.O_RDWR | os.O_CREAT) for n in range(20)]
        print("closed", flush=True)
        sys.stdin.read()
        if (child := os.fork()) == 0:
            os._exit(0 if all(os.fstat(file) for file in files) else 1)
        print(os.waitpid(child, 0)[1], sum(os.fstat(file).st_size for file in files))
        """
    )
    assert running.line() == "closed"
    pid = running.process.pid
    for _ in range(3):
        text = stacks.look(pid)
        assert "is not accessible" in text or "has not been prepared" in text
    assert running.finish() == (0, "0 0\n", "")


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import os; os._exit(0)"])
def test_a_process_ends_as_usual_while_it_is_looked_at(script: Run, end: str) -> None:
    running = script(textwrap.dedent(BUSY) + end)
    assert running.line() == "busy"
    process = running.process
    with ThreadPoolExecutor(1) as pool:
        looks = pool.submit(lambda: [stacks.look(process.pid) for _ in iter(process.poll, 0)])
        assert running.finish() == (0, "", "")
        looks.result(PATIENCE_S)


def test_a_process_that_is_not_there_any_more_is_said_to_be_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert stacks.look(gone.pid) == f"there is no process {gone.pid}"
