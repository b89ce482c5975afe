"""Messages to bytes and back, as their definitions in `control.wire.messages` say.

A message is packed and unpacked four times on the way of a call there and back, so this is where microseconds are made
or lost: what can be known of a class is worked out once.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from skipper.control.model.errors import ProtocolError
from skipper.control.wire.messages import MESSAGES, Fixed, Message, Since, Sized

HEADER = struct.Struct("<BBII")
"""Kind, options, size in bytes of the fields, number of segments."""
SIZE = struct.Struct("<Q")
"""The size of a segment; one of each stands behind the header."""

TRACED, NUMBERED = 1, 2
"""Options: behind the fields stands of which trace it is (its size, 8 bits, and it), and its number (64 bits)."""
OPTIONS = TRACED | NUMBERED


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """One field of a message.

    Attributes:
        name: as in its class.
        form: how it is laid out.
        since: the minor version with which it came.
    """

    name: str
    form: Fixed | Sized
    since: int


class _Part:
    """The fields that came with one minor version: those of fixed size, the sizes of the others, and those.

    Attributes:
        names: of the fields.
        nbytes: of what has a fixed size.
        codes: its layout.
        pack: of a message: what the layout takes, and the bytes behind that.
        unpack: of a frame, a position and the end of the message: the values, and the position behind them; raises
            ProtocolError where they exceed the end, and what decoding raises.
    """

    pack: Callable[[Message], tuple[tuple[Any, ...], bytes]]
    unpack: Callable[[bytes, int, int], tuple[tuple[Any, ...], int]]

    def __init__(self, fields: list[FieldLayout]) -> None:
        fixed = [field.name for field in fields if isinstance(field.form, Fixed)]
        sized = {field.name: field.form for field in fields if isinstance(field.form, Sized)}
        self.names = [*fixed, *sized]
        if self.names != [field.name for field in fields]:
            raise TypeError("the fields of fixed size come first")
        self.codes = "".join(field.form.code for field in fields)
        self.layout = struct.Struct("<" + self.codes)
        self.nbytes = self.layout.size
        made: dict[str, Any] = {"struct_of": self.layout, "Late": ProtocolError}
        for name, form in sized.items():
            made[f"encode_{name}"], made[f"decode_{name}"] = form.encode, form.decode
        exec("\n".join(_source(fixed, list(sized))), made)  # as dataclasses make theirs: of nothing but names of fields
        self.pack, self.unpack = made["pack"], made["unpack"]


def _source(fixed: list[str], sized: list[str]) -> list[str]:
    """Two functions without a loop: at some microseconds for each message, it would be a third of them."""
    values = "".join(f"message.{name}, " for name in fixed) + "".join(f"len({name}), " for name in sized)
    lines = ["def pack(message):"]
    lines += [f"    {name} = encode_{name}(message.{name})" for name in sized]
    lines += [f"    return ({values}), {' + '.join(sized) or repr(b'')}"]
    unpacked = "".join(f"{name}, " for name in (*fixed, *sized))
    lines += ["def unpack(frame, position, end):"]
    lines += [f"    {unpacked}= struct_of.unpack_from(frame, position)"] if unpacked else []
    lines += ["    position += struct_of.size"]
    for name in sized:
        lines += [
            f"    begin, position = position, position + {name}",
            "    if position > end:",
            "        raise Late('a field exceeds its message')",
            f"    {name} = decode_{name}(frame[begin:position])",
        ]
    lines += ["    if position > end:", "        raise Late('the fields of a message are too short')"]
    return [*lines, f"    return ({unpacked}), position"]


class MessageLayout:
    """How messages of one class are laid out.

    Attributes:
        kind: its number.
        fields: in the order of the class.
        codes: the layout of what has a fixed size of those that all versions know.
    """

    def __init__(self, cls: type[Message]) -> None:
        self.kind = cls.kind
        self.fields = [
            layout
            for base in reversed(cls.__mro__)
            if issubclass(base, Message) and base is not Message
            for layout in map(_layout_of, inspect.get_annotations(base, eval_str=True).items())
            if layout is not None
        ]
        minors = sorted({field.since for field in self.fields} | {0})
        self._first, *self._later = (
            _Part([field for field in self.fields if field.since == minor]) for minor in minors
        )
        self.codes = self._first.codes
        self._make = cls
        self._pack_head = struct.Struct(HEADER.format + "Q" + self._first.codes).pack

    def encode(self, message: Message, options: int, nbytes: int) -> tuple[bytes, bytes]:
        """A message of one segment of this size: header, size and fields."""
        values, behind = self._first.pack(message)
        if self._later:
            behind += self._encode_later(message)
        size = self._first.nbytes + len(behind)
        return self._pack_head(self.kind, options, size, 1, nbytes, *values), behind

    def encode_fields(self, message: Message) -> bytes:
        """The fields alone."""
        values, behind = self._first.pack(message)
        fields = self._first.layout.pack(*values) + behind
        return fields + self._encode_later(message) if self._later else fields

    def _encode_later(self, message: Message) -> bytes:
        parts: list[bytes] = []
        for part in self._later:
            values, behind = part.pack(message)
            parts += (part.layout.pack(*values), behind)
        return b"".join(parts)

    def decode(self, frame: bytes, begin: int, end: int) -> Message:
        """The message whose fields stand there; what follows behind those that this version knows is skipped.

        Raises:
            ProtocolError: they are not as the class says.
            ValueError, TypeError, struct.error: from decoding them.
        """
        values, position = self._first.unpack(frame, begin, end)
        message = self._make(*values)
        for part in self._later:
            if position == end:
                break  # of who does not know these
            values, position = part.unpack(frame, position, end)
            for name, value in zip(part.names, values, strict=True):
                setattr(message, name, value)
        return message


def _layout_of(annotation: tuple[str, Any]) -> FieldLayout | None:
    name, hint = annotation
    notes = get_args(hint)[1:]
    form = next((note for note in notes if isinstance(note, Fixed | Sized)), None)
    since = next((note.minor for note in notes if isinstance(note, Since)), 0)
    return None if form is None else FieldLayout(name, form, since)


LAYOUTS: dict[type[Message], MessageLayout] = {cls: MessageLayout(cls) for cls in MESSAGES}
BY_KIND: dict[int, MessageLayout] = {int(layout.kind): layout for layout in LAYOUTS.values()}
