"""From the ranks of an FSDP2 trainer to those of tensor-parallel readers, which prove together what they hold."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import ActorError, this_host
from tests.torchstore.proofs.ranks import Gated, SplitRank

pytestmark = [pytest.mark.usefixtures("store"), pytest.mark.timeout(180)]


@asynccontextmanager
async def group(folder: Path, size: int = 2) -> AsyncIterator[Any]:
    procs = this_host().spawn_procs(per_host={"gpus": size})
    try:
        ranks: Any = procs.spawn("ranks", SplitRank, folder, size)
        yield ranks
        await ranks.leave.call()
    finally:
        await procs.stop()


async def test_readers_of_another_layout_prove_the_trainers_version_and_find_a_flipped_bit(tmp_path: Path) -> None:
    async with group(tmp_path / "trainer") as trainer, group(tmp_path / "readers") as readers:
        assert set((await trainer.train.call(1)).values()) == {1}
        certificate = await ts.certificate("policy")
        whole = await ts.get_state_dict("policy")
        await ts.put_state_dict(whole, "whole", certify=(torch.bfloat16,))
        assert (await ts.certificate("whole")).root == certificate.root

        await readers.read.call()
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            proofs = list((await readers.prove.call(1, dtype)).values())
            assert [proof.is_right for proof in proofs] == [True, True]
            assert all(proof.covered < 1 and proof.open for proof in proofs)
            joined = ts.join_proofs(certificate, proofs)
            assert (joined.covered, joined.is_whole, certificate.accepts(joined.tag(), covered=1.0)) == (1, True, True)

        await readers.slice(gpus=0).change.call("down.weight")
        with pytest.raises(ts.ProofError, match=r"down\.weight\[0:16, 256:512\]"):
            ts.join_proofs(certificate, list((await readers.prove.call(1, torch.float32)).values()))

        await trainer.train.call(2)
        stale = await readers.slice(gpus=1).prove.call(1, torch.float32)
        assert [each.version for each in stale.values()] == [1]
        with pytest.raises(ActorError, match="ProofError: this is not version 2 of 'policy'"):
            await readers.slice(gpus=1).prove.call_one(2, torch.float32)
        assert sum(tensor.numel() for tensor in Gated().state_dict().values()) * 4 == certificate.nbytes
