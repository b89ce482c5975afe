"""Each shell, as a user has it, completes what is typed after ``skipper``."""

import shutil
import subprocess
from collections.abc import Callable

import pytest

from skipper.cli.completion import FOLDER, SHELLS, main

_BASH = """
eval "$SCRIPT"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _skipper; printf '%s\\n' "${COMPREPLY[@]}"
"""
# What zsh's completion system would be given: its own function is replaced by one that prints.
_ZSH = """
compdef() { :; }
_describe() { print -rl -- "${(@)words_found%%:*}"; }
_files() { print FILES; }
eval "$SCRIPT"
words=("$@"); CURRENT=$#; _skipper | while read -r word; do [[ $word == ${words[CURRENT]}* ]] && print -r -- $word; done
"""


def _run(shell: str, *words: str) -> list[str]:
    program = {"bash": ["bash", "-c", _BASH, "bash"], "zsh": ["zsh", "-fc", _ZSH, "zsh"]}[shell]
    script = (FOLDER / SHELLS[shell]).read_text()
    done = subprocess.run(
        [*program, *words], env={"SCRIPT": script, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    return done.stdout.split()


def _fish(*words: str) -> list[str]:
    line = " ".join(words)
    command = ["fish", "--no-config", "-c", f"source {FOLDER / SHELLS['fish']}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [each.split("\t")[0] for each in done.stdout.splitlines()]


@pytest.fixture(params=sorted(SHELLS))
def complete(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return _fish if shell == "fish" else lambda *words: _run(shell, *words)


def test_tools_come_first(complete: Callable[..., list[str]]) -> None:
    assert set(complete("skipper", "s")) == {"scale", "stacks", "status"}
    assert {"bw", "host", "help"} <= set(complete("skipper", ""))
    assert complete("skipper", "help", "weight-") == ["weight-sync"]


def test_then_flags_sub_commands_and_listed_values(complete: Callable[..., list[str]]) -> None:
    assert complete("skipper", "bw", "--bid") == ["--bidirectional"]
    assert set(complete("skipper", "host", "")) >= {"secret", "serve", "drain", "status"}
    assert complete("skipper", "host", "serve", "--anno") == ["--announce"]
    assert complete("skipper", "bw", "compare", "--rel") == ["--relative"]
    assert set(complete("skipper", "bw", "--local", "--backend", "u")) == {"ucx"}
    assert set(complete("skipper", "certs", "issue", "--role", "")) >= {"script", "host", "client"}
    assert complete("skipper", "completion", "z") == ["zsh"]


def test_where_nothing_is_listed_there_are_files(complete: Callable[..., list[str]]) -> None:
    assert not [word for word in complete("skipper", "bw", "--json", "zz") if word != "FILES"]


def test_a_shell_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tcsh"]) == 2
    assert main(["bash"]) == 0
    assert "complete -o default -F _skipper skipper" in capsys.readouterr().out
