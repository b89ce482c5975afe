"""What the script sends to its workers: batches of instructions, as flat lists of integers.

An instruction is ``[site, outputs..., inputs...]``. The *site* says what is done, with how many of each; it was defined
in the same batch or an earlier one. Outputs and inputs are numbers of values. Constants, such as the 0.5 of
``x * 0.5``, are in a list of their own, in the order in which the instructions of the batch take them. ``[FREE, n,
refs...]`` is the only instruction of variable length: it frees values, and does not count when instructions are
numbered.

A definition is ``(site, form, description)``: the number, the form of its instructions, and the description for the
function that makes the worker's part. Without a form, it says that the site will not be used again.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FREE = 0
"""No site has this number."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the instructions of a site, and the function that makes the worker's part of it.

    Attributes:
        maker: ``module:function``, called on the worker as ``function(interpreter, site, description)``; it returns the
            function that runs an instruction.
        name: for people.
        outputs: how many values come out.
        inputs: how many go in.
        constants: how many constants go with it.
        writes: which inputs are changed.
    """

    maker: str
    name: str
    outputs: int
    inputs: int
    constants: int = 0
    writes: tuple[int, ...] = ()


Definition = tuple[int, Form | None, Any]


def pack(items: Sequence[Any]) -> bytes:
    """Definitions or constants as bytes, empty for none. Workers must be able to import what they describe."""
    return pickle.dumps(items, protocol=5) if items else b""


def unpack(packed: Any) -> Sequence[Any]:
    """The values that `pack` packed; other values are returned unchanged."""
    if not isinstance(packed, bytes):
        plain: Sequence[Any] = packed
        return plain
    items: Sequence[Any] = pickle.loads(packed) if packed else ()
    return items


def pack_code(code: Sequence[int]) -> bytes:
    """Instructions as bytes, eight for each integer."""
    return array("q", code).tobytes()


def unpack_code(packed: bytes) -> list[int]:
    """What `pack_code` packed."""
    return memoryview(packed).cast("q").tolist()
