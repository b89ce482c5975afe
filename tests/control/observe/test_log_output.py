"""Lines on the script's own streams, among what the script prints itself."""

import io
from types import SimpleNamespace

import pytest

from skipper.control.observe import log_output
from skipper.control.observe.log_lines import Line
from skipper.control.observe.log_output import OutputWriter
from tests.control.conftest import PATIENCE_S


def written(monkeypatch: pytest.MonkeyPatch, text: str, *, line_buffering: bool, encoding: str = "utf-8") -> bytes:
    """What comes out when a line of an actor comes while the script is in the middle of one."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding, line_buffering=line_buffering)
    monkeypatch.setattr(log_output, "sys", SimpleNamespace(stdout=stream, stderr=stream))
    print("whole", file=stream)
    print("the script ", end="", file=stream)
    writer = OutputWriter()
    assert writer.put(Line(1, "trainers gpus=3", text), prefixed=True)
    assert writer.flush(PATIENCE_S)
    print("says", file=stream, flush=True)
    writer.close(PATIENCE_S)
    return raw.getvalue()


def test_on_a_terminal_a_line_does_not_land_within_one_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    out = written(monkeypatch, "loss 0.7", line_buffering=True)
    assert out == b"whole\n[trainers gpus=3] loss 0.7\nthe script says\n"


def test_on_a_pipe_what_the_script_printed_before_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, "loss 0.7", line_buffering=False).startswith(b"whole\n")


def test_letters_that_a_terminal_has_not_are_shown_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for line_buffering in (True, False):
        out = written(monkeypatch, "\u2603", line_buffering=line_buffering, encoding="ascii")
        assert b"[trainers gpus=3] \\u2603\n" in out
