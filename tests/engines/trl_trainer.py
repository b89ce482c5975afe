"""TRL's asynchronous GRPO, which trains on what vLLM says: ``python -m tests.engines.trl_trainer URL FOLDER OPTIONS``.

OPTIONS are those of `TorchStoreWeightTransfer`, as JSON. Prints a line of JSON for each time that TRL had given the
server its weights, and one for a time when that failed.
"""

import json
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from skipper.torchstore.adapters.trl import TorchStoreWeightTransfer
from tests.engines.models import PROMPTS, SHAPE, greedy, llama
from tests.engines.server import ask, generate

STEPS = 3


class Rollouts:
    """A rollout worker as TRL takes one: the server's answers to the prompts, of which every other one is rewarded."""

    def __init__(self, url: str) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=4)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._url = url
        self._version = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._has_ended.set()
        self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        assert self._thread.is_alive()

    def _produce(self) -> None:
        for sample in self._samples():
            while not self._has_ended.is_set():
                with suppress(queue.Full):
                    self.rollout_buffer.put(sample, timeout=0.1)
                    break

    def _samples(self) -> Iterator[RolloutSample]:
        group = 0
        while not self._has_ended.is_set():
            version = self._version
            for prompt, answer in zip(PROMPTS, generate(self._url), strict=True):
                for advantage in (1.0, -1.0):
                    ids = np.array([*prompt, *answer])
                    mask = np.array([0] * len(prompt) + [1] * len(answer))
                    yield RolloutSample(
                        [], [], ids, mask, -6.2 * mask, advantage, version, group, {"reward": advantage}
                    )
                group += 1


class Reported(TorchStoreWeightTransfer):
    """Prints what came of each sync: what the server says then, and what transformers says with the same weights."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.url = url
        self.reference = llama()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        sent = {}

        def kept() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in iterator:
                sent[name] = weight.clone()
                yield name, weight

        super().send_weights(kept())
        self.reference.load_state_dict(sent)
        assert self.last_send is not None
        line = {
            "version": self.last_send.version,
            "served": ask(self.url, "/weight_info")["weight_version"],
            "paused": ask(self.url, "/is_paused")["is_paused"],
            "tokens": generate(self.url),
            "expected": greedy(self.reference),
            "stopped_s": self.last_send.stopped_s,
        }
        print(json.dumps(line), flush=True)


class Definition:
    """The kernel of TRL's attention, which takes a GPU, by its definition."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **options: Any
    ) -> Any:
        rows = []
        for number in range(len(starts_q) - 1):
            q, k, v = (
                tensor[starts[number] : starts[number + 1]].transpose(0, 1)
                for tensor, starts in ((query, starts_q), (key, starts_k), (value, starts_k))
            )
            hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
            k, v = (tensor.repeat_interleave(len(q) // len(tensor), 0) for tensor in (k, v))
            scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(hidden, -torch.inf)
            rows.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(rows)


def refused(url: str) -> dict[str, str]:
    """What is said before there is a server, and before training begins."""
    found = {}
    for name, use in (
        ("no server", lambda: TorchStoreWeightTransfer("http://127.0.0.1:1", start_timeout=0.1).init_weight_transfer()),
        ("not begun", lambda: TorchStoreWeightTransfer(url).send_weights(iter(()))),
        ("nowhere", lambda: TorchStoreWeightTransfer(url, insecure=True).init_weight_transfer()),
        ("no second set", lambda: TorchStoreWeightTransfer(url, second_set_nbytes=1)),
    ):
        try:
            use()
        except Exception as error:  # noqa: BLE001  (the test says what was wrong)
            found[name] = type(error).__name__
    return found


def main() -> None:
    """See above."""
    url, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    packing._flash_attn = lambda: Definition
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12  # it asks CUDA what GPU this is
    llama().save_pretrained(folder / "model")
    words = {str(number): number for number in range(SHAPE["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token="499", pad_token="498"
    )
    tokenizer.save_pretrained(folder / "model")
    from datasets import Dataset

    print(json.dumps({"refused": refused(url)}), flush=True)
    transfer = Reported(url, bucket_nbytes=300_000, **options)
    trainer = AsyncGRPOTrainer(
        model=str(folder / "model"),
        args=AsyncGRPOConfig(
            str(folder / "out"),
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            learning_rate=0.02,
            gradient_checkpointing=False,
            vllm_server_base_url=url,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1 2 3"]}),
        processing_class=tokenizer,
        rollout_worker=Rollouts(url),
        weight_transfer=transfer,
    )
    trainer.train()
    transfer.init_weight_transfer()  # as another call of `train` does
    transfer.send_weights(iter(llama().named_parameters()))
    less = dict(llama().named_parameters())
    del less["model.norm.weight"]
    weights = iter(less.items())
    try:
        TorchStoreWeightTransfer.send_weights(transfer, weights)
    except (requests.HTTPError, RuntimeError) as error:
        kept = {"served": ask(url, "/weight_info")["weight_version"], "paused": ask(url, "/is_paused")["is_paused"]}
        print(
            json.dumps({"error": str(error), "left": len(list(weights)), "tokens": generate(url), **kept}), flush=True
        )
    transfer.destroy()
    transfer.destroy()  # again does nothing


if __name__ == "__main__":
    main()
