"""The real verl gives a real vLLM the weights of each step, which says then what transformers does."""

import pytest

from tests.engines.environment import needs_vllm
from tests.engines.processes import SITE
from tests.ray_scripts import run_ray_script

pytestmark = [needs_vllm("verl"), pytest.mark.timeout(900)]


def test_the_checkpoint_manager_gives_a_rollout_the_weights_of_each_step() -> None:
    done = run_ray_script("tests.engines.verl_script", str(SITE), timeout=800)
    assert done.status == 0, done.written[-3000:]
    assert len(done.lines) == 2
    for sync in done.lines:
        assert sync["tokens"] == sync["expected"]
        assert sync["metrics"]["torchstore/sent_nbytes"] > 1 << 20  # more than one bucket
    assert done.lines[0]["tokens"] != done.lines[1]["tokens"]
