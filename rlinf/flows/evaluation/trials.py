"""Evaluation of a policy that acts: whole episodes by its likeliest actions, or by sampled ones, as in training."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.envs.episodes import Episode


async def trials(env: Any, policy: Any, episodes: int, *, greedy: bool = True) -> tuple[Episode, ...]:
    """Act in environments without automatic resets until enough episodes have ended.

    Args:
        env: simulations with one slice each and without automatic resets; their starts are the same each time.
        policy: the role.
        episodes: how many, at least 1.
        greedy: take the likeliest actions; otherwise sample them.

    Returns:
        The episodes, in the order of their rounds and environments, without those that were lost with their simulator.
    """

    async def play(rank: int, epoch: int) -> list[Episode]:
        simulation, decider, key = env[rank], policy[rank % len(policy)], (rank, 0)
        ended: list[Episode] = []
        seen = await simulation.reset(0, epoch)
        while seen.chunk is None or bool(seen.chunk.running.any()):
            seen = await simulation.step(0, decider.act(key, seen, greedy=greedy, keep=False))
            ended += seen.chunk.episodes
        return sorted(ended, key=lambda episode: episode.env)

    found: list[Episode] = []
    epoch = 0
    while len(found) < episodes:
        rounds = await asyncio.gather(*(play(rank, epoch) for rank in range(len(env))))
        if not any(rounds):
            raise RuntimeError("not one trial ended in a whole round: the simulators lose every episode")
        found += [episode for played in rounds for episode in played]
        epoch += 1
    return tuple(found[:episodes])
