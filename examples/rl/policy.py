"""The algorithm, free of processes: how the policy samples, and the loss that improves it.

A policy gradient with group baselines (as GRPO has them) and PPO's clipped importance ratio, which
keeps it stable on rollouts that a version-old policy has sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from examples.rl.model import Cache
from examples.rl.task import Rollout

CLIP = 0.2
"""A token stops teaching once its probability has moved by this share from what it was sampled with."""


@torch.no_grad()
def sample(
    policy: nn.Module,
    prompts: Tensor,
    *,
    version: int,
    group: int,
    layers: int,
    generator: torch.Generator,
    agree: Callable[[Tensor], None],
) -> Rollout:
    """Let ``policy`` answer each of ``prompts`` (n, digits + 1) ``group`` times; nobody has judged that yet.

    Args:
        policy: returns logits for (tokens, cache).
        prompts: int64 tokens.
        version: which weights ``policy`` has.
        group: answers for each prompt.
        layers: of the policy.
        generator: the source of chance.
        agree: called with each sampled (n * group, 1) token column, which it may overwrite, so that
            processes that compute one policy together go on with the same tokens.
    """
    prompts = prompts.repeat_interleave(group, dim=0)
    cache = Cache(layers)
    tokens = prompts
    answers, log_probabilities = [], []
    for _ in range(prompts.shape[1] - 1):
        scores = policy(tokens, cache)[:, -1].log_softmax(dim=-1)
        tokens = torch.multinomial(scores.exp(), 1, generator=generator)
        agree(tokens)
        answers.append(tokens)
        log_probabilities.append(scores.gather(1, tokens))
    answer = torch.cat(answers, dim=1)
    return Rollout(version, group, prompts, answer, torch.cat(log_probabilities, dim=1), torch.zeros(answer.shape))


def advantages(rewards: Tensor, group: int) -> Tensor:
    """How much better each token did than the same position in the other answers to its prompt."""
    grouped = rewards.view(-1, group, rewards.shape[1])
    return (grouped - grouped.mean(dim=1, keepdim=True)).view_as(rewards)


def loss(policy: nn.Module, rollout: Rollout) -> Tensor:
    """The clipped policy-gradient loss, summed over the rollout's tokens (a scalar with gradient)."""
    digits = rollout.answers.shape[1]
    tokens = torch.cat((rollout.prompts, rollout.answers[:, :-1]), dim=1)
    scores = policy(tokens)[:, -digits:].log_softmax(dim=-1)
    chosen = scores.gather(2, rollout.answers.unsqueeze(2)).squeeze(2)
    ratio = (chosen - rollout.log_probabilities).exp()
    advantage = advantages(rollout.rewards, rollout.group)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
