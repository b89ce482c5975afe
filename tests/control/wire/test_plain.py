"""Pickles that are written without `pickle` are pickles all the same."""

import collections
import copy
import enum
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.control.wire._plain import MOST_NBYTES, pickle_arguments, pickle_value

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


class Text(str):
    """No plain value, though it equals one."""


class Level(enum.IntEnum):
    LOW = 1


class Named(NamedTuple):
    """No plain value, though it is a tuple."""

    number: int


def is_same(one: Any, two: Any) -> bool:
    """Whether two plain values are, NaN included."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(is_same, one, two))
    if isinstance(one, dict):
        return is_same(list(one.items()), list(two.items()))
    return bool(one == two or (one != one and two != two))


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
        [],
        (),
        {},
        (3, 4),
        ("name", [1, 2.5, None], {"a": (True, b"b"), 1: []}),
    ],
)
def test_small_plain_values_are_written(value: Any) -> None:
    for pickled, expected in (
        (pickle_value(value), value),
        (pickle_arguments((value,), {"name": copy.deepcopy(value)}), ((value,), {"name": value})),
    ):
        if len(str(value)) < 2000:
            assert pickled is not None
        if pickled is not None:
            assert repr(pickle.loads(pickled)) == repr(expected)


@pytest.mark.parametrize(
    "value",
    [
        *(Text("x"), Level.LOW, 2**63, -(2**63) - 1, "ä", "\ud800", bytes(MOST_NBYTES), object, frozenset(), 1j),
        *([object], (Level.LOW,), {"a": Text("x")}, {"ä": 1}, collections.Counter(), Named(1)),
    ],
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


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}])
def test_deep_values_never_exceed_the_room(wrap: Callable[[Any], Any]) -> None:
    value: Any = "x" * (MOST_NBYTES - 100)
    depth = 0
    while (pickled := pickle_value(value)) is not None:
        assert pickle.loads(pickled) == value
        value, depth = wrap(value), depth + 1
    assert 3 < depth < 100


def test_a_list_that_comes_twice_is_left_to_pickle() -> None:
    """It has to be one object at the other end, too."""
    for shared in ([1], {"a": 1}):
        assert pickle_value((shared, shared)) is None
        assert pickle_value([shared, (shared,)]) is None
        assert pickle_arguments((shared,), {"again": shared}) is None
        assert pickle_value((shared, type(shared)(shared))) is not None


def test_a_list_in_itself_is_left_to_pickle() -> None:
    value: list[Any] = [1]
    value.append(value)
    assert pickle_value(value) is None
