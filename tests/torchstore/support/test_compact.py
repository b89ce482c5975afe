"""Messages are pickled as a call of their class, and come out as they went in."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields, replace

import pytest

from skipper.torchstore.protocol.messages import Grant, Published, Retired, Share, Wanted
from skipper.torchstore.protocol.origin import Origin
from skipper.torchstore.support.compact import compact
from skipper.torchstore.support.process import this_process


@pytest.mark.parametrize(
    "message",
    [
        Grant(
            "key", 3, 7, (Share("manifest", "binding", 2, this_process()),), waited_s=0.5, singles=(Grant("one", 1),)
        ),
        Published(4, True, 2, (Retired("binding", "volume"),)),
        Wanted("key"),
    ],
)
def test_a_message_equals_its_copies(message: object) -> None:
    for copied in (pickle.loads(pickle.dumps(message, protocol=5)), copy.copy(message), copy.deepcopy(message)):
        assert copied == message
        assert type(copied) is type(message)


def test_a_message_is_checked_where_it_is_unpacked() -> None:
    forged = pickle.dumps(Origin("group", 1, 2), protocol=5).replace(b"K\x01K\x02", b"K\x03K\x02")
    with pytest.raises(ValueError, match="0 <= index < count"):
        pickle.loads(forged)


@compact
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


def test_the_class_is_still_a_dataclass() -> None:
    point = Point(1)
    assert [field.name for field in fields(point)] == ["x", "y"]
    assert replace(point, y=5) == Point(1, 5)
    assert point.__reduce__() == (Point, (1, 2))
