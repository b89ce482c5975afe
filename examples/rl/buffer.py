"""The replay buffer: rollouts wait here for the trainers, and whoever would sample too far ahead of them waits, too."""

from __future__ import annotations

import asyncio
from collections import deque

from examples.rl.task import Rollout
from skipper.control import Actor, concurrent_endpoint, endpoint


class ReplayBuffer(Actor):
    """Hands out each rollout once, the oldest first.

    Args:
        capacity: rollouts that wait here or are being sampled; with more of them they would be older when they are
            learned from.
    """

    def __init__(self, capacity: int) -> None:
        self._rollouts: deque[Rollout] = deque()
        self._room = asyncio.Semaphore(capacity)
        self._there = asyncio.Semaphore(0)

    @concurrent_endpoint
    async def reserve(self) -> None:
        """Answer when there is room for one more, which is to be sampled now and then `put`."""
        await self._room.acquire()

    @endpoint
    async def put(self, rollout: Rollout) -> None:
        """Take a rollout for which there is room."""
        self._rollouts.append(rollout)
        self._there.release()

    @concurrent_endpoint
    async def take(self) -> Rollout:
        """The oldest rollout, once there is one."""
        await self._there.acquire()
        self._room.release()
        return self._rollouts.popleft()
