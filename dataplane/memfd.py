"""Anonymous shared memory: files without a name, reached through the process that made them.

The owner creates a memfd, seals its size, and writes a header into its last page. A peer of the same user opens it as
`/proc/<pid>/fd/<n>`. A peer maps only a sealed memfd that has the random tokens of the handle, not
another file that has that number now, and not one that could shrink while it is mapped. When the last process
that maps it is gone, the memory is freed.
"""

import os
import secrets
import struct
from dataclasses import dataclass

from skipper.dataplane._copy import SharedMap, make_sealed, open_sealed
from skipper.dataplane.errors import BackendUnavailableError, BufferDroppedError, OwnerDiedError, RegistrationError
from skipper.dataplane.identity import OwnerId, limit_hint, page_size, start_time

_MAGIC = 0x31304B4950505349
_HEADER = struct.Struct("<QQQQ")  # magic, owner's token, file's token, bytes of payload
_NAME = b"skipper"
_LINK = b"/memfd:%b (deleted)" % _NAME


@dataclass(slots=True, weakref_slot=True)
class Mapping:
    """Shared memory as mapped here, by its owner or by a peer. Unmapped when the last reference goes.

    Attributes:
        fd: In the owner the open descriptor; in a peer -1.
        token: Random; a later file of the same number has another.
        address: Where it is mapped in this process.
        nbytes: Usable bytes, a multiple of the page size.
        memory: Holds the mapping.
    """

    fd: int
    token: int
    address: int
    nbytes: int
    memory: SharedMap

    def retire(self) -> None:
        """Owner only: give all pages back to the system although peers may still map them, and close the file."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.memory.remove(0, self.nbytes)
            os.close(fd)


def create(owner: OwnerId, nbytes: int) -> Mapping:
    """Make shared memory of at least `nbytes` bytes, zeroed, in this process.

    Raises:
        RegistrationError: The system has no file descriptor or no memory left.
    """
    page = page_size()
    nbytes = -(-nbytes // page) * page
    token = secrets.randbits(64)
    fd = -1
    try:
        fd = make_sealed(_NAME, nbytes + page, page, _HEADER.pack(_MAGIC, owner.token, token, nbytes))
        memory = SharedMap(fd, nbytes + page)
    except (OSError, OverflowError, struct.error) as error:
        if fd >= 0:
            os.close(fd)
        raise RegistrationError(
            f"no {nbytes} bytes of shared memory: {error} (limits: memory, ulimit -n, ulimit -v)"
        ) from error
    return Mapping(fd, token, memory.address, nbytes, memory)


def attach(owner: OwnerId, fd: int, token: int) -> Mapping:
    """Map memory of another process of this host.

    Args:
        owner: The process that made it.
        fd: Its descriptor's number there.
        token: The file's token, from the handle.

    Raises:
        OwnerDiedError: The process is gone.
        BufferDroppedError: The process lives, but that memory is no longer there.
        BackendUnavailableError: This process may not look into that one.
    """
    here = -1
    try:
        opened = open_sealed(b"/proc/%d/fd/%d" % (owner.pid, fd), _LINK, page_size(), _HEADER.size)
        if opened is None:
            raise _gone(owner)
        here, size, header = opened
        nbytes = size - page_size()
        if _HEADER.unpack(header) != (_MAGIC, owner.token, token, nbytes):
            raise _gone(owner)
        memory = SharedMap(here, size)
        return Mapping(-1, token, memory.address, nbytes, memory)
    except (FileNotFoundError, ProcessLookupError):
        if start_time(owner.pid) == owner.started:
            raise _gone(owner) from None
        raise OwnerDiedError(f"{owner} is gone") from None
    except OSError as error:
        hint = limit_hint(error) or (
            ". Both processes must run as the same user and see each other in /proc; else let the owner call "
            "dataplane.configure(export='all')"
        )
        raise BackendUnavailableError(f"cannot map memory of {owner}: {error.strerror}{hint}") from error
    finally:
        if here >= 0:
            os.close(here)


def _gone(owner: OwnerId) -> BufferDroppedError:
    return BufferDroppedError(f"{owner} has released the memory of that handle")
