"""Pickles that are written without `pickle` are pickles all the same."""

import enum
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.control.wire._plain import MOST_NBYTES, pickle_arguments, pickle_value

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


class Text(str):
    """No plain value, though it equals one."""


class Level(enum.IntEnum):
    LOW = 1


def is_same(one: Any, two: Any) -> bool:
    """Whether two plain values are, NaN included."""
    return type(one) is type(two) and (one == two or (one != one and two != two))


@given(PLAIN)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    pickled = pickle_value(value)
    if pickled is not None:
        assert is_same(pickle.loads(pickled), value)


@given(st.lists(PLAIN), st.dictionaries(st.text(), PLAIN))
def test_arguments_come_back_as_they_were(args: list[Any], kwargs: dict[str, Any]) -> None:
    pickled = pickle_arguments(tuple(args), kwargs)
    if pickled is None:
        return
    loaded_args, loaded_kwargs = pickle.loads(pickled)
    assert len(loaded_args) == len(args)
    assert all(map(is_same, loaded_args, args))
    assert list(loaded_kwargs) == list(kwargs)
    assert all(map(is_same, loaded_kwargs.values(), kwargs.values()))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        255,
        2**31,
        -(2**63),
        2**63 - 1,
        0.0,
        -0.0,
        math.inf,
        "",
        "x" * 255,
        "y" * 256,
        b"",
        bytes(4000),
    ],
)
def test_small_plain_values_are_written(value: Any) -> None:
    for pickled, expected in (
        (pickle_value(value), value),
        (pickle_arguments((value,), {"name": value}), ((value,), {"name": value})),
    ):
        if len(str(value)) < 2000:
            assert pickled is not None
        if pickled is not None:
            assert repr(pickle.loads(pickled)) == repr(expected)


@pytest.mark.parametrize(
    "value", [[], (), {}, Text("x"), Level.LOW, 2**63, -(2**63) - 1, "ä", "\ud800", bytes(MOST_NBYTES), object]
)
def test_all_else_is_left_to_pickle(value: Any) -> None:
    assert pickle_value(value) is None
    assert pickle_arguments((1, value), {}) is None
    assert pickle_arguments((), {"a": 1, "b": value}) is None


def test_many_small_values_never_exceed_the_room() -> None:
    for count in range(MOST_NBYTES):
        args = (1.5,) * count
        pickled = pickle_arguments(args, {})
        if pickled is None:
            break
        assert pickle.loads(pickled) == (args, {})
    assert 100 < count < MOST_NBYTES
