"""The laws that the simulation of bytes under way must keep, whatever the flows."""

import random
from collections.abc import Sequence

import pytest

from skipper.benchmarks.weight_sync.modelled.fabric import Fabric, Hardware
from skipper.benchmarks.weight_sync.modelled.simulation import ReadFlow, Resource, SimulatedRun, Simulation, bound_s

SEEDS = range(25)


def simulated(
    resources: Sequence[Resource], flows: Sequence[ReadFlow], *, chunk: int = 1000, window: int = 2
) -> SimulatedRun:
    simulation = Simulation(resources, chunk_nbytes=chunk, window=window)
    for flow in flows:
        simulation.begin(flow)
    return simulation.run()


def anything(seed: int) -> tuple[list[Resource], list[ReadFlow]]:
    """Some resources, and flows over some of them."""
    draw = random.Random(seed)
    resources = [
        Resource(str(n), "any", draw.uniform(1e3, 1e6), draw.choice([0.0, 1e-4]), draw.random() < 0.3)
        for n in range(draw.randint(1, 8))
    ]
    flows = [
        ReadFlow(
            draw.randrange(4),
            draw.randint(1, 30_000),
            draw.randint(0, 50),
            tuple(draw.sample(range(len(resources)), draw.randint(1, len(resources)))),
        )
        for _ in range(draw.randint(1, 20))
    ]
    return resources, flows


def faster(resources: Sequence[Resource], times: float) -> list[Resource]:
    return [Resource(r.name, r.kind, r.bytes_per_s * times, r.s_per_op / times, r.holds) for r in resources]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_byte_that_is_sent_passes_each_resource_of_its_path_once_and_arrives(seed: int) -> None:
    resources, flows = anything(seed)
    outcome = simulated(resources, flows)
    for reader in range(4):
        assert outcome.received_nbytes.get(reader, 0) == sum(flow.nbytes for flow in flows if flow.reader == reader)
    for at in range(len(resources)):
        assert outcome.served_nbytes[at] == sum(flow.nbytes for flow in flows if at in flow.path)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_resource_works_more_than_there_is_time_and_none_beats_the_bound(seed: int) -> None:
    resources, flows = anything(seed)
    outcome = simulated(resources, flows)
    for resource, busy_s, nbytes in zip(resources, outcome.served_s, outcome.served_nbytes, strict=True):
        assert busy_s <= outcome.end_s * (1 + 1e-9)
        assert nbytes <= resource.bytes_per_s * outcome.end_s * (1 + 1e-9)
    assert bound_s(resources, flows)[0] <= outcome.end_s * (1 + 1e-9)
    assert outcome.end_s == max(outcome.reader_end_s.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_flows_take_the_same_time(seed: int) -> None:
    assert simulated(*anything(seed)) == simulated(*anything(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_faster_by_a_factor_takes_as_much_less_time(seed: int) -> None:
    resources, flows = anything(seed)
    slow, fast = simulated(resources, flows), simulated(faster(resources, 4), flows)
    assert fast.end_s == pytest.approx(slow.end_s / 4)


def test_more_bandwidth_never_makes_a_sync_slower() -> None:
    ends = []
    for gigabytes in (10, 20, 30, 50, 80, 120):
        hardware = Hardware(nic_bytes_per_s=gigabytes * 1e9, leaf_cards=4, oversubscription=2)
        fabric = Fabric(hardware, 8, 4)
        flows = [fabric.flow(p, r, 40_000_000, 100) for p in range(8) for r in range(4)]
        ends.append(simulated(fabric.resources, flows, chunk=1 << 20).end_s)
    assert ends == sorted(ends, reverse=True)
    assert ends[0] > ends[-1]


def test_a_lone_flow_has_the_slowest_resource_of_its_path_to_itself() -> None:
    resources = [Resource("fast", "any", 4e6), Resource("slow", "any", 1e6), Resource("fast too", "any", 2e6)]
    outcome = simulated(resources, [ReadFlow(0, 100_000, 0, (0, 1, 2))])
    assert outcome.end_s == pytest.approx(0.1, rel=0.05)


def test_two_readers_share_a_card_and_end_together() -> None:
    resources = [Resource("out", "any", 1e6), Resource("in 0", "any", 1e6), Resource("in 1", "any", 1e6)]
    outcome = simulated(resources, [ReadFlow(0, 50_000, 0, (0, 1)), ReadFlow(1, 50_000, 0, (0, 2))])
    assert outcome.end_s == pytest.approx(0.1, rel=0.05)
    assert outcome.reader_end_s[0] == pytest.approx(outcome.reader_end_s[1], rel=0.05)


def test_operations_take_time_of_their_own() -> None:
    processor, card = Resource("cpu", "any", 1e18, 1e-3, holds=True), Resource("card", "any", 1e6)
    outcome = simulated([processor, card], [ReadFlow(0, 1000, 100, (0, 1))])
    assert outcome.end_s == pytest.approx(0.101)


def test_ranks_at_one_leaf_do_not_use_the_spine() -> None:
    fabric = Fabric(Hardware(leaf_cards=8), 4, 4)
    far, near = fabric.flow(0, 1, 10, 1), fabric.flow_between(0, 1, 10, 1)
    kinds = [[fabric.resources[at].kind for at in flow.path] for flow in (far, near)]
    assert "leaf to spine" in kinds[0]
    assert "leaf to spine" not in kinds[1]
    assert kinds[1].count("card, outgoing") == kinds[1].count("card, incoming") == 1


@pytest.mark.parametrize(("nbytes", "path"), [(0, (0,)), (1, ())])
def test_a_flow_without_bytes_or_path_is_refused(nbytes: int, path: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bytes and a path"):
        Simulation([Resource("any", "any", 1.0)]).begin(ReadFlow(0, nbytes, 0, path))
