"""Trials of a policy without training, and what is told and kept of trials.

In: a configuration that names a policy. Out: the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlinf.actors.embodied.policy_trainer import POLICY
from rlinf.config.embodied import EmbodiedConfig
from rlinf.envs.episodes import Episode
from rlinf.flows.evaluation.trials import trials
from rlinf.job.embodied.roles import NEW, TRIALS, start_roles
from rlinf.models.policy.build import CONFIG
from rlinf.placement.seats import CONTROL, place
from rlinf.runtime.system.system import ActorSystem


async def try_policy(system: ActorSystem, config: EmbodiedConfig, videos: Path | None = None) -> tuple[Episode, ...]:
    """Trials of the policy that a configuration names, without training.

    Args:
        system: where.
        config: what; `policy.path` is the policy.
        videos: directory for `trials.videos` of them; None records none.

    Raises:
        InputError: the simulator or the policy cannot be made, or they do not fit.
    """
    # a mode or a plan is for training: in trials nobody else is on a device
    placed = place(replace(config.placement, mode=None, plan=None), CONTROL[:2], system.hosts)
    roles = await start_roles(system, config, None, placed, videos)
    found = await trials(roles[TRIALS], roles["policy"], config.trials.episodes, greedy=config.trials.greedy)
    if videos is not None and config.trials.videos:
        await asyncio.to_thread(keep_videos, videos, 0)
    return found


def saved_policy(path: Path) -> Path:
    """The directory of a saved policy that a path leads to: itself, that of a checkpoint, or of a run's newest one."""
    ways = ("", POLICY, f"checkpoints/latest/{POLICY}")
    return next((path / way for way in ways if (path / way / CONFIG).is_file()), path)


def keep_videos(directory: Path, step: int) -> None:
    """Keep the videos of the trials that were just played as those of a step, and remove what else was recorded."""
    for video in sorted((directory / NEW).glob("epoch0000-*")):
        kept = directory / f"step_{step:06d}"
        kept.mkdir(exist_ok=True)
        video.replace(kept / video.name.removeprefix("epoch0000-"))
    for rest in (directory / NEW).glob("*"):
        rest.unlink()


def in_words(found: Mapping[str, float]) -> str:
    """How trials went, as half a sentence."""
    count = f"{found['episodes']:.0f} episodes"
    if "success_once" in found:
        return f"{found['success_once']:.1%} of {count} solved, mean return {found['reward/mean']:.2f}"
    return f"mean return {found['reward/mean']:.2f} over {count}"
