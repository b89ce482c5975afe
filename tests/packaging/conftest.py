"""What `make dist` has built, and environments with the wheel in them and nothing besides."""

import contextlib
import os
import subprocess
import sys
import sysconfig
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

    def install(self, *what: str) -> None:
        """Install into it, in the versions of constraints.txt, with the pip of this process."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.programs / "python"), "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *what],
            cwd=self.folder,
            env=_plain(),
            check=True,
            timeout=INSTALLATION_TIMEOUT_S,
        )

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        home = str(self.programs.parent)
        return Path(sysconfig.get_path("purelib", "venv", {"base": home, "platbase": home}))

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
def plain(wheel: Path) -> Iterator[Environment]:
    """The wheel, and what it asks for without any extra, in the versions of constraints.txt."""
    with _new_environment() as made:
        made.install(str(wheel))
        yield made


@pytest.fixture(scope="session")
def environment(plain: Environment, wheel: Path) -> Iterator[Environment]:
    """The wheel with UCX: its extra cu13, since the tests of a checkout have cu12."""
    with layer(plain) as made:
        made.install("--no-deps", "--ignore-installed", str(wheel))  # the command skipper
        made.install("skipper-mesh[cu13]")
        yield made


@contextlib.contextmanager
def layer(below: Environment, *, pip: bool = False) -> Iterator[Environment]:
    """An environment that has what another has, and more of its own in front of that.

    Args:
        below: The other one, which stays as it is.
        pip: It has a pip of its own, so that it can be changed as its user would.
    """
    with _new_environment(pip=pip) as made:
        (made.packages / "below.pth").write_text(f"{below.packages}\n")
        yield made


@contextlib.contextmanager
def _new_environment(*, pip: bool = False) -> Iterator[Environment]:
    with tempfile.TemporaryDirectory(prefix="skipper-") as folder:
        work, home = Path(folder, "work"), Path(folder, "environment")
        work.mkdir()
        venv.create(home, symlinks=True, with_pip=pip)
        yield Environment(home / "bin", work)


def _plain() -> dict[str, str]:
    """This process' environment without what would lead Python to other packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SKIPPER_"))}
