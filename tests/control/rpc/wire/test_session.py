"""The proofs: what they bind, and that nothing counts twice."""

import pytest

from skipper.control.rpc.wire import session as actor_session
from skipper.control.rpc.wire.session import (
    USE_WITHIN_S,
    WINDOW,
    BadAnswerError,
    ClientSession,
    Refused,
    ReplayWindow,
    ServerSessions,
    check_secret,
)

SECRET = bytes(range(32))
NONCE = b"n" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def pair(clock: Clock | None = None) -> tuple[ServerSessions, ClientSession]:
    server = ServerSessions(SECRET, clock=clock or Clock())
    return server, ClientSession(SECRET, NONCE, *server.offer(NONCE))


def test_a_request_and_its_answer_come_through_as_they_were() -> None:
    server, client = pair()
    for body in (b"", b"request", bytes(100_000)):
        number, request = client.prove(b"Invoke", body)
        received, seal = server.accept(b"Invoke", request)
        assert received == body
        assert seal is not None
        assert client.open(b"Invoke", number, seal.close(b"answer" + body)) == b"answer" + body


def test_a_request_that_was_changed_is_refused_wherever_it_was() -> None:
    server, client = pair()
    _, request = client.prove(b"Invoke", b"request")
    for position in range(len(request)):
        changed = bytearray(request)
        changed[position] ^= 1
        try:
            _, seal = server.accept(b"Invoke", bytes(changed))
        except Refused:
            continue
        assert seal is None  # it counts as one without a proof: the tail is not recognized
    assert server.accept(b"Invoke", request)[1] is not None


def test_a_request_counts_once_and_for_its_rpc_alone() -> None:
    server, client = pair()
    _, request = client.prove(b"Invoke", b"request")
    with pytest.raises(Refused):
        server.accept(b"CancelOperation", request)
    server.accept(b"Invoke", request)
    with pytest.raises(Refused, match="already received"):
        server.accept(b"Invoke", request)


def test_an_answer_is_good_for_its_request_alone() -> None:
    server, client = pair()
    number, request = client.prove(b"Invoke", b"request")
    other_number, _ = client.prove(b"Invoke", b"request")
    _, seal = server.accept(b"Invoke", request)
    assert seal is not None
    answer = seal.close(b"answer")
    for rpc, other, given in (
        (b"Invoke", other_number, answer),
        (b"PollOperation", number, answer),
        (b"Invoke", number, answer[:-1] + bytes((answer[-1] ^ 1,))),
        (b"Invoke", number, b"answer"),
        (b"Invoke", number, b""),
        (b"Invoke", number, request),
    ):
        with pytest.raises(BadAnswerError):
            client.open(rpc, other, given)
    assert client.open(b"Invoke", number, answer) == b"answer"


def test_neither_side_gets_far_with_another_secret() -> None:
    server, _ = pair()
    session, proof = server.offer(NONCE)
    with pytest.raises(BadAnswerError):
        ClientSession(b"x" * 32, NONCE, session, proof)
    for wrong in (proof[:-1], proof[::-1], b""):
        with pytest.raises(BadAnswerError):
            ClientSession(SECRET, NONCE, session, wrong)
    stranger = ServerSessions(b"x" * 32)
    forger = ClientSession(b"x" * 32, NONCE, *stranger.offer(NONCE))
    _, request = forger.prove(b"Invoke", b"request")
    with pytest.raises(Refused):
        server.accept(b"Invoke", request)


def test_a_session_of_another_server_with_the_same_secret_is_not_known() -> None:
    _, client = pair()
    _, request = client.prove(b"Invoke", b"request")
    with pytest.raises(Refused, match="does not know this session"):
        ServerSessions(SECRET).accept(b"Invoke", request)


def test_strangers_cost_no_memory() -> None:
    server, _ = pair()
    for number in range(100):
        server.offer(number.to_bytes(32, "little"))
    assert len(server._used) == 0
    with pytest.raises(Refused):
        server.offer(b"short")


def test_a_session_is_used_soon_or_not_at_all_and_then_stays() -> None:
    clock = Clock()
    server, used = pair(clock)
    unused = ClientSession(SECRET, NONCE, *server.offer(NONCE))
    server.accept(b"Invoke", used.prove(b"Invoke", b"")[1])
    clock.now += USE_WITHIN_S + 1
    server.accept(b"Invoke", used.prove(b"Invoke", b"")[1])
    with pytest.raises(Refused, match="ended"):
        server.accept(b"Invoke", unused.prove(b"Invoke", b"")[1])


def test_a_session_that_was_forgotten_never_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_session, "MAX_SESSIONS", 2)
    clock = Clock()
    server = ServerSessions(SECRET, clock=clock)

    def use() -> bytes:
        _, request = ClientSession(SECRET, NONCE, *server.offer(NONCE)).prove(b"Invoke", b"")
        server.accept(b"Invoke", request)
        return request

    first = use()
    use()
    with pytest.raises(Refused, match="too many"):
        use()
    clock.now += USE_WITHIN_S + 1
    use()  # in place of the first
    with pytest.raises(Refused, match="ended"):
        server.accept(b"Invoke", first)


def test_requests_may_overtake_each_other_within_the_window() -> None:
    window = ReplayWindow()
    assert [window.take(number) for number in (3, 1, 2, 3, 1, 0)] == [True, True, True, False, False, False]
    assert window.take(3 + WINDOW)
    assert not window.take(3)
    assert window.take(4)
    assert not window.take(4)
    assert window.take(10 * WINDOW)
    assert not window.take(3 + WINDOW)
    assert window.take(9 * WINDOW + 1)


def test_secrets_are_checked() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        check_secret(b"short")
    with pytest.raises(TypeError):
        check_secret("x" * 32)  # type: ignore[arg-type]
