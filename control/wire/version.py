"""The version of the protocol between processes, and which versions can talk to each other.

Two processes talk if their major versions are the same. A newer minor version adds fields that others leave out and
skip, and kinds of messages that others skip (see `control.wire.messages`).
"""

from __future__ import annotations

MAJOR, MINOR = 5, 0

VERSION = f"{MAJOR}.{MINOR}"
"""The form in the handshake."""


DO_NOT_GO_TOGETHER = "of the protocol do not go together"
"""Part of the reason why there is no link between processes of two major versions."""


def obstacle(theirs: object) -> str | None:
    """Why this process does not talk to one with that version, for people; None: it does."""
    major, _, minor = theirs.partition(".") if isinstance(theirs, str) and len(theirs) < 16 else ("", "", "")
    if not (major.isdecimal() and minor.isdecimal()):
        return f"version {VERSION} and the version of the other process {DO_NOT_GO_TOGETHER}"
    if int(major) == MAJOR:
        return None
    later = VERSION if int(major) < MAJOR else theirs
    return f"versions {VERSION} and {theirs} {DO_NOT_GO_TOGETHER}: {later} is that of a later Skipper"
