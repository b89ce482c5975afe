import json
import socket
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.benchmarks.bandwidth.channel import MessageChannel
from skipper.benchmarks.bandwidth.messages import (
    Connect,
    Done,
    Elapsed,
    Fill,
    IntegrityVerdict,
    Mismatch,
    Offer,
    Request,
    answer,
    read_answer,
    read_request,
    refuse,
    tell,
)
from skipper.benchmarks.errors import PeerError, PeerRefusedError

Pair = tuple[MessageChannel, MessageChannel]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with MessageChannel(left, peer="right", timeout=5) as near, MessageChannel(right, peer="left", timeout=5) as far:
        yield near, far


finite = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(float, finite)
requests = st.one_of([st.from_type(kind) for kind in typing.get_args(Request)])
answers = st.one_of([st.from_type(kind) for kind in (Offer, IntegrityVerdict, Elapsed, Done)])


@given(request=requests)
def test_a_request_arrives_as_it_was_sent(pair: Pair, request: Request) -> None:
    tell(pair[0], request)
    assert read_request(pair[1], timeout=5) == request


@given(value=answers)
def test_an_answer_arrives_as_it_was_sent(pair: Pair, value: Any) -> None:
    answer(pair[1], value)
    assert read_answer(pair[0], type(value)) == value


def test_a_refusal_raises_with_the_servers_own_words(pair: Pair) -> None:
    refuse(pair[1], ValueError("no such byte"))
    with pytest.raises(PeerRefusedError, match="ValueError: no such byte") as caught:
        read_answer(pair[0], Done)
    assert caught.value.kind == "ValueError"


@pytest.mark.parametrize(
    "message",
    [
        b"\x80\x04.",
        b"{",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"request": "shutdown"}',
        b'{"request": ["fill"]}',
        b'{"request": "fill"}',
        b'{"request": "connect", "handles": "1"}',
        b'{"request": "connect", "handles": true}',
        b'{"request": "connect", "handles": 1, "more": 1}',
        b'{"request": "fill", "where": "elsewhere", "size": 1, "seed": 1}',
    ],
)
def test_what_is_no_request_is_refused(pair: Pair, message: bytes) -> None:
    pair[0].send(message)
    with pytest.raises(PeerError, match="left"):
        read_request(pair[1], timeout=5)


@pytest.mark.parametrize("document", [{}, {"mismatch": 1}, {"mismatch": {"at": 1}}, {"mismatch": None, "more": 1}])
def test_what_is_no_answer_is_refused(pair: Pair, document: dict[str, object]) -> None:
    pair[1].send(json.dumps(document).encode())
    with pytest.raises(PeerError, match="right"):
        read_answer(pair[0], IntegrityVerdict)


def test_the_example_requests_are_what_the_page_of_the_protocol_says(pair: Pair) -> None:
    tell(pair[0], Fill(where="local", size=4096, seed=3))
    assert json.loads(pair[1].receive()) == {"request": "fill", "where": "local", "size": 4096, "seed": 3}
    tell(pair[0], Connect(handles=2))
    assert json.loads(pair[1].receive()) == {"request": "connect", "handles": 2}
    answer(pair[1], IntegrityVerdict(Mismatch(at=7, expected=1, found=2)))
    assert json.loads(pair[0].receive()) == {"mismatch": {"at": 7, "expected": 1, "found": 2}}
