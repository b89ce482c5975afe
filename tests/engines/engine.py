"""A process with one engine of vLLM: ``python -m tests.engines.engine SOCKET FOLDER RANKS``.

It is no process of Skipper's: its workers join the trainer's job. `tests.engines.sockets` calls its methods.
"""

import os
import sys
from dataclasses import asdict
from typing import Any

from tests.engines import sockets
from tests.engines.models import NEW_TOKENS, PROMPTS

NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "weight_transfer_config": {"backend": "torchstore"},
    "worker_extension_cls": "tests.engines.engine.WorkerLook",
}


class WorkerLook:
    """What these tests ask of a worker of vLLM, which is a subclass of this, too."""

    def look(self: Any) -> dict[str, Any]:
        """What the last update took."""
        update = self.weight_transfer_engine.last_update
        return {} if update is None else asdict(update)


class Engine:
    """The methods that others call."""

    def __init__(self, folder: str, ranks: int) -> None:
        from vllm import LLM

        executor = "uni" if ranks == 1 else "mp"
        self._llm = LLM(folder, tensor_parallel_size=ranks, distributed_executor_backend=executor, **OPTIONS)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def resume(self) -> None:
        """Forget what was computed with the old weights."""
        self._llm.reset_prefix_cache()

    def generate(self) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def weight_version(self) -> str:
        return self._llm.get_weight_version()

    def look(self) -> list[dict[str, Any]]:
        """What each worker's last update took."""
        return self._llm.collective_rpc("look")


def main() -> None:
    """See above."""
    socket, folder, ranks = sys.argv[1:]
    os.environ.update(NO_NETWORK)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = Engine(folder, int(ranks))
    sockets.serve(socket, engine)


if __name__ == "__main__":
    main()
