"""Calls to the processes of these tests: JSON over sockets of this user."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any


def serve(path: str | Path, handlers: Any) -> None:
    """Answer calls, one connection after the other, until somebody calls ``end``; this thread runs the methods."""
    with Listener(str(path), family="AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                if not _answer(connection, handlers):
                    return


def _answer(connection: Connection, handlers: Any) -> bool:
    while True:
        try:
            method, arguments = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return True
        try:
            answer = {"result": None if method == "end" else getattr(handlers, method)(**arguments)}
        except Exception as error:  # noqa: BLE001  (goes to whoever asked)
            answer = {"error": f"{type(error).__name__}: {error}"}
        with suppress(BrokenPipeError):  # nobody waits for it any more
            connection.send_bytes(json.dumps(answer).encode())
        if method == "end":
            return False


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
