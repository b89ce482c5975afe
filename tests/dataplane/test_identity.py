"""Owners are told apart even where a pid comes back."""

import dataclasses
import os
import resource
import subprocess
import sys

import pytest

from skipper.dataplane import BackendUnavailableError, OwnerDiedError
from skipper.dataplane.identity import ProcessWatch, host_id, new_owner, start_time


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def owner_of(process: "subprocess.Popen[bytes]") -> object:
    started = start_time(process.pid)
    assert started is not None
    return dataclasses.replace(new_owner(), pid=process.pid, started=started)


def test_two_identities_of_one_process_differ_by_their_token_only() -> None:
    one, other = new_owner(), new_owner()
    assert one != other
    assert dataclasses.replace(one, token=other.token) == other
    assert (one.pid, one.host) == (os.getpid(), host_id())


def test_a_watch_sees_the_end_even_of_a_zombie() -> None:
    process = sleeper()
    watch = ProcessWatch(owner_of(process))  # type: ignore[arg-type]
    assert not watch.gone
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped
    assert watch.gone
    process.communicate()
    assert watch.gone
    watch.close()
    watch.close()


def test_without_descriptors_processes_cannot_be_told_apart_and_the_error_names_the_limit() -> None:
    process = sleeper()
    owner = owner_of(process)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        for attempt in (lambda: ProcessWatch(owner), host_id, lambda: start_time(process.pid), new_owner):  # type: ignore[arg-type]
            with pytest.raises(BackendUnavailableError, match="ulimit -n"):
                attempt()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        process.communicate()
    assert ProcessWatch(new_owner()).gone is False


def test_a_process_that_is_gone_cannot_be_watched() -> None:
    process = sleeper()
    owner = owner_of(process)
    process.kill()
    process.communicate()
    with pytest.raises(OwnerDiedError, match="gone"):
        ProcessWatch(owner)  # type: ignore[arg-type]


def test_another_process_with_the_same_pid_is_not_taken_for_the_owner() -> None:
    before = len(os.listdir("/proc/self/fd"))
    owner = dataclasses.replace(new_owner(), started=1)
    with pytest.raises(OwnerDiedError, match="another process"):
        ProcessWatch(owner)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("pid", [0x7FFFFFFF, 4_000_000])
def test_a_pid_that_nobody_has_has_no_start_time(pid: int) -> None:
    assert start_time(pid) is None
    with pytest.raises(OwnerDiedError):
        ProcessWatch(dataclasses.replace(new_owner(), pid=pid))


def test_a_command_name_with_parentheses_does_not_confuse(tmp_path: object) -> None:
    script = f"{tmp_path}/a) S 1 (b"
    os.symlink("/bin/sleep", script)
    process = subprocess.Popen([script, "60"])
    try:
        assert start_time(process.pid) >= start_time(os.getpid())  # type: ignore[operator]
    finally:
        process.kill()
        process.wait()
