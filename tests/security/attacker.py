"""Another user of the host, who knows the code: ``python -m tests.security.attacker UID`` gives up root for that uid.

It is told what to attack by a line of JSON on its standard input, goes through all attacks again and again until that
ends, and says in a line of JSON for each what it has tried and what it got. Everything is imported before it gives up
root: the new user need not be able to read the interpreter's own files.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import io
import json
import os
import random
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from skipper import dataplane
from skipper.control.wire import auth
from skipper.control.wire._generated import actor_service_pb2 as actors_pb
from skipper.control.wire.frames import encode_process
from skipper.control.wire.local_stream import new_socket, pack_metadata
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION
from skipper.dataplane import RDMABuffer
from tests.security.job import CANARY

Hits = list[str]

LINK = "/skipper.control.v1.Link/Connect"
ACTORS = "/skipper.control.v1.ActorService/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SHORT_S = 0.3
"""How long to wait for an answer that nobody owes."""
TALKS = 16
"""So many talks go on side by side: most of each is waiting for what does not come."""
MOST_NBYTES = 1 << 30
"""Of one process' memory that is searched, where it can be read at all."""

_libc = ctypes.CDLL(None, use_errno=True)
_PTRACE_ATTACH, _PTRACE_SEIZE, _PTRACE_DETACH = 16, 0x4206, 17
_PIDFD_GETFD, _PIDFD_SEND_SIGNAL, _KCMP, _PROCESS_MADVISE, _MOVE_PAGES = 438, 424, 312, 440, 279
_SHMAT_READONLY = 0o10000
_AUTOBOUND = 5  # letters of a name that the kernel chose: unix(7)


