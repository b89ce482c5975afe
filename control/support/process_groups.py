"""`RunGroups`: ends all process groups of ``torch.distributed`` that one run has made in this process.

Only those of NCCL can be aborted through torch. `abort` of gloo's does nothing (PyTorch 2.13), and so does
`destroy_process_group`, as long as something refers to a group: a sharded module, a work that nobody has waited for,
the traceback of the error. So gloo is made to believe that the other process has ended: its connections are shut down
for reading. All that wait for a message then raise, functional collectives (``wait_tensor``) included, and gloo's
threads have nothing left to do. The connections to the store are shut down, too: ranks may wait there for one that does
not come.

gloo has a fault in this (`Pair::signalException` in its transport/tcp/pair.cc): a thread that waits for a message that
is in flight at this moment, in either direction, gets no error, and waits for as long as a collective may take, half an
hour by default. So a connection is shut down once no bytes move on it. Its socket stays open until the other process
has done the same and writes no more: bytes that are written into a closed connection would count as in flight.

Two waits have no connection yet. gloo waits for others to connect while it makes a group: then this process connects to
itself in their place. And a rank tries again and again to reach a store that was never created: then one is created.

Nothing of torch is imported here: code that waits in a collective has imported it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from skipper.trust import own_sockets
from skipper.trust.own_sockets import SocketPlace

_QUEUED_IN, _QUEUED_OUT = 0x541B, 0x5411  # FIONREAD and SIOCOUTQ of tcp(7)
_MOVED_AT = 120  # of tcp_info, linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received
_MOVED = struct.Struct("=QQ")
_PAIR = struct.Struct("=q")

_WAITING_CODE = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/graph.py")
"""Code of torch that waits for other ranks; backward passes wait below the last of these, unseen by Python."""

LOOK_S = 0.02
"""Seconds between two checks of the connections."""

PATIENCE_S = 2.0
"""How long a connection on which bytes move may stay: the other end may be frozen."""


STUCK_S = 0.3
"""How long code may take to leave before further steps are taken."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where the ranks of a run meet.

    Attributes:
        host: host of the store: an IP, or else a name.
        port: port of the store.
        size: how many ranks there are.
        is_here: whether it should be on this host.
    """

    host: str
    port: int
    size: int
    is_here: bool

    def is_end_of(self, here: SocketPlace, there: SocketPlace) -> bool:
        """Whether a connection of this process leads to the store, or from it.

        A user's connection to another host may have the same number at its other end.
        """
        if self.is_here and here.port == self.port:
            return True  # the kernel gives this port to nothing else on this host
        if there.port != self.port:
            return False
        try:
            return there.address == own_sockets.as_ipv6(self.host)
        except ValueError:
            return True  # a name, which other code resolved


class RunGroups:
    """The groups that any thread of this process makes from now on.

    Args:
        place: where the ranks of the run meet.
    """

    def __init__(self, place: StorePlace) -> None:
        self._place = place
        self._known = frozenset(own_sockets.descriptors().values())
        self._begin: float | None = None
        self._aborted: set[str] = set()
        self._moved: dict[int, tuple[int, int] | None] = {}
        self._held: dict[int, socket.socket] = {}
        self._knocked: set[int] = set()
        self._store: Any = None
        self._next_try = 0.0

    def abort(self) -> bool:
        """Make all waits in them raise. From any thread, one at a time; call it again for groups that are left or new.

        Code that does something else at the moment raises at its next collective.

        Returns:
            Whether no group is left.
        """
        if self._begin is None:
            self._begin = time.monotonic()
        self._abort_nccl()
        loops = list(_gloo_loops(self._known))
        of_gloo = {inode for loop in loops for inode in loop.connections}
        is_over = True
        has_store = False
        for fd, inode in own_sockets.descriptors().items():
            if inode in self._known or inode in self._held:
                continue
            copy = own_sockets.copy_of(fd, inode)
            if copy is None:
                continue
            with contextlib.ExitStack() as stack:
                stack.enter_context(copy)
                if own_sockets.is_listening(copy):
                    continue
                if inode not in of_gloo:
                    has_store |= self._end_if_store(copy)
                elif self._is_quiet(copy, inode):
                    own_sockets.shut(copy, socket.SHUT_RD)
                    self._held[inode] = copy
                    stack.pop_all()
                else:
                    is_over = False
        if self._has_taken(STUCK_S):
            for loop in loops:
                self._knock(*loop.listener)
            if not has_store and time.monotonic() > self._next_try:
                self._next_try = time.monotonic() + STUCK_S
                self.serve_store()
        return is_over

    def serve_store(self) -> None:
        """Create the store if it should be on this host and does not exist, for the ranks that try to reach it."""
        distributed = sys.modules.get("torch.distributed")
        if _distributed_c10d() is None or self._store is not None or not self._place.is_here:
            return
        place = self._place
        with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), timeout=STUCK_S):
            return  # there is one
        # Another rank of this host may be faster: then it is not needed here.
        with contextlib.suppress(RuntimeError):
            self._store = distributed.TCPStore(  # type: ignore[union-attr]
                place.host,
                place.port,
                place.size,
                is_master=True,
                timeout=timedelta(seconds=PATIENCE_S),
                wait_for_workers=False,
            )

    def close(self) -> None:
        """Close the connections that `abort` has shut down, once the other ends have done so. Idempotent."""
        self._store = None
        while self._held:
            self._held.popitem()[1].close()

    def _abort_nccl(self) -> None:
        """Abort the communicators of all groups at once: one by one they could wait for each other."""
        c10d = _distributed_c10d()
        if c10d is None or not c10d.is_nccl_available():
            return
        names = {group: name for group, name in list(c10d._world.pg_names.items()) if name not in self._aborted}
        backends = [backend for group in names for backend in _nccl_backends(group, c10d.ProcessGroupNCCL)]
        if not backends:
            return
        backends[0]._group_start()
        try:
            for backend in backends:
                backend.abort()
        finally:
            backends[0]._group_end()
        self._aborted.update(names.values())

    def _is_quiet(self, connection: socket.socket, inode: int) -> bool:
        """Whether no bytes have moved since the last check, or it has taken too long."""
        moved = _moved(connection)
        is_quiet = moved is not None and self._moved.get(inode) == moved
        self._moved[inode] = moved
        return is_quiet or self._has_taken(PATIENCE_S)

    def _has_taken(self, seconds: float) -> bool:
        return self._begin is not None and time.monotonic() > self._begin + seconds

    def _end_if_store(self, connection: socket.socket) -> bool:
        """End a connection if it leads to the store, or from it; returns whether it does."""
        both = own_sockets.ends(connection)
        if both is None or not self._place.is_end_of(*both):
            return False
        own_sockets.shut(connection)
        return True

    def _knock(self, fd: int, inode: int) -> None:
        """Connect to a listener of gloo in place of all ranks that it may wait for, and close the connection."""
        if inode in self._knocked:
            return
        self._knocked.add(inode)
        listener = own_sockets.copy_of(fd, inode)
        if listener is None:
            return
        with listener:
            address = listener.getsockname()[:2]
        for number in range(self._place.size):  # the pairs of a device are numbered from 0 on: gloo's listener.cc
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=STUCK_S) as knock:
                knock.sendall(_PAIR.pack(number))


def forget_process_groups(*, has_failed: bool) -> None:
    """Destroy the default process group of ``torch.distributed`` and all others, if code has left one.

    Args:
        has_failed: whether collectives may be running that will never end.
    """
    c10d = _distributed_c10d()
    if c10d is None:
        return
    if not has_failed:
        if c10d.is_initialized():
            c10d.destroy_process_group()
        return
    if c10d.is_initialized():
        c10d._abort_process_group()  # shutting them down would wait for work that runs on a GPU
    # Groups are numbered. One that could not be made has used a number, perhaps not on all ranks.
    c10d._world.group_count = 0


def collect_failed_run() -> None:
    """Free what a failed run has left in cycles of references: modules, and with them the groups that they refer to."""
    if _distributed_c10d() is not None:
        gc.collect()


def waits_in_torch(thread_id: int) -> str | None:
    """The place of a thread in code of torch that may wait for other ranks; None if it is in other code."""
    frame = sys._current_frames().get(thread_id)
    is_in_torch = False
    place = None
    while frame is not None:
        name = frame.f_code.co_filename
        place = place or f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        is_in_torch = is_in_torch or any(part in name for part in _WAITING_CODE)
        frame = frame.f_back
    return place if is_in_torch else None


def is_of_broken_group(error: BaseException) -> bool:
    """Whether an exception, or one of its causes, says that a process group or its store has broken.

    Those of gloo are plain `RuntimeError`; their text begins with the file of gloo that raised them.
    """
    kinds: Any = getattr(sys.modules.get("torch.distributed"), "DistError", ())
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, kinds) or (type(link) is RuntimeError and "/gloo/" in str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def _distributed_c10d() -> Any:
    """The module, if this process has imported it and can use it; else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    return sys.modules.get("torch.distributed.distributed_c10d")


