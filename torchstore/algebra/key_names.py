"""Which strings are keys, and which keys a prefix lists. Pure."""

from __future__ import annotations

from collections.abc import Iterable

SEPARATORS = (".", "/")
"""Dots are separators in Meta's torchstore and in names of state dicts; a slash separates a key from such a name."""


def check_key(key: object, what: str = "a key") -> str:
    """The key, if it is valid: any string without a NUL character, also the empty one.

    Raises:
        TypeError: It is not a string.
        ValueError: It contains a NUL character.
    """
    if not isinstance(key, str):
        raise TypeError(f"{what} is a string, not {key!r:.80}")
    if "\0" in key:
        raise ValueError(f"{what} cannot hold a NUL character, and {key!r:.80} does")
    return key


def check_keys(keys: object) -> tuple[str, ...]:
    """Several keys, if each of them is valid.

    Raises:
        TypeError: It is a single string, or not a collection of strings.
        ValueError: One of them contains a NUL character.
    """
    if isinstance(keys, str | bytes | bytearray):
        raise TypeError(f"several keys are expected, such as [{keys!r:.80}], not one: {keys!r:.80}")
    if not isinstance(keys, Iterable):
        raise TypeError(f"several keys are expected, in a list or a dict, not {keys!r:.80}")
    return tuple(check_key(key) for key in keys)


def is_below(key: str, prefix: str | None) -> bool:
    """Whether a listing of ``prefix`` contains a key: the components of the prefix are the first ones of the key.

    "v0" lists "v0", "v0.x" and "v0/x", but not "v01". None lists every key; "" those whose first component is empty. A
    prefix that ends in a separator lists all keys that begin with it.
    """
    if prefix is None:
        return True
    if not key.startswith(prefix):
        return False
    return len(key) == len(prefix) or key[len(prefix)] in SEPARATORS or prefix.endswith(SEPARATORS)
