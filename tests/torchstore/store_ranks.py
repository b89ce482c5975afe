"""What ranks of any launcher run in the tests of `initialize_spmd`: ``python store_ranks.py SCENARIO``."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it is found from wherever it is started

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.spmd import rank_store
from skipper.torchstore.spmd.launch import Trust
from skipper.torchstore.spmd.ranks import Launch, RankPlace, place_of

PATIENCE_S = 60.0
DEATH = 9
STRATEGIES = {"rank": ts.LocalRankStrategy, "host": ts.HostStrategy}
NELEMENTS = 1 << 17
"""More than what travels in a message: it takes a volume, and a transfer."""


def say(*words: object) -> None:
    """One line in one write, so that the ranks' lines do not run into each other."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def strategy() -> ts.TorchStoreStrategy:
    return STRATEGIES[os.environ.get("STORE_STRATEGY", "host")]()


async def initialize(strategy: ts.TorchStoreStrategy) -> RankPlace:
    """With what the test has put into the environment in the place of arguments."""
    insecure, data_plane = (bool(os.environ.get(name)) for name in ("STORE_INSECURE", "STORE_DATA_PLANE"))
    await ts.initialize_spmd(strategy, insecure=insecure, data_plane=data_plane or None)
    place = place_of("default")
    assert place is not None
    return place


async def exchange(place: RankPlace) -> None:
    """Put something, and read what each of the others has put."""
    await ts.put_state_dict({"w": torch.full((NELEMENTS,), float(place.rank))}, f"of {place.rank}")
    for rank in range(place.world_size):
        mine = {"w": torch.zeros(NELEMENTS)}
        await ts.get_state_dict(f"of {rank}", mine, version=("newer_than", 0), timeout=PATIENCE_S)
        assert torch.equal(mine["w"], torch.full((NELEMENTS,), float(rank)))


async def use() -> str:
    """What every script does; where this rank was, for people."""
    place = await initialize(strategy())
    await exchange(place)
    await ts.shutdown(timeout=PATIENCE_S)
    return f"rank {place.rank} is {place.local_rank} of {place.local_world_size} on host {place.host_rank}"


async def life() -> str:
    """Several stores of one name, one after another."""
    place = await initialize(strategy())
    with pytest.raises(ts.StrategyError, match="already"):
        await initialize(strategy())
    await exchange(place)
    await ts.shutdown(timeout=PATIENCE_S)
    assert place_of("default") is None

    place = await initialize(strategy())
    if place.rank == 0:
        with pytest.raises(ts.StoreTimeoutError, match="rank 1 did not shut down the store 'default'"):
            await ts.shutdown(timeout=0.5)
    else:
        with contextlib.suppress(ts.KeyNotFoundError, ts.StoreNotInitializedError):
            await ts.get_state_dict("never", version=("newer_than", 0), timeout=PATIENCE_S)
        await ts.shutdown(timeout=PATIENCE_S)  # rank 0 has shut it down

    place = await initialize(strategy())
    await exchange(place)
    if place.rank == 0:  # the other just ends
        await ts.shutdown(timeout=PATIENCE_S)
    return "the end"


async def lose() -> str:
    """Rank 0 kills rank 1, reads what that has put, and kills itself."""
    place = await initialize(strategy())
    await exchange(place)
    if place.rank:
        await ts.get_state_dict("never", version=("newer_than", 0), timeout=PATIENCE_S)
    os.kill(place.local_pids[1], signal.SIGKILL)
    mine = {"w": torch.zeros(NELEMENTS)}
    await ts.get_state_dict("of 1", mine)
    assert int(mine["w"].sum()) == NELEMENTS
    say("it is there")
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def beginning() -> rank_store._Beginning:
    launch = Launch.find()
    deadline = time.monotonic() + PATIENCE_S
    trust = Trust(insecure=bool(os.environ.get("STORE_INSECURE"))).completed()
    return rank_store._Beginning(launch, trust, "default", strategy(), deadline)


async def die() -> str:
    """The rank that STORE_VICTIM names dies once all have met, and before there is a store."""
    victim = int(os.environ["STORE_VICTIM"])
    if int(os.environ["RANK"]) != victim:
        try:
            return await use()
        except ts.StoreRendezvousError as error:
            return str(error)
    rendezvous = await beginning()._meet()
    await rendezvous.arrive.call_one(rank_store.arrival_of(victim), PATIENCE_S)
    os._exit(DEATH)


def blocking() -> str:
    """A script without an event loop, which lets go of the store twice, and begins another one."""
    rank = int(os.environ["RANK"])
    for _ in range(2):
        ts.sync.initialize_spmd(strategy())
        ts.sync.put_state_dict({"w": torch.full((NELEMENTS,), float(rank))}, f"of {rank}")
        other = ts.sync.get_state_dict(f"of {1 - rank}", version=("newer_than", 0), timeout=PATIENCE_S)
        assert other["w"][0] == 1 - rank
        ts.sync.shutdown(timeout=PATIENCE_S)
        ts.sync.shutdown(timeout=PATIENCE_S)
    return "the end"


SCENARIOS = {function.__name__: function for function in (use, life, die, lose)}


def run(rank: int, world_size: int, port: int) -> str:
    """One rank, which knows only what it is passed."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return asyncio.run(use())


def spawned(rank: int, port: int) -> None:
    """What `torch.multiprocessing.spawn` starts."""
    say(run(rank, 2, port))


def on_ray(port: int) -> None:
    """Two actors of a Ray of their own, with ranks as verl's workers have them."""
    import ray

    class Worker:
        def run(self, rank: int) -> str:
            return run(rank, 2, port)

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    actors = [ray.remote(Worker).options(num_cpus=1).remote() for _ in range(2)]
    for line in ray.get([actor.run.remote(rank) for rank, actor in enumerate(actors)], timeout=PATIENCE_S):
        say(line)
    ray.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(spawned, args=(int(sys.argv[2]),), nprocs=2)  # type: ignore[no-untyped-call]
    elif sys.argv[1] == "ray":
        on_ray(int(sys.argv[2]))
    elif sys.argv[1] == "blocking":
        say(blocking())
    else:
        say(asyncio.run(SCENARIOS[sys.argv[1]]()))
