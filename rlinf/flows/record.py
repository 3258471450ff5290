"""Demonstrations from a policy: whole episodes are acted in, and written into a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.data.demonstrations import Demonstration, write_demonstrations
from rlinf.envs.environment import Decision, EnvOutput


class NothingToKeep(RuntimeError):
    """No episode solved its task, round after round."""


async def record(
    env: Any,
    policy: Any,
    path: str | Path,
    episodes: int,
    *,
    greedy: bool = True,
    solved: bool = True,
    patience: int = 1,
    on_progress: Callable[[int, int], None] = lambda kept, played: None,
) -> int:
    """Act until enough episodes are written.

    Args:
        env: simulations with one slice each and without automatic resets.
        policy: the role, or anything whose ranks answer `act(key, output, greedy=…, keep=False)`, such as a script.
        path: directory that they are added to.
        episodes: how many, at least 1.
        greedy: take the likeliest actions.
        solved: keep only those that solved their task; all where the simulator does not say.
        patience: rounds in a row of which nothing could be kept after which it gives up.
        on_progress: called after each round with how many episodes are kept, and how many were played.

    Returns:
        How many episodes were acted in, for a share of success.

    Raises:
        NothingToKeep: no episode of `patience` rounds could be kept.
    """

    async def play(rank: int, epoch: int) -> list[Demonstration]:
        simulation, actor, key = env[rank], policy[rank % len(policy)], (rank, 0)
        outputs, actions = [await simulation.reset(0, epoch)], []
        while outputs[-1].chunk is None or bool(outputs[-1].chunk.running.any()):
            decided = await actor.act(key, outputs[-1], greedy=greedy, keep=False)
            outputs.append(await simulation.step(0, decided))
            actions.append(decided.actions if isinstance(decided, Decision) else decided)
        return demonstrated(outputs, actions)

    written = played = epoch = nothing = 0
    while written < episodes:
        rounds = await asyncio.gather(*(play(rank, epoch) for rank in range(len(env))))
        demonstrations = [demonstration for part in rounds for demonstration in part]
        solved_ones = [
            demonstration for demonstration in demonstrations if not (solved and demonstration.success is False)
        ]
        played, epoch, nothing = played + len(demonstrations), epoch + 1, 0 if solved_ones else nothing + 1
        if nothing >= patience:
            raise NothingToKeep(
                f"record: not one of {played if nothing == epoch else 'the last'} episodes solved its task"
                f"{'' if nothing == epoch else f', in {nothing} rounds'}; "
                "record a better policy, or failures, too (--all)"
            )
        written += await asyncio.to_thread(write_demonstrations, Path(path), solved_ones[: episodes - written])
        on_progress(written, played)
    return played


def demonstrated(outputs: Sequence[EnvOutput], actions: Sequence[Tensor]) -> list[Demonstration]:
    """Experience of a slice, episode by episode; those that were lost with their simulator are left out.

    Args:
        outputs: from the reset on, T + 1, of environments without automatic resets.
        actions: what was done at each but the last, float32 [N, C, A].
    """
    chunks = [output.chunk for output in outputs if output.chunk is not None]
    valid = torch.stack([chunk.valid for chunk in chunks])
    acted = [chunk.interventions for chunk in chunks]
    done = torch.stack(
        [
            own if other is None else torch.where(other.steps[..., None], other.actions, own)
            for own, other in zip(actions, acted, strict=True)
        ]
    )
    intervened = None
    if any(each is not None for each in acted):
        nobody = torch.zeros_like(chunks[0].valid)
        intervened = torch.stack([nobody if each is None else each.steps for each in acted])
    rewards, ended = (torch.stack([getattr(chunk, name) for chunk in chunks]) for name in ("rewards", "terminated"))
    lost = torch.stack([chunk.lost for chunk in chunks]).any(0)
    outcomes = {episode.env - outputs[0].first: episode for chunk in chunks for episode in chunk.episodes}
    words, demonstrations = outputs[0].instructions, []
    for env, episode in sorted(outcomes.items()):
        length = int(valid[:, env].any(-1).sum())
        if lost[env]:
            continue
        demonstrations.append(
            Demonstration(
                {
                    name: torch.stack([output.observation[name][env] for output in outputs[: length + 1]])
                    for name in outputs[0].observation
                },
                done[:length, env].clamp(-1.0, 1.0),
                rewards[:length, env],
                valid[:length, env],
                bool(ended[:, env].any()),
                episode.success_once,
                None if words is None else words[env],
                None if intervened is None else intervened[:length, env],
            )
        )
    return demonstrations
