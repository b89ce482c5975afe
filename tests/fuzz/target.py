"""`Target`: an entry that takes bytes of others, and what it may answer them with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.verdicts import Void

Mutator = Callable[[bytes, Random], bytes]


@dataclass(frozen=True)
class Target:
    """One line of the registry.

    Attributes:
        name: of the entry, and of the folder of its corpus.
        call: hands it the bytes; what they lead to beyond an exception it checks itself, and raises `verdicts.Broken`.
        seeds: real messages, made by the code itself.
        allowed: the exceptions that its docstring promises; with any other the input is a finding.
        mutate: makes an input of another one, for what bytes alone would seldom hit.
    """

    name: str
    call: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    allowed: tuple[type[BaseException], ...] = ()
    mutate: Mutator = mutate_bytes


def try_one(target: Target, data: bytes) -> BaseException | None:
    """Run a target on one input: the exception that is a finding, or None."""
    try:
        target.call(data)
    except (Void, *target.allowed):
        return None
    except BaseException as error:  # noqa: BLE001  (any other one is what is looked for)
        return error
    return None
