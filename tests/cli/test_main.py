import os
import signal
import subprocess
import sys

import pytest

from skipper.cli import main as cli
from skipper.cli.main import GROUPS, TOOLS, main

# What a user has not asked for with these words: each takes longer to import than all that is printed.
HEAVY = {"argparse", "numpy", "torch", "grpc", "rich", "skipper.control", "skipper.dataplane", "skipper.benchmarks"}


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_tool_in_its_group(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {word} " in out and tool.summary in out for word, tool in TOOLS.items())
    headings = [line.removesuffix(":") for line in out.splitlines() if line.endswith(":")]
    assert headings == list(GROUPS)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_imports_no_tool_and_no_library(word: str) -> None:
    code = f"import sys; from skipper.cli.main import main; main(['{word}']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not HEAVY & set(done.stderr.split())


def test_completion_imports_no_tool() -> None:
    shown = "print(*sys.modules, file=sys.stderr)"
    code = f"import sys; from skipper.cli.main import main; main(['completion', 'zsh']); {shown}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not (HEAVY - {"argparse"}) & set(done.stderr.split())


@pytest.mark.parametrize("words", [["completion"], ["bw", "compare"], ["host", "serve"]])
def test_help_of_a_tool_is_what_it_prints_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: skipper {' '.join(words)}")
    assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(
    ("word", "meant"), [("statsu", "status"), ("weight_sync", "weight-sync"), ("--hlep", "--help")]
)
def test_a_mistyped_tool_is_guessed(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    err = capsys.readouterr().err
    assert f"did you mean {meant}" in err
    assert err.count("\n") == 1


def test_ctrl_c_while_a_tool_is_imported_ends_with_130_and_no_traceback() -> None:
    code = f"""if True:
        import os, signal, sys
        class Interrupting:
            def find_spec(self, name, *_):
                if name == "skipper.benchmarks":
                    os.kill(os.getpid(), {int(signal.SIGINT)})
        sys.meta_path.insert(0, Interrupting())
        from skipper.cli.main import main
        sys.exit(main(["bw", "--help"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


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
