"""Messages to bytes and back, according to their definitions in `control.wire.messages`.

A call and its reply pack and unpack messages four times, so microseconds count here: what depends only on the class is
computed once.
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
"""The size of a segment; the header is followed by the size of each."""

TRACED, NUMBERED = 1, 2
"""Options: the fields are followed by the trace (its size, 8 bits, and its bytes), and the number (64 bits)."""
OPTIONS = TRACED | NUMBERED


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """One field of a message.

    Attributes:
        name: as in its class.
        form: its layout.
        since: the minor version that added it.
    """

    name: str
    form: Fixed | Sized
    since: int


class _Part:
    """The fields that one minor version added: those of fixed size, the sizes of the others, and the others.

    Attributes:
        names: of the fields.
        nbytes: the size of the fixed part.
        codes: the layout of that part.
        pack: takes a message; returns the values for the layout, and the bytes after them.
        unpack: takes a frame, a position and the end of the message; returns the values, and the position after them.
            Raises ProtocolError if they exceed the end, and what decoding raises.
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
        exec("\n".join(_source(fixed, list(sized))), made)  # as dataclasses do; only field names go into the source
        self.pack, self.unpack = made["pack"], made["unpack"]


def _source(fixed: list[str], sized: list[str]) -> list[str]:
    """The source of two functions without a loop: a loop would take a third of the few microseconds per message."""
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
    """The layout of the messages of one class.

    Attributes:
        kind: its number.
        fields: in the order of the class.
        codes: the layout of the fixed-size fields that all versions know.
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
        """A message with one segment of this size: header, size and fields."""
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
        """The message with the fields at this place; fields after those that this version knows are skipped.

        Raises:
            ProtocolError: they do not fit the class.
            ValueError, TypeError, struct.error: from decoding them.
        """
        values, position = self._first.unpack(frame, begin, end)
        message = self._make(*values)
        for part in self._later:
            if position == end:
                break  # the sender does not know these
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
