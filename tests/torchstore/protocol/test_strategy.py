"""Strategies against real volumes in real processes."""

from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.protocol.messages import Selector

TENSOR = torch.arange(30_000.0)


async def stored_in(key: str, store_name: str) -> str:
    """The volume that holds a key's newest version, as its readers are told."""
    grant = await (await ts.client(store_name)).remote.acquire(key, Selector(), (), 20.0)
    (await ts.client(store_name)).remote.release((grant,))
    binding: Any = grant.shares[0].binding
    return str(binding.volume)


@pytest.mark.parametrize(
    ("number", "strategy", "volumes"),
    [
        (1, None, {"0"}),
        (1, ts.SingletonStrategy(), {"Singleton"}),
        (1, ts.HostStrategy(), {"trainhost"}),
        (2, ts.LocalRankStrategy(), {"0", "1"}),
    ],
)
async def test_clients_write_to_the_volume_of_their_name(
    monkeypatch: pytest.MonkeyPatch, number: int, strategy: ts.TorchStoreStrategy | None, volumes: set[str]
) -> None:
    monkeypatch.setenv("HOSTNAME", "trainhost")
    await ts.initialize(number, strategy, "chosen")
    try:
        used: set[str] = set()
        for rank in range(number):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            await ts.put(f"k{rank}", TENSOR, "chosen")
            used.add(await stored_in(f"k{rank}", "chosen"))
            assert torch.equal(await ts.get(f"k{rank}", store_name="chosen"), TENSOR)
        assert used == volumes
    finally:
        await ts.shutdown("chosen")


def test_a_client_is_named_by_its_rank_before_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ts.LocalRankStrategy.get_client_id() == "1"
    monkeypatch.setenv("RANK", "7")
    assert ts.LocalRankStrategy.get_client_id() == "7"


async def test_a_client_without_a_volume_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    await ts.initialize(1, ts.LocalRankStrategy(), "chosen")
    try:
        monkeypatch.setenv("LOCAL_RANK", "7")
        with pytest.raises(ts.StrategyError, match=r"'7'.*volumes are '0'"):
            await ts.put("k", TENSOR, "chosen")
    finally:
        await ts.shutdown("chosen")


async def test_volumes_of_one_name_are_refused() -> None:
    with pytest.raises(ts.StrategyError, match="names two volumes"):
        await ts.initialize(2, ts.HostStrategy(), "chosen")
    await ts.initialize(store_name="chosen")  # the failure left nothing in the way
    await ts.shutdown("chosen")


def test_a_strategy_of_ones_own_must_name_both_sides() -> None:
    class Nameless(ts.TorchStoreStrategy):
        pass

    with pytest.raises(NotImplementedError, match="Nameless"):
        Nameless.get_volume_id()
    with pytest.raises(NotImplementedError, match="Nameless"):
        Nameless().choose(("0",))
