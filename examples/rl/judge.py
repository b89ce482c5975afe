"""The actor that rewards: it looks at answers, and needs neither torch nor the policy for that."""

from __future__ import annotations

from skipper.control import Actor, endpoint, idempotent


def grade(prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
    """The verifier: 1.0 for each token of an answer that is right, else 0.0.

    Args:
        prompts: the digits of each and the equals sign behind them.
        answers: as many tokens as there were digits.
    """
    return [
        [float(digit == right) for digit, right in zip(answer, reversed(prompt[:-1]), strict=True)]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


class Judge(Actor):
    """One of several that share the work: judging one answer knows nothing of the others."""

    @endpoint
    @idempotent
    def grade(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        """Reward each token of each answer."""
        return grade(prompts, answers)
