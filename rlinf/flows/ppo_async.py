"""Asynchronous PPO for text: answers for later steps are generated while policy and critic learn from this one."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from rlinf.data.step import Step, ahead
from rlinf.flows.ppo import ppo


@ahead
@functools.wraps(ppo, assigned=())
async def ppo_async(step: Step, *roles: Any, **named_roles: Any) -> dict[str, float]:
    """One step of `ppo`, from tokens whose weights are at most `staleness.max` versions old; values are the critic's
    newest.

    Args:
        step: group size, and whether only the critic learns yet; `step.in_flight` has what was begun, and the bound.
        roles, named_roles: those of `ppo`.

    Returns:
        The metrics of critic and trainer, and how the batch was found.
    """
    return await ppo(replace(step, works_ahead=True), *roles, **named_roles)
