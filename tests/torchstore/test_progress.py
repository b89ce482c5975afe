"""Large puts and gets as whoever follows progress sees them; without anybody they go as they did."""

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import Progress, on_progress
from skipper.dataplane import RDMAAction
from skipper.torchstore.tensors import plan

ROW = 1024


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small transfers count as large; how many pieces each was cut into."""
    monkeypatch.setattr(plan, "REPORTED_NBYTES", ROW)
    monkeypatch.setattr(plan, "_PIECE_BYTES", 4 * ROW)
    cut: list[int] = []
    split = RDMAAction.split

    def counted(action: RDMAAction, nbytes: int) -> tuple[RDMAAction, ...]:
        found = split(action, nbytes)
        cut.append(len(found))
        return found

    monkeypatch.setattr(RDMAAction, "split", counted)
    return cut


def weights(value: float) -> dict[str, torch.Tensor]:
    whole = torch.full((16, ROW // 4), value)
    return {"whole": whole, "turned": torch.arange(float(16 * 8)).reshape(16, 8).T + value, "rows": whole[3:9] * 2}


@pytest.mark.usefixtures("store")
async def test_a_put_and_a_get_are_told_of_in_bytes(pieces: list[int]) -> None:
    told: list[Progress] = []
    live = {name: torch.zeros_like(tensor) for name, tensor in weights(0.0).items()}
    with on_progress(told.append):
        for value in (1.0, 2.0, 3.0):  # the first compiles, the others replay
            await ts.put_state_dict(weights(value), "policy")
            await ts.get_state_dict("policy", live)
            assert all(torch.equal(live[name], tensor) for name, tensor in weights(value).items())
        await ts.put("one", weights(1.0)["whole"])
        await ts.get("one")
    nbytes = sum(tensor.nbytes for tensor in live.values())
    ends = [(each.description, each.completed, each.total, each.unit) for each in told if each.state == "finished"]
    assert ends[:6] == 3 * [("put policy", nbytes, nbytes, "bytes"), ("get policy", nbytes, nbytes, "bytes")]
    assert [description for description, *_ in ends[6:]] == ["put one", "get one"]
    assert min(pieces[:6]) > 3


@pytest.mark.usefixtures("store")
async def test_nothing_is_cut_where_nobody_follows(pieces: list[int]) -> None:
    await ts.put_state_dict(weights(1.0), "policy")
    got = await ts.get_state_dict("policy", weights(0.0))
    assert torch.equal(got["whole"], weights(1.0)["whole"])
    assert not pieces


@pytest.mark.usefixtures("store")
async def test_a_transfer_that_fails_is_told_of_as_failed(pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    await ts.put_state_dict(weights(1.0), "policy")
    told: list[Progress] = []

    def broken(action: RDMAAction, nbytes: int) -> tuple[RDMAAction, ...]:
        raise MemoryError

    monkeypatch.setattr(RDMAAction, "split", broken)
    with on_progress(told.append), pytest.raises(MemoryError):
        await ts.get_state_dict("policy", weights(0.0))
    assert [each.state for each in told if each.description == "get policy"][-1] == "failed"
