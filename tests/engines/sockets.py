"""Calls to the processes of these tests: JSON over sockets of this user."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any


def serve(path: str | Path, handlers: Any, step: Callable[[], bool] = lambda: False) -> None:
    """Answer calls, one after the other, until somebody calls ``end``; this thread runs the methods.

    Between two calls it runs ``step``, as long as that says that there is more to do.
    """
    calls: SimpleQueue[_Call] = SimpleQueue()
    with Listener(str(path), family="AF_UNIX") as listener:
        Thread(target=_accept, args=(listener, calls), daemon=True).start()
        while True:
            is_busy = step()
            with suppress(Empty):
                if not calls.get(block=not is_busy).run(handlers):
                    return


class _Call:
    """One that somebody waits for."""

    def __init__(self, connection: Connection, method: str, arguments: dict[str, Any]) -> None:
        self._connection = connection
        self._method = method
        self._arguments = arguments
        self._is_answered = Event()

    def run(self, handlers: Any) -> bool:
        """Run the method, and answer; whether there may be more calls."""
        is_last = self._method == "end"
        try:
            answer = {"result": None if is_last else getattr(handlers, self._method)(**self._arguments)}
        except Exception as error:  # noqa: BLE001  (goes to whoever asked)
            answer = {"error": f"{type(error).__name__}: {error}"}
        with suppress(BrokenPipeError):  # nobody waits for it any more
            self._connection.send_bytes(json.dumps(answer).encode())
        self._is_answered.set()
        return not is_last

    def wait(self) -> None:
        """Until it is answered."""
        self._is_answered.wait()


def _accept(listener: Listener, calls: SimpleQueue[_Call]) -> None:
    """Take calls, one connection after the other."""
    while True:
        try:
            connection = listener.accept()
        except OSError:  # it is closed
            return
        with connection, suppress(EOFError, ConnectionResetError):
            while True:
                method, arguments = json.loads(connection.recv_bytes())
                call = _Call(connection, method, arguments)
                calls.put(call)
                call.wait()


class CallFailedError(RuntimeError):
    """What the other process has raised."""


def call(path: str | Path, method: str, /, *, within_s: float = 200.0, **arguments: Any) -> Any:
    """Have another process run a method, and return what it has returned."""
    return begin(path, method, within_s=within_s, **arguments)()


def begin(path: str | Path, method: str, /, *, within_s: float = 200.0, **arguments: Any) -> Callable[[], Any]:
    """The same, without waiting; returns a function that waits."""
    connection = Client(str(path), family="AF_UNIX")
    connection.send_bytes(json.dumps([method, arguments]).encode())
    end = time.monotonic() + within_s

    def result() -> Any:
        with connection:
            if not connection.poll(max(end - time.monotonic(), 0.0)):
                raise TimeoutError(f"{method} took more than {within_s} s")
            answer = json.loads(connection.recv_bytes())
        if "error" in answer:
            raise CallFailedError(answer["error"])
        return answer["result"]

    return result
