"""Ends of listeners and of processes, by the thousand: ``python -m tests.control.endings --times N --processes M``.

gRPC aborts a process in which an operation is begun on a completion queue that is shut down. Here listeners are closed
while others dial them, greet, send and hang up, in all orders that chance brings; and whole processes end in the middle
of that, with and without closing anything. Whoever is aborted has an exit status other than 0, and so has this command.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipper.control.wire import grpc_poller

grpc_poller.choose()

from skipper.control.wire.auth_listener import AuthListener  # noqa: E402
from skipper.control.wire.grpc_streams import OutgoingStream  # noqa: E402
from skipper.control.wire.handshake import WELCOME, Dial, Guest  # noqa: E402
from skipper.control.wire.link import Link  # noqa: E402
from skipper.control.wire.messages import Bye, Ping  # noqa: E402
from skipper.control.wire.process_ref import ProcessRef  # noqa: E402

if TYPE_CHECKING:
    from skipper.control.wire.message_stream import MessageStream

PATIENCE_S = 30.0
ENDS = ("open", "closing", "cut", "dropped")
"""What a process has done with its listeners when it ends."""

_SECRET = b"s" * 32
_numbers = itertools.count()


class _Server:
    """A listener, and the links of those that it has let in, on which a thread posts as fast as it can."""

    def __init__(self) -> None:
        self.name = f"endings-{os.getpid()}-{next(_numbers)}"
        self.address = f"unix-abstract:{self.name}"
        self.links: list[Link] = []
        self.closed = threading.Event()
        self.listener = AuthListener(
            [(self.address, None)], self.name, _SECRET, on_proven=self._let_in, on_closed=self.closed.set
        )

    def _let_in(self, guest: Guest, peer: ProcessRef) -> None:
        link = Link(peer, _ignore, _ignore)
        link.connected = True
        self.links.append(link)
        link.open(guest.stream, greeting=WELCOME)

    def close(self, chance: random.Random) -> None:
        """End it, as an agent or a process does, with the streams in whatever state they are."""
        for link in list(self.links):
            link.post(Bye())
        self.listener.close()
        for link in list(self.links):
            what = chance.randrange(3)
            if what == 0:
                link.post(Ping())
            elif what == 1:
                link.lose("the end")
        if chance.random() < 0.5 or not self.closed.wait(chance.random() * 0.01):
            self.listener.cut()
        for link in list(self.links):
            link.post(Ping())
        assert self.closed.wait(PATIENCE_S), "a listener does not end"
        for link in list(self.links):
            link.post(Ping())
            link.lose("the end")


class _Client:
    """Dials, says something once the stream stands, and hangs up sooner or later."""

    def __init__(self, server: _Server, chance: random.Random) -> None:
        self.over = threading.Event()
        self._greets = chance.random() < 0.9
        self._says_bye = chance.random() < 0.3
        self.link = Link(ProcessRef(server.name, "", "server"), _ignore, self._ended)
        me = ProcessRef(secrets.token_hex(8), "", "client")
        self.dial = Dial(
            me,
            self.link.peer,
            _SECRET if self._greets else b"x" * 32,
            on_open=self._opened,
            on_failure=lambda reason, status: self.over.set(),
            address=server.address,
        )
        assert isinstance(self.dial.stream, OutgoingStream)
        self.thread = threading.Thread(target=self.dial.stream.run, daemon=True)
        self.thread.start()

    def _opened(self, stream: MessageStream) -> None:
        self.link.connected = True
        self.link.open(stream)
        for _ in range(3):
            self.link.post(Ping())
        if self._says_bye:
            self.link.post(Bye())

    def _ended(self, link: Link, reason: str) -> None:
        link.lose(reason)
        self.over.set()

    def hang_up(self) -> None:
        """Whether the stream stands or is still being dialed."""
        self.dial.give_up("the end")
        self.link.lose("the end")

    def join(self) -> None:
        """Wait for the stream's thread."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the thread of a stream does not end"


def _ignore(*_: Any) -> None:
    """Nobody reads it."""


def end_one(chance: random.Random) -> None:
    """Begin a listener, have some dial it, and end it while they do."""
    server = _Server()
    clients = [_Client(server, chance) for _ in range(chance.randrange(4))]
    time.sleep(chance.choice((0, 0, 0.001, 0.003, 0.006)) * chance.random())
    late = [_Client(server, chance)] if chance.random() < 0.3 else []
    server.close(chance)
    for client in clients + late:
        client.hang_up()
    for client in clients + late:
        client.join()


def end_many(times: int, seed: int) -> None:
    """`end_one`, so many times."""
    chance = random.Random(seed)
    for _ in range(times):
        end_one(chance)


def end_this_process(how: str, seed: int) -> None:
    """Have this process end in the middle of streams that are dialed and written to by threads that go on."""
    chance = random.Random(seed)
    servers = [_Server(), _Server()]
    clients = [_Client(chance.choice(servers), chance) for _ in range(4)]
    links = [client.link for client in clients]

    def post() -> None:
        while True:
            for link in links + [link for server in list(servers) for link in list(server.links)]:
                link.post(Ping())

    def dial(left: tuple[_Server, ...]) -> None:
        while True:
            clients.append(_Client(chance.choice(left), chance))

    threading.Thread(target=post, daemon=True).start()
    threading.Thread(target=dial, args=(tuple(servers),), daemon=True).start()
    time.sleep(chance.random() * 0.03)
    for server in servers:
        if how in ("closing", "cut"):
            server.listener.close()
        if how == "cut":
            server.listener.cut()
    if how == "dropped":
        servers.clear()


def end_processes(times: int, seed: int) -> list[str]:
    """Have processes end, one after the other, in every way; returns what went wrong."""
    wrong = []
    for number in range(times):
        how = ENDS[number % len(ENDS)]
        command = [sys.executable, "-m", "tests.control.endings", "--end", how, "--seed", str(seed + number)]
        ended = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if ended.returncode != 0:
            wrong.append(f"{how}, seed {seed + number}: status {ended.returncode}: {ended.stderr[:500]}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.control.endings", description=__doc__)
    parser.add_argument("--times", type=int, default=0, help="how many listeners begin and end")
    parser.add_argument("--processes", type=int, default=0, help="how many processes do")
    parser.add_argument("--seed", type=int, default=0, help="what chance begins with")
    parser.add_argument("--end", choices=ENDS, help="be one of the processes")
    options = parser.parse_args(arguments)
    if options.end is not None:
        end_this_process(options.end, options.seed)
        return 0
    end_many(options.times, options.seed)
    print(f"{options.times} listeners have ended")
    wrong = end_processes(options.processes, options.seed)
    print(f"{options.processes} processes have ended, {len(wrong)} of them wrongly", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
