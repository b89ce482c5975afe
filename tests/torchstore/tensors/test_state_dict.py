import enum
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skipper.torchstore.tensors.state_dict import flatten, unflatten

LEAVES = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.builds(lambda n: torch.full((2,), n), st.integers(0, 9))
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(st.text("xyz", min_size=1, max_size=3), st.integers(0, 3)), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left is right
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), NESTED, max_size=4))
def test_unflatten_undoes_flatten(state: dict[str, Any]) -> None:
    try:
        leaves, paths = flatten(state)
    except ValueError:
        return  # {1: .., "1": ..} have one name: refused, as the test below shows
    assert same(unflatten(leaves, pickle.loads(pickle.dumps(paths))), state)


def test_names_are_the_steps_joined_by_dots() -> None:
    weight = torch.zeros(1)
    leaves, _ = flatten(OrderedDict(model={"layers": [{"weight": weight}]}, step=3, betas=(0.9, 0.99), empty={}))
    assert list(leaves) == ["model.layers.0.weight", "step", "betas", "empty"]
    assert leaves["model.layers.0.weight"] is weight
    assert leaves["betas"] == (0.9, 0.99)


def test_optimizer_state_keeps_its_integer_keys() -> None:
    state = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    assert same(unflatten(*flatten(state)), state)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a\.b'"):
        flatten({"a.b": 1, "a": {"b": 2}})


def test_something_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="list"):
        flatten([1, 2])  # type: ignore[arg-type]


def test_both_paths_of_a_name_are_told() -> None:
    with pytest.raises(ValueError, match=r"\['a\.b'\] and \['a'\]\['b'\]"):
        flatten({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(ValueError, match=r"\[1\] and \['1'\]"):
        flatten({1: 1, "1": 2})


class Color(enum.Enum):
    RED = 1


def test_keys_of_any_kind_that_equals_its_copy_come_back() -> None:
    weight = torch.zeros(1)
    state = {1: weight, "a/b": weight, None: 3, (1, "x"): {Color.RED: weight, 2.5: weight}, b"x": {}, False: 4}
    leaves, paths = flatten(state)
    assert same(unflatten(leaves, pickle.loads(pickle.dumps(paths))), state)


@pytest.mark.parametrize("key", [object(), lambda: 0, torch.zeros(3), (object(),)], ids=lambda key: type(key).__name__)
def test_keys_that_are_unlike_their_copies_are_refused(key: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(key).__name__} cannot be a key.* within 'state'"):
        flatten({"state": {key: {"exp_avg": torch.zeros(3)}}})


def test_what_contains_itself_is_refused() -> None:
    looped: dict[str, Any] = {"w": torch.zeros(1)}
    looped["layers"] = [looped, torch.zeros(1)]
    with pytest.raises(ValueError, match=r"contains itself.*\['layers'\]\[0\]"):
        flatten(looped)
    listed: list[Any] = [torch.zeros(1)]
    listed.append(listed)
    with pytest.raises(ValueError, match=r"contains itself.*\['opt'\]\[1\]"):
        flatten({"opt": listed})
    listed.pop(0)
    with pytest.raises(ValueError, match="contains itself"):
        flatten({"opt": listed})
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"d": deep, "w": torch.zeros(1)}
    with pytest.raises(ValueError, match="too deep"):
        flatten(deep)