class Attacker:
    """All attacks on one job; each gives what it got, in words, and counts its attempts.

    Args:
        target: pids, addresses, handles, needles, recordings and folders, as `tests.security.attack` says them.
    """

    def __init__(self, target: dict[str, Any]) -> None:
        self.pids: list[int] = target["pids"]
        self.addresses: dict[str, str] = target["addresses"]
        self.handles = [bytes.fromhex(handle) for handle in target["handles"]]
        self.me: str = target["me"]
        self.uid: int = target["uid"]
        self.recordings = {name: bytes.fromhex(recorded) for name, recorded in target["recordings"].items()}
        self.folders: list[str] = target["folders"]
        secrets = [bytes.fromhex(secret) for secret in target["secrets"]]
        self.needles = (CANARY, *(word for one in secrets for word in (one, one.hex().encode(), base64.b64encode(one))))
        self.tries = 0
        self.random = random.Random(target.get("seed", 0))
        self.held: list[socket.socket] = []
        self.attacks: dict[str, Callable[[], Hits]] = {
            name.removeprefix("try_"): getattr(self, name) for name in dir(self) if name.startswith("try_")
        }

    def look_for_needles(self, content: bytes, where: str) -> Hits:
        """What of the job's secrets is among bytes that were read."""
        return [f"{where}: needle {number}" for number, needle in enumerate(self.needles) if needle in content]

    # What the kernel shows of a process

    def try_proc(self) -> Hits:
        """Files of /proc that show memory, variables and descriptors, and whatever else can be read there."""
        hits: Hits = []
        for pid in self.pids:
            folder = Path(f"/proc/{pid}")
            for name in ("mem", "maps", "smaps", "environ", "auxv", "stack", "syscall", "pagemap", "numa_maps", "io"):
                self.tries += 1
                with contextlib.suppress(OSError), open(folder / name, "rb", buffering=0) as file:
                    hits.append(f"{name} of a process can be opened")
                    hits += self._memory(pid, file) if name == "mem" else ()
            for name in ("fd", "fdinfo", "map_files", "ns"):
                with contextlib.suppress(OSError):
                    for entry in os.listdir(folder / name):
                        self.tries += 1
                        if name == "fd":
                            hits.append("descriptors of a process can be listed")
                        with contextlib.suppress(OSError):
                            os.close(os.open(folder / name / entry, os.O_RDONLY | os.O_NONBLOCK))
                            hits.append(f"{name}/N of a process can be opened")
            for name in (
                "mem",
                "oom_score_adj",
                "coredump_filter",
                "clear_refs",
                "comm",
                "timerslack_ns",
                "attr/current",
            ):
                self.tries += 1
                with contextlib.suppress(OSError), open(folder / name, "wb", buffering=0) as file:
                    file.write(b"0")
                    hits.append(f"{name} of a process can be written")
            for entry in folder.iterdir():  # what everybody may read must not tell a secret
                with contextlib.suppress(OSError):
                    if entry.name not in ("mem", "pagemap") and stat.S_ISREG(entry.stat().st_mode):
                        self.tries += 1
                        hits += self.look_for_needles(_read(entry), f"/proc/PID/{entry.name}")
        return hits

    def _memory(self, pid: int, file: io.FileIO) -> Hits:
        """Search what of a process' memory can be read."""
        left = MOST_NBYTES
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split()
            begin, end = (int(text, 16) for text in fields[0].split("-"))
            if fields[1].startswith("rw") and left > 0:
                nbytes = min(end - begin, left)
                left -= nbytes
                with contextlib.suppress(OSError, OverflowError):
                    if found := self.look_for_needles(os.pread(file.fileno(), nbytes, begin), "memory"):
                        return found
        return []

    def try_system_calls(self) -> Hits:
        """Calls that read, write, stop, end, change or borrow from another process."""
        hits: Hits = []
        own = ctypes.create_string_buffer(64)
        local = struct.pack("PN", ctypes.addressof(own), 64)
        for pid in self.pids:
            for address in (0x400000, 0x7FFFF7FF0000 - (self.random.randrange(1 << 20) << 12)):
                remote = struct.pack("PN", address, 64)
                for call in (_libc.process_vm_readv, _libc.process_vm_writev):
                    hits += self._call(call.__name__, call, pid, local, 1, remote, 1, 0, allowed=(errno.EPERM,))
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue  # the job's side notices that, too
            try:
                for number in range(3, 24):
                    hits += self._call("pidfd_getfd", _libc.syscall, _PIDFD_GETFD, pidfd, number, 0)
                for sent in (0, signal.SIGSTOP, signal.SIGTERM, signal.SIGRTMIN + 7):
                    hits += self._call("pidfd_send_signal", _libc.syscall, _PIDFD_SEND_SIGNAL, pidfd, sent, None, 0)
                hits += self._call("process_madvise", _libc.syscall, _PROCESS_MADVISE, pidfd, local, 1, 4, 0)
            finally:
                os.close(pidfd)
            for request in (_PTRACE_SEIZE, _PTRACE_ATTACH):
                got = self._call("ptrace", _libc.ptrace, request, pid, None, None)
                if got:
                    _libc.ptrace(_PTRACE_DETACH, pid, None, None)
                hits += got
            for sent in (0, signal.SIGSTOP, signal.SIGKILL, signal.SIGHUP):
                hits += self._call("kill", _libc.kill, pid, sent)
            hits += self._call("kcmp", _libc.syscall, _KCMP, os.getpid(), pid, 0, 1, 1)
            hits += self._call("move_pages", _libc.syscall, _MOVE_PAGES, pid, 0, None, None, None, 0)
            hits += self._call("setpriority", _libc.setpriority, 0, pid, 19)
            hits += self._call("prlimit", _libc.prlimit, pid, 7, struct.pack("QQ", 4, 4), None)
            hits += self._call("sched_setaffinity", _libc.sched_setaffinity, pid, 8, struct.pack("Q", 1))
        return hits

    def _call(self, name: str, call: Any, *arguments: Any, allowed: Sequence[int] = ()) -> Hits:
        """Call the C library; whatever does not end in an error is a hit."""
        self.tries += 1
        ctypes.set_errno(0)
        return [] if call(*arguments) == -1 else [f"{name} succeeds"]

    # Memory and files

    def try_shared_memory(self) -> Hits:
        """Segments with a name, segments of System V."""
        hits: Hits = []
        for path in Path("/dev/shm").rglob("*"):
            hits += self._open(path)
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[4]) in self.pids or int(fields[5]) in self.pids:
                _libc.shmat.restype = ctypes.c_void_p
                for flags in (0, _SHMAT_READONLY):
                    self.tries += 1
                    if _libc.shmat(int(fields[1]), None, flags) != ctypes.c_void_p(-1).value:
                        hits.append("a segment of System V can be mapped")
        return hits

    def try_files(self) -> Hits:
        """What lies in the folders for temporary files."""
        hits: Hits = []
        for folder in self.folders:
            for path in Path(folder).rglob("*"):
                hits += self._open(path)
            for name in (f"skipper-{self.uid}",):
                for act in (
                    os.rmdir,
                    lambda path: os.rename(path, f"{path}-taken"),
                    lambda path: os.chmod(path, 0o777),
                ):
                    self.tries += 1
                    with contextlib.suppress(OSError):
                        act(os.path.join(folder, name))
                        hits.append("the folder of the job's user can be changed")
        return hits

    def _open(self, path: Path) -> Hits:
        self.tries += 2
        hits: Hits = []
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                hits += self.look_for_needles(_read(path), str(path))
            if stat.S_ISREG(status.st_mode) and status.st_uid != os.getuid():
                os.close(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
                hits.append(f"{path} can be written")
        return hits

    def try_handles(self) -> Hits:
        """Buffers of the job by their own handles, and by altered ones."""
        hits: Hits = []
        into = np.zeros(1 << 12, np.uint8)
        for handle in self.handles:
            altered = bytearray(handle)
            altered[self.random.randrange(len(altered))] ^= 1 << self.random.randrange(8)
            for raw in (handle, bytes(altered), handle[: self.random.randrange(len(handle))]):
                for write in (False, True):
                    self.tries += 1
                    try:
                        buffer = RDMABuffer.deserialize(raw).at(0, into.nbytes)
                        act = buffer.write_from if write else buffer.read_into
                        act(into, timeout=SHORT_S).get()
                    except (dataplane.DataplaneError, ValueError, TypeError):
                        continue
                    hits.append(f"a handle lets a stranger {'write' if write else 'read'}")
        return hits

    # Sockets

    def sockets(self) -> Iterator[tuple[int, Any]]:
        """Every unix socket of the host that may be of the job, and its ports: family and address."""
        job = self.me.partition("-")[0]
        for name in dict.fromkeys(_abstract_names()):  # a connection that was accepted has the listener's name
            if job in name or name.startswith("skipper-logs"):
                yield socket.AF_UNIX, f"\0{name}"
        for address in self.addresses.values():
            yield socket.AF_INET, _split(address)

    def try_garbage(self) -> Hits:
        """Bytes that mean nothing, or that are almost right, to everything that takes connections."""
        garbage = [
            (family, address, content)
            for family, address in self.sockets()
            for content in (
                self.random.randbytes(self.random.randrange(1, 5000)),
                PREFACE + _frame(self.random.randrange(10), self.random.randrange(256), 1, self.random.randbytes(40)),
                PREFACE + _frame(1, 4, 1, self.random.randbytes(200)) + _frame(0, 1, 1, bytes(4096)),
                PREFACE + _frame(8, 0, 0, b"\x7f\xff\xff\xff") * 50,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.random.randbytes(64),
                b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
                b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            )
        ]
        self.tries += len(garbage)
        hits: Hits = []
        with ThreadPoolExecutor(TALKS) as talks:
            for (_, address, _), answer in zip(garbage, talks.map(lambda each: talk(*each), garbage), strict=True):
                hits += self.look_for_needles(answer, f"the answer of {address!r}")
        return hits

    def try_bells(self) -> Hits:
        """Datagrams to UCX's own sockets, as many as they take."""
        for name in _abstract_names():
            if len(name) == _AUTOBOUND:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell, contextlib.suppress(OSError):
                    bell.setblocking(False)
                    bell.connect(f"\0{name}")
                    for _ in range(50):
                        self.tries += 1
                        bell.send(self.random.randbytes(self.random.choice((0, 1, self.random.randrange(200)))))
        return []

    def try_recordings(self) -> Hits:
        """What legitimate peers have said, once more."""
        hits: Hits = []
        for name, where in (("link", (socket.AF_UNIX, f"\0skipper-{self.me}")), ("actors", (socket.AF_INET, None))):
            if (recorded := self.recordings.get(name)) is not None:
                address = where[1] or _split(self.addresses[name])
                for content in (recorded, recorded[:-1], recorded + recorded[len(PREFACE) :]):
                    self.tries += 1
                    answer = talk(where[0], address, content)
                    if name == "link" and (got := _data_of(answer)):
                        hits.append(f"a recorded handshake opens the link: {got!r}")
                    hits += self.look_for_needles(answer, f"the answer to a recording at {name}")
        return hits

    def try_wrong_proofs(self) -> Hits:
        """The protocol of the link, as it should be but for the secret."""
        hits: Hits = []
        stranger = encode_process(ProcessRef("stranger", "unix-abstract:stranger", "stranger"))
        for family, address in self.sockets():
            if family != socket.AF_UNIX or "logs" in address:
                continue
            nonce = self.random.randbytes(auth.NONCE_NBYTES)
            version = self.random.choice((VERSION, VERSION, "0", "999999"))
            metadata = (("skipper-version", version), ("skipper-process-bin", stranger), ("skipper-nonce-bin", nonce))
            if address.endswith("/local"):
                hits += self._try_packets(address, pack_metadata(metadata))
                continue
            with grpc.insecure_channel(f"unix-abstract:{address[1:]}", options=_OWN) as channel:
                for kind in ("reflected", "zero", "random", "none"):
                    self.tries += 1
                    said: list[bytes] = []
                    call = channel.stream_stream(LINK, _registered_method=False)(
                        self._proofs(kind, said), metadata=metadata, timeout=1.0
                    )
                    with contextlib.suppress(grpc.RpcError):
                        said += [v for k, v in call.initial_metadata() if k == "skipper-proof-bin"]
                        hits += [f"a {kind} proof opens the link: {message!r}" for message in call]
        return hits

    def _try_packets(self, address: str, metadata: bytes) -> Hits:
        """Wrong proofs where links within the host come in, which nobody of another user gets to send."""
        hits: Hits = []
        for proof in (b"", bytes(32), self.random.randbytes(32)):
            self.tries += 1
            with new_socket() as stranger, contextlib.suppress(OSError):
                stranger.settimeout(SHORT_S)
                stranger.connect(address)
                stranger.send(metadata)
                if proof:
                    stranger.send(proof)
                while answer := stranger.recv(1 << 16):
                    if os.geteuid() != self.uid or not answer.startswith((b"\xff", b"\x11")):
                        hits.append(f"a stranger is answered at {address!r}: {answer!r}")
        return hits

    def _proofs(self, kind: str, said: list[bytes]) -> Iterator[bytes]:
        if kind == "reflected":
            until = time.monotonic() + SHORT_S
            while not said and time.monotonic() < until:
                time.sleep(0.01)
            yield from said
        elif kind != "none":
            yield bytes(32) if kind == "zero" else self.random.randbytes(self.random.choice((0, 31, 32, 33, 5000)))
        yield b"\x00" + self.random.randbytes(200)

    def try_actor_server(self) -> Hits:
        """Calls of the actor server and of the metadata service without a proof, and with wrong ones."""
        hits: Hits = []
        for address in (self.addresses[name] for name in ("actors", "metadata") if name in self.addresses):
            with grpc.insecure_channel(address, options=_OWN) as channel:
                opened = self._ask(channel, "OpenSession", actors_pb.OpenSessionRequest(version=1, nonce=bytes(32)))
                session = actors_pb.OpenSessionResponse.FromString(opened or b"").session
                for actor, method in (("calculator", "note"), ("/metadata", "names"), ("/metadata", "register")):
                    arguments = self.random.choice((b"[]", b"[1, 2]", b"\x80\x05)}\x86.", self.random.randbytes(50)))
                    for proof in (b"", session + bytes(40), session + self.random.randbytes(40), bytes(128)):
                        asked = actors_pb.ActorRequest(
                            actor=actor, method=method, args=arguments, encoding=self.random.choice((0, 1)), proof=proof
                        )
                        answer = self._ask(channel, "Invoke", asked)
                        hits += [] if answer is None else [f"{method} answers {answer!r} without a proof"]
                for rpc in ("ListActors", "ListMethods", "StartOperation", "PollOperation"):
                    answer = self._ask(channel, rpc, None)
                    hits += [] if answer is None else [f"{rpc} answers {answer!r} without a proof"]
        return hits

    def _ask(self, channel: Any, rpc: str, message: Any) -> bytes | None:
        self.tries += 1
        content = b"" if message is None else message.SerializeToString()
        try:
            answer: bytes = channel.unary_unary(ACTORS + rpc, _registered_method=False)(content, timeout=2.0)
        except grpc.RpcError:
            return None
        return answer

    def try_backlogs(self) -> Hits:
        """Connections that say nothing, and some that say the beginning, as many as may be; held for a round."""
        for one in self.held:
            one.close()
        self.held.clear()
        for family, address in self.sockets():
            for number in range(150):
                self.tries += 1
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.setblocking(False)
                try:
                    connection.connect(address)
                    if number % 2:
                        connection.send(PREFACE[: self.random.randrange(1, len(PREFACE))])
                except OSError as error:
                    if error.errno != errno.EINPROGRESS:
                        connection.close()
                        continue
                self.held.append(connection)
        return []


_OWN = (("grpc.use_local_subchannel_pool", 1),)


def talk(family: int, address: Any, content: bytes) -> bytes:
    """Say something, and hear what comes of it for a while."""
    heard = b""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(family, kind) as connection, contextlib.suppress(OSError):
            connection.settimeout(SHORT_S)
            connection.connect(address)
            connection.sendall(content)
            while chunk := connection.recv(1 << 16):
                heard += chunk
        if family != socket.AF_UNIX:
            break
    return heard


def impersonate(recorded: bytes, listener: socket.socket) -> None:
    """Play what a server has said to whoever connects."""

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5.0)
                connection.recv(1 << 16)
                connection.sendall(recorded)
                while connection.recv(1 << 16):
                    pass

    threading.Thread(target=serve, daemon=True).start()


