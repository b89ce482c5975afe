"""A trainer with FSDP2 sends its weights to a running server of vLLM.

Run it as ``torchrun --nproc-per-node 2 -m examples.fsdp_to_vllm URL``. The model is a small Llama that begins with
random weights and learns to count. Every few steps the server gets the weights, and is asked to go on counting.
docs/tutorials/fsdp_to_vllm.md explains it.
"""

import argparse
import asyncio
import json
import urllib.request
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from skipper import torchstore as ts
from skipper.torchstore.adapters import register_vllm

VOCABULARY, PROMPT, ANSWER = 64, 16, 12
ROUNDS, STEPS = 5, 3


def new_model() -> LlamaForCausalLM:
    """A model of 2 MB, the same on every rank."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **shape))


def connect(model: torch.nn.Module, url: str) -> Any:
    """Every rank calls this; rank 0 has the server's workers join its job."""
    register_vllm()
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from skipper.torchstore.adapters.vllm import PausingHTTPClient, ShardSource, TorchStoreTrainerInitInfo

    client = PausingHTTPClient(url, mode="step")
    if dist.get_rank() == 0:
        client.wait_until_ready(timeout=600)
    info = TorchStoreTrainerInitInfo(rank=dist.get_rank(), num_trainer_ranks=dist.get_world_size(), background=True)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ShardSource(model))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Some steps on sequences that count; the last loss."""
    for _ in range(STEPS):
        starts = torch.randint(0, VOCABULARY, (16, 1))
        batch = (starts + torch.arange(PROMPT + ANSWER)) % VOCABULARY
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def ask(url: str, prompt: list[int]) -> list[int]:
    """The server's answer, in tokens."""
    sampling = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "detokenize": False}
    body = json.dumps({"token_ids": prompt, "sampling_params": sampling, "stream": False}).encode()
    request = urllib.request.Request(f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m examples.fsdp_to_vllm", description=__doc__.splitlines()[0])
    parser.add_argument("target", help="the server's URL, or with --write-model a folder")
    parser.add_argument("--write-model", action="store_true", help="write the model for vllm serve, and end")
    given = parser.parse_args()
    if given.write_model:
        new_model().save_pretrained(given.target)
        return

    dist.init_process_group("gloo")
    asyncio.run(ts.initialize_spmd(ts.HostStrategy()))
    model = new_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    engine = connect(model, given.target)

    torch.manual_seed(1 + dist.get_rank())  # each rank has sequences of its own
    prompt = list(range(10, 10 + PROMPT))
    for _ in range(ROUNDS):
        loss = train(model, optimizer)
        record = engine.send_weights()
        if dist.get_rank() == 0:
            answer = ask(given.target, prompt)
            right = sum(token == 10 + PROMPT + place for place, token in enumerate(answer))
            print(
                f"version {record.version}: loss {loss:.3f}, read in {record.transfer_s * 1e3:.0f} ms while the server "
                f"generates, changed in {record.stopped_s * 1e3:.1f} ms; it counts {right} of {ANSWER} numbers right",
                flush=True,
            )
    engine.shutdown()
    asyncio.run(ts.shutdown())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
