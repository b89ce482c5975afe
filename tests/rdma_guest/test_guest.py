"""The tool itself, from the outside: what a command in the guest sees, and what is left when it is over."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.rdma_guest.gates import GUEST, needs_guest

pytestmark = [needs_guest, pytest.mark.timeout(240)]


def guest(*arguments, **kwargs):
    return subprocess.run(
        [GUEST, *map(str, arguments)], stdout=subprocess.PIPE, text=True, timeout=200, check=False, **kwargs
    )


def test_run_returns_the_output_and_the_status_of_the_command():
    done = guest("run", "bash", "-c", "echo a line; exit 7")
    assert (done.returncode, done.stdout) == (7, "a line\n")


def test_the_command_has_the_callers_folder_environment_and_files(tmp_path):
    folder = tmp_path / "with a blank"
    folder.mkdir()
    (folder / "file").write_text("from the host")
    done = guest(
        "run", "bash", "-c", 'cat file; echo " $VALUE"', cwd=folder, env={**os.environ, "VALUE": "two  words 'quoted'"}
    )
    assert done.stdout == "from the host two  words 'quoted'\n"


def test_only_the_out_folder_is_written_through(tmp_path):
    out = tmp_path / "out"
    done = guest("run", "--out", out, "bash", "-c", f"echo lost > {tmp_path}/lost; echo kept > {out}/kept")
    assert done.returncode == 0
    assert (out / "kept").read_text() == "kept\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_command_that_takes_too_long_is_ended_with_status_124():
    assert guest("run", "--timeout", "8", "sleep", "100").returncode == 124


def test_a_guest_that_dies_gives_status_125():
    assert guest("run", "bash", "-c", "echo o > /proc/sysrq-trigger; sleep 100").returncode == 125


def test_nothing_is_left_when_the_caller_is_killed():
    with subprocess.Popen([GUEST, "run", "bash", "-c", "echo up; sleep 100"], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        folders = kernels()
        assert folders, "the guest's kernel was not found among the processes: this test would prove nothing"
        assert all(folder.is_dir() for folder in folders)
        caller.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while kernels() or any(folder.exists() for folder in folders):
        assert time.monotonic() < end
        time.sleep(0.05)


def kernels():
    """The folders of running guest kernels that belong to a child of this test."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if (
                b"linux-uml-" in command
                and f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".encode() in environment
            ):
                found.add(Path(re.search(rb"\buml_dir=([^\0]+)", command)[1].decode()))
    return found
