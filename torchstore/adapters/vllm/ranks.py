"""The ranks of one engine of vLLM, which tell each other how something has gone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

_SAID_NBYTES = 2048


def workers_of(parallel_config: Any) -> Any:
    """VLLM's group of the workers of this engine; None: it has one worker."""
    if getattr(parallel_config, "world_size", 1) == 1:
        return None
    state: Any = import_module("vllm.distributed.parallel_state")
    group = state.get_world_group()
    if group.world_size == parallel_config.world_size:
        return group
    # With data parallelism the world has several engines, of which each answers for itself.
    tensor_group = state.get_tp_group()
    return tensor_group if tensor_group.world_size == parallel_config.world_size else None


def all_say(own: str, group: Any) -> list[str]:
    """Exchange a text with the other ranks, which call this, too; what each of them says, in the order of their ranks.

    Of a long text the others get the beginning.
    """
    if group is None:
        return [own]
    mine = torch.zeros(_SAID_NBYTES, dtype=torch.uint8)
    text = own.encode()[:_SAID_NBYTES]
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    every = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(every, mine, group=group.cpu_group)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
