"""The real TRL trains, and a real vLLM says what transformers does with the weights of each step."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import needs_vllm
from tests.engines.processes import Processes, ServerProcess

pytestmark = [needs_vllm("trl"), pytest.mark.timeout(900)]

PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def server(processes: Processes) -> ServerProcess:
    """One for all trainers, of which each takes over from the one before."""
    return processes.server().wait()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "500 Server Error"),
        ({"background": True, "mode": "step"}, "workers could not read .* sends nothing for model.norm.weight"),
    ],
)
def test_asynchronous_grpo_gives_a_server_the_weights_of_each_step(
    processes: Processes, server: ServerProcess, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    command = (sys.executable, "-m", "tests.engines.trl_trainer", server.path, str(tmp_path), json.dumps(options))
    trainer, log = processes.start(*command)
    status = trainer.wait(PATIENCE_S)
    written = log.read_text(encoding="utf-8", errors="replace")
    assert status == 0, written[-3000:]
    syncs = [json.loads(line) for line in written.splitlines() if line.startswith('{"')]
    first, *syncs, failed = syncs
    refused = {"no server": "TimeoutError", "not begun": "RuntimeError"}
    assert first["refused"] == refused | dict.fromkeys(("nowhere", "no second set"), "ValueError")
    *trained, anew = syncs
    assert [int(sync["version"]) for sync in trained] == [1, 2, 3, 4]  # when training begins, and after each step
    for sync in syncs:
        assert sync["served"] == str(sync["version"])
        assert sync["paused"] is False
        assert sync["tokens"] == sync["expected"]
        assert sync["stopped_s"] > 0
    assert len({str(sync["tokens"]) for sync in trained}) == len(trained)
    assert anew["tokens"] == trained[0]["tokens"]  # the weights with which it began
    assert re.search(said, failed["error"])
    assert failed["left"] == 0  # the other ranks have gathered all of them along
    assert (failed["tokens"], failed["served"], failed["paused"]) == (anew["tokens"], anew["served"], False)
