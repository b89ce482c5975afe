import traceback

import pytest

from skipper.control import ActorError
from skipper.control.model.exception_text import (
    MOST_MESSAGE,
    MOST_TEXT,
    describe,
    in_seconds,
    shorten,
    summarize,
    summarize_fully,
)


class MuteError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__

    def __getattr__(self, name: str) -> object:
        raise GeneratorExit

    @property
    def __class__(self) -> type:
        raise RuntimeError("not even that")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001
        return caught


def test_text_within_its_bound_is_left_alone_and_longer_text_says_how_much_is_cut() -> None:
    assert shorten("x" * 10, 10) == "x" * 10
    assert shorten("a" * 500 + "b" * 500, 100) == "a" * 50 + "\n[... 900 characters are cut here ...]\n" + "b" * 50


def test_an_exception_in_short_is_its_class_and_its_words() -> None:
    assert summarize(ValueError("x")) == "ValueError: x"
    assert summarize(KeyError()) == "KeyError"


def test_a_long_message_is_cut_in_every_text() -> None:
    error = raised(ValueError("x" * 100_000_000))
    for text, most in (
        (summarize(error), MOST_MESSAGE),
        (summarize_fully(error), MOST_MESSAGE),
        (describe(error), MOST_TEXT),
    ):
        assert len(text) < most + 200
        assert "characters are cut here" in text
    assert "in raised" in describe(error)


def test_an_exception_whose_methods_raise_has_a_text_all_the_same() -> None:
    error = raised(MuteError())
    assert summarize(error) == "MuteError: <its __str__ raised SystemExit>"
    assert "MuteError" in summarize_fully(error)
    assert "in raised" in describe(error)
    assert "MuteError" in describe(error)


def test_a_described_error_of_an_actor_shows_its_remote_traceback_once() -> None:
    inner = ActorError("b[0]", "step", "ValueError: x", "Traceback: in step of b", ValueError("x"))
    middle = raised(RuntimeError("no luck"), raised(inner))
    text = describe(middle)
    assert text.count("in step of b") == 1
    assert text.count("ValueError: x") == 1
    assert text.index("in step of b") < text.index("no luck")
    group = describe(raised(ExceptionGroup("both", [raised(inner), raised(KeyError("y"))])))
    assert group.count("in step of b") == 1
    assert "KeyError: 'y'" in group


def test_others_are_described_as_python_does() -> None:
    error = raised(ValueError("x"), raised(KeyError("y")))
    error.add_note("a note")
    assert describe(error) == "".join(traceback.format_exception(error))
    assert summarize_fully(error) == "ValueError: x\na note"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "less than a millisecond"), (0.05, "0.05 s"), (1.9999871, "2 s"), (14.96, "15 s"), (86399.7, "86400 s")],
)
def test_seconds_are_rounded_and_never_to_none(seconds: float, words: str) -> None:
    assert in_seconds(seconds) == words
