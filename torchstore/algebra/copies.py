"""Where the copies of a stored part go, and which of them a reader reads. No I/O.

With ``copies=2`` each rank's part of a version is in two volumes: the rank's own and a neighbour. The neighbour is a
volume of another host if there is one, so that the version survives the loss of any one host; otherwise a volume of
another process, so that it survives the loss of any one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from skipper.control.model.bounds import MAX_PROCESSES, check_count
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.errors import StrategyError, VolumeLostError


def check_copies(copies: object) -> None:
    """Raise TypeError or ValueError for a value that is not a number of copies."""
    check_count("copies", copies, 1, MAX_PROCESSES)


def check_room(copies: int, volumes: int) -> None:
    """Refuse more copies than there are volumes.

    Raises:
        StrategyError: There are more.
    """
    if copies > volumes:
        raise StrategyError(
            f"copies={copies} needs {copies} volumes, one for each copy, and the store has {volumes}; initialize it "
            "with more volumes, or put with fewer copies"
        )


def neighbours(hosts: Mapping[str, str], own: str) -> Iterator[str]:
    """All volumes in the order in which a client's parts are copied to them, its own first.

    The copies of one host's volumes are spread over the volumes of the next host (those of the last host over the
    first). A second volume of a host follows only after one volume of every host.

    ``hosts`` names the host of each volume, in the order of their numbers.
    """
    by_host: dict[str, list[str]] = {}
    for volume, host in hosts.items():
        by_host.setdefault(host, []).append(volume)
    rows = list(by_host.values())
    first = next(at for at, row in enumerate(rows) if own in row)
    column = rows[first].index(own)
    named: set[str] = set()
    for turn in range(max(map(len, rows))):
        for step in range(len(rows)):
            row = rows[(first + step) % len(rows)]
            volume = row[(column + turn) % len(row)]
            if volume not in named:
                named.add(volume)
                yield volume


def place(hosts: Mapping[str, str], own: str, copies: int, lost: Collection[str]) -> tuple[str, ...]:
    """The volumes that hold the copies of one client's parts.

    Raises:
        StrategyError: There are fewer volumes than copies.
        VolumeLostError: So many volumes are lost that fewer than ``copies`` are left.
    """
    check_room(copies, len(hosts))
    living = [volume for volume in neighbours(hosts, own) if volume not in lost]
    if len(living) < copies:
        gone = ", ".join(map(repr, sorted(lost)))
        raise VolumeLostError(
            min(lost), f"copies={copies} needs {copies} volumes; {gone} died, {len(living)} of {len(hosts)} are left"
        )
    return tuple(living[:copies])


def choose(holders: Sequence[Binding], near: Collection[str], lost: Collection[str], reader: int) -> Binding:
    """The copy that a reader reads: one on its own host if there is one, otherwise any, spread over the readers.

    Args:
        holders: The copies of one part, at least one.
        near: The volumes on the reader's host.
        lost: Volumes that cannot be read. If no other volume has a copy, one of them is chosen, and the read fails.
        reader: Any number that differs between readers.
    """
    living = [holder for holder in holders if holder.volume not in lost] or list(holders)
    local = [holder for holder in living if holder.volume in near]
    among = local or living
    return among[reader % len(among)]
