"""The ranks of one vLLM engine, which exchange the results of their steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

_SAID_NBYTES = 2048


def workers_of(parallel_config: Any) -> Any:
    """The group (of vLLM) of this engine's workers; None: it has one worker."""
    if getattr(parallel_config, "world_size", 1) == 1:
        return None
    state: Any = import_module("vllm.distributed.parallel_state")
    group = state.get_world_group()
    if group.world_size == parallel_config.world_size:
        return group
    # With data parallelism the world has several engines, each with its own result.
    tensor_group = state.get_tp_group()
    return tensor_group if tensor_group.world_size == parallel_config.world_size else None


def all_say(own: str, group: Any) -> list[str]:
    """Exchange a text with the other ranks, which also call this. Returns the texts of all, in the order of ranks.

    Of a long text, the others get only the beginning.
    """
    if group is None:
        return [own]
    mine = torch.zeros(_SAID_NBYTES, dtype=torch.uint8)
    text = own.encode()[:_SAID_NBYTES]
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    every = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(every, mine, group=group.cpu_group)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
