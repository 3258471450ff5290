"""Parts of a step on text that flows share: columns that further roles fill in, and who gets the new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from rlinf.data.sample import Group
from rlinf.data.step import Step

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


async def publish_weights(
    step: Step, trainer: Any, load: Callable[[Any], Awaitable[Any]], reference: Any = None
) -> None:
    """Let whoever generates have the trainer's new weights, and a reference that moves follow them.

    Args:
        step: says whether they are published, and whether the reference moves.
        trainer: the role that has them.
        load: takes a promise of them: they do not pass through the flow.
        reference: the role, where there is one.
    """
    if not step.publishes:
        return
    weights = trainer.weights()
    await load(weights)
    if step.moving_reference:
        await reference.follow(weights)
