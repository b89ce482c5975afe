"""A process with one engine of vLLM: ``python -m tests.engines.engine SOCKET FOLDER RANKS``.

It is no process of Skipper's: its workers join the trainer's job. `tests.engines.sockets` calls its methods.
"""

import os
import sys
import time
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

    def tear(self: Any) -> None:
        """Give the first layer, and no other, the weights of the second set, which are those before the last flip."""
        second, layer = self.weight_transfer_engine._second_set, self.get_model().model.layers[0]
        mine = set(map(id, layer.modules()))
        second._baselines = [baseline for baseline in second._baselines if id(baseline[0]) in mine]
        second._original = layer
        second.flip()


class Stream:
    """Requests without an end: when one has its answer, the next one begins.

    Attributes:
        answers: The number of the prompt and the tokens, of each request that has ended.
        steps: When each step of the engine ended, and how many tokens it gave.
    """

    def __init__(self, engine: Any, requests: int, max_tokens: int) -> None:
        self.answers: list[tuple[int, list[int]]] = []
        self.steps: list[tuple[float, int]] = []
        self._engine = engine
        self._requests = requests
        self._max_tokens = max_tokens
        self._begun = 0
        self._running: dict[str, int] = {}

    def step(self) -> None:
        """One step of the engine."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=self._max_tokens, temperature=0, detokenize=False, ignore_eos=True)
        while len(self._running) < self._requests:
            name, number = f"stream-{id(self)}-{self._begun}", self._begun % len(PROMPTS)
            self._begun += 1
            self._running[name] = number
            self._engine.add_request(name, {"prompt_token_ids": PROMPTS[number]}, sampling)
        outputs = self._engine.step()
        self.steps.append((time.perf_counter(), len(outputs)))
        for output in outputs:
            if output.finished:
                self.answers.append((self._running.pop(output.request_id), list(output.outputs[0].token_ids)))

    def end(self) -> None:
        """Drop the requests that have no answer yet."""
        self._engine.abort_request(list(self._running))
        self._running.clear()


class Engine:
    """The methods that others call."""

    def __init__(self, folder: str, ranks: int) -> None:
        from vllm import LLM

        executor = "uni" if ranks == 1 else "mp"
        self._llm = LLM(folder, tensor_parallel_size=ranks, distributed_executor_backend=executor, **OPTIONS)
        self._stream: Stream | None = None
        self._recomputes = True

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Forget what was computed with the old weights, too, before another step."""
        self._llm.finish_weight_update(weight_version)
        self._forget()

    def resume(self) -> None:
        """Nothing was paused."""

    def stream(self, requests: int, max_tokens: int, recomputes: bool = True) -> None:
        """Begin to generate without an end, between two calls.

        With new weights requests compute once more what they had of the old ones, or not.
        """
        self._recomputes = recomputes
        self._stream = Stream(self._llm.llm_engine, requests, max_tokens)

    def streamed(self) -> int:
        """How many answers there are."""
        assert self._stream is not None
        return len(self._stream.answers)

    def end_stream(self) -> dict[str, Any]:
        """What came of it."""
        stream, self._stream = self._stream, None
        self._recomputes = True
        assert stream is not None
        stream.end()
        return {"answers": stream.answers, "steps": stream.steps}

    def step(self) -> bool:
        """One step of the stream, if there is one."""
        if self._stream is not None:
            self._stream.step()
        return self._stream is not None

    def clock(self) -> float:
        """That of the stream's steps."""
        return time.perf_counter()

    def reload(self, folder: str) -> None:
        """vLLM's own path over files; it began without one."""
        self._llm.collective_rpc("update_config", args=({"load_config": {"load_format": "safetensors"}},))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._forget()

    def tear(self) -> None:
        """See `WorkerLook`."""
        self._llm.collective_rpc("tear")
        self._forget()

    def _forget(self) -> None:
        if self._recomputes:
            self._llm.reset_prefix_cache(reset_running_requests=True)

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
    sockets.serve(socket, engine, engine.step)


if __name__ == "__main__":
    main()
