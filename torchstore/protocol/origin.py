"""The publisher: one of the ranks that together put a version, and the put that a share comes from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from skipper.control.model.bounds import MAX_PROCESSES
from skipper.torchstore.support.compact import compact


@compact
@dataclass(frozen=True, slots=True)
class Origin:
    """One publisher of a group, as it can be given to `put_state_dict` (``publisher=``).

    Attributes:
        group: The group's name. All of its members give the same name; a new group needs a new name, so that the steps
            of the two groups are not confused.
        rank: Rank of this publisher in the group.
        size: How many publishers the group has.

    Raises:
        ValueError: Rank and size do not fit together, or the name is not a string.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        for rank in range(2):  # in a real job: by two processes
            part = {f"stage{rank}": torch.ones(2)}
            ts.put_state_dict(part, "policy", publisher=torchstore.Origin("trainers", rank, 2))
        print(sorted(ts.get_state_dict("policy")))  # ['stage0', 'stage1']
        ts.shutdown()
        ```
    """

    group: str
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.group, str):
            raise ValueError(f"the name of a group of publishers is a string, not {self.group!r:.80}")
        match (self.rank, self.size):
            case (int(rank), int(size)) if 0 <= rank < size <= MAX_PROCESSES:
                return
        said = f"{(self.rank, self.size)!r:.80}"
        raise ValueError(f"publisher is (index, count) with 0 <= index < count <= {MAX_PROCESSES}, not {said}")


SOLE = Origin("", 0, 1)
"""A process that publishes alone: each of its puts is a version."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which put of which publisher a share comes from.

    Attributes:
        origin: The publisher.
        session: Differs from that of every other process that ever was this rank; "" for one that publishes alone.
        number: The number of this put among those of the key by this rank, from 1. It is the step of the share.
        alone: The share holds the whole value; the other ranks have at most replicas of it. None: the share is empty.
        refused: How many puts before, which count as well, were refused before anything was sent; None: the caller says
            which version this one is, so that it does not matter.
    """

    origin: Origin = SOLE
    session: str = ""
    number: int = 0
    alone: bool | None = False
    refused: int | None = 0

    def __reduce__(self) -> str | tuple[type[Turn], tuple[Any, ...]]:
        """Pickle an empty turn, as in most messages, by name: pickling its fields costs more than the rest."""
        if self is ALONE:
            return "ALONE"
        return Turn, (self.origin, self.session, self.number, self.alone, self.refused)


ALONE = Turn()
"""The turn of everything that a process publishes alone."""


def read_publisher(publisher: object) -> Origin | None:
    """The publisher that a caller has given as an argument.

    Raises:
        ValueError: It is something else, or the numbers do not fit together.
    """
    match publisher:
        case None:
            return None
        case Origin():
            return publisher
        case (int(index), int(number)):
            return _one_of(index, number)
    raise ValueError(
        f"publisher is (index, count) with 0 <= index < count <= {MAX_PROCESSES}, or an Origin, not {publisher!r:.80}"
    )


@lru_cache(maxsize=16)
def _one_of(index: int, number: int) -> Origin:
    return Origin("", index, number)
