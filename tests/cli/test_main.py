import pytest

from skipper.cli import main as cli
from skipper.cli.main import TOOLS, main


def test_help_lists_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {word}  " in out and tool.summary in out for word, tool in TOOLS.items())


@pytest.mark.parametrize("argv", [[], ["fly"], ["--fly"]])
def test_an_unknown_tool_or_none_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "usage: skipper TOOL" in captured.err
    assert captured.out == ""


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("skipper ")


def test_a_tool_gets_its_arguments_and_its_exit_code_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bw", "--local", "-s", "nothing"]) == 2
    assert "skipper bw: argument -s/--size: 'nothing' is not a size" in capsys.readouterr().err


def test_without_arguments_the_process_own_are_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.sys, "argv", ["skipper", "--help"])
    assert main() == 0
    assert "bw" in capsys.readouterr().out
