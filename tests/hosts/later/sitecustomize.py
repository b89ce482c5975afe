"""Makes a process one of a later Skipper: calls and spawn requests have a field more, and there is a message more."""

import dataclasses
import importlib.metadata
from typing import Annotated, Any

from skipper.control.runtime import messages as data
from skipper.control.wire import messages, version
from skipper.control.wire.messages import U32, Message, Since


@dataclasses.dataclass(slots=True)
class Call(messages.Call):
    """With a field that others do not know."""

    urgency: Annotated[U32, Since(1)] = 7


@dataclasses.dataclass(slots=True)
class Hint(Message):
    """Which others do not know, and skip."""

    kind = 128  # type: ignore[assignment]

    words: messages.Text


@data.growing
@dataclasses.dataclass(frozen=True, slots=True)
class SpawnRequest(data.SpawnRequest):
    """With a field that others do not know."""

    weight: int = 3


messages.MESSAGES = (*(Call if message is messages.Call else message for message in messages.MESSAGES), Hint)
messages.Call, data.SpawnRequest = Call, SpawnRequest  # type: ignore[misc]
version.MINOR, version.VERSION = version.MINOR + 1, f"{version.MAJOR}.{version.MINOR + 1}"
_version_of = importlib.metadata.version
importlib.metadata.version = lambda name: "9.9.9" if name == "skipper-mesh" else _version_of(name)

from skipper.control.wire import link  # noqa: E402  (it takes what was made here)

_open = link.Link.open


def _greet(self: link.Link, *arguments: Any, **keywords: Any) -> None:
    self.post(Hint("hello", payload=(b"what others skip",)))
    _open(self, *arguments, **keywords)


link.Link.open = _greet  # type: ignore[method-assign]
