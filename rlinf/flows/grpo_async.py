"""Asynchronous GRPO, and every other algorithm on text without a critic: answers for later steps are generated while
this one is learned from."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from rlinf.data.step import Step, ahead
from rlinf.flows.grpo import grpo


@ahead
@functools.wraps(grpo, assigned=())
async def grpo_async(step: Step, *roles: Any, **named_roles: Any) -> dict[str, float]:
    """One step of `grpo`, from tokens whose weights are at most `staleness.max` versions old.

    Where rollout and trainer are on different devices, a step takes as long as the longer of generating and learning;
    where they share devices, the longest answers do not hold it up.

    Args:
        step: group size; `step.in_flight` has what was begun, and the bound.
        roles, named_roles: those of `grpo`.

    Returns:
        The trainer's metrics, and how the batch was found.
    """
    return await grpo(replace(step, works_ahead=True), *roles, **named_roles)
