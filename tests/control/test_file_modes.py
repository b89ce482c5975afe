"""What a job makes is for its user alone, whatever the umask says; what others have prepared is refused."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control import UnsafeFileError
from skipper.control.cluster.jobs.folder import JobFolder, start_into
from skipper.control.runtime import join_file
from skipper.control.support.private_file import make_folder, open_log
from tests.strangers import STRANGER, as_stranger, meeting_place, needs_root

from .conftest import PATIENCE_S, REPOSITORY

JOB = Path(__file__).with_name("file_modes_script.py")


@pytest.fixture
def place() -> Iterator[Path]:
    with meeting_place() as path:
        yield path


def test_all_that_a_job_makes_is_for_its_user_alone(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir(mode=0o700)
    env = {**os.environ, "TMPDIR": str(here), "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("XDG_RUNTIME_DIR", None)
    done = subprocess.run(
        [sys.executable, str(JOB)], umask=0, env=env, capture_output=True, text=True, timeout=3 * PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith(("OPEN", "FILE"))]
    assert not [line for line in lines if int(line[1], 8) & 0o077]
    names = " ".join(line[2] for line in lines)
    for expected in (
        "memfd:skipper-stacks",
        "memfd:skipper ",
        f"skipper-{os.geteuid()}/open.json",
        "actors.secret",
        "agent.log",
        "kept/logs/",
        "shared/jobs/skipper-job-",
        "/secret",
        ".skipper-workspace",
    ):
        assert expected in names


def test_a_log_that_another_has_prepared_is_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "hard").hardlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "hard", "pipe"):
        with pytest.raises(OSError, match=r"symbolic links|alone|No such device"):
            start_into(tmp_path / name, ["echo", "overwritten"])
    assert victim.read_text() == "precious"


@needs_root
def test_a_log_of_another_user_is_not_written_to(place: Path) -> None:
    as_stranger(f"open({str(place / 'log')!r}, 'w').close()")
    with pytest.raises(OSError, match=r"alone|Permission denied"):  # the latter by fs.protected_regular
        os.close(open_log(place / "log"))


def test_a_log_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    (tmp_path / "log").chmod(0o666)
    with os.fdopen(open_log(tmp_path / "log"), "a") as log:
        log.write("after\n")
    assert (tmp_path / "log").read_text() == "before\nafter\n"
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "log")


def test_a_folder_of_a_job_is_made_below_what_is_missing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = JobFolder(tmp_path / "a" / "b")
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b", folder.path)}
        folder.close()
    finally:
        os.umask(before)
    assert modes == {0o700}


@needs_root
def test_the_runtime_folder_that_another_user_has_made_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    folder = join_file.folder()
    assert folder.parent == place
    as_stranger(f"os.mkdir({str(folder)!r})\nopen({str(folder / 'job.json')!r}, 'w').close()")
    with pytest.raises(UnsafeFileError, match=f"belongs to the user {STRANGER}.*XDG_RUNTIME_DIR"):
        join_file.running()
    (folder / "job.json").unlink()
    folder.rmdir()
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    as_stranger(f"os.symlink({str(private)!r}, {str(folder)!r})")
    with pytest.raises(UnsafeFileError, match="is a link"):
        join_file.running()
