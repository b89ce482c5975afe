"""The other side: an owner of memory that does what a test tells it, in a process of its own or in this one."""

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from skipper.dataplane.handle import Card
from tests.conformance import fork_server
from tests.conformance.fork_server import ROOT, Forked
from tests.conformance.visitor import Visitor
from tests.freezing import freeze
from tests.handles import parsed, proved

REPLY_S = 100.0  # an emulated one takes long to import PyTorch; less than a test may take


class Memory(Visitor):
    """What an owner can be told to do, with others' buffers too. Runs wherever the owner is."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._arrays: dict[int, Any] = {}
        self._buffers: dict[int, RDMABuffer] = {}
        self._plugs: list[int] = []
        self._next = 0

    def make(self, content: bytes, writable: bool = True) -> tuple[int, bytes]:
        """Register a copy of `content`: (its name, the handle)."""
        array = self._allocate(len(content))
        array[:] = np.frombuffer(content, np.uint8)
        return self._register(array, writable)

    def make_filled(self, nbytes: int, value: int) -> tuple[int, bytes]:
        array = self._allocate(nbytes)
        array[:] = value
        return self._register(array, True)

    def content(self, name: int) -> bytes:
        return bytes(self._arrays[name])

    def fill(self, name: int, value: int) -> None:
        self._arrays[name][:] = value

    def drop(self, name: int) -> None:
        self._buffers.pop(name).drop()

    def forget(self, name: int) -> None:
        """Let go of buffer and memory without dropping."""
        del self._buffers[name], self._arrays[name]

    def forget_memory(self, name: int) -> None:
        """Of a buffer that was dropped."""
        del self._arrays[name]

    def drop_and_fill(self, name: int, value: int) -> None:
        self.drop(name)
        self.fill(name, value)

    def churn(self, count: int, nbytes: int) -> None:
        """Register, export and drop many buffers."""
        for _ in range(count):
            buffer = RDMABuffer(self._allocate(nbytes))
            buffer.serialize()
            buffer.drop()

    def limit_descriptors(self, spare: int) -> None:
        """Let this process open so many more files, until `lift_limits`."""
        _limit(resource.RLIMIT_NOFILE, 256)
        with contextlib.suppress(OSError):
            while True:
                self._plugs.append(os.dup(0))
        for _ in range(spare):
            os.close(self._plugs.pop())

    def limit_memory(self, spare: int) -> None:
        """Let this process have so many more bytes of address space."""
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _limit(resource.RLIMIT_AS, used + spare)

    def lift_limits(self) -> None:
        while self._plugs:
            os.close(self._plugs.pop())
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
            _limit(kind, resource.getrlimit(kind)[1])

    def mappings(self) -> int:
        """How many ranges of memory this process has mapped."""
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)

    def footprint(self) -> tuple[int, int, int]:
        """(open file descriptors, resident KiB, threads)."""
        return *footprint(), len(os.listdir("/proc/self/task"))

    def _allocate(self, nbytes: int) -> Any:
        return dataplane.empty_array(nbytes, np.uint8) if self._shared else np.empty(nbytes, np.uint8)

    def _register(self, array: Any, writable: bool) -> tuple[int, bytes]:
        self._next += 1
        self._arrays[self._next] = array
        self._buffers[self._next] = buffer = RDMABuffer(array, writable=writable)
        return self._next, buffer.serialize()


class LocalOwner:
    """The same process as the test."""

    def __init__(self, *, shared: bool) -> None:
        self._memory = Memory(shared=shared)
        self._thread = ThreadPoolExecutor(1)
        self._told: Future[Any] | None = None

    def __call__(self, method: str, *args: Any) -> Any:
        return getattr(self._memory, method)(*args)

    def tell(self, method: str, *args: Any) -> None:
        """To be done by a thread of its own."""
        self._told = self._thread.submit(self, method, *args)

    def reply(self) -> Any:
        assert self._told is not None
        return self._told.result(REPLY_S)

    def close(self) -> None:
        self._thread.shutdown()


class RemoteOwner:
    """A process of its own."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        shared: bool,
        far: bool = False,
        module: str = "tests.conformance.owner",
        prefix: Sequence[str] = (),
        inherits: bool = False,
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            settings: For `dataplane.configure` over there.
            shared: Whether its memory comes from `dataplane.empty_array`.
            far: Whether its handles are to look as if it ran on another host.
            module: The program: one that calls `main` with what it can be told to do.
            prefix: A command that runs the program, such as `ip netns exec NAME`, in the same process.
            inherits: Whether it has the limits and rights of the calling thread, beside its environment.
        """
        self._far = far
        self._connection, theirs = Pipe()
        self.process: subprocess.Popen[bytes] | Forked
        if prefix or inherits:
            command = [*prefix, sys.executable, "-m", module, str(theirs.fileno())]
            self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        else:
            self.process = fork_server.server().start(module, theirs.fileno())
        theirs.close()
        self._connection.send((dict(settings), shared))
        self.reply()

    def __call__(self, method: str, *args: Any) -> Any:
        self.tell(method, *args)
        return self.reply()

    def tell(self, method: str, *args: Any) -> None:
        """Without waiting for the answer."""
        self._connection.send((method, args))

    def reply(self) -> Any:
        if not self._connection.poll(REPLY_S):
            raise TimeoutError("the owner does not answer")
        error, value = self._connection.recv()
        if error is not None:
            raise error
        if self._far and isinstance(value, tuple) and isinstance(value[1], bytes):
            name, handle = value
            return name, from_afar(handle)
        return value

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until its last thread has stopped."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.wait(REPLY_S)

    def close(self) -> None:
        if not self._connection.closed:
            self.kill()
            self._connection.close()


Owner = LocalOwner | RemoteOwner


def replies(told: Sequence[Owner]) -> list[Any]:
    """What each of them answers; the first error, once all have answered."""
    answers: list[Any] = []
    errors: list[Exception] = []
    for one in told:
        try:
            answers.append(one.reply())
        except Exception as error:  # noqa: BLE001 - of whatever was asked for
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


def from_afar(raw: bytes) -> bytes:
    """The handle as it would be if its owner ran on another host: no pidfd, no page in reach, only the network."""
    return forged(raw, host=1)


def forged(raw: bytes, **changes: Any) -> bytes:
    """A handle with another owner in its card, otherwise the same."""
    handle, offset, nbytes = parsed(raw)
    owner = dataclasses.replace(handle.card.owner, **changes)
    card = Card.make(owner, handle.card.page_token, handle.card.sections)
    return proved(card.encoded, handle.body(offset, nbytes))


def _limit(kind: int, soft: int) -> None:
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def footprint() -> tuple[int, int]:
    """(open file descriptors, resident KiB) of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return len(os.listdir("/proc/self/fd")), resident


def main(kind: Callable[..., Any] = Memory) -> None:
    """Do what comes in by the descriptor that the program's argument names, until nobody is there any more."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    settings, shared = connection.recv()
    dataplane.configure(**settings)
    memory = kind(shared=shared)
    connection.send((None, "ready"))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, getattr(memory, method)(*args)))
        except Exception as error:  # noqa: BLE001 - it is the test that asked for it
            connection.send((error, None))


if __name__ == "__main__":
    main()
