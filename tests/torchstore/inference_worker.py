"""A process of an inference engine, driven by lines of JSON: what the adapters' tests have in place of vLLM and verl.

Nothing here is started by control: a worker joins the job that it is told of. ``["method", [arguments]]`` comes in on
standard input, ``{"result": ...}`` or ``{"error": ...}`` goes out on standard output.
"""

import asyncio
import importlib
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from tests.torchstore import stand_ins


class VllmWorker:
    """What vLLM's worker does with its weight transfer engine."""

    def __init__(self) -> None:
        adapter = importlib.import_module("skipper.torchstore.adapters.vllm")
        self.model = stand_ins.Model()
        self.new_engine = partial(adapter.TorchStoreWeightTransferEngine, None)
        self.engine = self.new_engine(stand_ins.worker_config(), torch.device("cpu"), self.model)

    def renew(self) -> None:
        """Be a worker of another engine."""
        self.model = stand_ins.Model()
        self.engine = self.new_engine(stand_ins.worker_config(), torch.device("cpu"), self.model)

    def start_late(self, job: str) -> tuple[list[float], list[str]]:
        """Be a worker of an engine that starts now and knows the trainer's job."""
        os.environ["SKIPPER_VLLM_JOB"] = job
        try:
            self.renew()
        finally:
            del os.environ["SKIPPER_VLLM_JOB"]
        return self.look()

    def last_update(self) -> dict[str, Any]:
        """What the last one took."""
        return asdict(self.engine.last_update)

    def become_stage(self, layers: dict[str, list[int]]) -> None:
        """Be a worker of a pipeline, with these layers (by process id) of its model."""
        self.model = stand_ins.Stage(*layers[str(os.getpid())])
        self.engine = self.new_engine(stand_ins.worker_config(len(layers)), torch.device("cpu"), self.model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()

    def shutdown(self) -> None:
        self.engine.shutdown()

    def look(self) -> tuple[list[float], list[str]]:
        """The values of the model's weights, and what it was asked for since the last look."""
        calls, self.model.calls = self.model.calls, []
        return self.model.values(), calls


class VerlWorker:
    """What verl's ``CheckpointEngineWorker`` does, in an event loop as in an async Ray actor."""

    def __init__(self) -> None:
        importlib.import_module("skipper.torchstore.adapters.verl")
        registry = importlib.import_module("verl.checkpoint_engine.base").CheckpointEngineRegistry
        self.engine = registry.new("torchstore", bucket_size=1000)

    def execute(self, method: str, options: dict[str, Any]) -> Any:
        async def call() -> Any:
            return getattr(self.engine, method)(**options)

        return asyncio.run(call())

    def update_weights(self, global_steps: int) -> list[list[Any]]:
        """Name, dtype, shape and distinct values of everything that came."""

        async def receive() -> list[list[Any]]:
            weights = self.engine.receive_weights(global_steps=global_steps)
            return [
                [name, str(weight.dtype), list(weight.shape), weight.float().unique().tolist()]
                async for name, weight in weights
            ]

        return asyncio.run(receive())


def main() -> None:
    torch.set_num_threads(1)
    stand_ins.install()
    workers: dict[str, Any] = {}
    for line in sys.stdin:
        kind, method, arguments = json.loads(line)
        if kind not in workers:
            workers[kind] = {"vllm": VllmWorker, "verl": VerlWorker}[kind]()
        try:
            answer = {"result": getattr(workers[kind], method)(*arguments)}
        except Exception as error:  # noqa: BLE001  (goes to whoever asked)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
