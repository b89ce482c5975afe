"""transformers' Llama, as it comes, trained by plain PyTorch and over the processes of a mesh, with the same losses.

The training loop is one function, which knows nothing of processes. Under ``with mesh.activate()`` each process has the
whole model and its part of every batch; bfloat16, dropout, checkpointing of activations, shuffling, clipping, AdamW and
the schedule of its rate are PyTorch's and transformers' own. `torch.distributed.checkpoint` saves what the processes
have, and the checkpoint is loaded into a model of the script.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from skipper.control import ProcMesh, this_host
from skipper.tensor_engine import inspect, reduce, reduce_, to_mesh

VOCABULARY, LENGTH, BATCH, BATCHES = 64, 16, 8, 3
RATE, SEED = 1e-2, 1

Gradients = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""Gives all parameters of a model their gradients for a batch, and returns the loss."""


def make_model() -> torch.nn.Module:
    """A Llama with weights of its own, the same at each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    model.activation_checkpointing_enable()
    return model.train()  # type: ignore[no-any-return]


def make_texts() -> TensorDataset:
    """Words that count up, in steps of some size."""
    drawn = torch.Generator().manual_seed(2)
    begin, step = torch.randint(1, VOCABULARY, (2, BATCHES * BATCH, 1), generator=drawn)
    return TensorDataset((begin + step % 4 * torch.arange(LENGTH)) % VOCABULARY)


def loss_of(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Of predicting the next word, most of it in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(input_ids=words, labels=words).loss
    return loss


def train(
    model: torch.nn.Module, texts: TensorDataset, epochs: int, gradients: Gradients
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """The losses, and the optimizer with its state."""
    torch.manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * BATCHES, eta_min=RATE / 10)
    losses = []
    loader = DataLoader(texts, batch_size=BATCH, shuffle=True, num_workers=2)
    for _ in range(epochs):
        for (words,) in loader:
            optimizer.zero_grad()
            losses.append(gradients(model, words))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return losses, optimizer


def gradients_here(parts: int) -> Gradients:
    """In the script: the mean over parts of the batch, each with the dropout of a process that was seeded alike."""

    def gradients(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
        losses = []
        drawn = torch.get_rng_state()
        for part in words.chunk(parts):
            torch.set_rng_state(drawn)
            loss = loss_of(model, part) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return gradients


def gradients_on(mesh: ProcMesh) -> Gradients:
    """On a mesh with the axis ``dp``: the mean over its processes, of which each works on its part of the batch."""
    rank = mesh.rank_tensor("dp").view(1)

    def gradients(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
        part = to_mesh(words.view(mesh.size, -1, LENGTH), mesh).index_select(0, rank).squeeze(0)
        loss = loss_of(model, part)
        loss.backward()  # type: ignore[no-untyped-call]
        reduce_([parameter.grad for parameter in model.parameters()], "dp", "avg")
        return reduce(loss.detach(), "dp", "avg")

    return gradients


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Write a checkpoint of a model that is here, or on a mesh."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)  # type: ignore[attr-defined]


def load(folder: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of the script, and its optimizer, from a checkpoint."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, compare, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the texts")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2, 4, 8), help="parts of each batch")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")  # that one process saves, and more
    torch.set_num_threads(1)  # as the processes have it: sums of another order are others

    texts = make_texts()
    model = make_model()
    mesh = this_host().spawn_procs({"dp": options.processes}, env={"OMP_NUM_THREADS": "1"})
    there = mesh.place(model)
    expected, _ = train(model, texts, options.epochs, gradients_here(options.processes))
    with mesh.activate():
        found, optimizer = train(there, texts, options.epochs, gradients_on(mesh))
    losses = [(one.item(), inspect(other).item()) for one, other in zip(expected, found, strict=True)]
    print(f"{'step':>4}{'PyTorch':>14}{'tensor engine':>14}")
    for step, (one, other) in enumerate(losses):
        print(f"{step:>4}{one:>14.8f}{other:>14.8f}")
    difference = max(abs(one - other) for one, other in losses)
    print(f"largest difference: {difference:.1e}")

    with tempfile.TemporaryDirectory() as folder:
        save(there, optimizer, folder)
        loaded, _ = load(folder)
    same = all(torch.equal(one, other) for one, other in zip(model.parameters(), loaded.parameters(), strict=True))
    print(f"weights from the checkpoint: {'the same' if same else 'others'}")
    return 0 if same and difference < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
