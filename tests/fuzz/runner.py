"""Runs targets, each in a child process of its own, and watches the children.

The child writes every input into memory that it shares with its parent before it tries it. So whatever becomes of the
child, the parent has the input: a signal, an input that takes too long, and an exit are findings as much as an
exception that is not allowed. The child has an address space of what it needs to begin with and a little more: who
believes a length that nobody has sent gets a MemoryError, which no target allows.

Where atheris is installed, libFuzzer chooses the inputs by the code that they reach; else they are random mutations.
"""

import contextlib
import ctypes
import faulthandler
import hashlib
import importlib.util
import io
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutation import MAX_NBYTES, mutate_bytes
from tests.fuzz.target import Target, try_one

CORPUS = Path(__file__).parent / "corpus"
"""Seeds and inputs that were findings once, a folder for each target."""

WATCHED = [
    *(
        "skipper.control.wire",
        "skipper.control.runtime.cast.messages",
        "skipper.control.runtime.join_file",
        "skipper.control.cluster.hosts",
        "skipper.control.rpc",
    ),
    *(
        "skipper.control.cluster.workspace",
        "skipper.control.support.pages",
        "skipper.control.observe",
        "skipper.dataplane.handle",
        "skipper.dataplane.backends",
    ),
    *(
        "skipper.torchstore.peers.shm_value_board",
        "skipper.torchstore.algebra.manifest",
        "skipper.torchstore.tensors.delta",
    ),
]
"""The modules whose code libFuzzer watches."""

ROOM_NBYTES = 1 << 30
"""How much address space a child may come to need; threads and libraries of a target take theirs from it, too."""

MOST_CPU_S = 5.0
"""For one input. Waiting is allowed for longer: a machine may be busy, and a target may have a server."""

MOST_WALL_S = 60.0

_PR_SET_PDEATHSIG = 1  # prctl(2)
_DONE = "done"
_LOOK_S = 0.05
_SLOT = MAX_NBYTES + 64


@dataclass(frozen=True)
class Finding:
    """An input that led to something that must not be.

    Attributes:
        target: the name of the target.
        what: the exception, or how the child ended.
        file: holds the input.
        text: the traceback, or the end of what the child wrote.
    """

    target: str
    what: str
    file: Path
    text: str


@dataclass
class Result:
    """How a target fared.

    Attributes:
        target: its name.
        inputs: how many it was given.
        findings: see there.
    """

    target: str
    inputs: int = 0
    findings: list[Finding] = field(default_factory=list)


def has_atheris() -> bool:
    """Whether inputs are chosen by coverage."""
    return importlib.util.find_spec("atheris") is not None


@contextlib.contextmanager
def watched_imports(*, guided: bool) -> Iterator[None]:
    """Have the code that is imported within tell which of it runs."""
    if not guided:
        yield
        return
    import atheris

    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=WATCHED):
        yield


def corpus_of(target: Target) -> list[Path]:
    """The files of the committed corpus of a target."""
    return sorted((CORPUS / target.name).glob("*"))


def write_seeds(target: Target) -> int:
    """Make the seeds of a target anew; inputs that were found stay. How many there are."""
    folder = CORPUS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("seed-*"):
        old.unlink()
    seeds = list(target.seeds())
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    return len(seeds)


def run(
    targets: Sequence[Target],
    seconds: float,
    *,
    out: Path,
    jobs: int,
    seed: int,
    guided: bool,
    until_found: bool = False,
    corpus: Callable[[Target], list[Path]] = corpus_of,
) -> Iterator[Result]:
    """Fuzz targets, a few at a time, each for its part of the seconds.

    Args:
        targets: what to fuzz.
        seconds: for all of them together.
        out: a folder for what is found, and for what libFuzzer learns.
        jobs: how many run at a time.
        seed: of what is random.
        guided: by coverage; atheris has to be installed.
        until_found: end a target with its first finding.
        corpus: the files to begin with.

    Yields:
        The result of each, when it is there.
    """
    share = seconds * min(jobs, len(targets)) / len(targets)
    with scratch_folder():
        yield from _run(targets, share, out, jobs, seed, guided, until_found, corpus)


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Where this process and its children have their temporary files: children are killed, and clean up nothing."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="skipper-fuzz-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)  # a target may try something as another user
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _run(
    targets: Sequence[Target],
    share: float,
    out: Path,
    jobs: int,
    seed: int,
    guided: bool,
    until_found: bool,
    corpus: Callable[[Target], list[Path]],
) -> Iterator[Result]:
    waiting = list(targets)
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                target = waiting.pop(0)
                running.append(_Child(target, corpus(target), out / target.name, share, seed, guided, until_found))
            for child in [child for child in running if child.is_over()]:
                running.remove(child)
                yield child.result()
            time.sleep(_LOOK_S)
    finally:
        for child in running:
            child.kill()


