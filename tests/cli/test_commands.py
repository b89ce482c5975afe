"""Every tool and every flag: what it says of itself, what it takes, and how it refuses what it does not know."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from skipper.cli import generate
from skipper.cli.generate import PAGE, files, tools
from skipper.cli.main import TOOLS
from skipper.commandline import EXIT_CODES, CommandParser, Described, Option, described, walk

SHARED = {
    "--json": "-J, --json [PATH]",
    "--csv": "--csv PATH",
    "--quick": "--quick",
    "--timeout": "--timeout S",
    "--job": "-j, --job JOB",
    "--secret-file": "--secret-file FILE",
    "--certs": "--certs DIR",
    "--insecure": "--insecure",
}
EXAMPLES = ("1", "8", "64K", "127.0.0.1:0", "PATH", "host", "-")


@pytest.fixture(scope="module")
def parsers() -> dict[str, CommandParser]:
    return tools()


@pytest.fixture(scope="module")
def commands(parsers: dict[str, CommandParser]) -> list[Described]:
    return [each for parser in parsers.values() for each in walk(described(parser))]


def test_everything_says_what_it_is(commands: list[Described]) -> None:
    for command in commands:
        assert re.fullmatch(r"[A-Z].*\.", " ".join(command.description.split())), command.prog
        for option in command.options:
            where = f"{command.prog} {option.usage}"
            assert option.help, where
            assert not option.help.endswith("."), where
            assert option.action.nargs == 0 or option.action.metavar or option.choices, f"{where}: name the value"
            assert all(re.fullmatch(r"-\w|--[a-z][\w-]+", name) for name in option.names), where
    flags = {command.prog: [name for option in command.options for name in option.names] for command in commands}
    assert all(len(names) == len(set(names)) for names in flags.values())


def test_a_flag_that_several_have_is_the_same_in_all(commands: list[Described]) -> None:
    for command in commands:
        for option in command.options:
            for name in set(option.names) & set(SHARED):
                assert option.usage == SHARED[name], command.prog


def test_every_flag_takes_a_value_of_its_kind(commands: list[Described]) -> None:
    for command in commands:
        for option in command.options:
            assert option.action.nargs == 0 or list(_values(option)), f"{command.prog} {option.usage}"


def _values(option: Option) -> Iterator[object]:
    parse = option.action.type
    for text in option.choices or EXAMPLES:
        try:
            yield parse(text) if callable(parse) else text
        except Exception:  # noqa: BLE001 - it takes another one
            continue


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_unknown_ends_with_2_and_a_hint(
    tool: str, parsers: dict[str, CommandParser], capsys: pytest.CaptureFixture[str]
) -> None:
    main = __import__(TOOLS[tool].module, fromlist=["main"]).main
    found = described(parsers[tool])
    if found.commands:
        assert main([next(iter(found.commands))[:-1]], prog=f"skipper {tool}") == 2
    else:
        given = {"completion": ["bash"], "bw compare": ["a", "b"]}.get(tool, [])
        behind = ["train.py"] if tool == "run" else []  # what stands behind a script is for that
        assert main([*given, "--verbos", *behind], prog=f"skipper {tool}") == 2
    captured = capsys.readouterr()
    assert f"skipper {tool}: " in captured.err
    assert "did you mean" in captured.err
    assert f"see skipper {tool} --help" in captured.err
    assert captured.out == ""


def test_exit_codes_mean_the_same(parsers: dict[str, CommandParser]) -> None:
    for tool, parser in parsers.items():
        assert set(EXIT_CODES) <= set(parser.exit_codes), tool
        assert parser.exit_codes[130] == EXIT_CODES[130]
        assert set(parser.exit_codes) <= {*EXIT_CODES, 3, 4}, tool


def test_the_page_and_the_scripts_are_those_of_the_parsers(parsers: dict[str, CommandParser]) -> None:
    made = files(parsers)
    assert {path.name for path in made} == {"cli.md", "skipper.bash", "_skipper", "skipper.fish"}
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: make cli"
    parsers["status"].add_argument("--new-flag", help="that nobody has")
    assert sum(path.read_text(encoding="utf-8") != text for path, text in files(parsers).items()) == len(made)
    assert PAGE.name == "cli.md"
    assert generate.main(["--chek"]) == 2


@pytest.mark.parametrize(
    "words",
    [("bw", "--local", "--quick", "-s", "4K"), ("doctor",), ("actors", "--quick")],
    ids=lambda words: words[0],
)
def test_json_alone_is_on_standard_output(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skipper", *words, "--json"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["schema_version"] == 1