def _nccl_backends(group: Any, kind: type) -> list[Any]:
    backends = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # not created yet: only operations create it
            backends.append(group._get_backend(device))
    return [backend for backend in backends if isinstance(backend, kind)]


@dataclass(frozen=True, slots=True)
class _GlooLoop:
    """The sockets that one of gloo's threads waits for.

    Attributes:
        listener: descriptor and inode of the socket that listens.
        connections: inodes of the connected sockets.
    """

    listener: tuple[int, int]
    connections: frozenset[int]


def _gloo_loops(known: Container[int]) -> Iterator[_GlooLoop]:
    """All of gloo's threads in this process.

    Each device of gloo has an epoll instance with one TCP socket that listens, the connections, and the end of a pipe
    by which it is woken. Event loops of others are woken by an eventfd (libuv, gRPC) or a Unix socket (asyncio).

    Args:
        known: sockets that do not belong to a run. A device whose listener is one of them is left out.
    """
    for _, waits_for in own_sockets.event_loops():
        by_kind: dict[str, list[tuple[int, int]]] = {}
        for entry in waits_for:
            by_kind.setdefault(_kind_of(*entry), []).append(entry)
        listeners = by_kind.get("listener", [])
        if len(listeners) == 1 and listeners[0][1] not in known and "other" not in by_kind:
            yield _GlooLoop(listeners[0], frozenset(inode for _, inode in by_kind.get("connection", [])))


def _kind_of(fd: int, inode: int) -> str:
    """What an epoll instance waits for: a listener or a connection of TCP, a pipe, gone, or other."""
    try:
        found = os.fstat(fd)
    except OSError:
        return "gone"
    if found.st_ino != inode:
        return "gone"
    if stat.S_ISFIFO(found.st_mode):
        return "pipe"
    copy = own_sockets.copy_of(fd, inode)
    if copy is None:
        return "other"
    with copy:
        return "listener" if own_sockets.is_listening(copy) else "connection"


def _moved(connection: socket.socket) -> tuple[int, int] | None:
    """How many bytes were sent and received, once all of them have arrived; None before, or if it has ended."""
    try:
        for question in (_QUEUED_IN, _QUEUED_OUT):
            if any(fcntl.ioctl(connection.fileno(), question, bytes(4))):
                return None
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOVED_AT + _MOVED.size)
    except OSError:
        return None
    out, into = _MOVED.unpack_from(told, _MOVED_AT)
    return out, into
