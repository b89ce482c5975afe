"""Scripts as people write them, and every way in which they end."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.control.conftest import PATIENCE_S, Script, alive, wait_until

PREAMBLE = """
import asyncio, os, signal, sys, time
from skipper import control
from skipper.control import Actor, endpoint, this_host, context

class Worker(Actor):
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def grow(self):
        self.procs = this_host().spawn_procs({"x": 2})
        self.mesh = self.procs.spawn("grandchildren", Worker)
        return list(self.mesh.pid.call().get())
    @endpoint
    def hang(self):
        time.sleep(1000)
    @endpoint
    def fail(self):
        raise ValueError("the first error")
    @endpoint
    def say(self, text):
        print(text)
    @endpoint
    def module(self):
        return __name__, type(self).__name__

"""
TREE = (
    PREAMBLE
    + """
control.configure(exit_grace_s=0.2)  # one of them hangs
workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
pids = list(workers.pid.call().get())
pids += workers.slice(gpus=0).grow.call_one().get()
workers.slice(gpus=1).hang.broadcast()
print(*pids, flush=True)
"""
)


def pids_of(script: Script) -> list[int]:
    pids = [int(word) for word in script.line().split()]
    assert len(pids) == 4
    assert all(alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(5)", 5),
        ("raise RuntimeError('script')", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(10)", -signal.SIGINT),
        ("control.shutdown(); control.shutdown()", 0),
        ("os.execv('/bin/true', ['true'])", 0),
    ],
)
def test_no_process_survives_the_script_however_it_ends(
    script: Callable[[str], Script], ending: str, code: int
) -> None:
    running = script(TREE + "time.sleep(0.05)\n" + ending)
    pids = pids_of(running)
    assert running.finish()[0] == code
    wait_until(lambda: not any(map(alive, pids)), "all descendants end", timeout=2.0)


def test_no_process_survives_when_a_middle_one_is_killed(script: Callable[[str], Script]) -> None:
    running = script(TREE + "time.sleep(30)")
    pids = pids_of(running)
    os.kill(pids[0], signal.SIGKILL)
    code, _, err = running.finish()
    assert code == 1
    assert "SIGKILL" in err
    wait_until(lambda: not any(map(alive, pids)), "all descendants end", timeout=2.0)


def test_an_unhandled_failure_ends_the_script_with_the_first_error_as_headline(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
class Manager(Actor):
    @endpoint
    def grow(self):
        self.workers = context().proc.spawn("workers", Worker)
        self.workers.fail.broadcast()

manager = this_host().spawn_procs().spawn("manager", Manager)
manager.grow.call_one().get()
time.sleep(30)
"""
    )
    code, _, err = running.finish()
    assert code == 1
    lines = err.splitlines()
    assert lines[0] == "control: unhandled failure, exiting with code 1"
    assert "ValueError: the first error" in lines[1]
    assert any("did not handle a failure of 'workers'" in line for line in lines)


def test_a_signal_that_breaks_no_call_of_the_main_thread_is_repeated(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
class Once:
    calls, send = 0, signal.pthread_kill
    def __call__(self, thread, number):
        Once.calls += 1
        if Once.calls > 1:  # the first comes just before the call of the system begins, and breaks nothing
            Once.send(thread, number)

signal.pthread_kill = Once()
context().actor_instance.abort("the script has had enough")
time.sleep(1000)
"""
    )
    code, _, err = running.finish()
    assert code == 1
    assert "the script has had enough" in err
    assert "has not ended within" not in err


def test_the_fault_hook_can_be_replaced(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
import threading
told = threading.Event()
def hook(failure):
    print("told of", failure.mesh_name, flush=True)
    told.set()
control.unhandled_fault_hook = hook
worker = this_host().spawn_procs().spawn("worker", Worker)
worker.fail.broadcast()
assert told.wait(10)
print("went on")
"""
    )
    assert running.finish() == (0, "told of worker\nwent on\n", "")


