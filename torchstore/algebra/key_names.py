"""What a key may be, and which keys a prefix lists. Pure."""

from __future__ import annotations

from collections.abc import Iterable

SEPARATORS = (".", "/")
"""Dots are those of Meta's torchstore and of names in state dicts; a slash stands between a key and such a name."""


def check_key(key: object, what: str = "a key") -> str:
    """The key, if it can be one: any string without a NUL character; the empty one is a key as others are.

    Raises:
        TypeError: It is no string.
        ValueError: It holds a NUL character.
    """
    if not isinstance(key, str):
        raise TypeError(f"{what} is a string, not {key!r:.80}")
    if "\0" in key:
        raise ValueError(f"{what} cannot hold a NUL character, and {key!r:.80} does")
    return key


def check_keys(keys: object) -> tuple[str, ...]:
    """Several keys, each of which can be one.

    Raises:
        TypeError: It is a single string, or nothing that holds strings.
        ValueError: One of them holds a NUL character.
    """
    if isinstance(keys, str | bytes | bytearray):
        raise TypeError(f"several keys are expected, such as [{keys!r:.80}], not one: {keys!r:.80}")
    if not isinstance(keys, Iterable):
        raise TypeError(f"several keys are expected, in a list or a dict, not {keys!r:.80}")
    return tuple(check_key(key) for key in keys)


def is_below(key: str, prefix: str | None) -> bool:
    """Whether a listing of ``prefix`` has a key: all components of the prefix are the first ones of the key.

    "v0" has "v0", "v0.x" and "v0/x", and not "v01". None has every key; "" those whose first component is empty. A
    prefix that ends in a separator has all that begins with it.
    """
    if prefix is None:
        return True
    if not key.startswith(prefix):
        return False
    return len(key) == len(prefix) or key[len(prefix)] in SEPARATORS or prefix.endswith(SEPARATORS)