def _abstract_names() -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith("@"):
            yield fields[7][1:]


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(fd, 1 << 22)
    finally:
        os.close(fd)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").partition("/")[0].rpartition(":")
    return host, int(port)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _data_of(answer: bytes) -> bytes:
    """What a server has sent in frames of DATA."""
    found, at = b"", 0
    while at + 9 <= len(answer):
        nbytes, kind = int.from_bytes(answer[at : at + 3], "big"), answer[at + 3]
        found += answer[at + 9 : at + 9 + nbytes] if kind == 0 else b""
        at += 9 + nbytes
    return found


def give_up_root(uid: int) -> None:
    """Be another user for good, after everything has been used once that will be used then."""
    buffer = RDMABuffer(np.zeros(64, np.uint8))
    buffer.read_into(np.zeros(64, np.uint8)).get()
    with contextlib.suppress(dataplane.DataplaneError):
        buffer.serialize()
    with (
        grpc.insecure_channel("unix-abstract:nobody-listens-here", options=_OWN) as channel,
        contextlib.suppress(grpc.RpcError),
    ):
        channel.unary_unary("/a/b", _registered_method=False)(b"", timeout=0.5)
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def main(uid: int) -> None:
    """Attack until the standard input ends."""
    give_up_root(uid)
    target = json.loads(sys.stdin.readline())
    attacker = Attacker(target)
    only = target.get("only") or list(attacker.attacks)
    for kind, name in ((socket.SOCK_STREAM, ""), (socket.SOCK_SEQPACKET, "/local")):
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(f"\0skipper-{target['impostor']}{name}")
        listener.listen()
        impersonate(attacker.recordings.get("link-answers", b""), listener)
    while True:
        for name in only:
            before, began = attacker.tries, time.monotonic()
            hits = attacker.attacks[name]()
            report = {
                "attack": name,
                "tries": attacker.tries - before,
                "hits": list(dict.fromkeys(hits))[:50],
                "nhits": len(hits),
            }
            sys.stdout.write(json.dumps(report | {"took_s": round(time.monotonic() - began, 2)}) + "\n")
            sys.stdout.flush()
            if select.select([sys.stdin], [], [], 0)[0]:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
