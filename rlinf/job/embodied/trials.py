"""Trials of a policy without training, and what is told and kept of trials.

In: a configuration that names a policy. Out: the episodes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlinf.actors.embodied.policy_trainer import POLICY
from rlinf.algos.evaluation import wilson_interval
from rlinf.config.embodied import EmbodiedConfig
from rlinf.envs.episodes import Episode
from rlinf.flows.evaluation.trials import trials
from rlinf.job.embodied.roles import NEW, role_of, start_roles
from rlinf.job.embodied.suites import suites_of
from rlinf.job.roles.running import Roles
from rlinf.metrics.console.success import success_rows
from rlinf.models.policy.build import CONFIG
from rlinf.placement.seats import CONTROL, place
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectory_batch import by_task, summary

Tried = dict[str, tuple[Episode, ...]]
"""The episodes that were played, by suite; those in the environments of training are of the suite ""."""


async def try_policy(system: ActorSystem, config: EmbodiedConfig, videos: Path | None = None) -> Tried:
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
    return await try_suites(roles, config, videos, 0)


async def try_suites(roles: Roles, config: EmbodiedConfig, videos: Path | None, step: int) -> Tried:
    """Play the trials of all suites, one after the other.

    Args:
        roles: the policy, and the simulators of each suite.
        config: of the run.
        videos: directory for `trials.videos` of each suite; None records none.
        step: after which this is, for the names of videos.
    """
    wanted, found = config.trials, {}
    recorded = 0 if videos is None else wanted.videos
    for name, suite in suites_of(config).items():
        found[name] = await trials(
            roles[role_of(name)], roles["policy"], suite.episodes, greedy=wanted.greedy, videos=recorded
        )
    if videos is not None and recorded:
        await asyncio.to_thread(keep_videos, videos, step)
    return found


def measured(tried: Tried) -> dict[str, float]:
    """How trials went: `episodes`, means of return and length, and where the simulator says the share of success with
    the interval in which it lies (`success_once/low` and `/high`, 95 %); the same of each suite as `suites/NAME/…`, and
    of each task, where there are several, as `tasks/NAME/…`. Where training's environments are not tried, the first are
    of all suites together.

    Args:
        tried: at least one suite.
    """
    first = tried.get("", tuple(episode for episodes in tried.values() for episode in episodes))
    parts = {"": first, **{f"tasks/{task}/": part for task, part in by_task(tried.get("", ())).items()}}
    for name, episodes in tried.items():
        if name:
            parts[f"suites/{name}/"] = episodes
            parts |= {f"suites/{name}/tasks/{task}/": part for task, part in by_task(episodes).items()}
    found: dict[str, float] = {}
    for prefix, episodes in parts.items():
        told = summary(episodes)
        if "success_once" in told:
            solved = sum(bool(episode.success_once) for episode in episodes)
            told["success_once/low"], told["success_once/high"] = wilson_interval(solved, len(episodes))
        found |= {f"{prefix}{name.removeprefix('episodes/') if prefix else name}": told[name] for name in told}
    return found


def written(tried: Tried, **about: Any) -> str:
    """Trials as JSON: what they are of, a row per suite and task, and every episode.

    Args:
        tried: at least one suite.
        about: further entries at its beginning.
    """
    rows = [asdict(row) for row in success_rows(measured(tried))]
    episodes = [{"suite": name, **asdict(episode)} for name, episodes in tried.items() for episode in episodes]
    return json.dumps({**about, "rows": rows, "episodes": episodes}, indent=1) + "\n"


def saved_policy(path: Path) -> Path:
    """The directory of a saved policy that a path leads to: itself, that of a checkpoint, or of a run's newest one."""
    ways = ("", POLICY, f"checkpoints/latest/{POLICY}")
    return next((path / way for way in ways if (path / way / CONFIG).is_file()), path)


def acting(model: str | None, overrides: Sequence[str]) -> list[str]:
    """Overrides by which a configuration acts and learns nothing: no demonstrations need be there.

    The policy that a path leads to acts with the adapters of `policy.lora.path` where it is its authors'; one that
    was saved here has those that it learned with in its weights.

    Args:
        model: the path; None for what the configuration says.
        overrides: the user's, which go before as far as adapters are concerned.
    """
    overrides = [*overrides, "imitation.path=null", "imitation.mixture={}", "imitation.statistics=null"]
    if model is None:
        return overrides
    found = saved_policy(Path(model).expanduser())
    plain = ["policy.lora.path=null"] if (found / CONFIG).is_file() else []
    return [*plain, *overrides, f"policy.path={found}"]


def keep_videos(directory: Path, step: int) -> None:
    """Keep the videos of the trials that were just played as those of a step, by suite.

    Args:
        directory: of all videos of a run.
        step: after which they were played.
    """
    new = directory / NEW
    for video in sorted(path for path in new.rglob("*") if path.is_file()):
        kept = directory / f"step_{step:06d}" / video.parent.relative_to(new)
        kept.mkdir(parents=True, exist_ok=True)
        video.replace(kept / video.name.removeprefix("epoch0000-"))
    shutil.rmtree(new, ignore_errors=True)


def in_words(found: Mapping[str, float]) -> str:
    """How trials went, as half a sentence."""
    count = f"{found['episodes']:.0f} episodes"
    if "success_once" in found:
        low, high = found["success_once/low"], found["success_once/high"]
        share = f"{found['success_once']:.1%} ({low:.1%} to {high:.1%})"
        return f"{share} of {count} solved, mean return {found['reward/mean']:.2f}"
    return f"mean return {found['reward/mean']:.2f} over {count}"
