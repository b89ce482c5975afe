"""The program of the tutorial, as it says."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.engines.environment import needs_vllm
from tests.engines.processes import Processes, free_port
from tests.tree import ROOT

pytestmark = [needs_vllm(), pytest.mark.timeout(900)]

PATIENCE_S = 400.0
LINE = re.compile(r"version (\d+): loss [\d.]+, .* it counts (\d+) of 12 numbers right")


def test_a_server_counts_when_the_trainer_has_learnt_to() -> None:
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        module = (sys.executable, "-m", "examples.fsdp_to_vllm")
        writer, log = processes.start(*module, str(processes.model), "--write-model")
        assert writer.wait(100) == 0, log.read_text()
        server = processes.server()
        command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
        trainer, log = processes.start(*command, "-m", "examples.fsdp_to_vllm", server.path)
        status = trainer.wait(PATIENCE_S)
        written = log.read_text(encoding="utf-8", errors="replace")
        assert status == 0, written[-3000:]
        found = [tuple(map(int, match.groups())) for match in LINE.finditer(written)]
        print(*(match.group() for match in LINE.finditer(written)), sep="\n")
        assert [version for version, _ in found] == [1, 2, 3, 4, 5]
        assert found[0][1] < found[-1][1] == 12


def test_the_tutorial_quotes_the_program() -> None:
    program = (ROOT / "examples" / "fsdp_to_vllm.py").read_text(encoding="utf-8")
    tutorial = (ROOT / "docs" / "tutorials" / "fsdp_to_vllm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```py\n(.*?)```", tutorial, re.DOTALL)
    assert len(blocks) >= 4
    lines = {line.strip() for line in program.splitlines()}
    for block in blocks:
        missing = [line for line in block.splitlines() if line.strip() and line.strip() not in lines]
        assert not missing