def test_a_hook_that_raises_does_not_hide_the_failure(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
def hook(failure):
    raise OSError("hook")
control.unhandled_fault_hook = hook
this_host().spawn_procs().spawn("worker", Worker).fail.broadcast()
time.sleep(30)
"""
    )
    code, _, err = running.finish()
    assert code == 1
    assert "OSError: hook" in err


def test_an_uncaught_actor_error_ends_the_script_as_any_exception(script: Callable[[str], Script]) -> None:
    code, _, err = script(PREAMBLE + 'this_host().spawn_procs().spawn("w", Worker).fail.call_one().get()').finish()
    assert code == 1
    assert "skipper.control.model.errors.ActorError" in err
    assert "ValueError: the first error" in err


def test_classes_of_main_and_of_modules_beside_the_script_travel(
    script: Callable[[str], Script], tmp_path: os.PathLike[str]
) -> None:
    with open(os.path.join(tmp_path, "beside.py"), "w", encoding="utf-8") as file:
        file.write(
            "from skipper.control import Actor, endpoint\n"
            "class Beside(Actor):\n"
            "    @endpoint\n"
            "    async def where(self): return __name__\n"
        )
    running = script(
        PREAMBLE
        + """
from dataclasses import dataclass
from beside import Beside

@dataclass
class Message:
    text: str

class Reader(Actor):
    @endpoint
    def read(self, message):
        assert isinstance(message, Message)
        return Message(message.text + "!")

async def main():
    procs = this_host().spawn_procs()
    print(await procs.spawn("beside", Beside).where.call_one())
    answer = await procs.spawn("reader", Reader).read.call_one(Message("hi"))
    print(isinstance(answer, Message), answer.text)
    print(await procs.spawn("w", Worker).module.call_one())

asyncio.run(main())
"""
    )
    assert running.finish() == (0, "beside\nTrue hi!\n('__main__', 'Worker')\n", "")


def test_what_actors_print_passes_through_line_by_line(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
worker = this_host().spawn_procs().spawn("worker", Worker)
worker.say.call_one("hello from there").get()
sys.stdin.close()
time.sleep(30)
"""
    )
    assert running.line() == "[worker] hello from there"
    running.process.kill()


def test_ctrl_c_ends_the_script_by_its_signal_whatever_runs_at_its_end(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
import atexit
atexit.register(lambda: exec("1"))
this_host().spawn_procs().initialized.get(20)
print("up", flush=True)
time.sleep(60)
"""
    )
    assert running.line() == "up"
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.finish()
    assert (code, "KeyboardInterrupt" in err) == (-signal.SIGINT, True)


def test_actors_clean_up_when_the_script_ends_even_beside_one_that_hangs(
    script: Callable[[str], Script], tmp_path: os.PathLike[str]
) -> None:
    running = script(
        PREAMBLE
        + f"""
class Cleaner(Actor):
    @endpoint
    def ready(self):
        pass
    def __cleanup__(self, error):
        open({os.path.join(tmp_path, "cleaned")!r} + str(context().actor_instance.rank.rank), "w").close()

control.configure(exit_grace_s=3.0)  # all of it passes, since one of them hangs
procs = this_host().spawn_procs({{"gpus": 2}})
cleaners = procs.spawn("cleaners", Cleaner)
cleaners.ready.call().get()
procs.spawn("hanging", Worker).hang.broadcast()
"""
    )
    code, _, err = running.finish()
    assert code == 0
    assert "actor hanging{'gpus': 0} in procs{'gpus': 0} did not end within" in err
    assert "hang has been running for" in err
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("cleaned")) == ["cleaned0", "cleaned1"]


def test_processes_wait_for_actors_that_were_stopped_before_and_clean_up(
    script: Callable[[str], Script], tmp_path: os.PathLike[str]
) -> None:
    running = script(
        PREAMBLE
        + f"""
class Slow(Actor):
    @endpoint
    def ready(self):
        pass
    def __cleanup__(self, error):
        time.sleep(0.3)
        open({os.path.join(tmp_path, "cleaned")!r}, "w").close()

procs = this_host().spawn_procs()
slow = procs.spawn("slow", Slow)
slow.ready.call_one().get()
slow.stop()
procs.stop().get()
print(os.path.exists({os.path.join(tmp_path, "cleaned")!r}))
"""
    )
    assert running.finish() == (0, "True\n", "")


def test_the_script_can_start_again_after_a_shutdown(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
for _ in range(3):
    print(len(this_host().spawn_procs({"gpus": 2}).spawn("w", Worker).pid.call().get()))
    control.shutdown()
"""
    )
    assert running.finish() == (0, "2\n2\n2\n", "")


def test_context_names_the_script_and_a_strange_thread_of_an_actor_has_none(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
import threading
class Threader(Actor):
    @endpoint
    def strange(self):
        result = []
        def ask():
            try:
                result.append(context())
            except control.NoActorContextError:
                result.append("none")
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return result[0]

here = context()
print(here.actor_instance.name, dict(here.message_rank), control.current_rank().rank, dict(control.current_size()))
print(this_host().spawn_procs().spawn("t", Threader).strange.call_one().get())
"""
    )
    assert running.finish() == (0, "root {} 0 {}\nnone\n", "")


def test_a_forked_copy_of_the_script_is_no_part_of_the_job(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
worker = this_host().spawn_procs().spawn("worker", Worker)
pid = worker.pid.call_one().get()
if os.fork() == 0:
    sys.exit(0)  # runs the exit handlers, which must leave the parent's children alone
os.wait()
print(worker.pid.call_one().get() == pid)
"""
    )
    code, out, _ = running.finish()
    assert (code, out) == (0, "True\n")


def test_importing_control_starts_nothing_and_does_not_import_the_heavy_parts(script: Callable[[str], Script]) -> None:
    running = script(
        """
import sys, threading
from skipper import control
print(threading.active_count(), sorted({"torch", "grpc", "google.protobuf", "uvloop", "numpy"} & set(sys.modules)))
"""
    )
    assert running.finish() == (0, "1 []\n", "")
    assert PATIENCE_S > 0
