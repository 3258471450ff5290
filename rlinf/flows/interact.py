"""Acting in environments: each slice is a coroutine, side by side with the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine
from typing import Any

from rlinf.data.in_flight import Completed
from rlinf.data.step import EmbodiedStep


def interactions(
    step: EmbodiedStep, env: Any, policy: Any, beginnings: list[Any] | None = None
) -> list[Coroutine[Any, Any, Any]]:
    """One coroutine per slice of environments, to be gathered: while one is simulated, another gets its actions.

    Args:
        step: how long, in how many slices.
        env, policy: the roles.
        beginnings: gets a promise of each slice in which the episodes of the next step, which wait for no weights, are
            begun as soon as this one is acted out; await them. None begins nothing early.

    Returns:
        Coroutines, each of which returns the promise of a trajectory.
    """
    early = beginnings is not None and step.fresh and (step.until is None or step.index + 1 < step.until)

    def begin_next(simulation: Any, number: int, *after: Any) -> None:
        prepare = getattr(simulation, "prepare", None) if early else None
        if prepare is not None and beginnings is not None:
            beginnings.append(prepare(number, step.index + 1, *after))

    async def interact(rank: int, number: int) -> Any:
        simulation, decider, key = env[rank], policy[(rank * step.slices + number) % len(policy)], (rank, number)
        live = getattr(decider, "live", None)  # which a role of one's own need not have
        # a rehearsal's actors answer with something else: there every decision is to be counted
        if live is not None and await live(key, simulation, step.index, step.horizon, fresh=step.fresh) is True:
            begin_next(simulation, number)
            return decider.trajectory(key)
        output = simulation.reset(number, step.index) if step.fresh else simulation.observe(number, step.index)
        for _ in range(step.horizon):
            actions = decider.act(key, output)
            output = simulation.step(number, actions)
            try:
                await actions  # keeps pace; what was seen does not pass through here
            except BaseException:
                given_up(output)
                raise
        begin_next(simulation, number, output)
        return decider.trajectory(key, output)  # a promise: it goes from the policy to the trainer

    return [interact(rank, number) for rank in range(len(env)) for number in range(step.slices)]


def given_up(promise: Any) -> None:
    """Nobody awaits a promise any more, because what it depends on has failed and tells why."""
    if not promise.cancel() and not promise.cancelled():
        promise.exception()


async def acting(steps: AsyncIterable[EmbodiedStep], env: Any, policy: Any) -> AsyncIterator[Completed]:
    """The trajectories of each step, once all are complete, so that the next episodes and other weights do not mix with
    them."""
    async for step in steps:
        trajectories = await asyncio.gather(*interactions(step, env, policy))
        yield Completed(step.index, tuple(await asyncio.gather(*trajectories)))
