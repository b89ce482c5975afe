"""A training job with a mistake in it: after some steps it stands still. docs/tutorials/find_a_hang.md looks for it.

    skipper run examples/find_a_hang.py                  # Ctrl-C ends it
    python examples/find_a_hang.py --mended              # the mistake is mended: twelve steps, and an end

One part fails, one is slow, and one hangs. The others wait for that one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Iterator

import torch

from skipper import Actor, context, endpoint, this_host
from skipper import torchstore as ts
from skipper.control import ActorError, idempotent
from skipper.torchstore import sync

STEPS = 12
SHARDS = (12, 12, 12, 8)
"""How many batches each of the loaders has; the last one has less than the others."""


class Loader(Actor):
    """Has the next batches of its shard ready, which a thread reads ahead."""

    def __init__(self, is_mended: bool) -> None:
        self.shard = range(SHARDS[context().actor_instance.rank.rank])
        self.ready: queue.Queue[list[float]] = queue.Queue(maxsize=2)
        batches = itertools.cycle(self.shard) if is_mended else iter(self.shard)
        threading.Thread(target=self.read_ahead, args=(batches,), daemon=True).start()

    def read_ahead(self, batches: Iterator[int]) -> None:
        """Read until the shard ends. That it has ended is told to nobody: this is the mistake."""
        for number in batches:
            self.ready.put([number / 10] * 4)

    @endpoint
    def batch(self, step: int) -> list[float]:
        """The next batch."""
        return self.ready.get()


class Trainer(Actor):
    """Makes a new version of the weights in each step, and puts it into the store."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(256, 256)

    @endpoint
    async def step(self, batches: list[list[float]]) -> float:
        """Learn from batches; returns the loss."""
        await asyncio.sleep(0.3)  # what a real step takes
        loss = 1 / (1 + sum(map(sum, batches)))
        with torch.no_grad():
            self.model.weight.fill_(loss)
        await ts.put_state_dict(self.model.state_dict(), "policy")
        return loss


class Generator(Actor):
    """Answers with the newest weights."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(256, 256)

    @endpoint
    async def sync(self, after: int) -> None:
        """Wait for weights that are newer, and take them."""
        await ts.get_state_dict("policy", self.model.state_dict(), version=("newer_than", after))

    @endpoint
    async def answer(self, step: int) -> str:
        """Answer a prompt; some are too long."""
        if step % 3 == 0:
            raise ValueError(f"the prompt of step {step} has {4000 + step * 64} tokens, and the model takes 4096")
        return f"answer {step}"


class Judge(Actor):
    """Says how good an answer is."""

    @endpoint
    @idempotent
    def grade(self, answer: str) -> float:
        """From 0 to 1."""
        return len(answer) / 16


class Evaluator(Actor):
    """Measures each version on a test set, which takes longer than a step: this one is slow, and well."""

    @endpoint
    def evaluate(self, step: int, seconds: float) -> None:
        """Go through the test set."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mended", action="store_true", help="without the mistake")
    parser.add_argument("--evaluation", type=float, default=5.0, metavar="S", help="what an evaluation takes")
    given = parser.parse_args()
    sync.initialize()
    loaders = this_host().spawn_procs({"gpus": len(SHARDS)}, name="loading").spawn("loaders", Loader, given.mended)
    trainer = this_host().spawn_procs(name="training").spawn("trainer", Trainer)
    generators = this_host().spawn_procs({"gpus": 2}, name="generating").spawn("generators", Generator)
    evaluator = this_host().spawn_procs(name="evaluating").spawn("evaluator", Evaluator)
    judges = Judge.options(num_replicas=2).as_service(name="judges")
    for step in range(1, STEPS + 1):
        batches = loaders.batch.call(step)
        synced = generators.sync.call(step - 1)
        loss = trainer.step.call_one(list(batches.get())).get()
        synced.get()
        try:
            answers = generators.answer.call(step).get()
            reward = sum(judges.grade.route(answer).get() for answer in answers) / len(answers)
        except ActorError as error:
            print(f"step {step}: no answers: {error.cause}")
        else:
            print(f"step {step}: loss {loss:.3f}, reward {reward:.2f}")
        evaluator.evaluate.broadcast(step, given.evaluation)
    judges.stop().get()
    sync.shutdown()


if __name__ == "__main__":
    main()
