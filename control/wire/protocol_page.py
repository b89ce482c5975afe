"""The tables of messages in ``docs/wire_protocol.md``, made from their definitions.

``python -m skipper.control.wire.protocol_page`` writes them; with ``--check`` it compares.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from skipper.control.model.shape import Extent
from skipper.control.wire.codec import LAYOUTS
from skipper.control.wire.frames import encode
from skipper.control.wire.messages import (
    MESSAGES,
    Bye,
    Call,
    Cast,
    CastAnswers,
    Credit,
    Failure,
    Filler,
    Fixed,
    Kind,
    LoanReturned,
    Message,
    Ping,
    PortValue,
    ProcessRequest,
    Reply,
    RouteBegun,
    RouteClosed,
    RouteCut,
    RouteDone,
    RouteLost,
    RouteOpened,
    RouteSettled,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire_protocol.md"
_BEGIN, _END = "<!-- from control/wire/messages.py -->\n", "<!-- end -->\n"
_SIZES = {"H": "16", "I": "32"}

_TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

EXAMPLES: tuple[Message, ...] = (
    Call(7, 9, 3, "step", Extent(("hosts", "gpus"), (2, 8)), payload=(b"args",), trace=_TRACE, sequence=5),
    Reply(9, 2, payload=(b"result",)),
    Failure(9, payload=(b"why",)),
    ProcessRequest(0, 9, 0, "ping"),
    Ping(4711, 4026531836),
    Bye(),
    Credit(7, 64, 4096),
    LoanReturned(3, is_readable=True),
    Cast(11, 1, 0, 7, 9, "step", Extent(("gpus",), (4,)), ((0, 2, 1),), payload=(b"args", b"buffer")),
    CastAnswers(11, 1, 9, is_home=True, entries=((0, Kind.REPLY, 1), (1, Kind.FAILURE, 1)), payload=(b"a", b"why")),
    PortValue(12, payload=(b"value",)),
    RouteOpened(payload=(b"[]",)),
    RouteBegun(),
    RouteDone(11, 1),
    RouteSettled(11, 1),
    RouteCut(11, "job-4"),
    RouteLost(11),
    RouteClosed(11, 2),
    Filler(sequence=6),
)
"""One message of each kind."""


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or compare them; the exit code is 1 where they differ."""
    parser = argparse.ArgumentParser(prog="python -m skipper.control.wire.protocol_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the files, and write nothing")
    is_check = parser.parse_args(arguments).check
    page = PAGE.read_text()
    before, rest = page.split(_BEGIN)
    made = "".join((before, _BEGIN, "\n", *tables(), _END, rest.split(_END, 1)[1]))
    if made == page:
        return 0
    if is_check:
        sys.stderr.write(f"{PAGE.name} is not what the messages say; run make proto\n")
        return 1
    PAGE.write_text(made)
    return 0


def tables() -> Iterator[str]:
    """The part of the page that describes each message."""
    examples = {type(example): example for example in EXAMPLES}
    for cls in MESSAGES:
        words, fields = _said_of(cls)
        yield f"#### {int(cls.kind)} {cls.__name__}\n{words}\n\n"
        if layout := LAYOUTS[cls].fields:
            yield "| field | layout | meaning |\n|---|---|---|\n"
            for field in layout:
                form = field.form
                size = form.words if isinstance(form, Fixed) else f"{form.words}; size in {_SIZES[form.code]} bits"
                since = f" Since minor version {field.since}." if field.since else ""
                yield f"| {field.name} | {size} | {fields[field.name]}{since} |\n"
            yield "\n"
        yield f"`{_shown(examples[cls])}` is\n```text\n{_hex(examples[cls])}\n```\n\n"


def _said_of(cls: type[Message]) -> tuple[str, dict[str, str]]:
    """What the docstring says about a message, and about each of its fields."""
    words, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")
    fields = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return _in_line(words), {name: _in_line(text) for name, text in fields}


def _in_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _shown(message: Message) -> str:
    fields = {field.name: getattr(message, field.name) for field in LAYOUTS[type(message)].fields}
    fields |= {name: getattr(message, name) for name in ("payload", "trace", "sequence")}
    said = ", ".join(f"{name}={_value(value)}" for name, value in fields.items() if value or name in ("target",))
    return f"{type(message).__name__}({said})"


def _value(value: object) -> str:
    if isinstance(value, Extent):
        return "{" + ", ".join(f"{axis}: {size}" for axis, size in zip(value.axes, value.sizes, strict=True)) + "}"
    return repr(value).replace("<Kind.REPLY: 2>", "2").replace("<Kind.FAILURE: 3>", "3")


def _hex(message: Message) -> str:
    (frame,) = encode([message])
    text = frame[1:].hex()
    return "\n".join(text[at : at + 96] for at in range(0, len(text), 96))


if __name__ == "__main__":
    sys.exit(main())
