"""How good the model is now: greedy answers to problems it never trained on."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import Any

from rlinf.data.sample import Group, Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The outcome."""

    accuracy: float
    """Mean reward of the answers; with rewards of 0 and 1, the share of right ones."""
    groups: tuple[Group, ...]
    """The judged answers, one sample each unless asked for more, in the order of their prompts' ids."""


async def evaluate(
    prompts: Iterable[Prompt] | AsyncIterable[Prompt], rollout: Any, judge: Any, *, n: int = 1, temperature: float = 0.0
) -> Evaluation:
    """Answer the prompts and score the answers.

    Args:
        prompts: what to answer, at least one.
        rollout, judge: the roles.
        n: answers per prompt.
        temperature: 0 takes the likeliest token.

    Raises:
        ValueError: there was no prompt.
    """
    answers = rollout.generate(prompts, n=n, temperature=temperature)
    groups = [group async for group in judge.score.map(answers)]
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards:
        raise ValueError("evaluate: there was no prompt to answer")
    groups.sort(key=lambda group: group.prompt.id)
    return Evaluation(sum(rewards) / len(rewards), tuple(groups))
