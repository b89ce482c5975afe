"""A stranger on another machine tries what he can against a job on attached hosts, which checks its results."""

import os
from pathlib import Path

import pytest

from tests.hosts.netns import Network
from tests.security.far import attack_far

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("tls", [False, True], ids=["without certificates", "with certificates"])
def test_a_stranger_on_another_machine_gets_nothing_and_harms_nobody(net: Network, tmp_path: Path, tls: bool) -> None:
    outcome = attack_far(net, tmp_path, for_s=1, tls=tls)
    assert outcome.hits == []
    assert outcome.failed == []
    assert outcome.rounds > 0
    tried = {name for name, tries in outcome.tries.items() if tries}
    assert tried >= {"backlogs", "certificates", "floods", "garbage", "handles", "ports", "proofs", "recordings", "ucx"}
