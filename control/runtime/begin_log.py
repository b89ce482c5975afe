"""`BeginLog`: which messages an actor has begun to handle, in memory that outlives its process; `BeginView` reads it.

A process that has been killed cannot say what it had begun. So it writes that down before it begins, in anonymous
memory. Its senders map that memory while it lives, and read it once it is certainly dead.
"""

from __future__ import annotations

import enum
import mmap
import os
import secrets
import select
import weakref
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from skipper.control.model.growing import quickly_pickled

if TYPE_CHECKING:
    from skipper.control.runtime.messages import Mail

CAPACITY = 4096
"""How many of the latest messages the log holds."""

_NAME = "skipper-begins"
_TOKEN, _COUNT, _BEGUN, _FIRST = 0, 1, 2, 3
"""Positions in the log, in words of 8 bytes: a token that identifies it, how many messages have been taken, which of
them was begun last, and the messages. Each message has two words: its sender, and the port where that waits."""

_DEATH_S = 1.0
"""A killed process closes its connections before it is gone; this is plenty for the time between."""

_NBYTES = 8 * (_FIRST + 2 * CAPACITY)


@quickly_pickled
@dataclass(frozen=True, slots=True)
class BeginAddress:
    """Where to find a log while its process lives.

    Attributes:
        kernel: which kernel, and which of its tables of processes, the process belongs to.
        pid: of the process.
        fd: the log's descriptor there.
        token: what the log begins with.
    """

    kernel: str
    pid: int
    fd: int
    token: int


class BeginLog:
    """The log of one actor; its thread writes it."""

    def __init__(self) -> None:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, _NBYTES)
        self._words = memoryview(mmap.mmap(fd, _NBYTES)).cast("Q")
        self._words[_TOKEN] = secrets.randbits(64)
        self._count = 0
        self._senders: dict[str, int] = {}
        self.address = BeginAddress(_this_kernel(), os.getpid(), fd, self._words[_TOKEN])
        weakref.finalize(self, os.close, fd).atexit = False

    def take(self, mail: Mail) -> None:
        """Write down that a message is about to be opened."""
        sender = mail.sender.id
        key = self._senders.get(sender)
        if key is None:
            key = self._senders[sender] = _key_of(sender)
        words, count = self._words, self._count
        at = _FIRST + 2 * (count % CAPACITY)
        # The order matters: a kill may come between any two of these.
        words[at] = key
        words[at + 1] = mail.message.reply_to
        words[_COUNT] = self._count = count + 1

    def begin(self) -> None:
        """Write down that the message taken last is about to be handled."""
        self._words[_BEGUN] = self._count


class ProcessGoneError(Exception):
    """The process of a log is dead, and its log with it."""


class Fate(enum.Enum):
    """What a process that is dead had done with a message."""

    UNTOUCHED = "untouched"
    TAKEN = "taken"
    """It had begun to unpickle it, and died before its actor got it, perhaps because of its content."""
    PERHAPS_BEGUN = "perhaps begun"


class BeginView:
    """The log of an actor of another process, mapped while that process lived. For any thread.

    Args:
        address: of the log.
        reader: the id of this process, whose messages are looked up.

    Raises:
        OSError: it cannot be mapped: the process runs on another machine, or the system does not allow it.
        ProcessGoneError: the process is dead.
    """

    def __init__(self, address: BeginAddress, reader: str) -> None:
        if address.kernel != _this_kernel():
            raise OSError(f"process {address.pid} runs elsewhere")
        try:
            self._pidfd = os.pidfd_open(address.pid)
        except ProcessLookupError as error:
            raise ProcessGoneError(f"process {address.pid} has ended") from error
        weakref.finalize(self, os.close, self._pidfd).atexit = False
        try:
            self._words = _map(address)
        except (FileNotFoundError, ProcessLookupError) as error:  # the log exists while the process lives
            raise ProcessGoneError(f"process {address.pid} has ended") from error
        if self._is_over():  # either this has been the log's process since the first line, or that is dead
            raise ProcessGoneError(f"process {address.pid} has ended")
        self._key = _key_of(reader)
        self._patience_s = _DEATH_S
        self._taken: frozenset[int] | None = None

    @property
    def count(self) -> int:
        """How many messages the actor has taken."""
        return self._words[_COUNT]

    def is_final(self) -> bool:
        """Whether the process is dead, or `fate` has waited for its end in vain: then it does not wait again."""
        return self._taken is not None or not self._patience_s or self._is_over()

    def fate(self, port: int, since: int) -> Fate:
        """What the process, if it is dead, had done with a message of this process.

        Waits for up to a second, once, for a process that has lost its connection but has not ended yet. A process that
        does not end may still begin anything.

        Args:
            port: where this process waited for the answer.
            since: `count` before the message was sent.
        """
        words = self._words
        if self._taken is None:
            if not self._is_over(self._patience_s):
                self._patience_s = 0.0
                return Fate.PERHAPS_BEGUN
            self._taken = frozenset(words[at + 1] for at in range(_FIRST, len(words), 2) if words[at] == self._key)
        if self.count - since >= CAPACITY:
            return Fate.PERHAPS_BEGUN  # it may have been in the log before
        if port not in self._taken:
            return Fate.UNTOUCHED
        last = _FIRST + 2 * ((self.count - 1) % CAPACITY)
        is_last = words[_BEGUN] < self.count and (words[last], words[last + 1]) == (self._key, port)
        return Fate.TAKEN if is_last else Fate.PERHAPS_BEGUN

    def _is_over(self, timeout_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))


def _map(address: BeginAddress) -> memoryview:
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_size != _NBYTES:
            raise OSError(f"descriptor {address.fd} of process {address.pid} is another file")
        words = memoryview(mmap.mmap(fd, _NBYTES, prot=mmap.PROT_READ)).cast("Q")
    finally:
        os.close(fd)
    if words[_TOKEN] != address.token:
        raise OSError(f"descriptor {address.fd} of process {address.pid} is another log")
    return words


def _key_of(process_id: str) -> int:
    return int.from_bytes(blake2b(process_id.encode(), digest_size=8).digest(), "little")


def _this_kernel() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown/{secrets.token_hex(8)}"  # equal to no other
