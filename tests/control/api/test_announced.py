"""Jobs that nobody has served: their user's tools find them, and nobody else, nor `join`."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skipper import control
from skipper.control import JobNotFoundError, UnsafeFileError, serve_job
from skipper.control.api import announced
from skipper.control.api.announced import script_name
from skipper.control.api.join import find_for_tools
from skipper.control.runtime import join_file
from tests.control.conftest import PATIENCE_S, REPOSITORY, Script, wait_until

Scripts = Callable[[], Script]


@pytest.fixture
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("SKIPPER_JOB", raising=False)
    return folder


@pytest.fixture
def job(script: Callable[[str], Script], runtime_folder: Path) -> Scripts:
    """Starts a script whose job nobody serves."""

    def start() -> Script:
        running = script(
            f"""
            import os, sys
            os.environ["XDG_RUNTIME_DIR"] = {str(runtime_folder)!r}
            from skipper import control
            control.this_proc()
            print("up", flush=True)
            sys.stdin.read()
            """
        )
        assert running.line() == "up"
        return running

    return start


def skipper(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "skipper", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}/src", "XDG_RUNTIME_DIR": str(folder)},
    )


def test_tools_find_the_only_job_and_by_the_name_of_its_script(job: Scripts, runtime_folder: Path) -> None:
    pid = job().process.pid
    for words in ([], ["--job", "script0"], ["--job", f"script0-{pid}"], ["--job", str(pid)]):
        done = skipper("status", *words, folder=runtime_folder)
        assert done.returncode == 0, done.stderr
        assert f" {pid} " in done.stdout


def test_of_several_jobs_the_names_are_told(job: Scripts, runtime_folder: Path) -> None:
    pids = [job().process.pid, job().process.pid]
    done = skipper("status", folder=runtime_folder)
    assert done.returncode == 3
    assert f"these run: script0-{pids[0]}, script1-{pids[1]}" in done.stderr
    assert find_for_tools("script1").name == f"script1-{pids[1]}"


def test_one_that_is_served_comes_first_and_is_not_told_twice(job: Scripts, runtime_folder: Path) -> None:
    other = job().process.pid
    control.this_proc()
    with serve_job("mine"):
        assert find_for_tools(None).name == "mine"
        with serve_job("again"), pytest.raises(JobNotFoundError, match=f"these run: again, mine, script0-{other};"):
            find_for_tools(None)


def test_nobody_joins_a_job_that_is_only_announced(job: Scripts, runtime_folder: Path) -> None:
    job()
    control.shutdown()
    with pytest.raises(JobNotFoundError, match="there is none"):
        control.join()


def test_the_file_is_for_this_user_alone_and_goes_with_the_job(job: Scripts, runtime_folder: Path) -> None:
    running = job()
    (path,) = (runtime_folder / "skipper").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert running.finish()[0] == 0
    assert not path.exists()


def test_the_file_of_a_job_that_was_killed_goes_with_the_next_look(job: Scripts, runtime_folder: Path) -> None:
    running = job()
    running.process.kill()
    running.process.wait(PATIENCE_S)
    with pytest.raises(JobNotFoundError, match="lists no running job"):
        find_for_tools(None)
    assert list((runtime_folder / "skipper").iterdir()) == []


def test_files_of_killed_jobs_do_not_pile_up_where_nobody_looks(
    job: Scripts, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = job()
    folder = runtime_folder / "skipper"
    (path,) = folder.iterdir()
    content = path.read_text()
    for number in range(announced.MANY):
        left = folder / f"old-{number}.job"
        left.write_text(content)
        left.chmod(0o600)
    running.process.kill()
    running.process.wait(PATIENCE_S)
    pid = job().process.pid
    wait_until(lambda: [found.name for found in folder.iterdir()] == [f"script1-{pid}.job"], "the old ones are gone")


def test_links_are_not_followed(job: Scripts, runtime_folder: Path, tmp_path: Path) -> None:
    job()
    folder = runtime_folder / "skipper"
    (path,) = folder.iterdir()
    path.rename(tmp_path / "elsewhere.job")
    path.symlink_to(tmp_path / "elsewhere.job")
    with pytest.raises(JobNotFoundError):
        find_for_tools(None)
    folder.rename(tmp_path / "folder")
    folder.symlink_to(tmp_path / "folder")
    with pytest.raises(UnsafeFileError, match="is a link"):
        find_for_tools(None)


def test_a_folder_that_others_have_made_leaves_the_job_as_it_is(runtime_folder: Path, tmp_path: Path) -> None:
    (runtime_folder / "skipper").mkdir(mode=0o777)
    (runtime_folder / "skipper").chmod(0o777)
    control.shutdown()
    assert control.this_proc().size() == 1
    assert join_file.folder() == runtime_folder / "skipper"
    assert list((runtime_folder / "skipper").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("train.py", "train"),
        ("/x/y/train model.py", "train-model"),
        ("/x/pkg/__main__.py", "pkg"),
        ("", "python"),
        ("-c", "python"),
        ("ä.py", "python"),
        ("a" * 99 + ".py", "a" * 40),
    ],
)
def test_the_name_is_that_of_the_script(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [path])
    assert script_name() == name