class _Child:
    """A process that fuzzes one target, as its parent sees it."""

    def __init__(
        self,
        target: Target,
        corpus: list[Path],
        out: Path,
        seconds: float,
        seed: int,
        guided: bool,
        until_found: bool,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._target, self._out, self._until_found = target, out, until_found
        self._shared = _Shared()
        self._seconds, self._until = seconds, 0.0
        self._log = out / "log"
        self._before = set(out.glob("found-*"))
        self._what = ""
        self._tried = -1
        self._since, self._since_cpu = time.monotonic(), 0.0
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _be_child(target, corpus, out, self._log, self._shared, seed, guided)
            except BaseException:  # noqa: BLE001  (its words are in the log, and this is no place to return to)
                traceback.print_exc()
            finally:
                os._exit(1)

    def is_over(self) -> bool:
        """Whether it has ended, or is ended now."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        now = time.monotonic()
        if pid:
            self._what = how_it_ended(status)
            return True
        tried = self._shared.tried
        if tried != self._tried:
            if self._tried <= 0 < tried:
                self._until = now + self._seconds  # it begins with the first input: setting up is not fuzzing
            self._tried, self._since, self._since_cpu = tried, now, _cpu_s(self._pid)
        elif now - self._since > MOST_WALL_S or _cpu_s(self._pid) - self._since_cpu > MOST_CPU_S:
            self._what = f"took more than {MOST_CPU_S:g} s of CPU time, or {MOST_WALL_S:g} s"
        if not self._what and ((self._until and now > self._until) or (self._until_found and self._found())):
            self._what = _DONE
        if self._what:
            self.kill()
        return bool(self._what)

    def _found(self) -> list[Path]:
        return sorted(set(self._out.glob("found-*.txt")) - self._before)

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def result(self) -> Result:
        """What came of it."""
        result = Result(self._target.name, self._shared.tried)
        for text in self._found():
            words = text.read_text(encoding="utf-8", errors="replace")
            what = words.strip().splitlines()[-1] if words.strip() else "?"
            result.findings.append(Finding(self._target.name, what, text.with_suffix(""), words))
        if self._what != _DONE:
            file = _save(self._out, self._shared.input, "ended")
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            result.findings.append(Finding(self._target.name, self._what, file, tail))
        return result


class _Shared:
    """Memory of parent and child: how many inputs were tried, and the last one."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOT)
        self._words = memoryview(self._memory)[:16].cast("Q")

    def note(self, data: bytes) -> None:
        """In the child, before an input is tried."""
        data = data[: _SLOT - 16]
        self._memory[16 : 16 + len(data)] = data
        self._words[1] = len(data)
        self._words[0] += 1

    @property
    def tried(self) -> int:
        """How many."""
        return self._words[0]

    @property
    def input(self) -> bytes:
        """The last one."""
        return self._memory[16 : 16 + self._words[1]]


def _be_child(
    target: Target, corpus: list[Path], out: Path, log: Path, shared: _Shared, seed: int, guided: bool
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable(fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seen: set[str] = set()

    def one(data: bytes) -> None:
        shared.note(data)
        error = try_one(target, data)
        if error is not None:
            _report(error, data, out, seen)

    if not list(corpus):
        one(b"")
    for file in corpus:
        one(file.read_bytes())
    limit_memory()
    if guided:
        _guided(target, corpus, out, one, seed)
    else:
        _random(target, corpus, one, seed)


def limit_memory() -> None:
    """Let this process have little more address space than it has; not under a sanitizer, which maps terabytes."""
    if any(name in os.environ.get("LD_PRELOAD", "") for name in ("libasan", "libtsan")):
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + ROOM_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _guided(target: Target, corpus: list[Path], out: Path, one: Callable[[bytes], None], seed: int) -> None:
    import atheris

    learned = out / "learned"
    learned.mkdir(exist_ok=True)
    chance = random.Random(seed)

    def mutate(data: bytes, most: int, _: int) -> bytes:
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return target.mutate(data, chance)[:most]

    # The parent watches time and memory, and wants to see a signal as a signal.
    signals = [f"-handle_{name}=0" for name in ("segv", "bus", "abrt", "ill", "fpe", "int", "term", "xfsz", "usr1")]
    limits = ["-timeout=100000", "-rss_limit_mb=0", "-malloc_limit_mb=0", f"-max_len={MAX_NBYTES}", "-len_control=0"]
    folders = [str(learned), *sorted({str(file.parent) for file in corpus})]
    atheris.Setup(["fuzz", *signals, *limits, f"-seed={seed + 1}", *folders], one, custom_mutator=mutate)
    atheris.Fuzz()


def _random(target: Target, corpus: list[Path], one: Callable[[bytes], None], seed: int) -> None:
    chance = random.Random(seed)
    known = [file.read_bytes() for file in corpus] or [b""]
    while True:
        data = chance.choice(known)
        for _ in range(chance.choice((1, 1, 2, 4))):
            data = (target.mutate if chance.random() < 0.8 else mutate_bytes)(data, chance)
        one(data)


def _report(error: BaseException, data: bytes, out: Path, seen: set[str]) -> None:
    """Write down an input, unless another one has ended at the same place in the same way."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__name__} {[(frame.filename, frame.lineno) for frame in frames[-4:]]}"
    if place not in seen:
        seen.add(place)
        file = _save(out, data, type(error).__name__)
        words = "".join(traceback.format_exception(error, limit=-12))
        draft = file.with_suffix(".draft")
        draft.write_text(words, encoding="utf-8", errors="replace")
        draft.rename(file.with_name(file.name + ".txt"))


def _save(out: Path, data: bytes, kind: str) -> Path:
    file = out / f"found-{kind}-{hashlib.blake2b(data, digest_size=6).hexdigest()}"
    file.write_bytes(data)
    return file


def how_it_ended(status: int) -> str:
    """A status of `waitpid` in words."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with status {os.WEXITSTATUS(status)}"


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
