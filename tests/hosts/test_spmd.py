"""Ordinary SPMD code across machines: the ranks meet at the IPs that their hosts were attached with."""

import os
from pathlib import Path

import pytest

from skipper.control import ActorError, HostMesh, RankFailedError, SpmdActor
from skipper.control.wire.addresses import device_of
from tests.control.api.parallel_ranks import reduce
from tests.hosts.netns import Machine, Network

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_ddp.py"
STEPS = 20
TORCH_S = 90.0
"""For processes that import torch on a busy machine."""


def meeting_place() -> list[object]:
    address = os.environ["MASTER_ADDR"]
    mine = [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"].removeprefix("=")]
    return [address, os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], device_of(address), *mine]


def losses(hosts: HostMesh, per_host: int, printer: Machine) -> list[str]:
    """What rank 0 prints when the script trains there: its agent passes that on."""
    procs = hosts.spawn_procs({"gpus": per_host}, env={"OMP_NUM_THREADS": "1"})
    procs.spawn("trainers", SpmdActor, SCRIPT, "--steps", STEPS).run.call().get(TORCH_S)
    procs.stop().get(TORCH_S)
    output = printer.processes[-1].stdout
    assert output is not None
    return [output.readline() for _ in range(STEPS // 10)]


def test_an_unchanged_ddp_script_trains_across_machines_with_the_losses_of_one(net: Network, hosts: HostMesh) -> None:
    two = hosts.slice(hosts=slice(1, 3))
    ranks = two.spawn_procs().spawn("ranks", SpmdActor, meeting_place).run.call().get(TORCH_S)
    device = ranks[0][3]
    assert ranks[0] == [net.machines[1].address, "0", "0", device, device, device]
    assert ranks[1][:4] == [net.machines[1].address, "0", "1", None]
    assert ranks[1][4] not in ("", "lo")
    apart = losses(two, 1, net.machines[1])
    assert [line.partition(":")[0].split() for line in apart] == [["step", "10"], ["step", "20"]]
    assert apart == losses(hosts.slice(hosts=1), 2, net.machines[1])


def test_ranks_of_several_machines_fail_together_and_the_next_run_is_whole(hosts: HostMesh) -> None:
    two = hosts.slice(hosts=slice(1, 3)).spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    ranks = two.spawn("ranks", SpmdActor, reduce, "never")
    for moment, failing in (("before they meet", 0), ("before a group is made", 3), ("before it sends", 0)):
        causes = []
        for future in ranks.run.stream(moment, failing=failing):
            with pytest.raises(ActorError) as caught:
                future.get(TORCH_S)
            causes.append(caught.value.cause)
        assert [cause.rank for cause in causes if isinstance(cause, RankFailedError)] == [failing] * 3
        assert sum(isinstance(cause, ValueError) for cause in causes) == 1
        assert list(ranks.run.call(moment).get(TORCH_S)) == [4.0] * 4
