"""Which actor a record of `logging` is from."""

import asyncio
import logging
from typing import Any

import pytest

from skipper.control import Actor, ProcMesh, concurrent_endpoint, context, current_actor_name, endpoint, this_proc
from tests.control.conftest import PATIENCE_S


class Kept(logging.Handler):
    """Keeps what records say of actors, and the lines that a format makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(actor_prefix)s%(name)s: %(message)s"))
        self.lines: list[str] = []
        self.fields: list[tuple[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self.fields.append((record.actor_name, record.actor_rank))  # type: ignore[attr-defined]


class Talker(Actor):
    def __init__(self) -> None:
        self.kept = Kept()
        logging.getLogger().addHandler(self.kept)
        logging.getLogger().setLevel(logging.INFO)

    @endpoint
    def talk(self) -> tuple[list[str], list[tuple[str, Any]]]:
        self.logger.info("by the actor's logger")
        logging.getLogger("library").warning("by %s logger", "another")
        return self.kept.lines, self.kept.fields

    @endpoint
    def names(self) -> tuple[str, str]:
        return current_actor_name(), context().actor_instance.actor_id


class Waiter(Actor):
    def __init__(self) -> None:
        self.kept = Kept()
        self.logger.addHandler(self.kept)

    @concurrent_endpoint
    async def wait(self) -> list[str]:
        await asyncio.sleep(0)
        self.logger.warning("late")
        return self.kept.lines


class OwnLogger(Actor):
    def __init__(self) -> None:
        self.logger = logging.getLogger("own")  # type: ignore[misc]

    @endpoint
    def logger_name(self) -> str:
        return self.logger.name


def test_records_say_which_actor_they_are_from(procs: ProcMesh) -> None:
    talkers = procs.spawn("talker", Talker)
    lines, fields = talkers.talk.call().get(PATIENCE_S).item(gpus=1)
    assert lines[-2:] == [
        "[actor=talker{'gpus': 1}] Talker: by the actor's logger",
        "[actor=talker{'gpus': 1}] library: by another logger",
    ]
    assert fields[-1] == ("talker", {"gpus": 1})
    waiter = procs.slice(gpus=0).spawn("waiter", Waiter)
    assert waiter.wait.call_one().get(PATIENCE_S) == ["[actor=waiter] Waiter: late"]


def test_actors_of_the_script_are_named_too_and_the_script_itself_is_not(caplog: pytest.LogCaptureFixture) -> None:
    talker = this_proc().spawn("here", Talker)
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    talker.talk.call_one().get(PATIENCE_S)
    logging.getLogger("script").warning("by the script")
    named = {record.name: record.actor_name for record in caplog.records}  # type: ignore[attr-defined]
    assert (named["library"], named["script"]) == ("here", "")
    talker.stop().get(PATIENCE_S)
    for handler in set(logging.getLogger().handlers) - set(handlers):
        logging.getLogger().removeHandler(handler)
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, Kept):
            logging.getLogger().removeHandler(handler)
    logging.getLogger().setLevel(level)


def test_an_actor_knows_its_name_and_may_have_a_logger_of_its_own(procs: ProcMesh) -> None:
    name, actor_id = procs.slice(gpus=0).spawn("named", Talker).names.call_one().get(PATIENCE_S)
    assert name == actor_id
    assert "named" in name
    assert current_actor_name() == context().actor_instance.actor_id
    assert procs.slice(gpus=0).spawn("own", OwnLogger).logger_name.call_one().get(PATIENCE_S) == "own"
