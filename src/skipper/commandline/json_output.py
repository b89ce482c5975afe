"""Where ``--json`` writes: standard output, or a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

STDOUT = "-"
"""The path that means standard output."""


def write_json(data: object, where: str | None) -> None:
    """Write what ``--json`` asked for, if it did.

    Args:
        data: plain data.
        where: a path, `STDOUT`, or None for nothing at all.

    Raises:
        OSError: the file cannot be written.
    """
    if where is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if where == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(where).write_text(text, encoding="utf-8")
