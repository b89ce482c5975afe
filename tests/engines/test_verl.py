"""The real verl gives a real vLLM the weights of each step, which says then what transformers does."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from tests.engines.environment import needs_vllm
from tests.engines.processes import SITE
from tests.tree import ROOT

pytestmark = [needs_vllm("verl"), pytest.mark.timeout(900)]


def test_the_checkpoint_manager_gives_a_rollout_the_weights_of_each_step() -> None:
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="verl-", dir="/tmp") as folder:  # paths of Ray's sockets are short
        done = subprocess.run(
            [sys.executable, "-m", "tests.engines.verl_script", folder],
            env={**os.environ, **own},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=800,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    syncs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert len(syncs) == 2
    for sync in syncs:
        assert sync["tokens"] == sync["expected"]
        assert sync["metrics"]["torchstore/sent_nbytes"] > 1 << 20  # more than one bucket
    assert syncs[0]["tokens"] != syncs[1]["tokens"]
