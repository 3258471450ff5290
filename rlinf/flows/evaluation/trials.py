"""Evaluation of a policy that acts: whole episodes by its likeliest actions, or by sampled ones, as in training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlinf.envs.episodes import Episode
from rlinf.runtime.base.progress import Work, work


@dataclass(slots=True, eq=False)
class _Round:
    """One episode of every environment of an actor."""

    rank: int
    """Of the actor."""
    epoch: int
    """That its episodes began with."""
    actions: list[Tensor] = field(default_factory=list)
    """In order, float32 [N, C, A] each; kept where videos are wanted."""
    episodes: list[Episode] = field(default_factory=list)
    """By environment."""


async def trials(env: Any, policy: Any, episodes: int, *, greedy: bool = True, videos: int = 0) -> tuple[Episode, ...]:
    """Act in environments without automatic resets until enough episodes have ended.

    Args:
        env: simulations with one slice each and without automatic resets; their starts are the same each time.
        policy: the role.
        episodes: how many, at least 1.
        greedy: take the likeliest actions; otherwise sample them.
        videos: of so many of them a video is recorded: failures first, those with the smallest returns. Starts and
            actions repeat, so they are played again for it, and only they are drawn. `env` needs a `Recording`.

    Returns:
        The episodes, in the order of their rounds and environments, without those that were lost with their simulator.

    Raises:
        RuntimeError: every episode of a round was lost.
    """

    async def play(rank: int, epoch: int, trying: Work) -> _Round:
        simulation, decider, key = env[rank], policy[rank % len(policy)], (rank, 0)
        played = _Round(rank, epoch)
        seen = await simulation.reset(0, epoch)
        while seen.chunk is None or bool(seen.chunk.running.any()):
            actions = decider.act(key, seen, greedy=greedy, keep=False)
            seen = await simulation.step(0, actions)
            played.episodes += seen.chunk.episodes
            trying.advance(len(seen.chunk.episodes))
            if videos:
                played.actions.append(await actions)
        played.episodes.sort(key=lambda episode: episode.env)
        return played

    rounds: list[_Round] = []
    found: list[tuple[_Round, Episode]] = []
    with work("trying the policy", episodes, "episodes") as trying:
        while len(found) < episodes:
            epoch = len(rounds) // len(env)
            played = await asyncio.gather(*(play(rank, epoch, trying) for rank in range(len(env))))
            if not any(each.episodes for each in played):
                raise RuntimeError("not one trial ended in a whole round: the simulators lose every episode")
            rounds += played
            found += [(each, episode) for each in played for episode in each.episodes]
    found = found[:episodes]
    if videos:
        await _record(env, failures_first(found)[:videos])
    return tuple(episode for _, episode in found)


def failures_first(found: Sequence[tuple[Any, Episode]]) -> list[tuple[Any, Episode]]:
    """Episodes in the order in which they are worth looking at: failures, then by their returns, the smallest first.

    Args:
        found: each with what it comes from.
    """
    return sorted(found, key=lambda pair: (bool(pair[1].success_once), pair[1].total))


async def _record(env: Any, wanted: Sequence[tuple[_Round, Episode]]) -> None:
    """Play the rounds of some episodes again, by the same actions, and record those."""
    chosen: dict[int, tuple[_Round, list[int]]] = {}
    for played, episode in wanted:
        chosen.setdefault(id(played), (played, []))[1].append(episode.env)
    for played, numbers in chosen.values():
        simulation = env[played.rank]
        await simulation.watch(0, numbers)
        await simulation.reset(0, played.epoch)
        for actions in played.actions:
            await simulation.step(0, actions)
        await simulation.watch(0, ())
