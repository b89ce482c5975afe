"""Inputs made of others: bytes, and texts in JSON whose structure stays that of the sender."""

import json
from random import Random
from typing import Any

from tests.fuzz.verdicts import Void

MAX_NBYTES = 16 << 10

_BOUNDS = (0, 1, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)
_WIDE_BOUNDS = (*_BOUNDS, 1 << 32, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 65_536, 2**31, 2**32 - 1, 2**63, 2**64, -(2**63) - 1, 10**300),
    *(0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "\0", " ", "9" * 5000, "\u0663", "\ud800", "x" * 3000, "../x", "/", "tcp://", "127.0.0.1:65536", "{name}"),
    *([], {}, [[]], [{}], {"": None}, [0] * 300),
)


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Change a few bytes, most often one number: lengths and counts are where decoders break."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        _change(changed, random)
    return bytes(changed[:MAX_NBYTES])


def _change(data: bytearray, random: Random) -> None:
    way = random.randrange(8)
    at = random.randrange(len(data) + 1)
    end = min(len(data), at + random.choice((1, 2, 4, 8, 32, 256)))
    if way == 0 and at < len(data):
        data[at] ^= 1 << random.randrange(8)
    elif way in (1, 2, 3) and at < len(data):
        nbytes = random.choice((1, 2, 4, 8))
        bound = random.choice((*_WIDE_BOUNDS, len(data), len(data) - at, random.getrandbits(64)))
        number = (bound + random.choice((-1, 0, 0, 1))) % (1 << 8 * nbytes)
        data[at : at + nbytes] = number.to_bytes(nbytes, "little")
    elif way == 4:
        data[at:at] = random.randbytes(random.choice((1, 2, 8, 64)))
    elif way == 5:
        del data[at:end]
    elif way == 6:
        data[at:at] = data[at:end] * random.choice((1, 2, 50))
    else:
        del data[at:]


def mutate_json(data: bytes, random: Random) -> bytes:
    """Change a value, a key or the depth of a JSON text; sometimes its bytes."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, random)
    way = random.randrange(12)
    if way == 0:
        return mutate_bytes(data, random)
    if way == 1:
        depth = random.choice((500, 1200, MAX_NBYTES // 2 - len(data)))
        text = json.dumps(_replaced(content, "<deep>", random))
        return text.replace('"<deep>"', "[" * depth + "]" * depth, 1).encode()
    for _ in range(random.choice((1, 1, 2, 3))):
        content = _replaced(content, random.choice(_ODD), random)
    return json.dumps(content).encode()[:MAX_NBYTES]


def _replaced(content: Any, value: Any, random: Random) -> Any:
    """The same with one of its parts replaced, left out, or there twice."""
    if not isinstance(content, list | dict) or not content or random.random() < 0.1:
        return value
    if isinstance(content, list):
        items, at = list(content), random.randrange(len(content))
        way = random.randrange(8)
        if way == 0:
            del items[at]
        elif way == 1:
            items.insert(at, items[at])
        else:
            items[at] = _replaced(items[at], value, random)
        return items
    pairs = dict(content)
    key = random.choice(list(pairs))
    if random.randrange(8) == 0:
        pairs[value if isinstance(value, str) else key + "_"] = pairs.pop(key)
    else:
        pairs[key] = _replaced(pairs[key], value, random)
    return pairs


def parts_in_json(data: bytes, count: int) -> list[Any]:
    """Values of any kind as one input: for entries whose parts some other reader has told apart.

    Raises:
        Void: it is not that many values.
    """
    try:
        parts = json.loads(data)
    except (ValueError, RecursionError):
        raise Void from None
    if not isinstance(parts, list) or len(parts) != count:
        raise Void
    return parts


def numbers_of(data: bytes, *bounds: int) -> tuple[list[int], bytes]:
    """As many numbers as there are bounds, each below its bound, off the front of an input; and the rest.

    So an entry that takes numbers beside bytes gets both from one input.
    """
    numbers = []
    for bound in bounds:
        nbytes = (bound.bit_length() + 7) // 8
        numbers.append(int.from_bytes(data[:nbytes], "little") % bound)
        data = data[nbytes:]
    return numbers, data


def join_parts(*parts: bytes) -> bytes:
    """Several byte strings as one input."""
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """The byte strings of an input; the last may be cut short."""
    parts = []
    while data:
        end = 2 + int.from_bytes(data[:2], "little")
        parts.append(data[2:end])
        data = data[end:]
    return parts
