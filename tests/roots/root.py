"""Debian roots with another Python or for another processor: made once, then the tree is built and tested in them."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.roots import cross, emulation
from tests.tree import ROOT, chosen, copy_tree, pins_beside

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipper" / "roots"
DEFAULT_MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("ca-certificates", "gcc", "git", "iproute2", "libc6-dev", "make", "procps", "python3-dev", "python3-venv")
_CONFIGURE = """
ldconfig
for name in passwd group; do cp /usr/share/base-passwd/$name.master /etc/$name; done
ln -s gcc /usr/bin/cc
"""
_ENVIRONMENT = "test -x /skipper/venv/bin/python || python3 -m venv {} /skipper/venv"
_BUILD = """
cd /skipper/tree
pip="/skipper/venv/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --no-compile -c /skipper/constraints.txt -e '.[test,cu12]'
"""
_ABOVE_TORCH = ("torch", "peft", "accelerate")
"""torch, and what requires it."""
_EMULATED_TEST_S = 400  # more than pyproject.toml gives a test, less than it gives the run until faulthandler ends it
_GLIBCS = (17, 42)  # of the wheels that such a root can take: 2.17 to 2.41, that of trixie
_DESCRIBE = """
import platform, numpy, torch, google.protobuf, grpc
print(f"Python {platform.python_version()} on {platform.machine()}", end=", ")
print(*(f"{each.__name__} {each.__version__}" for each in (torch, numpy, grpc, google.protobuf)), sep=", ")
"""


class RootError(Exception):
    """A root cannot be made or used here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Root:
    """A Debian root.

    Attributes:
        name: which the command line takes.
        suite: of Debian.
        architecture: as Debian calls it.
        tests: what runs in it unless something else is asked for.
        torch: the version that pip installs, with the other packages of `constraints.txt`; None for the newest release
            of every package.
    """

    name: str
    suite: str
    architecture: str
    tests: tuple[str, ...]
    torch: str | None

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return CACHE / f"{self.suite}-{self.architecture}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs away from it meanwhile."""
        CACHE.mkdir(parents=True, exist_ok=True)
        with open(CACHE / f"{self.folder.name}.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RootError(f"another run uses {self.folder}: wait for it") from None
            yield

    def prepare(self) -> None:
        """Make it where it does not exist, and build the tree in it where that has changed.

        Raises:
            RootError: it cannot be made here.
            CrossError: the tree's modules cannot be compiled for its processor.
        """
        if emulation.is_needed(self.architecture):
            cross.check(self.architecture)
        if not (self.folder / "skipper" / "made").exists():
            self._make()
        # torchrun looks up the machine's own name, and waits for ever where nobody knows it.
        names = f"127.0.0.1 localhost {socket.gethostname()}\n::1 localhost\n"
        (self.folder / "etc" / "hosts").write_text(names, encoding="utf-8")
        copy_tree(self.folder / "skipper" / "tree")
        built, made_of = self.folder / "skipper" / "built", _digest()
        if not built.exists() or built.read_text() != made_of:
            built.unlink(missing_ok=True)
            pins = [] if self.torch is None else [f"torch=={self.torch}", *pins_beside({"torch"})]
            (self.folder / "skipper" / "constraints.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
            emulated = emulation.is_needed(self.architecture)
            environment = _ENVIRONMENT.format("--without-pip" if emulated else "")
            self._check(self.run(environment), "there can be no environment")
            if emulated:
                (library,) = (self.folder / "skipper" / "venv" / "lib").iterdir()
                self._take_packages(library)
                tree = self.folder / "skipper" / "tree"
                cross.install(tree, self.folder, library / "site-packages", self.architecture)
            else:
                self._check(self.run(_BUILD), "the tree cannot be built")
            built.write_text(made_of)

    def run(self, script: str) -> int:
        """Run a shell script in it, with processes of its own, which end with it; its exit status."""
        root = shlex.quote(str(self.folder))
        # The shell that stays is process 1 there, and collects what is orphaned.
        enter = (
            f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && mount --rbind /sys {root}/sys && "
            f"env -i {' '.join(map(shlex.quote, _environment()))} chroot {root} sh -e -c {shlex.quote(script)}"
        )
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        command += ["sh", "-c", f"{enter}; exit $?"]
        with emulation.of(self.architecture):
            return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode

    def test(self, arguments: Sequence[str]) -> int:
        """Run pytest in it; its exit status."""
        slowly = [f"--timeout={_EMULATED_TEST_S}"] if emulation.is_needed(self.architecture) else []
        every = " ".join(map(shlex.quote, [*slowly, *chosen(arguments, self.tests)]))
        describe = f"/skipper/venv/bin/python -c {shlex.quote(_DESCRIBE)}"
        pytest = f"/skipper/venv/bin/python -m pytest -p no:cacheprovider {every}"
        return self.run(f"cd /skipper/tree\n{describe}\n{pytest}")

    def _take_packages(self, library: Path) -> None:
        """Install what the tree requires by the pip of this machine: an emulated one takes long to unpack it."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        machine = emulation.MACHINES[self.architecture]
        platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(*_GLIBCS)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        command += ["--constraint", str(self.folder / "skipper" / "constraints.txt"), "--only-binary=:all:", *platforms]
        command += ["--python-version", library.name.removeprefix("python"), "--target", str(library / "site-packages")]
        required = [*project["dependencies"], *extras["test"], *extras["cu12"]]
        # What torch requires depends on the processor, and this pip would judge by that of this machine.
        torch = [each for each in required if each.startswith(_ABOVE_TORCH)]
        others = [each for each in required if each not in torch]
        for names in (["--no-deps", *torch, *_ABOVE_TORCH], ["pip", "setuptools", "wheel", *others]):
            self._check(subprocess.run([*command, *names], check=False).returncode, "its packages cannot be installed")

    def _make(self) -> None:
        if self.folder.exists():  # a run was cut off in the middle
            shutil.rmtree(self.folder)
        print(f"{self.name}: making {self.folder} from Debian's {self.suite}", flush=True)
        # Packages are unpacked by this machine and not configured: an emulated one takes half an hour for that.
        # A mirror that lags has lists that are out of date for apt.
        command = ["mmdebstrap", "--mode=root", "--variant=extract", f"--architectures={self.architecture}"]
        command += [
            "--aptopt=Acquire::Check-Valid-Until false",
            "--include=?essential",
            f"--include={','.join(PACKAGES)}",
        ]
        log = CACHE / f"{self.folder.name}.log"
        with open(log, "w") as file:
            done = subprocess.run(
                [*command, self.suite, str(self.folder), _mirror()], stdout=file, stderr=file, check=False
            )
        self._check(done.returncode, f"mmdebstrap ended with {done.returncode}: see {log}")
        self._check(self.run(_CONFIGURE), "what the packages would have configured cannot be made")
        self._trust_our_certificates()
        (self.folder / "skipper").mkdir()
        (self.folder / "skipper" / "made").touch()

    def _trust_our_certificates(self) -> None:
        """Have programs there trust whom this machine trusts: its way to package indices may need that."""
        ours = Path("/etc/ssl/certs/ca-certificates.crt")
        if ours.exists():
            shutil.copy(ours, self.folder / ours.relative_to("/"))

    def _check(self, status: int, problem: str) -> None:
        if status:
            raise RootError(f"{self.name}: {problem}")


def check_machine() -> None:
    """See whether roots can be made and used here.

    Raises:
        RootError: they cannot.
    """
    if os.geteuid() != 0:
        raise RootError("a root with another Python is entered by chroot, which is for root: run this by sudo")
    for program, package in {"mmdebstrap": "mmdebstrap", "setpriv": "util-linux", "unshare": "util-linux"}.items():
        if shutil.which(program) is None:
            raise RootError(f"{program} is missing: apt-get install {package}")


def _mirror() -> str:
    return os.environ.get("DEBIAN_MIRROR", DEFAULT_MIRROR)


def _environment() -> list[str]:
    """What pip is told here it is told there."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    return [
        f"{name}={value}"
        for name, value in {
            **ours,
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }.items()
    ]


def _digest() -> str:
    """Of what the modules and the environment are made of."""
    found = hashlib.sha256(sys.version.encode())
    sources = [ROOT / name for name in ("pyproject.toml", "setup.py", "constraints.txt")]
    for folder, kind in itertools.product(("control", "dataplane"), ("pyx", "pxd", "pxi", "h")):
        sources += sorted((ROOT / folder).rglob(f"*.{kind}"))
    for path in sources:
        found.update(path.read_bytes())
    return found.hexdigest()
