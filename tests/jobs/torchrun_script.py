"""What `torchrun` starts in these tests: the script of a job of all ranks, here and on several machines.

``torchrun_script.py WHAT [SECRET_FILE|FOLDER_OF_CERTIFICATES] [TIMEOUT_S]``
"""

import os
import sys
from pathlib import Path

# So that it is found from wherever it is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skipper import control
from skipper.control import Actor, ActorMesh, ProcMesh, SpmdActor, SupervisionError, endpoint, this_host
from skipper.control.cluster.jobs import SpmdJob

PATIENCE_S = 60.0
DEATH = 9
"""Exit status of who ends without a word; the first process of a machine cannot kill itself."""


def say(*words: object) -> None:
    """A line in one write: the hook for failures speaks on a thread of its own."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


class Rank(Actor):
    @endpoint
    def place(self) -> tuple[str, str]:
        return os.environ["RANK"], os.environ["GROUP_RANK"]

    @endpoint
    def ask(self, others: ActorMesh) -> list[tuple[str, str]]:
        return list(others.place.call().get(PATIENCE_S))

    @endpoint
    def spawn_below(self) -> ActorMesh:
        """An actor in a process more, on this rank's node."""
        self.children = this_host().spawn_procs()
        return self.children.spawn("below", Rank)

    @endpoint
    def echo(self, content: bytes) -> int:
        return len(content)

    @endpoint
    def die(self) -> None:
        os._exit(DEATH)


class Reader(Actor):
    @endpoint
    async def total(self) -> int:
        from skipper import torchstore as ts

        return int((await ts.get("weights")).sum())


def total() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1) * (1 + dist.get_rank())
    dist.all_reduce(tensor)
    return float(tensor)


def last(procs: ProcMesh) -> dict[str, int]:
    return {axis: size - 1 for axis, size in procs.extent.items()}


def work(job: SpmdJob) -> None:
    """Everything that a script does with the ranks."""
    procs = job.procs()
    say(procs.extent)
    ranks = procs.spawn("ranks", Rank)
    say(list(ranks.place.call().get(PATIENCE_S)))
    visitors = procs.spawn("visitors", Rank)
    say(visitors.slice(**last(procs)).ask.call_one(ranks).get(PATIENCE_S))
    below = visitors.slice(**last(procs)).spawn_below.call_one().get(PATIENCE_S)
    say(below.ask.call_one(ranks).get(PATIENCE_S))
    say(list(ranks.echo.call(bytes(1 << 20)).get(PATIENCE_S)))
    say(list(procs.spawn("totals", SpmdActor, total).run.call().get(PATIENCE_S)))


def lose(job: SpmdJob) -> None:
    """Lose the last rank, and say what is told of it."""
    control.unhandled_fault_hook = lambda failure: say("told of", failure.kind, failure.rank.rank)
    procs = job.procs()
    ranks = procs.spawn("ranks", Rank)
    try:
        ranks.slice(**last(procs)).die.call_one().get(PATIENCE_S)
    except SupervisionError:
        say(ranks.slice(**dict.fromkeys(procs.extent, 0)).place.call_one().get(PATIENCE_S))


def store(job: SpmdJob) -> None:
    """Put on rank 0, get on all."""
    import asyncio

    import torch

    from skipper import torchstore as ts

    async def put() -> None:
        class ByRank(ts.TorchStoreStrategy):
            """A volume for each rank."""

            @classmethod
            def get_volume_id(cls) -> str:
                return os.environ["RANK"]

            get_client_id = get_volume_id

        await ts.initialize(job.launch.world_size, ByRank(), mesh=job.procs())
        await ts.put("weights", torch.arange(1 << 18))
        say(list(job.procs().spawn("readers", Reader).total.call().get(PATIENCE_S)))
        await ts.shutdown()

    asyncio.run(put())


def lose_once(job: SpmdJob) -> None:
    """Lose the last rank in the first round."""
    say("round", job.launch.restart, job.procs().members[0].job)
    if job.launch.restart == 0:
        ranks = job.procs().spawn("ranks", Rank)
        ranks.slice(**last(job.procs())).die.call_one().get(PATIENCE_S)


def stop(job: SpmdJob) -> None:
    """Have the others leave, and go on."""
    procs = job.procs()
    procs.stop().get(PATIENCE_S)
    say("stopped")


def fail(job: SpmdJob) -> None:
    raise RuntimeError("rank 0 fails so")


def leave(job: SpmdJob) -> None:
    sys.exit(3)


def enter_again(job: SpmdJob) -> None:
    job.__exit__(None, None, None)
    with job:
        pass


def die(job: SpmdJob) -> None:
    """Rank 0 ends without a word."""
    job.procs().initialized.get(PATIENCE_S)
    os._exit(DEATH)


WHAT = {function.__name__: function for function in (work, store, lose, lose_once, stop, fail, leave, enter_again, die)}

if __name__ == "__main__":
    what, secret, *timeout = sys.argv[1:]
    trust = {"certs": secret} if os.path.isdir(secret) else {"secret_file": secret or None, "insecure": True}
    with SpmdJob(**trust, timeout=float(*timeout or [PATIENCE_S])) as job:
        WHAT[what](job)
    say("the end")
