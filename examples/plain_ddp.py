"""A data-parallel training script that knows nothing of Skipper, as ``torchrun`` starts it.

It runs by ``torchrun --nproc-per-node 2 examples/plain_ddp.py``, and unchanged on a mesh of processes by
``python examples/spmd_training.py``.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, as one rank of several."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train()
    # After `train` has let go of its model: a DistributedDataParallel that outlives the group waits, now and then, with
    # the interpreter's lock held for a thread of the group that needs it.
    dist.destroy_process_group()
    # The threads of gloo drop what the last backward pass gave them, for which they need the interpreter's lock. One
    # that still waits for it when the interpreter ends aborts the process (PyTorch 2.13).
    time.sleep(0.2)


def train() -> None:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", help="begin with it if it is there; rank 0 writes it at the end")
    given = parser.parse_args()
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    if given.checkpoint and os.path.exists(given.checkpoint):
        network.load_state_dict(torch.load(given.checkpoint, map_location=device))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
    samples = torch.Generator().manual_seed(1 + rank)
    for step in range(given.steps):
        inputs = torch.randn(64, 16, generator=samples).to(device)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:3}: loss {loss.item():.4f}", flush=True)
    if given.checkpoint and rank == 0:
        torch.save(network.state_dict(), given.checkpoint)


if __name__ == "__main__":
    main()
