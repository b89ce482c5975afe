"""Sorted keys: what a set and `sorted` would say, in blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.torchstore.algebra.listing import SortedKeys

KEYS = st.text("ab./é\U0001f600", max_size=6)


def test_many_keys_are_listed_in_order_however_they_came_and_went() -> None:
    keys = [f"layer.{(n * 7919) % 10_007}.weight" for n in range(10_007)]
    found = SortedKeys()
    for key in keys:
        found.add(key)
    assert list(found) == sorted(keys)
    assert list(found.starting_with("layer.99")) == sorted(key for key in keys if key.startswith("layer.99"))
    for key in keys[::3]:
        found.remove(key)
    left = sorted(key for position, key in enumerate(keys) if position % 3)
    assert list(found) == left
    assert len(found) == len(left)
    for key in left:
        found.remove(key)
    assert list(found) == []
    assert list(found.starting_with("")) == []


def test_what_is_not_there_cannot_be_removed() -> None:
    found = SortedKeys()
    for key in ("a", None, "c"):
        with pytest.raises(KeyError):
            found.remove("b")
        if key is not None:
            found.add(key)


@given(st.lists(st.tuples(st.booleans(), KEYS)), KEYS)
def test_a_prefix_finds_what_begins_with_it(steps: list[tuple[bool, str]], prefix: str) -> None:
    found, model = SortedKeys(), set[str]()
    for add, key in steps:
        if add and key not in model:
            found.add(key)
            model.add(key)
        elif not add and key in model:
            found.remove(key)
            model.remove(key)
    assert list(found) == sorted(model)
    assert list(found.starting_with(prefix)) == sorted(key for key in model if key.startswith(prefix))
    assert list(found.from_(prefix)) == sorted(key for key in model if key >= prefix)
    whole = [key for key in model if key == prefix or key.startswith((f"{prefix}.", f"{prefix}/"))]
    assert list(found.below(prefix, "./")) == sorted(whole)
