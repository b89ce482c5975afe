"""Streams on gRPC's core at their ends. What gRPC does not take aborts the process: hence scripts."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.control.conftest import REPOSITORY, Script

HERE = Path(__file__).parent


@pytest.mark.parametrize("late", ["send", "receive", "end"])
def test_what_is_done_with_a_stream_after_the_end_of_its_listener_is_void(
    script: Callable[..., Script], late: str
) -> None:
    code, out, err = script(HERE / "late_stream_script.py", late).finish()
    assert (code, out) == (0, "alive\n"), err


def test_no_order_in_which_streams_and_listeners_end_aborts_the_process() -> None:
    command = [sys.executable, "-m", "tests.control.endings", "--times", "150", "--processes", "4"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)


def test_a_listener_that_cannot_have_an_address_lets_go_of_the_others(
    script: Callable[..., Script],
) -> None:
    code, out, err = script(HERE / "two_addresses_script.py").finish()
    assert (code, out) == (0, "listens\n"), err
