"""Frozen dataclasses with slots come back from pickle as they were, also where they have other fields."""

import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from skipper.control.model.growing import growing, quickly_pickled
from skipper.control.model.shape import Extent, Shape


@quickly_pickled
@dataclass(frozen=True, slots=True)
class Fixed:
    one: int
    two: Any = None


@growing
@dataclass(frozen=True, slots=True)
class Grown:
    one: int
    two: str = "default"


@pytest.mark.parametrize(
    "value",
    [
        Fixed(1, [Fixed(2)]),
        Grown(1, "given"),
        Extent(("hosts", "gpus"), (2, 4)),
        Extent(("gpus",), (4,)).point(3),
        Shape.whole(Extent(("gpus",), (4,))),
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_what_has_come_back_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        pickle.loads(pickle.dumps(Fixed(1))).one = 2


def test_the_state_is_that_of_dataclasses() -> None:
    """So that processes of versions before and after understand each other."""

    @dataclass(frozen=True, slots=True)
    class Plain:
        one: int
        two: Any = None

    ours, usual = Fixed(1, "a"), Plain(1, "a")
    assert ours.__getstate__() == usual.__getstate__()  # type: ignore[attr-defined]


def test_a_grown_value_takes_fewer_fields_and_more() -> None:
    fewer, more = Grown.__new__(Grown), Grown.__new__(Grown)
    fewer.__setstate__([1])  # type: ignore[attr-defined]
    more.__setstate__([1, "given", "unknown"])  # type: ignore[attr-defined]
    assert (fewer, more) == (Grown(1), Grown(1, "given"))
