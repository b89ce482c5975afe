"""Actors of these tests, and processes that serve them; no pytest and no torch here, so that those start quickly."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skipper.control import Actor, endpoint, idempotent
from skipper.control.rpc import ActorServer, MetadataMapping, RpcClient, is_cancelled, remaining_s

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 20.0
"""Bound on waits that take milliseconds where nothing is wrong."""


class NotCallable(Exception):  # noqa: N818
    """An exception that can be told from those of the library."""


class Calculator:
    """A plain class."""

    kind = "pocket"

    def __init__(self, label: str = "calculator") -> None:
        self._label = label
        self.count = 0

    def add(self, left: int, right: int = 2) -> int:
        """Add two numbers."""
        self.count += 1
        return left + right

    async def add_later(self, left: int, *, right: int, after_s: float = 0.0) -> int:
        await asyncio.sleep(after_s)
        return left + right

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @idempotent
    def label(self) -> str:
        return self._label

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def fail(self, words: str) -> None:
        raise NotCallable(words)

    def fail_with_lock(self) -> None:
        error = NotCallable("it has a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def give_lock(self) -> Any:
        return threading.Lock()

    def quit(self) -> None:
        raise SystemExit(3)

    def counted(self) -> int:
        return self.count

    def close(self) -> str:
        return "closed"

    def _private(self) -> str:
        return "never"


class Gate:
    """Holds calls up until it is told to let them go."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.order: list[int] = []
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def wait(self, number: int = 0) -> int:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        if not self._open.wait(PATIENCE_S):
            raise TimeoutError
        with self._lock:
            self.inside -= 1
            self.order.append(number)
        return number

    def let_go(self) -> None:
        self._open.set()


class Patient:
    """Does what takes long."""

    def __init__(self) -> None:
        self.noticed = threading.Event()
        self.started = threading.Event()

    def wait_until_cancelled(self) -> str:
        self.started.set()
        deadline = time.monotonic() + PATIENCE_S
        while not is_cancelled() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.noticed.set()
        return "nobody wants to know"

    async def wait_in_vain(self) -> None:
        self.started.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            self.noticed.set()

    def left(self) -> float | None:
        return remaining_s()


class Relay:
    """Calls on."""

    def __init__(self, make_client: Callable[[], RpcClient[Any]]) -> None:
        self._client = make_client()

    def left_there(self) -> float | None:
        left: float | None = self._client.left.sync()
        return left

    async def left_there_async(self) -> float | None:
        left: float | None = await self._client.left()
        return left


class Fragile:
    """Dies when asked to."""

    def __init__(self, path: str) -> None:
        self._path = path

    def die(self) -> None:
        self._note()
        os.kill(os.getpid(), signal.SIGKILL)

    @idempotent
    def die_once(self) -> str:
        self._note()
        if self.times() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"survived in {os.getpid()}"

    def times(self) -> int:
        return Path(self._path).read_text().count("x")

    def _note(self) -> None:
        with open(self._path, "a") as file:
            file.write("x")


class Worker(Actor):
    """An actor of a mesh."""

    @endpoint
    def add(self, left: int, right: int) -> int:
        return left + right

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        raise NotCallable("in a mesh")

    @endpoint
    def die(self) -> None:
        os._exit(1)

    @endpoint
    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class Host:
    """A process that serves a `Calculator` and a `Fragile`, as ``calculator`` and ``fragile``."""

    def __init__(self, *, port: int = 0, metadata: str | None = None, env: dict[str, str] | None = None, **config: Any):
        config |= {"port": port, "metadata": metadata}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.control.rpc.parties", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the host has not started"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def url(self, name: str = "calculator") -> str:
        return f"actor://{self.address}/{name}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # until then it may still answer

    def kill(self) -> None:
        with self.process:  # closes its pipes
            self.process.kill()

    def end(self) -> None:
        """Have it stop in good order."""
        self.process.communicate(timeout=PATIENCE_S)


def main(config: dict[str, Any]) -> None:
    if "descriptors" in config:
        resource.setrlimit(resource.RLIMIT_NOFILE, (config["descriptors"],) * 2)
    mapping = None
    if config["metadata"] is not None:
        mapping = MetadataMapping(config["metadata"], lease_s=config.get("lease_s", 1.0))
    secret = bytes.fromhex(config["secret"]) if "secret" in config else None
    with ActorServer("127.0.0.1", config["port"], mapping, secret=secret) as server:
        server.register(config.get("name", "calculator"), Calculator(config.get("label", "calculator")))
        server.register("fragile", Fragile(config.get("path", os.devnull)))
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
