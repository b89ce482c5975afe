"""How an agent says where it listens, for who has had it started: a small file, there as a whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from skipper.control.model.errors import HostError
from skipper.control.support import private_file
from skipper.control.wire import addresses

_MOST_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Announcement:
    """What an agent says of itself.

    Attributes:
        address: where it listens, ``tcp://IP:PORT``.
        pid: its process, on its machine.
    """

    address: str
    pid: int


def write(path: Path, announcement: Announcement) -> None:
    """Announce an agent; readers see all of it or nothing, also through NFS.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"address": announcement.address, "pid": announcement.pid}
    private_file.replace(path, json.dumps(content).encode(), 0o600)


def read(path: Path) -> Announcement | None:
    """What an agent has announced; None before it has.

    Raises:
        HostError: what is there no agent has written.
    """
    try:
        if not path.exists():
            # An NFS client remembers for a while that a name was not there; listing the folder makes it ask again.
            os.listdir(path.parent)
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_NBYTES))
        address, pid = content["address"], content["pid"]
        if not isinstance(address, str) or not isinstance(pid, int) or addresses.parse(address)[1] == 0:
            raise ValueError("no address and process")
    except OSError:
        return None  # it is not there yet, or a server does not answer: the next look tells
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HostError(f"{path} is not what an agent announces: {error}") from None
    return Announcement(address, pid)
