"""A trainer publishes its weights, two generators read them from the trainer's own memory."""

import asyncio

import torch

from skipper import torchstore as ts
from skipper.control import Actor, endpoint, this_host


class Trainer(Actor):
    def __init__(self) -> None:
        self.model = ts.share_memory_(torch.nn.Linear(256, 256))  # memory that other processes can map

    @endpoint
    async def step(self, number: int) -> int:
        await ts.fence("policy")  # nobody reads the parameters any more
        with torch.no_grad():
            self.model.weight.fill_(number)
        return await ts.put_state_dict(self.model.state_dict(), "policy", mode="direct")


class Generator(Actor):
    def __init__(self) -> None:
        self.model = torch.nn.Linear(256, 256)

    @endpoint
    async def sync(self, after: int) -> tuple[float, int]:
        await ts.get_state_dict("policy", self.model.state_dict(), version=("newer_than", after))
        record = ts.last_sync()
        assert record is not None
        return self.model.weight[0, 0].item(), record.nbytes


async def main() -> None:
    await ts.initialize()
    trainer = this_host().spawn_procs(per_host={"gpus": 1}).spawn("trainer", Trainer)
    generators = this_host().spawn_procs(per_host={"gpus": 2}).spawn("generators", Generator)
    for number in range(1, 4):
        waiting = generators.sync.call(number - 1)
        version = await trainer.step.call_one(number)
        print(version, list(await waiting))
    await ts.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
