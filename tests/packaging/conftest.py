"""What `make dist` has built, and an environment with the wheel in it and nothing besides."""

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("skipper",)
VARIABLE = "SKIPPER_TEST_DIST"
INSTALLATION_TIMEOUT_S = 540.0


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, the folder in which its programs run, and what is before it on the path of Python.

    None of it lies in the checkout.
    """

    programs: Path
    folder: Path
    path: tuple[Path, ...] = ()

    def run(self, program: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run one of its programs to its end; a failure fails the test."""
        own = {"PATH": f"{self.programs}{os.pathsep}{os.defpath}"}
        if self.path:
            own["PYTHONPATH"] = os.pathsep.join(map(str, self.path))
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.folder,
            env={**_plain(), **own},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def write(self, name: str, text: str) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.write_text(text)
        return path

    def run_script(self, text: str) -> str:
        """What a script prints, which has to have nothing to say on its stderr."""
        done = self.run("python", str(self.write("script.py", text)))
        assert done.stderr == ""
        return done.stdout


@pytest.fixture(scope="session")
def distributions() -> Path:
    """The folder of the wheel and of the source distribution."""
    if VARIABLE not in os.environ:
        pytest.skip("distributions are built by make test-dist alone")
    return ROOT / os.environ[VARIABLE]


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def sdist(distributions: Path) -> Path:
    (path,) = distributions.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def environment(wheel: Path) -> Iterator[Environment]:
    """The wheel, and what it asks for, in the versions of constraints.txt."""
    with tempfile.TemporaryDirectory(prefix="skipper-") as folder:
        work, home = Path(folder, "work"), Path(folder, "environment")
        work.mkdir()
        venv.create(home, symlinks=True)
        programs = home / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        subprocess.run(
            [*pip, "install", "--quiet", *constraints, str(wheel)],
            cwd=work,
            env=_plain(),
            check=True,
            timeout=INSTALLATION_TIMEOUT_S,
        )
        yield Environment(programs, work)


def _plain() -> dict[str, str]:
    """This process' environment without what would lead Python to other packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SKIPPER_"))}
