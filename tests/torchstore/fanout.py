"""What a publisher has to give when many readers feed each other: bytes out of its memory, in models.

python -m tests.torchstore.fanout --readers 8 --mode direct
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from skipper import dataplane
from skipper import torchstore as ts
from skipper.control import Actor, ActorMesh, MeshFailure, SupervisionError, endpoint, shutdown, this_host
from skipper.torchstore.algebra.manifest import Mode
from skipper.torchstore.clients import transfer
from skipper.torchstore.clients.transfer import Mover
from tests.freezing import freeze


@dataclass(frozen=True)
class Fused:
    """Two stored matrices, one after the other: of each a chunk, or what the placements say."""

    chunk: tuple[int, int] | None

    def __call__(self, name: str) -> ts.Stack | None:
        return None if name == "own" else ts.Stack(*(ts.Part(stored, chunk=self.chunk) for stored in "ab"))


class FanReader(Actor):
    """A reader that offers what it has."""

    def __init__(self, rows: int) -> None:
        self.mine = {"w": torch.zeros(rows, 1024), "b": torch.zeros(5000)}
        self.gate, self.reached = asyncio.Event(), asyncio.Event()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def use_transport(self, name: str) -> None:
        """Before anything is moved: by which of UCX' transports."""
        dataplane.configure(ucx={"TLS": name})

    @endpoint
    async def read(self, key: str, after: int, serve: bool = True, timeout: float = 40) -> tuple[float, int, int]:
        """Read the next version; the only value in it, bytes from the publisher and bytes from other readers."""
        await ts.get_state_dict(key, self.mine, version=("newer_than", after), serve=serve, timeout=timeout)
        record = ts.last_sync()
        assert record is not None
        (value,) = {float(tensor.min()) for tensor in self.mine.values()} | {float(t.max()) for t in self.mine.values()}
        return value, record.nbytes - record.lent_nbytes, record.lent_nbytes

    @endpoint
    async def read_fused(self, rank: int, like: str, own: float) -> tuple[torch.Tensor, float, int, int]:
        """Read rank 0's or 1's half of the fused matrix: "plain" by chunks, or a "sharded" DTensor.

        Returns:
            It, what is in a tensor that is this reader's own, and the bytes from the publisher and from other readers.
        """
        half = torch.zeros(16, 8)
        into: dict[str, torch.Tensor] = {"ab": half, "own": torch.full((3,), own)}
        if like == "sharded":
            # Only here: these imports take as long as all others.
            import torch.distributed as dist
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import DTensor, Shard
            from torch.testing._internal.distributed.fake_pg import FakeStore

            if not dist.is_initialized():
                dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
            into["ab"] = DTensor.from_local(half, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        names = Fused((rank, 2) if like == "plain" else None)
        await ts.get_state_dict("f", into, names=names, serve=True, timeout=40)
        record = ts.last_sync()
        assert record is not None
        return half, float(into["own"].max()), record.nbytes - record.lent_nbytes, record.lent_nbytes

    @endpoint
    async def read_beside(self, own: float) -> tuple[float, int]:
        """Read with a tensor that is not stored; what is in it afterwards, and the bytes from other readers."""
        into = {"a": torch.zeros(16, 8), "own": torch.full((3,), own)}
        await ts.get_state_dict("f", into, strict=False, serve=True, timeout=40)
        record = ts.last_sync()
        assert record is not None
        return float(into["own"].max()), record.lent_nbytes

    @endpoint
    async def publish(self, key: str, value: float) -> None:
        """Publish in direct mode what `read` reads, all of it this value."""
        for tensor in self.mine.values():
            tensor.fill_(value)
        await ts.put_state_dict(self.mine, key, mode="direct")

    @endpoint
    async def calls(self) -> int:
        """Control messages of the last read."""
        record = ts.last_sync()
        assert record is not None
        return record.control_calls

    @endpoint
    async def scribble(self, value: float) -> None:
        """Break the promise in the way of a reader that is about to write: with a fence."""
        await ts.fence("m")
        for tensor in self.mine.values():
            tensor.fill_(value)

    @endpoint
    async def stop_before_reading(self, seals: bool = True) -> None:
        """The next read stands still when it has its lease, until `go_on`: before it has seen the seals, or after."""
        gate, reached = self.gate, self.reached = asyncio.Event(), asyncio.Event()
        owner: Any = Mover if seals else transfer
        name = "move" if seals else "execute"
        done = getattr(owner, name)

        async def later(*args: Any, **kwargs: Any) -> None:
            setattr(owner, name, done)
            reached.set()
            await gate.wait()
            await done(*args, **kwargs)

        setattr(owner, name, later)

    @endpoint
    async def begin(self, key: str, after: int, timeout: float = 40) -> bool:
        """`read` in the background, up to where it stands still; True: there."""
        self.reading = asyncio.create_task(self._read(key, after, timeout))
        async with asyncio.timeout(20):
            return await self.reached.wait()

    async def _read(self, key: str, after: int, timeout: float) -> tuple[float, int, int]:
        await ts.get_state_dict(key, self.mine, version=("newer_than", after), serve=True, timeout=timeout)
        record = ts.last_sync()
        assert record is not None
        return float(self.mine["w"].min()), record.nbytes - record.lent_nbytes, record.lent_nbytes

    @endpoint
    async def go_on(self) -> tuple[float, int, int]:
        """Let the read that `begin` has begun go on, and wait for its end."""
        self.gate.set()
        return await self.reading


class Family(Actor):
    """Owns the readers, some of which are made to be killed, and takes deaths calmly."""

    def __init__(self, readers: int, rows: int) -> None:
        self.procs = this_host().spawn_procs(per_host={"gpus": readers})
        self.rows = rows

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True

    @endpoint
    async def spawn(self) -> ActorMesh[FanReader]:
        return self.procs.spawn("readers", FanReader, self.rows)


async def kill(reader: Any) -> None:
    """SIGKILL a reader's process; returns when calls to it fail."""
    os.kill(await reader.pid.call_one(), signal.SIGKILL)
    while True:
        try:
            await reader.pid.call_one()
        except SupervisionError:
            return


@asynccontextmanager
async def frozen(reader: Any) -> AsyncIterator[None]:
    """While it lasts, a reader's process stands still."""
    pid = await reader.pid.call_one()
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def run(readers: int, rows: int, mode: Mode, versions: int) -> dict[str, Any]:
    """Some versions to some readers, all of whom wait for each of them."""
    procs = this_host().spawn_procs(per_host={"gpus": readers})
    await ts.initialize()
    try:
        mesh = procs.spawn("readers", FanReader, rows)
        model = {"w": torch.zeros(rows, 1024), "b": torch.zeros(5000)}
        nbytes = sum(tensor.nbytes for tensor in model.values())
        figures: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        number = 0
        for _ in range(versions):
            for serve in (True, False):
                number += 1
                await ts.fence("m")
                for tensor in model.values():
                    tensor.fill_(number)
                waiting = mesh.read.call("m", number - 1, serve)
                begin = time.perf_counter()
                await ts.put_state_dict(model, "m", mode=mode)
                answers = list(await waiting)
                if {value for value, _, _ in answers} != {float(number)}:
                    raise ValueError(f"version {number} is not what was read: {answers}")
                figures[serve].append((sum(own for _, own, _ in answers) / nbytes, time.perf_counter() - begin))
        return {
            "mode": mode,
            "readers": readers,
            "nbytes": nbytes,
            "models_out_of_the_publisher": [round(models, 3) for models, _ in figures[True]],
            "without": [round(models, 3) for models, _ in figures[False]],
            "seconds": [round(seconds, 3) for _, seconds in figures[True]],
            "seconds_without": [round(seconds, 3) for _, seconds in figures[False]],
        }
    finally:
        await ts.shutdown()
        await procs.stop()


def main() -> None:
    """Run and print a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16384, help="of 4 KiB")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--mode", choices=["snapshot", "direct"], default="snapshot")
    options = parser.parse_args()
    try:
        print(json.dumps(asyncio.run(run(options.readers, options.rows, options.mode, options.versions))), flush=True)
    finally:
        shutdown()


if __name__ == "__main__":
    main()
