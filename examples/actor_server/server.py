"""Actors in Python for callers in any language: two that are called by name until Ctrl-C. The caller is `client.mjs`.

``board`` is an object of a plain class and lives here; ``models`` is a mesh of actors in two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from skipper.control import Actor, current_rank, endpoint, this_host
from skipper.control.rpc import ActorServer


class Board:
    """Tasks to be solved and graded. One call at a time is all that an actor server lets in, so it needs no lock."""

    def __init__(self, tasks: Sequence[tuple[int, int]]) -> None:
        self._open = dict(enumerate(tasks))
        self._rewards: dict[int, float] = {}

    def next_task(self) -> dict[str, object] | None:
        """The next task without a reward; None when there is none left."""
        for number, (left, right) in self._open.items():
            if number not in self._rewards:
                return {"number": number, "left": left, "right": right}
        return None

    def report(self, number: int, reward: float) -> None:
        """Take note of a reward.

        Raises:
            KeyError: there is no such task.
        """
        if number not in self._open:
            raise KeyError(f"there is no task {number}")
        self._rewards[number] = reward

    def mean_reward(self) -> float:
        """Over the tasks so far."""
        return sum(self._rewards.values()) / len(self._rewards)


class Model(Actor):
    """Solves tasks; the second of them with little care."""

    @endpoint
    def answer(self, left: int, right: int) -> int:
        """What it takes for the sum."""
        return left + right + (current_rank().rank if left > 10 else 0)


def read_or_make_secret(path: Path) -> bytes:
    """The secret that server and callers share, from a file that its owner alone may read."""
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    return path.read_bytes()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("secret_file", type=Path, help="holds the secret; made if it is not there")
    parser.add_argument("--port", type=int, default=0, help="on which to listen (default: a free one)")
    options = parser.parse_args(arguments)

    models = this_host().spawn_procs({"replicas": 2}).spawn("models", Model)
    with ActorServer("127.0.0.1", options.port, secret=read_or_make_secret(options.secret_file)) as server:
        server.register("board", Board([(1, 2), (20, 22), (30, 12)]))
        server.register("models", models)
        print(server.address, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
