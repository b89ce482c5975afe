"""What the processes of a job leave open, and to whom: examined from outside, by /proc, while the job runs.

The processes are those with something named by Skipper (a socket, anonymous memory), and all their descendants. It
examines listening and bound sockets, shared memory, files, named pipes, and the folders and files that Skipper keeps
for the user. It does not connect to anything.

As JSON:

    {"schema_version": 1, "tool": "exposure", "processes": [{"pid", "uid", "command"}],
     "items": [{"kind", "name", "pids", "uid", "mode", "reach", "designed", "why"}],
     "open": <how many items are open although nobody asked for it>, "unseen": [<processes that did not let us look>]}
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

PROC = Path("/proc")
_SHM = "/dev/shm/"
_MARKS = ("@skipper-", "memfd:skipper")
_DELETED = " (deleted)"

_PROOF = "asks for a proof of the secret first"
_SAME_USER = "takes this user's processes only"
_UCX_WAKES = "UCX's bell within a host: a datagram wakes its owner and is not read"
_BY_DESIGN = (("@skipper-logs-", _SAME_USER), ("@skipper-", _PROOF))

_LISTENS = "0A"  # TCP_LISTEN of include/net/tcp_states.h
_UNCONNECTED = "07"  # a socket of UDP that was bound and takes from everybody
_ACCEPTS = 1 << 16  # __SO_ACCEPTCON of include/uapi/linux/net.h
_DATAGRAM = 2
_AUTOBOUND = re.compile(r"@[0-9a-f]{5}")  # unix(7): a name that the kernel chose


class Reach(enum.StrEnum):
    """Who can access a thing, by what the kernel checks."""

    USER = "this user"
    GROUP = "a group"
    HOST = "everybody on this host"
    NETWORK = "the network"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that is open.

    Attributes:
        kind: tcp, udp, unix, abstract, shm, memfd, sysv, file, fifo or directory.
        name: Its address, name or path.
        pids: Processes that have it open; empty if no process does.
        uid: Its owner.
        mode: Permission bits; None if there are none, as for sockets without a file.
        reach: Who can access it.
        designed: Whether that is intended, or was asked for.
        why: The reason in a few words.
    """

    kind: str
    name: str
    pids: tuple[int, ...]
    uid: int
    mode: int | None
    reach: Reach
    designed: bool
    why: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; the mode in octal digits."""
        mode = None if self.mode is None else f"{self.mode:04o}"
        return {**asdict(self), "pids": list(self.pids), "mode": mode, "reach": str(self.reach)}


@dataclass(frozen=True, slots=True)
class Seen:
    """A process that was examined."""

    pid: int
    uid: int
    command: str


@dataclass(frozen=True, slots=True)
class Exposure:
    """The result.

    Attributes:
        processes: The examined processes.
        items: What they leave open, the widest first.
        unseen: Pids of processes that the system did not let us examine.
    """

    processes: Sequence[Seen]
    items: Sequence[Item]
    unseen: Sequence[int] = field(default=())

    @property
    def open(self) -> Sequence[Item]:
        """What is open although nobody asked for it."""
        return [item for item in self.items if not item.designed]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool": "exposure",
            "processes": [asdict(process) for process in self.processes],
            "items": [item.to_dict() for item in self.items],
            "open": len(self.open),
            "unseen": list(self.unseen),
        }


def expose(pids: Collection[int] | None = None, *, asked: Collection[str] = ()) -> Exposure:
    """Find out what the processes of a job leave open.

    Args:
        pids: Process ids of scripts or other processes, each with its descendants; None: all of Skipper's of this user.
        asked: What the user has asked for: "HOST:PORT" of TCP sockets, "HOST:*" for all of an address, names of
            abstract sockets with their "@", paths.

    Raises:
        ProcessLookupError: One of `pids` does not exist.
    """
    for pid in pids or ():
        if not (PROC / str(pid)).exists():
            raise ProcessLookupError(f"there is no process {pid}")
    roots = list(pids) if pids is not None else _processes_of_skipper()
    found: list[Item] = []
    seen: list[Seen] = []
    unseen: list[int] = []
    for pid in _with_descendants(roots):
        try:
            items = list(_items_of(pid))
            seen.append(Seen(pid, (PROC / str(pid)).stat().st_uid, _command(pid)))
            found += items
        except PermissionError:
            unseen.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended in the meantime
    merged = [_asked_for(item, asked) for item in _merged(found)]
    order = list(Reach)
    merged.sort(key=lambda item: (item.designed, -order.index(item.reach), item.kind, item.name))
    return Exposure(seen, merged, unseen)


def _processes_of_skipper() -> list[int]:
    here = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]
    found = []
    for pid in here:
        with contextlib.suppress(OSError):
            if pid != os.getpid() and (PROC / str(pid)).stat().st_uid == os.geteuid() and _is_marked(pid):
                found.append(pid)
    return found


def _is_marked(pid: int) -> bool:
    names = [link.removeprefix("/") for _, link in _descriptors(pid)]
    bound = sockets_of(pid, _socket_inodes(pid))
    return any(name.startswith(_MARKS) for name in (*names, *(item.name for item in bound)))


def _with_descendants(pids: Collection[int]) -> list[int]:
    """Each process once, parents first."""
    found: dict[int, None] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop(0)
        if pid not in found:
            found[pid] = None
            for children in (PROC / str(pid) / "task").glob("*/children"):
                with contextlib.suppress(OSError):
                    waiting += map(int, children.read_text().split())
    return list(found)


def _items_of(pid: int) -> Iterator[Item]:
    for item in sockets_of(pid, _socket_inodes(pid)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # nobody can find a socket whose file is gone
            yield _of_socket(item)
    for number, link in _descriptors(pid):
        with contextlib.suppress(FileNotFoundError):
            found = _of_descriptor(pid, number, link)
            if found is not None:
                yield found
    yield from _mapped(pid)
    yield from _places(pid)


def _of_socket(item: Socket) -> Item:
    """A listening or bound socket; only unix sockets with a path have permissions."""
    if item.kind == "unix":
        name = str(_seen_from_here(item.pid, item.name))
        return _of_path("unix", name, (item.pid,), "a unix socket that this process has bound")
    if item.kind == "abstract":
        why = next((why for name, why in _BY_DESIGN if item.name.startswith(name)), "")
        if not why and item.is_datagram and _is_autobound(item.name):
            why = _UCX_WAKES
        return Item(
            item.kind, item.name, (item.pid,), item.uid, None, Reach.HOST, bool(why), why or "nothing of Skipper's"
        )
    reach = Reach.HOST if item.is_loopback else Reach.NETWORK
    return Item(item.kind, item.name, (item.pid,), item.uid, None, reach, False, "a port that is open")


def _seen_from_here(pid: int, name: str) -> Path:
    """A path as a process has given it to bind(2): from its working directory, or by its own descriptors."""
    process = PROC / str(pid)
    path = Path(name)
    if path.is_relative_to("/proc/self"):
        path = process / path.relative_to("/proc/self")
    path = process / "cwd" / path
    return path.parent.resolve(strict=True) / path.name


def _of_descriptor(pid: int, number: int, link: str) -> Item | None:
    """What a descriptor refers to, if others could access it."""
    path = PROC / str(pid) / "fd" / str(number)
    name = link.removesuffix(_DELETED)
    if name.startswith("/memfd:"):
        status = path.stat()
        return _anonymous("memfd", name.removeprefix("/"), pid, status)
    if not name.startswith("/") or (name.startswith(("/dev/", "/proc/", "/sys/")) and not name.startswith(_SHM)):
        return None
    status = path.stat()
    if stat.S_ISFIFO(status.st_mode):
        why = "a named pipe"
        return None if link.endswith(_DELETED) else _of_path("fifo", name, (pid,), why, own=number > 2)
    if not stat.S_ISREG(status.st_mode):
        return None
    kind = "shm" if name.startswith(_SHM) else "file"
    if not status.st_nlink:
        return _anonymous(kind, name, pid, status)
    if not _is_writable(pid, number):
        return None  # programs, libraries and data that it reads
    why = "input or output of the user's choice" if number <= 2 else "a file that this process writes"
    return _of_path(kind, name, (pid,), why, own=number > 2)


def _anonymous(kind: str, name: str, pid: int, status: os.stat_result) -> Item:
    """Without a name, only the process gives access to it, and the kernel allows that to its user (ptrace(2))."""
    mode = stat.S_IMODE(status.st_mode)
    return Item(kind, name, (pid,), status.st_uid, mode, Reach.USER, True, "has no name: only by /proc of the process")


def _mapped(pid: int) -> Iterator[Item]:
    """Shared memory that is mapped but not open: of System V, and of peers."""
    names = set()
    for line in (PROC / str(pid) / "maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].endswith("s"):
            names.add((fields[4], fields[5]))
    for inode, name in sorted(names):
        if name.startswith("/SYSV"):
            yield from _system_v(pid, inode)
        elif name.startswith(_SHM) and not name.endswith(_DELETED):
            with contextlib.suppress(FileNotFoundError):
                yield _of_path("shm", name, (pid,), "named memory")


def _system_v(pid: int, identifier: str) -> Iterator[Item]:
    """A segment of System V; its inode is its identifier."""
    with contextlib.suppress(FileNotFoundError):
        for line in (PROC / "sysvipc" / "shm").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] == identifier:
                mode = int(fields[2], 8) & 0o777
                reach = _reach_of_mode(mode)
                yield Item("sysv", fields[1], (pid,), int(fields[7]), mode, reach, reach is Reach.USER, "by its mode")


def _places(pid: int) -> Iterator[Item]:
    """Files that Skipper keeps for this user: connection files, secrets, folders of jobs."""
    uid = (PROC / str(pid)).stat().st_uid
    environment = _environment(pid)
    temporary = Path(next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), "/tmp"))
    expected = [Path(environment["XDG_RUNTIME_DIR"]) / "skipper"] if environment.get("XDG_RUNTIME_DIR") else []
    expected.append(temporary / f"skipper-{uid}")
    # Other users may have made something of that name; other names are not ours.
    theirs = [path for path in sorted(temporary.glob("skipper-*")) if path not in expected]
    mine = [path for path in theirs if path.lstat().st_uid == uid]
    named = environment.get("SKIPPER_SECRET_FILE")
    for path in (*expected, *mine, *([Path(named)] if named else ())):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield from _below(path, uid)


def _below(path: Path, uid: int) -> Iterator[Item]:
    status = path.lstat()
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "fifo" if stat.S_ISFIFO(status.st_mode) else "file"
    item = _of_path(kind, str(path), (), "kept for this user")
    if status.st_uid != uid or stat.S_ISLNK(status.st_mode):
        item = replace(item, designed=False, why=f"not a plain {kind} of this user")
    yield item
    if kind == "directory" and item.designed:
        with contextlib.suppress(PermissionError):
            for entry in sorted(path.iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    yield from _below(entry, uid)


def _of_path(kind: str, name: str, pids: tuple[int, ...], why: str, *, own: bool = True) -> Item:
    """A thing with a path: its mode and the folders above it decide who can access it.

    `own` is false where the process' user has redirected input or output to it.
    """
    path = Path(name)
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    reach = _reach_of_mode(mode)
    for above in path.absolute().parents:
        over = above.stat().st_mode
        if reach is not Reach.USER and not over & stat.S_IXOTH:
            reach = Reach.GROUP if over & stat.S_IXGRP else Reach.USER
    designed = reach is Reach.USER or not own
    return Item(kind, name, pids, status.st_uid, mode, reach, designed, why)


def _reach_of_mode(mode: int) -> Reach:
    return Reach.HOST if mode & 0o007 else Reach.GROUP if mode & 0o070 else Reach.USER


def _asked_for(item: Item, asked: Collection[str]) -> Item:
    if item.designed:
        return item
    host = item.name.rpartition(":")[0] if item.kind in ("tcp", "udp") else item.name
    if item.name in asked or f"{host}:*" in asked:
        return replace(item, designed=True, why="asked for")
    return item


def _merged(items: Sequence[Item]) -> list[Item]:
    """Each item once, with all processes that have it open."""
    found: dict[Item, list[int]] = {}
    for item in items:
        found.setdefault(replace(item, pids=()), []).extend(item.pids)
    return [replace(item, pids=tuple(sorted(set(pids)))) for item, pids in found.items()]


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    folder = PROC / str(pid) / "fd"
    for entry in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield int(entry), os.readlink(folder / entry)


def _socket_inodes(pid: int) -> set[int]:
    links = (link for _, link in _descriptors(pid))
    return {int(link.removeprefix("socket:[").rstrip("]")) for link in links if link.startswith("socket:[")}


def _is_writable(pid: int, number: int) -> bool:
    text = (PROC / str(pid) / "fdinfo" / str(number)).read_text()
    flags = next(line.split()[1] for line in text.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _environment(pid: int) -> dict[str, str]:
    text = (PROC / str(pid) / "environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in text.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _command(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket that listens, or that is bound and takes datagrams.

    Attributes:
        kind: tcp, udp, unix or abstract.
        name: ``IP:PORT``, a path, or a name of an abstract socket with its "@".
        pid: Process id of the process.
        uid: User id of its owner.
        is_loopback: Whether only this host reaches its address; False for unix sockets.
        is_datagram: Whether it is a unix socket without connections.
    """

    kind: str
    name: str
    pid: int
    uid: int
    is_loopback: bool = False
    is_datagram: bool = False


