"""What can be known of the messages that were with an actor whose process has died."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skipper.control.runtime import begin_log
from skipper.control.runtime.begin_log import CAPACITY, BeginAddress, BeginView, Fate, ProcessGoneError
from tests.control.conftest import PATIENCE_S, REPOSITORY

PROGRAM = Path(__file__).with_name("begin_log_script.py")


class Writer:
    """A process that writes a log as it is told, and nothing else."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        kernel, *numbers = self._line().split()
        self.address = BeginAddress(kernel, *map(int, numbers))

    def write(self, sender: str, first: int, last: int | None = None, what: str = "begin") -> None:
        """Have it take the messages of a sender with these ports, and begin them or not."""
        assert self.process.stdin is not None
        print(sender, first, first if last is None else last, what, file=self.process.stdin, flush=True)
        self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    with made.process:  # closes its pipes
        made.process.kill()


def test_after_its_death_a_process_is_known_to_have_begun_what_it_had_written_down(writer: Writer) -> None:
    view = BeginView(writer.address, "mine")
    writer.write("mine", 1, 3)
    writer.write("other", 4)
    writer.write("mine", 5, what="take")
    assert view.count == 5
    writer.kill()
    fates = {port: view.fate(port, 0) for port in (1, 3, 4, 5, 6)}
    assert fates == {
        1: Fate.PERHAPS_BEGUN,
        3: Fate.PERHAPS_BEGUN,
        4: Fate.UNTOUCHED,  # as far as messages of ours are concerned
        5: Fate.TAKEN,
        6: Fate.UNTOUCHED,
    }


def test_what_another_message_was_taken_after_has_been_begun(writer: Writer) -> None:
    view = BeginView(writer.address, "mine")
    writer.write("mine", 1)
    writer.write("other", 1, what="take")
    writer.kill()
    assert view.fate(1, 0) is Fate.PERHAPS_BEGUN


def test_what_may_have_left_the_log_may_have_been_begun(writer: Writer) -> None:
    view = BeginView(writer.address, "mine")
    writer.write("mine", 1, CAPACITY + 10)
    writer.kill()
    assert view.fate(1, 0) is Fate.PERHAPS_BEGUN
    assert view.fate(CAPACITY + 11, 0) is Fate.PERHAPS_BEGUN
    assert view.fate(CAPACITY + 11, CAPACITY) is Fate.UNTOUCHED
    assert view.fate(CAPACITY + 10, CAPACITY) is Fate.PERHAPS_BEGUN


def test_a_process_that_lives_may_begin_anything_and_is_waited_for_once(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(begin_log, "_DEATH_S", 0.05)
    view = BeginView(writer.address, "mine")
    assert not view.is_final()
    writer.process.send_signal(signal.SIGSTOP)
    assert view.fate(1, 0) is Fate.PERHAPS_BEGUN
    assert view.is_final()
    writer.kill()
    assert view.fate(1, 0) is Fate.UNTOUCHED


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda address: replace(address, kernel="another"), OSError),
        (lambda address: replace(address, token=address.token ^ 1), OSError),
        (lambda address: replace(address, fd=0), OSError),
        (lambda address: replace(address, fd=10_000), ProcessGoneError),
    ],
)
def test_what_is_no_log_is_not_taken_for_one(
    writer: Writer, change: Callable[[BeginAddress], BeginAddress], error: type[Exception]
) -> None:
    with pytest.raises(error):
        BeginView(change(writer.address), "mine")


def test_a_process_that_is_gone_is_told_from_one_that_cannot_be_reached(writer: Writer) -> None:
    writer.kill()
    with pytest.raises(ProcessGoneError):
        BeginView(writer.address, "mine")
