import argparse
import logging
import os
import subprocess
import sys

import pytest

from skipper import commandline
from skipper.commandline import BadArgumentsError, CommandParser, add_command, add_json, described, run, walk


def parser() -> CommandParser:
    made = CommandParser(
        prog="tool", description="What it does.", exit_codes={3: "no luck", 1: "bad luck"}, notes="A note."
    )
    made.add_argument("who", nargs="*", metavar="WHO", help="whom")
    made.add_argument("--size", choices=("small", "large"), help="how much")
    add_json(made)
    return made


def with_commands() -> CommandParser:
    made = CommandParser(prog="tool")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_command(commands, "serve", "be there").add_argument("--announce", metavar="FILE", help="say so")
    return made


def outcome(*argv: str, of: CommandParser | None = None, raising: Exception | None = None) -> int:
    def action(given: argparse.Namespace) -> int:
        if raising is not None:
            raise raising
        return 0

    return run(of or parser(), argv, action, errors=(OSError,), status=3)


@pytest.fixture(autouse=True)
def _quiet_again() -> object:
    yield
    logging.getLogger("skipper").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--siez", "small"], "unrecognized arguments: --siez (did you mean --size?); see tool --help"),
        (["--size=lrge"], "(did you mean large?)"),
        (["--size"], "argument --size: expected one argument; see tool --help"),
        (["--siz", "small"], "unrecognized"),
        (["--json", "no/such/folder/x"], "there is no folder no/such/folder"),
        (["--json", "/"], "is a folder"),
    ],
)
def test_bad_arguments_end_with_2_and_one_line_that_helps(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(*argv) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("tool: ")
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_a_mistyped_flag_of_a_sub_command_is_guessed_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("serve", "--anounce", "x", of=with_commands()) == 2
    assert "did you mean --announce?" in capsys.readouterr().err
    assert outcome("server", of=with_commands()) == 2
    assert "did you mean serve?" in capsys.readouterr().err


def test_help_ends_with_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("--help") == 0
    out = capsys.readouterr().out
    below = out[out.index("A note.") :]
    assert [line.split()[0] for line in below.splitlines()[3:]] == ["0", "1", "2", "3", "130"]
    assert "1    bad luck" in below


@pytest.mark.parametrize(
    ("raised", "status"), [(OSError("gone"), 3), (BadArgumentsError("one of both"), 2), (BrokenPipeError(), 0)]
)
def test_what_an_action_raises_is_an_exit_code(raised: Exception, status: int) -> None:
    code = f"""if True:
        from tests.commandline.test_parser import outcome
        import sys
        sys.exit(outcome(raising={type(raised).__name__}("{raised}")))
    """
    code = code.replace("BadArgumentsError(", "__import__('skipper.commandline').commandline.BadArgumentsError(")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (status, "" if status == 0 else f"tool: {raised}\n")


def test_verbose_shows_the_log_and_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("-v", raising=OSError("gone")) == 3
    assert logging.getLogger("skipper").level == logging.DEBUG
    assert "raise raising" in capsys.readouterr().err
    given = with_commands().parse_args(["-v", "serve"])
    assert given.verbose, "before a sub-command it counts as well"


def test_json_is_for_standard_output_without_a_path() -> None:
    for argv, where in (([], None), (["--json"], "-"), (["-J"], "-"), (["--json", "a.json"], "a.json"), (["-J-"], "-")):
        assert parser().parse_args(argv).json == where


def test_a_parser_is_described_as_it_is() -> None:
    found = described(parser())
    assert [option.usage for option in found.options] == [
        "[WHO ...]",
        "-h, --help",
        "-v, --verbose",
        "--size small|large",
        "-J, --json [PATH]",
    ]
    assert found.usage == "tool [OPTIONS] [WHO ...]"
    assert "usage: tool" in parser().format_help(), "and says itself what it said before"
    below = [each.prog for each in walk(described(with_commands()))]
    assert below == ["tool", "tool serve"]
    assert described(with_commands()).commands["serve"].description == "Be there."


def test_importing_it_brings_the_standard_library_only() -> None:
    code = "import sys, skipper.commandline; print([name for name in sys.modules if name.startswith('skipper.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert all(name.startswith("skipper.commandline") for name in eval(done.stdout)), commandline.__name__
