"""Parts of steps on text: the groups of a batch, columns that further roles fill in, and who gets the new weights.

`next_batch` gives the groups that a step learns from. With dynamic sampling, prompts are drawn, answered and scored in
rounds until the batch is full of groups worth learning: a group goes on as soon as all prompts drawn before its own are
answered; the last group of a round wakes the drawing of the next; the group that fills the batch ends all answering
still under way. What is kept is a function of the groups alone, never of when they came: within a round they are looked
at in the order in which their prompts were drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rlinf.algos.advantages import Filling
from rlinf.data.face import known
from rlinf.data.ledger import EQUAL_REWARDS, SURPLUS
from rlinf.data.sample import Group, Prompt
from rlinf.data.step import Step
from rlinf.runtime.streams.channel import Handle
from rlinf.runtime.streams.handles import handles
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


def generate(step: Step, rollout: Any, prompts: Any) -> Any:
    """Groups of answers as they come, by ranks that share the prompts, or that they are dealt to in turn.

    Args:
        step: says which, and how many answers a group has.
        rollout: the role.
        prompts: to answer; to be dealt, a list.
    """
    if step.deal is None:
        return rollout.generate(prompts, n=step.group_size)
    ranks = len(rollout)
    return rollout.generate.each([prompts[rank::ranks] for rank in range(ranks)], n=[step.group_size] * ranks)


def next_batch(step: Step, answer: Answer, rollout: Any) -> Any:
    """The batch of a step: answers that were begun in steps before, where its flow works ahead, else `filled`.

    Args:
        step: the step.
        answer: has prompts answered and scored.
        rollout: the role that answers, whose weights bound how far it may be ahead.

    Returns:
        Its `groups`, a stream, and `metrics` of how they came about, complete once the stream has ended.
    """
    return step.in_flight.next_batch(step, answer, rollout) if step.works_ahead else filled(step, answer)


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
        return Batch(answer(step.prompts if step.deal is None else step.deal))
    if step.prompts_per_step < 1:
        raise ValueError(
            f"step {step.index} has sampling, but prompts_per_step={step.prompts_per_step}: give Step the number of "
            "groups of a full batch"
        )
    filling = Filling(step.prompts_per_step, step.sampling.max_rounds)
    metrics: dict[str, float] = {}
    return Batch(Stream.of(_kept(step, answer, filling, metrics), name="kept"), metrics)


async def _kept(step: Step, answer: Answer, filling: Filling, metrics: dict[str, float]) -> AsyncIterator[Handle]:
    """Groups worth learning, round by round; by what their faces tell, so that tokens do not come here."""
    draws = 0
    rewards: list[float] = []
    even: list[tuple[Handle, Group]] = []  # of the first round
    kept_ids: set[int] = set()
    while count := filling.next_round():
        first = step.prompts if step.deal is None else step.deal
        prompts = first if filling.rounds == 1 else await step.draw(count)
        prompt_ids: list[int] = []
        async with aclosing(_in_turn(step, prompts, answer, prompt_ids)) as groups:
            async for handle, group in groups:
                rewards += group.rewards
                if filling.offer(step.teaches(group)):
                    kept_ids.add(group.id)
                    yield handle
                elif filling.rounds == 1:
                    even.append((handle, group))
                else:
                    step.ledger.dropped(group.id, EQUAL_REWARDS, tokens=tokens_of(group))
                if not filling.missing:
                    break
        draws += len(prompt_ids)
        if not prompt_ids:  # the data have come to their end
            break
    for handle, group in even:
        if not filling.kept:
            yield handle
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
    step: Step, prompts: Any, answer: Answer, prompt_ids: list[int]
) -> AsyncGenerator[tuple[Handle, Group], None]:
    """The groups of one round, each as soon as all whose prompts were drawn before it have come: a handle, and what is
    known of the group here.

    Args:
        step: says how ranks come by them.
        prompts: of the round.
        answer: has them answered and scored.
        prompt_ids: gets the ids of the prompts, as they are taken.
    """

    async def noted() -> AsyncIterator[Prompt]:
        async for prompt in each(prompts):
            prompt_ids.append(prompt.id)
            yield prompt

    waiting: dict[int, tuple[Handle, Group]] = {}
    turn = 0
    if step.deal is None:
        answers = answer(Stream.of(noted(), name="prompts"))
    else:
        prompt_ids += (prompt.id for prompt in prompts)
        answers = answer(prompts) if prompts else Stream.of(())
    try:
        async for handle in handles(answers):
            group = await known(handle)
            waiting[group.prompt.id] = handle, group
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


TEACHER = "teacher"
"""The role whose log-probs are distilled; several are `teacher_NAME` each."""


def annotate(
    groups: Any, *, reward_model: Any = None, reference: Any = None, teacher: Any = None, critic: Any = None
) -> Any:
    """Groups with the columns that these roles fill in, each as soon as the one before has.

    Args:
        groups: a stream of them, as they come.
        reward_model: rewards of a model, which take the answers only.
        reference: log-probs under the policy of a KL penalty.
        teacher: log-probs under the policy that is distilled.
        critic: what is still to be expected at each token.
    """
    columns = ((reward_model, "score"), (reference, "logprobs"), (teacher, "logprobs"), (critic, "values"))
    for role, endpoint in columns:
        if role is not None:
            groups = getattr(role, endpoint)(groups)
    return groups


async def annotate_in_order(groups: Sequence[Group], reference: Any) -> list[Group]:
    """Groups with the reference's log-probs, in the order of their ids.

    Each rank gets a share that does not depend on when another is done: the last bits of a log-prob depend on what is
    computed beside it, and a run is to repeat bit for bit.

    Args:
        groups: all of the batch.
        reference: the role.
    """
    ranks = len(reference.hosts)
    shares = (groups[rank::ranks] for rank in range(ranks))
    parts = await asyncio.gather(
        *(_all(reference[rank].logprobs(list(share))) for rank, share in enumerate(shares) if share)
    )
    return sorted(chain.from_iterable(parts), key=lambda group: group.id)


async def _all(groups: AsyncIterable[Group]) -> list[Group]:
    return [group async for group in groups]


class Teachers:
    """Several teachers that a flow calls like one: groups go from each to the next.

    Args:
        teachers: their handles.
    """

    def __init__(self, teachers: Sequence[Any]):
        self._teachers = teachers

    def logprobs(self, groups: Any) -> Any:
        """Groups with the log-probs of each teacher, and with the mixture in `teacher_logprobs`."""
        for teacher in self._teachers:
            groups = teacher.logprobs(groups)
        return groups


def with_one_teacher(roles: Mapping[str, Any]) -> dict[str, Any]:
    """Roles by name, in which several teachers are one, `teacher`."""
    several = [role for name, role in roles.items() if name.startswith(f"{TEACHER}_")]
    return {**roles, TEACHER: Teachers(several)} if several else dict(roles)


async def publish_weights(step: Step, trainer: Any, rollout: Any, reference: Any = None) -> None:
    """Let the rollout have the trainer's new weights, and a reference that moves follow them.

    Args:
        step: says whether they are published, and whether the reference moves.
        trainer: the role that has them; they do not pass through the flow.
        rollout: the role that answers: at once, or, where the flow works ahead, in the middle of its answers.
        reference: the role, where there is one.
    """
    if not step.publishes:
        return
    weights = trainer.weights()
    await (step.in_flight.publish(rollout, weights) if step.works_ahead else rollout.load(weights))
    if step.moving_reference:
        await reference.follow(weights)
