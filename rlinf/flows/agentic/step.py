"""One step of agents that learn, each by the newest weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf.data.step import Step
from rlinf.flows.parts.dynamic_sampling import filled


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