def sockets_of(pid: int, inodes: Collection[int]) -> Iterator[Socket]:
    """The listening and bound sockets of a process, by their inodes, in its network namespace."""
    owner = (PROC / str(pid)).stat().st_uid
    for table, kind, wanted in (("tcp", "tcp", _LISTENS), ("udp", "udp", _UNCONNECTED), ("raw", "raw", _UNCONNECTED)):
        for version in ("", "6"):
            yield from _internet(pid, f"{table}{version}", kind, wanted, inodes)
    for fields in _rows(pid, "unix"):
        if len(fields) == 8 and int(fields[6]) in inodes:
            is_datagram = int(fields[4], 16) == _DATAGRAM
            if is_datagram or int(fields[3], 16) & _ACCEPTS:
                kind = "abstract" if fields[7].startswith("@") else "unix"
                yield Socket(kind, fields[7], pid, owner, is_datagram=is_datagram)


def _is_autobound(name: str) -> bool:
    """Whether the kernel chose the name of an abstract socket."""
    return bool(_AUTOBOUND.fullmatch(name))


def _internet(pid: int, table: str, kind: str, wanted: str, inodes: Collection[int]) -> Iterator[Socket]:
    for fields in _rows(pid, table):
        if fields[3] == wanted and int(fields[9]) in inodes:
            host, _, port = fields[1].partition(":")
            ip = _ip(host)
            text = f"[{ip}]" if ip.version == 6 else str(ip)
            yield Socket(kind, f"{text}:{int(port, 16)}", pid, int(fields[7]), is_loopback=ip.is_loopback)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of 32 bits in hexadecimal, each in native byte order."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    ip = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def _rows(pid: int, table: str) -> Iterator[list[str]]:
    path = PROC / str(pid) / "net" / table
    if path.exists():  # not every kernel has IPv6
        for line in path.read_text(errors="replace").splitlines()[1:]:
            yield line.split(maxsplit=7 if table == "unix" else -1)
