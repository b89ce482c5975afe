"""Who may send a body, as a game of names and times."""

import random

import pytest

from skipper.control.rpc.wire import unproven
from skipper.control.rpc.wire.unproven import Unproven


class Game:
    """A request is a pair of its connection, ``peer:number``, and a number."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.refused: list[tuple[str, int]] = []
        self.table: Unproven[tuple[str, int]] = Unproven(
            begin=self.begun.append, refuse=self.refused.append, group=lambda name: name.partition(":")[0]
        )

    def flood(self, connection: str, count: int, now: float = 0.0) -> None:
        for number in range(count):
            self.table.came((connection, number), connection, now)


@pytest.fixture
def game() -> Game:
    return Game()


def test_one_connection_takes_a_few_places_and_goes_on_as_they_get_free(game: Game) -> None:
    game.flood("one:1", 10)
    assert game.begun == [("one:1", number) for number in range(unproven.MAX_OF_CONNECTION)]
    for request in list(game.begun):
        game.table.gone(request, 0.0)
    assert len(game.begun) == 2 * unproven.MAX_OF_CONNECTION
    assert game.refused == []


def test_there_are_never_more_places_taken_than_there_are(game: Game) -> None:
    for number in range(100):
        game.flood(f"one:{number}", 10)
    assert len(game.begun) == unproven.MAX_AT_ONCE


def test_who_is_slow_makes_way_for_a_newcomer_and_nobody_else_does(game: Game) -> None:
    for number in range(100):
        game.flood(f"many:{number}", 10)
    game.flood("other:1", 1, unproven.SLOW_S / 2)
    assert ("other:1", 0) not in game.begun
    game.table.sweep(2 * unproven.SLOW_S)
    assert ("other:1", 0) in game.begun
    assert {connection.partition(":")[0] for connection, _ in game.refused} == {"many"}


def test_the_peer_with_the_fewest_places_is_the_next(game: Game) -> None:
    for number in range(100):
        game.flood(f"many:{number}", 10)
    game.flood("other:1", 2)
    game.table.gone(game.begun[0], 0.0)
    assert game.begun[-1] == ("other:1", 0)


def test_who_does_not_come_to_an_end_is_turned_away(game: Game) -> None:
    game.flood("one:1", 10)
    assert game.table.sweep(0.0) is not None
    game.table.sweep(unproven.PATIENCE_S + 1)
    assert len(game.refused) == 10
    assert len(game.table) == 0
    assert game.table.sweep(unproven.PATIENCE_S + 1) is None


def test_a_connection_with_a_proof_waits_for_nothing(game: Game) -> None:
    game.flood("one:1", 10)
    game.table.proved("one:1")
    assert len(game.begun) == 10
    assert len(game.table) == 0
    game.flood("one:1", 100)
    assert len(game.begun) == 110


def test_the_fullest_connection_pays_for_what_is_too_much(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unproven, "MAX_WAITING", 50)
    game.flood("one:1", 50)
    game.flood("other:1", 1)
    assert game.refused == [("one:1", 49)]
    assert ("other:1", 0) in game.begun


def test_only_so_many_connections_are_remembered(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unproven, "MAX_PROVEN", 2)
    for number in range(3):
        game.table.proved(f"one:{number}")
    game.flood("one:0", 10)
    assert len(game.begun) == unproven.MAX_OF_CONNECTION


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_request_is_begun_or_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unproven, "MAX_AT_ONCE", 6)
    monkeypatch.setattr(unproven, "MAX_WAITING", 40)
    choose, game, now = random.Random(seed), Game(), 0.0
    come: set[tuple[str, int]] = set()
    gone: set[tuple[str, int]] = set()
    for number in range(1500):
        now += choose.random() / 20
        what = choose.random()
        if what < 0.6:
            request = (f"{choose.randrange(4)}:{choose.randrange(3)}", number)
            come.add(request)
            game.table.came(request, request[0], now)
        elif what < 0.9 and game.begun:
            request = choose.choice(game.begun)
            gone.add(request)
            game.table.gone(request, now)
        elif what < 0.92 and choose.random() < 0.1:
            game.table.proved(f"{choose.randrange(4)}:{choose.randrange(3)}")
        else:
            game.table.sweep(now)
    game.table.sweep(now + 2 * unproven.PATIENCE_S)
    assert len(game.table) == 0
    assert set(game.begun) | set(game.refused) == come
    assert len(game.begun) == len(set(game.begun))
    assert len(game.refused) == len(set(game.refused))
