"""Dynamic sampling: prompts are drawn, answered and scored in rounds until the batch is full of groups worth learning.

In: a step, and how a flow answers prompts. Out: a stream of the groups to learn from, and how they were found. Who
wakes whom: a group goes on as soon as all prompts drawn before its own are answered; the last group of a round wakes
the drawing of the next; the group that fills the batch ends all answering still under way.

What is kept is a function of the groups alone, never of when they came: within a round they are looked at in the order
in which their prompts were drawn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rlinf.algos.advantages import Filling
from rlinf.data.ledger import EQUAL_REWARDS, SURPLUS
from rlinf.data.sample import Group, Prompt
from rlinf.data.step import Step
from rlinf.runtime.streams.stream import Stream, each

Answer = Callable[[Any], Stream[Group]]
"""From prompts, a list or a stream, to their scored groups."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Groups that a step learns from."""

    groups: Stream[Group]
    """Scored groups, as they come."""
    metrics: dict[str, float] = field(default_factory=dict)
    """How they were found, complete once `groups` has ended: `sampling/rounds`, `sampling/drawn` (prompts),
    `sampling/dropped` and `sampling/kept` (groups), `sampling/reward/mean` (of dropped ones too, which the trainer does
    not see). Nothing without dynamic sampling."""


def filled(step: Step, answer: Answer) -> Batch:
    """The groups of a step: its `batch`, or those of its prompts; with dynamic sampling, a full batch of groups that
    give a gradient.

    Dynamic sampling is DAPO's (arXiv:2503.14476, section 3.2); `step.teaches` says what is kept, and `filters.Filling`
    how many more prompts are drawn. After the last round a batch that is not full goes on as it is. If not one group
    was kept, those of the first round go on instead: the trainer makes no update of them, but tells of them.

    Args:
        step: its prompts, where to draw more, and whether to.
        answer: has prompts answered and scored.

    Raises:
        ValueError: dynamic sampling, and the step does not say how many groups a full batch has.
    """
    if step.batch is not None:
        return Batch(step.batch)
    if step.sampling is None:
        return Batch(answer(step.prompts))
    if step.prompts_per_step < 1:
        raise ValueError(
            f"step {step.index} has sampling, but prompts_per_step={step.prompts_per_step}: give Step the number of "
            "groups of a full batch"
        )
    filling = Filling(step.prompts_per_step, step.sampling.max_rounds)
    metrics: dict[str, float] = {}
    return Batch(Stream.of(_kept(step, answer, filling, metrics), name="kept"), metrics)


async def _kept(step: Step, answer: Answer, filling: Filling, metrics: dict[str, float]) -> AsyncIterator[Group]:
    """Groups worth learning, round by round."""
    draws = 0
    rewards: list[float] = []
    even: list[Group] = []  # of the first round
    kept_ids: set[int] = set()
    while count := filling.next_round():
        prompts = step.prompts if filling.rounds == 1 else await step.draw(count)
        prompt_ids: list[int] = []
        async with aclosing(_in_turn(prompts, answer, prompt_ids)) as groups:
            async for group in groups:
                rewards += group.rewards
                if filling.offer(step.teaches(group)):
                    kept_ids.add(group.id)
                    yield group
                elif filling.rounds == 1:
                    even.append(group)
                else:
                    step.ledger.dropped(group.id, EQUAL_REWARDS, tokens=tokens_of(group))
                if not filling.missing:
                    break
        draws += len(prompt_ids)
        if not prompt_ids:  # the data have come to their end
            break
    for group in even:
        if not filling.kept:
            yield group
        else:
            step.ledger.dropped(group.id, EQUAL_REWARDS, tokens=tokens_of(group))
    if not filling.missing:  # the batch was full before the others were answered
        for prompt_id in step.ledger.open.keys() - kept_ids:
            step.ledger.dropped(prompt_id, SURPLUS)
    metrics |= {
        "sampling/rounds": float(filling.rounds),
        "sampling/drawn": float(draws),
        "sampling/dropped": float(filling.offered - filling.kept),
        "sampling/kept": float(filling.kept),
    }
    if rewards:
        metrics["sampling/reward/mean"] = sum(rewards) / len(rewards)


async def _in_turn(
    prompts: Iterable[Prompt] | AsyncIterable[Prompt], answer: Answer, prompt_ids: list[int]
) -> AsyncGenerator[Group, None]:
    """The groups of one round, each as soon as all whose prompts were drawn before it have come.

    Args:
        prompts: of the round.
        answer: has them answered and scored.
        prompt_ids: gets the ids of the prompts, as they are taken.
    """

    async def noted() -> AsyncIterator[Prompt]:
        async for prompt in each(prompts):
            prompt_ids.append(prompt.id)
            yield prompt

    waiting: dict[int, Group] = {}
    turn = 0
    answers = answer(Stream.of(noted(), name="prompts"))
    try:
        async for group in answers:
            waiting[group.prompt.id] = group
            while turn < len(prompt_ids) and prompt_ids[turn] in waiting:
                yield waiting.pop(prompt_ids[turn])
                turn += 1
    finally:
        await answers.close()  # a batch that is full, or that nobody wants any more, needs no further answers
    for number in sorted(waiting):  # behind a prompt that was not answered, as after an abort
        yield waiting.pop(number)


def tokens_of(group: Group) -> int:
    """Generated tokens of a group."""
    return sum(sample.learned_tokens for sample in group.samples)
