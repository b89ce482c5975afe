"""verl's checkpoint manager between a trainer and a rollout with vLLM: ``python -m tests.engines.verl_script FOLDER``.

The manager, the worker groups and the rollout's worker are verl's own; the trainer's worker has the methods that verl's
has, and its rollout is vLLM in the worker's process, since verl's own takes a GPU. Prints a line of JSON for each sync.
"""

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.engines.engine import NO_NETWORK, OPTIONS
from tests.engines.models import NEW_TOKENS, PROMPTS, greedy, llama, write_folder
from tests.ray_scripts import start_ray

BACKEND = "torchstore"
SYNCS = 2


class Trainer(Worker):
    """One rank, with FSDP2."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._reference, self._model = llama(), llama()
        for layer in self._model.model.layers:
            fully_shard(layer)
        fully_shard(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.5)
        self._steps = 0
        import_external_libs(config.custom_backend_module)
        bucket_nbytes = 1 << 19  # in verl's configuration it is a MiB at least, which is all of this model
        options = {**config.engine_kwargs[BACKEND], "is_master": self.rank == 0}
        self.checkpoint_engine = CheckpointEngineRegistry.new(BACKEND, bucket_size=bucket_nbytes, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self) -> list[list[int]]:
        """Train; what transformers says then."""
        self._steps += 1
        batch = torch.randint(0, 499, (2, 24), generator=torch.Generator().manual_seed(self._steps))
        self._model(input_ids=batch, labels=batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._reference.load_state_dict(dict(self._whole()))
        return greedy(self._reference)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        return await self.checkpoint_engine.send_weights(self._whole(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._model.named_parameters():
            yield name, weight.detach().full_tensor()


class VLLM:
    """A rollout, as verl's worker calls it."""

    def __init__(self, folder: str) -> None:
        os.environ.update(NO_NETWORK)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        options = {
            name: OPTIONS[name] for name in OPTIONS if name not in {"weight_transfer_config", "worker_extension_cls"}
        }
        self._llm = LLM(folder, distributed_executor_backend="uni", **options)

    async def update_weights(self, weights: AsyncIterator[tuple[str, torch.Tensor]], **options: Any) -> None:
        """Load them."""
        taken = [each async for each in weights]
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": taken})
        self._llm.reset_prefix_cache()

    def generate(self) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(each.outputs[0].token_ids) for each in self._llm.generate(prompts, sampling, use_tqdm=False)]


class Rollout(CheckpointEngineWorker):
    """verl's worker beside it."""

    def __init__(self, rollout_config: RolloutConfig, folder: str) -> None:
        super().__init__(rollout_config, None, VLLM(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self) -> list[list[int]]:
        return self.server_adapter.generate()


class Replica:
    """What verl's manager asks of a replica that has no server of its own."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def _nothing(self, **options: Any) -> None:
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def group(of: type, ranks: int, **arguments: Any) -> RayWorkerGroup:
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(of), **arguments), device_name="cpu")


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    model = write_folder(folder / "model")
    config = CheckpointEngineConfig(
        backend=BACKEND,
        update_weights_bucket_megabytes=1,
        engine_kwargs={BACKEND: {"rollout_dtype": None, "timeout": 60.0}},
        custom_backend_module="skipper.torchstore.adapters.verl",
    )
    start_ray(str(folder), cpus=8)
    trainer = group(Trainer, 2, config=config)
    rollout = group(Rollout, 1, rollout_config=RolloutConfig(name="vllm", checkpoint_engine=config), folder=str(model))
    manager = CheckpointEngineManager(config, trainer, [Replica(rollout.workers)])
    for step in range(SYNCS):
        expected = trainer.step()[0]
        metrics = manager.update_weights(global_steps=step)
        found = rollout.generate()[0]
        print(json.dumps({"tokens": found, "expected": expected, "metrics": metrics}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
