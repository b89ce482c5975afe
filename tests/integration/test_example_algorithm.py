"""The RL example's algorithm by itself: no processes, so that a fault here is told from one of the meshes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from examples.rl.judge import grade
from examples.rl.model import Cache, ModelConfig, Transformer
from examples.rl.policy import advantages, loss, sample
from examples.rl.task import EQUALS, VOCABULARY, Rollout, make_prompts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(digits: int) -> ModelConfig:
    return ModelConfig(vocabulary=VOCABULARY, positions=2 * digits, width=64, heads=4, layers=2)


def rollout(policy: Transformer, config: ModelConfig, *, digits: int, seed: int, prompts: int = 16) -> Rollout:
    chance = torch.Generator().manual_seed(seed)
    sampled = sample(
        policy,
        make_prompts(prompts, digits, chance),
        version=0,
        group=8,
        layers=config.layers,
        generator=chance,
        agree=lambda tokens: None,
    )
    return sampled.judged(grade(sampled.prompts.tolist(), sampled.answers.tolist()))


def test_the_verifier_rewards_each_right_digit() -> None:
    assert grade([[1, 2, 3, EQUALS]], [[3, 2, 1]]) == [[1.0, 1.0, 1.0]]
    assert grade([[1, 2, 3, EQUALS]], [[1, 2, 3]]) == [[0.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="zip"):
        grade([[1, 2, 3, EQUALS]], [[3, 2]])


def test_an_advantage_compares_a_token_with_its_own_group_only() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert advantages(rewards, 2).tolist() == [[0.5, 0.0], [-0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_sampling_with_a_cache_agrees_with_the_whole_sequence() -> None:
    torch.manual_seed(0)
    config = small(4)
    policy = Transformer(config)
    torch.nn.init.normal_(policy.head.weight)
    tokens = torch.randint(0, 10, (3, 7))
    cache = Cache(config.layers)
    with torch.no_grad():
        steps = [policy(tokens[:, :5], cache), policy(tokens[:, 5:6], cache), policy(tokens[:, 6:], cache)]
        torch.testing.assert_close(torch.cat(steps, dim=1), policy(tokens))


def test_the_parts_of_a_rollout_keep_groups_whole_and_lose_nothing() -> None:
    torch.manual_seed(0)
    config = small(3)
    whole = rollout(Transformer(config), config, digits=3, seed=1, prompts=7)
    parts = [whole.part(index, 3) for index in range(3)]
    assert [len(part.answers) for part in parts] == [16, 16, 24]
    assert torch.equal(torch.cat([part.answers for part in parts]), whole.answers)


def test_the_loss_of_fresh_samples_has_the_policy_gradient() -> None:
    torch.manual_seed(0)
    config = small(3)
    policy = Transformer(config)
    batch = rollout(policy, config, digits=3, seed=2)
    loss(policy, batch).backward()
    clipped = policy.head.weight.grad
    policy.zero_grad()
    tokens = torch.cat((batch.prompts, batch.answers[:, :-1]), dim=1)
    scores = policy(tokens)[:, -3:].log_softmax(-1).gather(2, batch.answers.unsqueeze(2)).squeeze(2)
    (-scores * advantages(batch.rewards, batch.group)).sum().backward()
    torch.testing.assert_close(clipped, policy.head.weight.grad)


def test_a_token_that_has_become_likelier_than_the_clip_teaches_only_where_it_did_worse() -> None:
    torch.manual_seed(0)
    config = small(3)
    policy = Transformer(config)
    batch = rollout(policy, config, digits=3, seed=3)
    rewards = torch.zeros_like(batch.rewards)
    rewards[0::2] = 1.0  # in each pair the first answer did better
    # As if each token had been half as likely when it was sampled.
    moved = Rollout(0, 2, batch.prompts, batch.answers, batch.log_probabilities - math.log(2), rewards)
    loss(policy, moved).backward()
    gradient = policy.head.weight.grad
    policy.zero_grad()
    tokens = torch.cat((batch.prompts, batch.answers[:, :-1]), dim=1)
    worse = policy(tokens)[1::2, -3:].log_softmax(-1).gather(2, batch.answers[1::2].unsqueeze(2)).squeeze(2)
    (0.5 * 2 * (worse - batch.log_probabilities[1::2]).exp()).sum().backward()
    torch.testing.assert_close(gradient, policy.head.weight.grad)


def test_the_policy_learns_from_the_verifier_alone() -> None:
    torch.manual_seed(0)
    config = small(2)
    policy = Transformer(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    rewards = []
    for step in range(60):
        batch = rollout(policy, config, digits=2, seed=step)
        rewards.append(batch.reward)
        (loss(policy, batch) / batch.answers.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.9
