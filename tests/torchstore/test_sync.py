"""`torchstore.sync`: the same store without an event loop."""

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch

from skipper import torchstore
from skipper.control import Actor, endpoint, this_host
from skipper.torchstore import sync
from skipper.torchstore.support.coroutines import is_public
from tests.integration.notebooks import execute

COROUTINES = [name for name in torchstore.__all__ if is_public(getattr(torchstore, name))]
PATIENCE_S = 100


@pytest.fixture(scope="module", autouse=True)
def _store() -> Iterator[None]:
    sync.initialize()
    yield
    sync.shutdown()


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    sync.delete_batch(sync.keys())


class Waiting(Actor):
    """Has sync endpoints."""

    @endpoint
    def put_and_get(self, key: str) -> torch.Tensor:
        sync.put(key, torch.arange(3))
        got: torch.Tensor = sync.get(key)
        return got


class Awaiting(Actor):
    """Has async endpoints."""

    @endpoint
    async def get(self, key: str) -> str:
        try:
            sync.get(key)
        except torchstore.BlockingCallError as error:
            return str(error)
        return "it waited"


def run(script: Path) -> tuple[int, str, str]:
    """The exit code of a script, and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return done.returncode, done.stdout, done.stderr


def test_there_is_each_name_of_the_package_and_the_functions_that_await_do_not() -> None:
    assert sorted(sync.__all__) == sorted(torchstore.__all__)
    public = {
        name for name, value in vars(sync).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(sync.__all__) <= public
    for name in torchstore.__all__:
        function = getattr(sync, name)
        if name in COROUTINES:
            assert not inspect.iscoroutinefunction(function)
            assert inspect.signature(function) == inspect.signature(getattr(torchstore, name))
            assert inspect.getdoc(function) == inspect.getdoc(getattr(torchstore, name))
        else:
            assert function is getattr(torchstore, name)
    assert COROUTINES


def test_a_script_needs_no_event_loop() -> None:
    weights = {"w": torch.randn(100, 100), "step": 3}
    version = sync.put_state_dict(weights, "policy")
    mine = {"w": torch.zeros(100, 100), "step": 0}
    got = sync.get_state_dict("policy", mine, version=version)
    assert got["step"] == 3
    assert torch.equal(mine["w"], weights["w"])
    assert sync.keys("policy") == ["policy/step", "policy/w"]
    assert sync.versions("policy") == (version,)


def test_errors_are_those_of_the_store() -> None:
    with pytest.raises(torchstore.KeyNotFoundError, match="nothing"):
        sync.get("nothing")
    with pytest.raises(TypeError, match="a key is a string"):
        sync.get(b"key")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        sync.put("key")  # type: ignore[call-arg]
    with pytest.raises(torchstore.StoreTimeoutError):
        sync.get_state_dict("never", version=("newer_than", 0), timeout=0.1)


def test_many_threads_use_it_at_once() -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(5):
                sync.put(f"{number}.{step}", torch.full((100,), number))
                assert set(sync.get(f"{number}.{step}").tolist()) == {number}
        except BaseException as error:  # noqa: BLE001  (told to the test)
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed
    assert len(sync.keys()) == 40


def test_a_loop_that_runs_in_this_thread_is_no_hindrance() -> None:
    async def cell() -> torch.Tensor:
        sync.put("a", torch.ones(3))
        got: torch.Tensor = sync.get("a")
        return got

    assert asyncio.run(cell()).tolist() == [1, 1, 1]


def test_actors_with_sync_endpoints_use_it_and_async_ones_are_told_to_await() -> None:
    procs = this_host().spawn_procs()
    try:
        assert procs.spawn("waiting", Waiting).put_and_get.call_one("a").get(PATIENCE_S).tolist() == [0, 1, 2]
        told = procs.spawn("awaiting", Awaiting).get.call_one("a").get(PATIENCE_S)
        assert "await torchstore.get(...)" in told
    finally:
        procs.stop().get(PATIENCE_S)


def test_a_call_from_the_store_s_own_thread_is_refused_before_it_waits_for_itself() -> None:
    sync.put_state_dict({"w": torch.ones(3)}, "policy")

    def names(name: str) -> str:
        sync.keys()
        return name

    with pytest.raises(torchstore.BlockingCallError, match=r"await torchstore.keys\(...\)"):
        sync.get_state_dict("policy", {"w": torch.zeros(3)}, names=names)


def test_a_script_ends_without_a_word_and_without_shutting_down(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nimport skipper.torchstore.sync as ts\n"
        "ts.initialize()\nts.put('a', torch.ones(2))\nprint(ts.get('a').tolist())\n"
    )
    assert run(script) == (0, "[1.0, 1.0]\n", "")


def test_an_interrupted_wait_is_over_and_the_next_call_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading\nimport skipper.torchstore.sync as ts\n"
        "ts.initialize()\n"
        "timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "try:\n"
        "    timer.start()\n"
        "    ts.get_state_dict('never', version=('newer_than', 0), timeout=90)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "ts.put('a', 1)\nprint(ts.get('a'))\nts.shutdown()\n"
    )
    assert run(script) == (0, "interrupted\n1\n", "")


def test_a_forked_child_is_told_so_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nimport torch\n"
        "import skipper.torchstore.sync as ts\nfrom skipper.control import ForkedProcessError\n"
        "ts.initialize()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try:\n        ts.get('a')\n"
        "    except ForkedProcessError:\n        os._exit(7)\n"
        "    os._exit(1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert run(script)[0] == 7


def test_cells_of_a_notebook_use_it(tmp_path: Path) -> None:
    cells = [
        "import torch\nimport skipper.torchstore.sync as ts\nts.initialize()",
        "ts.put('a', torch.ones(2))\nprint(ts.get('a').tolist(), ts.keys())",
        "ts.shutdown()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    path = tmp_path / "book.ipynb"
    nbformat.write(book, path)
    outputs = execute(path).cells[1].outputs
    assert [output.text for output in outputs] == ["[1.0, 1.0] ['a']\n"]
