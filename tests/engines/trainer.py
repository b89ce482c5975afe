"""One rank of a trainer with FSDP2, under torchrun's variables: ``python -m tests.engines.trainer SOCKET CHANGES``.

CHANGES is what is different in the model's configuration, as JSON.

`tests.engines.sockets` calls its methods; those that communicate are called on every rank at once.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import psutil
import torch
import torch.distributed as dist

from skipper import control
from skipper import torchstore as ts
from tests.engines import sockets
from tests.engines.models import PROMPTS, greedy, llama, switches_of


class Engines:
    """vLLM's client for any number of engines behind sockets; those that are gone are left out."""

    def __init__(self, paths: list[str], kill_before_reading: list[int]) -> None:
        self.paths = paths
        self._victims = kill_before_reading

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._each("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._each("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        while self._victims:
            process = psutil.Process(self._victims.pop())
            process.kill()  # it may be this one
            psutil.wait_procs([process], timeout=20)
        self._each("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish_weight_update", weight_version=weight_version)

    def pause(self) -> None:
        """These generate nothing of their own."""

    def resume(self) -> None:
        self._each("resume")

    def _each(self, method: str, **arguments: Any) -> None:
        answers = []
        for path in list(self.paths):
            try:
                answers.append((path, sockets.begin(path, method, **arguments)))
            except OSError:
                self.paths.remove(path)
        for path, answer in answers:
            try:
                answer()
            except (EOFError, OSError):
                self.paths.remove(path)


class Trainer:
    """The methods that others call."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._reference, self._before, self._model = llama(**changes), llama(**changes), llama(**changes)
        if self.ranks > 1:
            from torch.distributed.fsdp import fully_shard

            for layer in self._model.model.layers:
                fully_shard(layer)
            fully_shard(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.5)
        self._steps = 1000 * int(os.environ["MASTER_PORT"])  # each trainer takes steps of its own
        self._engine: Any = None

    def connect(
        self,
        paths: list[str],
        source: str = "shards",
        without: str = "",
        kill_before_reading: list[int] | None = None,
        pause: str = "wait",
        **options: Any,
    ) -> None:
        """Make the engine, and rank 0 with the workers behind these sockets.

        Args:
            paths: Sockets of engines, or one URL.
            source: How the weights are given.
            without: A weight that is forgotten.
            kill_before_reading: Processes that end when all ranks have put, before a worker reads.
            pause: How a server is paused.
            options: Of `TorchStoreTrainerInitInfo`.
        """
        from vllm.distributed.weight_transfer import ModuleSource

        from skipper.torchstore.adapters import register_vllm

        register_vllm()
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from skipper.torchstore.adapters.vllm import PausingHTTPClient, ShardSource, TorchStoreTrainerInitInfo

        if self._engine is not None:
            self._engine.shutdown()

        class Forgetful(ShardSource):
            def weights(self) -> dict[str, torch.Tensor]:
                return {name: weight for name, weight in super().weights().items() if name != without}

        sources = {"shards": Forgetful, "whole": ModuleSource}
        is_http = paths[0].startswith("http:")
        self._engine = WeightTransferTrainerFactory.trainer_init(
            TorchStoreTrainerInitInfo(rank=self.rank, num_trainer_ranks=self.ranks, **options),
            client=PausingHTTPClient(paths[0], mode=pause) if is_http else Engines(paths, kill_before_reading or []),
            source=sources[source](self._model),
        )

    def step(self) -> None:
        """One step of training, the same on every rank."""
        self._steps += 1
        batch = torch.randint(0, 499, (2, 24), generator=torch.Generator().manual_seed(self._steps))
        self._model(input_ids=batch, labels=batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def send(self) -> dict[str, Any]:
        """Where the time went."""
        return asdict(self._engine.send_weights())

    def expected(self) -> list[list[int]]:
        """What transformers generates with the weights that are there now."""
        whole = self._whole()
        self._before.load_state_dict(self._reference.state_dict())
        self._reference.load_state_dict(whole)
        return greedy(self._reference)

    def explain(self, answers: list[tuple[int, list[int]]]) -> list[list[int]]:
        """How many tokens of each answer may be of the version before the last `expected`, the others of that one.

        No number: some step computed with something else.
        """
        return [switches_of(self._before, self._reference, PROMPTS[number], tokens) for number, tokens in answers]

    def save(self, folder: str) -> None:
        """Write the weights into a file, as a checkpoint that vLLM loads."""
        from safetensors.torch import save_file

        whole = {name: weight.contiguous() for name, weight in self._whole().items()}
        if self.rank == 0:
            save_file(whole, f"{folder}/model.safetensors", metadata={"format": "pt"})

    def _whole(self) -> dict[str, Any]:
        return {
            name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            for name, weight in self._model.state_dict().items()
        }

    def nbytes(self) -> int:
        """Of all parameters."""
        return sum(weight.numel() * weight.element_size() for weight in self._model.parameters())

    def job(self) -> str:
        """Where engines join it."""
        return str(control.serve_job().path)

    def volumes(self) -> list[int]:
        """The process ids of the store's volumes."""
        info = asyncio.run(ts.client()).remote.info
        return [process.pid for process in info.processes.values()]

    def process(self) -> int:
        return os.getpid()


def main() -> None:
    """See above."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asyncio.run(ts.initialize_spmd(ts.HostStrategy()))
    sockets.serve(sys.argv[1], Trainer(json.loads(sys.argv[2])))
    os._exit(0)  # what is left of gloo may wait for ranks that were killed


if __name__ == "__main__":
    main()
