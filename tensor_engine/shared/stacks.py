"""Where the script issued an operation: captured in a microsecond or two, turned into text only when it is needed.

`line_of_script` gives only the line, for rare operations for which that is enough.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Stack = list[Any]
"""Pairs of a code object and a position in it, the innermost first; frames would keep their variables alive."""


class Replayed(Stack):
    """The stack of the replay of a program.

    Attributes:
        traced: the stack of each of the program's instructions, from when it was traced.
    """

    traced: Sequence[Stack]


_DEPTH = 40
_OWN = str(Path(__file__).parents[1])
_NOT_OF_THE_SCRIPT = (_OWN, contextlib.__file__)


def capture(depth: int = 2) -> Stack:
    """The stack of the caller, ``depth`` frames up."""
    frame: FrameType | None = sys._getframe(depth)
    stack: Stack = []
    append = stack.append
    left = _DEPTH
    while frame is not None and left:
        append(frame.f_code)
        append(frame.f_lasti)
        frame = frame.f_back
        left -= 1
    return stack


def line_of_script() -> str:
    """The line that the script is at, as ``file:line``: that of the innermost frame that is not of this package.

    At the end of a ``with`` block it is the line of its ``with``.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_NOT_OF_THE_SCRIPT) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def describe(stack: Stack, step: int | None = None) -> str:
    """The stack as text, the innermost last, without the frames of this package.

    Args:
        stack: the stack of an instruction.
        step: if that was the replay of a program, the index of the instruction in it.
    """
    if isinstance(stack, Replayed) and step is not None:
        return f"{describe(list(stack))}\n  replayed there; traced here:\n{describe(stack.traced[step])}"
    lines: list[str] = []
    for index in range(len(stack) - 2, -2, -2):
        code, position = stack[index], stack[index + 1]
        if code.co_filename.startswith(_OWN):
            continue
        line = _line(code, position)
        lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}')
        if text := linecache.getline(code.co_filename, line).strip():
            lines.append(f"    {text}")
    return "\n".join(lines)


def _line(code: CodeType, position: int) -> int:
    for begin, end, line in code.co_lines():
        if begin <= position < end and line is not None:
            return line
    return code.co_firstlineno
