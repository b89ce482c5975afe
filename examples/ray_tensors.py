"""Actors of Ray that read each other's tensors one-sidedly, beside the way through Ray's object store.

`tensor_transport="skipper"` on a method is all: what it returns stays where it is, and whoever gets the reference reads
the tensors out of that memory. The same tensors go through Ray's object store in turns with that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch

from skipper.torchstore.adapters import register_ray

register_ray()  # before the class: Ray looks the transport up when a method asks for it


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Trainer:
    """Has the weights."""

    def __init__(self, nbytes: int) -> None:
        self.weights = {"layer": torch.zeros(nbytes // 4)}

    def step(self) -> None:
        """Change every one of them."""
        self.weights["layer"] += 1

    @ray.method(tensor_transport="skipper")  # type: ignore[untyped-decorator]
    def give(self) -> dict[str, torch.Tensor]:
        """A reference to the weights; no byte moves."""
        return self.weights

    def copy(self) -> dict[str, torch.Tensor]:
        """The weights, through the object store."""
        return self.weights


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Generator:
    """Takes them."""

    def take(self, weights: dict[str, torch.Tensor], step: int) -> None:
        """Compare every element."""
        low, high = (float(edge) for edge in torch.aminmax(weights["layer"]))
        if not low == high == step:
            raise ValueError(f"expected {step} in every element, found {low} to {high}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Take as many steps, and print what it took to take the weights over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--nbytes", type=int, default=64 << 20, help="of the weights")
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.nbytes < 4:
        parser.error("two steps or more, of four bytes or more")

    store_nbytes = max(80_000_000, 4 * options.nbytes)  # Ray's least is 75 MiB
    ray.init(include_dashboard=False, object_store_memory=store_nbytes, logging_level="error")
    trainer: Any = Trainer.remote(options.nbytes)  # type: ignore[attr-defined]
    generator: Any = Generator.remote()  # type: ignore[attr-defined]
    ways = {"skipper": trainer.give, "object store": trainer.copy}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(1, options.steps + 1):
        ray.get(trainer.step.remote(), timeout=120)
        for way, ask in ways.items():
            begin = time.perf_counter()
            ray.get(generator.take.remote(ask.remote(), step), timeout=120)
            seconds[way].append(time.perf_counter() - begin)
    ray.shutdown()
    for way, times in seconds.items():
        median = statistics.median(times[1:])  # the first one connects
        print(f"{way:>12}: {1e3 * median:.1f} ms for {options.nbytes} bytes")
    print(f"{options.steps} steps, every element as expected after each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
