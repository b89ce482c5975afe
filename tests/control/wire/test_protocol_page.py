import re
from pathlib import Path

import pytest

from skipper.control.wire import protocol_page
from skipper.control.wire.frames import Decoder, encode
from skipper.control.wire.protocol_page import EXAMPLES, PAGE
from tests.control.wire.plain import plain


def test_the_page_is_what_the_messages_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert protocol_page.main(["--check"]) == 0
    stale = tmp_path / "wire_protocol.md"
    stale.write_text(PAGE.read_text().replace("#### 2 Reply", "#### 2 Answer"))
    monkeypatch.setattr(protocol_page, "PAGE", stale)
    assert protocol_page.main(["--check"]) == 1
    assert "is not what the messages say" in capsys.readouterr().err
    assert protocol_page.main([]) == 0
    assert stale.read_text() == PAGE.read_text()


def test_the_examples_of_the_page_are_those_bytes_and_those_bytes_are_the_examples() -> None:
    shown = re.findall(r"` is\n```text\n([0-9a-f\n]+)```", PAGE.read_text())
    frames = [b"\x00" + bytes.fromhex(text.replace("\n", "")) for text in shown]
    assert [plain(message) for frame in frames for message in Decoder().feed(frame)] == list(EXAMPLES)
    assert [next(encode([example]))[1:] for example in EXAMPLES] == [frame[1:] for frame in frames]
