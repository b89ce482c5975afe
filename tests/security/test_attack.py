"""Another user of the host tries what he can, live, against a job that works and checks its own results."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.attack import STRANGER, attack
from tests.security.target import ROOT

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users"),
    pytest.mark.timeout(180),
]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder for everybody, as /tmp is; that of pytest is closed to others."""
    with tempfile.TemporaryDirectory(prefix="attacked-") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def test_another_user_reads_nothing_writes_nothing_and_harms_nobody(shared: Path) -> None:
    outcome = attack(shared, for_s=1)
    assert outcome.hits == []
    assert outcome.failed == []
    assert outcome.rounds > 0
    assert {name for name, tries in outcome.tries.items() if tries} >= {
        *("actor_server", "backlogs", "files", "garbage", "handles", "proc"),
        *("recordings", "system_calls", "wrong_proofs"),
    }


def test_the_same_attacks_by_the_user_of_the_job_find_what_they_look_for(shared: Path) -> None:
    outcome = attack(shared, for_s=0, uid=0, only=("proc",))
    for what in ("mem of a process can be opened", "environ of a process can be opened", "memory: needle 0"):
        assert f"proc: {what}" in outcome.hits


SQUATTED = Path(__file__).with_name("squatted_script.py")

SQUAT = {
    "a folder": "os.mkdir(path, 0o777); os.chmod(path, 0o777)",
    "a link to a folder": "os.mkdir(other, 0o777); os.chmod(other, 0o777); os.symlink(other, path)",
    "a link to a folder of the victim's": "os.symlink(sys.argv[2], path)",
    "a file": "open(path, 'w').close()",
    "a pipe": "os.mkfifo(path, 0o666); os.chmod(path, 0o666)",
}


@pytest.mark.parametrize("how", SQUAT)
def test_who_takes_the_jobs_path_beforehand_gets_nothing_of_it(shared: Path, how: str) -> None:
    victims = shared / "victims"
    victims.mkdir(mode=0o755)
    program = f"""
        import os, sys
        os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})
        path, other = os.path.join(sys.argv[1], "skipper-0"), os.path.join(sys.argv[1], "other")
        {SQUAT[how]}
    """
    subprocess.run([sys.executable, "-S", "-c", textwrap.dedent(program), str(shared), str(victims)], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKIPPER_")}
    environment.pop("XDG_RUNTIME_DIR", None)
    done = subprocess.run(
        [sys.executable, str(SQUATTED)],
        env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(shared)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    first, second, result = done.stdout.split("\n")[:3]
    assert first != "went on", done.stdout + done.stderr
    assert second != "went on", done.stdout + done.stderr
    assert result == "3", done.stderr
    left = [path for place in (shared / "skipper-0", shared / "other", victims) for path in _files_below(place)]
    assert left == [], "nothing is written into what a stranger has made"


def _files_below(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else []
