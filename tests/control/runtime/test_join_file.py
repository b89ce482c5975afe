"""Connection files: private, whole, and never believed where they might not be ours."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper import trust
from skipper.control import JobExistsError, JobNotFoundError, RemoteHostError, Settings, UnsafeFileError
from skipper.control.runtime import join_file
from skipper.control.runtime.join_file import Connection
from skipper.control.wire.process_ref import ProcessRef

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def address() -> Iterator[str]:
    """Where somebody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        name = f"skipper-test-{os.getpid()}"
        server.bind(f"\0{name}")
        server.listen()
        yield f"unix-abstract:{name}"


def connection(address: str, *, name: str = "job", host: str | None = None) -> Connection:
    root = ProcessRef(address.removeprefix("unix-abstract:skipper-"), address, "script")
    return Connection(name, root, SECRET, Settings(heartbeat_s=3.5), host or join_file.this_network(), "here")


def test_what_was_written_is_read_again(address: str) -> None:
    written = connection(address)
    path = join_file.write(written)
    assert join_file.read(path) == written
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert os.listdir(path.parent) == [path.name]  # no draft is left


def test_the_modes_do_not_depend_on_the_umask(address: str) -> None:
    before = os.umask(0)
    try:
        path = join_file.write(connection(address))
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_secret_shows_in_no_text_about_a_connection(address: str) -> None:
    shown = connection(address)
    assert SECRET.hex() not in f"{shown!r} {shown}"
    assert str(SECRET) not in repr(shown)


def test_without_a_runtime_folder_the_one_for_temporary_files_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert trust.folder().name == f"skipper-{os.geteuid()}"


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620])
def test_a_file_that_others_can_open_is_refused(address: str, mode: int) -> None:
    path = join_file.write(connection(address))
    path.chmod(mode)
    with pytest.raises(UnsafeFileError, match="0600") as caught:
        join_file.read(path)
    assert isinstance(caught.value, PermissionError)


def test_a_folder_that_others_can_enter_is_refused(address: str) -> None:
    path = join_file.write(connection(address))
    path.parent.chmod(0o755)
    with pytest.raises(UnsafeFileError, match="open to other users"):
        join_file.read(path)
    with pytest.raises(UnsafeFileError, match="open to other users"):
        join_file.write(connection(address, name="other"))


def test_the_file_and_the_folder_of_another_user_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = join_file.write(connection(address))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeFileError, match=f"belongs to the user {os.getuid()}"):
        join_file.read(path)


def test_a_link_is_not_followed(address: str) -> None:
    path = join_file.write(connection(address))
    link = path.with_name("link.json")
    link.symlink_to(path)
    with pytest.raises(JobNotFoundError):
        join_file.read(link)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"version": 99}', "no json \udcff".encode("utf-8", "replace").decode()]
)
def test_a_file_that_says_something_else_is_no_job(runtime_folder: Path, text: str) -> None:
    folder = runtime_folder / "skipper"
    folder.mkdir(mode=0o700)
    path = folder / "odd.json"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(JobNotFoundError, match="is not the connection file of a job"):
        join_file.read(path)


def test_a_missing_file_is_a_lookup_error(runtime_folder: Path) -> None:
    with pytest.raises(LookupError, match="no job to join"):
        join_file.read(runtime_folder / "skipper" / "nobody.json")


def test_a_running_job_keeps_its_name_and_a_dead_one_loses_it(address: str) -> None:
    dead = join_file.write(connection("unix-abstract:skipper-nobody-listens-here"))
    path = join_file.write(connection(address))  # over the dead job's
    assert path == dead
    with pytest.raises(JobExistsError, match="'job'") as caught:
        join_file.write(connection(address))
    assert isinstance(caught.value, ValueError)
    assert os.listdir(path.parent) == [path.name]


def test_files_of_dead_jobs_are_swept_away_and_others_left_alone(address: str) -> None:
    alive = join_file.write(connection(address, name="alive"))
    dead = join_file.write(connection("unix-abstract:skipper-nobody-listens-here", name="dead"))
    far = join_file.write(connection(address, name="far", host="another boot/1"))
    assert join_file.running() == ["alive", "far"]
    assert (alive.exists(), dead.exists(), far.exists()) == (True, False, True)


def test_a_job_of_another_host_is_told_from_one_that_has_ended(address: str) -> None:
    with pytest.raises(RemoteHostError, match="join it at the address") as caught:
        connection(address, host="another boot/1").check_reachable()
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(JobNotFoundError, match="has ended"):
        connection("unix-abstract:skipper-nobody-listens-here").check_reachable()
    connection(address).check_reachable()


def test_only_its_own_file_is_removed(address: str) -> None:
    path = join_file.write(connection("unix-abstract:skipper-nobody-listens-here"))
    successor = Connection(
        "job", ProcessRef("job-2", address, "script"), SECRET, Settings(), join_file.this_network(), ""
    )
    join_file.remove(path, successor)
    assert path.exists()
    join_file.write(successor)
    join_file.remove(path, successor)
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65, "sp ace"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(ValueError, match="name is made of"):
        join_file.path_of(name)
