"""What the tests of `initialize_spmd` run under torchrun: ``python -m tests.torchstore.spmd_ranks SCENARIO``."""

import asyncio
import contextlib
import os
import signal
import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from skipper import control
from skipper import torchstore as ts
from tests.torchstore.inference_worker import VllmWorker
from tests.torchstore.oracle import bits
from tests.torchstore.stand_ins import Model, ModuleSource, install

TIMEOUT_S = 20.0


def say(*words: object) -> None:
    """One line in one write, so that the ranks' lines do not run into each other."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def full(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


async def use(rank: int, world_size: int) -> None:
    """Every kind of put and get, with the tensors of every rank."""
    if rank == 0:
        await ts.put("demo", torch.tensor([10, 20, 30]))
    dist.barrier()
    assert (await ts.get("demo")).tolist() == [10, 20, 30]
    assert (await (await ts.client()).keys("demo")) == ["demo"]

    square = init_device_mesh("cpu", (2, world_size // 2))
    line = init_device_mesh("cpu", (world_size,))
    whole = {"a": full(1, 7, 9), "b": full(2, 13), "c": full(3, 4, 5, 6)}
    placed = {"a": (Shard(0), Shard(1)), "b": (Replicate(), Shard(0)), "c": (Shard(2), Shard(0))}
    mine = {name: distribute_tensor(tensor, square, placed[name]) for name, tensor in whole.items()}
    assert await ts.put_state_dict(mine, "model") == 1
    dist.barrier()
    into: dict[str, Any] = {
        "a": distribute_tensor(torch.zeros(7, 9), line, (Shard(1),)),
        "b": distribute_tensor(torch.zeros(13), line, (Shard(0),)),
        "c": torch.zeros(4, 5, 6),
    }
    await ts.get_state_dict("model", into)
    for name, tensor in into.items():
        read = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert same(read, whole[name]), name


def sharded_model(world_size: int) -> torch.nn.Module:
    """A model whose parameters are split between the ranks, unevenly."""
    model, line = Model(), init_device_mesh("cpu", (world_size,))
    for name, weight in list(model.named_parameters()):
        sharded = distribute_tensor(weight.detach(), line, (Shard(0),))
        setattr(model, name, torch.nn.Parameter(sharded))
    return model


def send_shards(rank: int, world_size: int) -> None:
    """Every rank gives its own shards to a vLLM worker, which is in rank 0's process here."""
    install()
    vllm = import_module("skipper.torchstore.adapters.vllm")
    model, worker = sharded_model(world_size), VllmWorker() if rank == 0 else None
    engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
        vllm.TorchStoreTrainerInitInfo(rank=rank, num_trainer_ranks=world_size),
        client=worker,
        source=ModuleSource(model),
    )
    for value in (1.0, 2.0):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(value)
        engine.send_weights()
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(-1)
        assert worker is None or worker.look()[0] == [value]
    engine.shutdown()


async def everything(rank: int, world_size: int) -> None:
    """Two stores side by side."""
    await ts.initialize_spmd(strategy=ts.LocalRankStrategy())
    assert (await ts.client()).remote.choose_volume() == os.environ["LOCAL_RANK"]
    await use(rank, world_size)
    send_shards(rank, world_size)
    await ts.initialize_spmd(ts.HostStrategy(), "second", keep_versions=2)
    await ts.put(f"of {rank}", torch.full((4096,), rank), "second")
    dist.barrier()
    assert len(await ts.keys(store_name="second")) == world_size
    dist.barrier()
    await ts.shutdown()  # no rank leaves the job yet
    assert len(await ts.keys(store_name="second")) == world_size
    dist.barrier()
    await ts.shutdown("second")
    say("done", rank)


async def said(what: str) -> int:
    """Wait until a rank has said something; the number that it said."""
    words = await ts.get_state_dict(what, version=("newer_than", 0), timeout=TIMEOUT_S)
    return int(words["number"])


async def say_to_ranks(what: str, number: int) -> None:
    await ts.put_state_dict({"number": number}, what)


async def deaths(rank: int) -> None:
    """Rank 1 is killed, then rank 0; what those learn that are left."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks when one fails; here they have more to do
    await ts.initialize_spmd(ts.HostStrategy())
    if rank == 1:
        await ts.put("copied", full(1, 5000))
        await ts.put_state_dict({"w": ts.share_memory_(torch.nn.Linear(64, 64)).weight}, "direct", mode="direct")
        await say_to_ranks("ready", os.getpid())
        signal.pause()
    victim = await said("ready")
    if rank == 0:
        await ts.get_state_dict("direct")  # it can be read
        os.kill(victim, signal.SIGKILL)
        await say_to_ranks("killed", 1)
    await said("killed")
    assert same(await ts.get("copied"), full(1, 5000))
    try:
        while True:  # the store may still have to learn of it
            await ts.get_state_dict("direct")
    except ts.PublisherLostError as error:
        say("rank", rank, type(error).__name__)
    if rank == 0:
        await said("rank 2 knows")
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(control.SupervisionError):  # rank 0 may die before it has answered
        await say_to_ranks("rank 2 knows", 1)
    try:
        await ts.shutdown(timeout=TIMEOUT_S)
    except control.SupervisionError as error:
        say("rank", rank, type(error).__name__, "script is gone" in str(error))


async def main(scenario: str) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if scenario == "deaths":
        await deaths(rank)
        return
    dist.init_process_group("gloo")
    await everything(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
