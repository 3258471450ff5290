"""Learning of agents: tasks are worked on by the newest weights, or, in `agentic_async`, for the next step already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf.data.step import Step, ahead
from rlinf.flows.text import filled


async def agentic(step: Step, session: Any) -> Mapping[str, float]:
    """One step: tasks are worked on, and learned from as soon as all attempts at one have ended.

    Args:
        step: tasks, attempts at each, and whether more tasks are drawn in place of those that teach nothing.
        session: of the run; `agent.function` works on a task.

    Returns:
        The trainer's metrics, and those of episodes and of dynamic sampling.
    """
    batch = filled(step, lambda tasks: session.gather(tasks, n=step.group_size))
    metrics: Mapping[str, float] = await session.train(batch.groups)
    return {**metrics, **batch.metrics}


@ahead
async def agentic_async(step: Step, session: Any) -> Mapping[str, float]:
    """One step of `agentic`, from tokens whose weights are at most `staleness.max` versions old.

    Where rollout and trainer are on different devices, a step takes as long as the longer of working and learning.

    Args:
        step: tasks, and attempts at each; `step.in_flight` has what was begun, and the bound.
        session: of the run; `agent.function` works on a task.

    Returns:
        The trainer's metrics, and those of episodes.
    """

    def work(tasks: Any) -> Any:
        return session.gather_tasks(tasks, n=step.group_size, give_up=step.prompts_per_step)

    batch = step.in_flight.next_batch(step, work, session.rollout)
    metrics: Mapping[str, float] = await session.train(batch.groups, publish=False)
    await step.in_flight.publish(session.rollout, session.trainer.weights())
    return {**metrics, **batch.metrics}
