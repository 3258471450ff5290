"""Records demonstrations: a configuration's policy, or a script, acts in its environments, and whole episodes are kept.

In: an `EmbodiedConfig`, and who acts. Out: a data set in any format, complete as soon as it can be seen.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import Scripted
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import InputError, RunFailure
from rlinf.data.demonstrations.load import chosen_of, open_episodes, save_demonstrations
from rlinf.envs.base import CannotSimulate
from rlinf.envs.episodes import Decision
from rlinf.envs.workers import EnvironmentLost
from rlinf.flows.record import NothingToKeep, record
from rlinf.placement.seats import CONTROL, place
from rlinf.runs.embodied_roles import TRIALS, _cause, _simulation, _trials, learners_of
from rlinf.runs.roles import Role, Roles, spawn_roles
from rlinf.runs.rules import suites_of
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import counted
from rlinf.runtime.processes.supervisor import ChildDied
from rlinf.runtime.system.system import ActorSystem

_PATIENCE = 10
"""Rounds of episodes in a row of which none solves its task before recording gives up: a policy that solves one episode
in a hundred is recorded by 16 environments, and one that solves none costs minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Settings of a recording: episodes, who acts, and the format."""

    directory: Path
    """Where the data set goes; not there, or empty."""
    episodes: int
    """How many are kept."""
    form: str = "rlinf"
    """One of `save.WRITTEN`."""
    expert: str | None = None
    """Dotted path of a function that acts, see `Scripted`; None takes the configuration's policy."""
    solved: bool = True
    """Keep only episodes that solved their task."""
    greedy: bool = True
    """The policy takes its likeliest actions."""
    fps: float = 10.0
    """Rows per second, where the format says it."""
    videos: bool = True
    """Pictures become videos, where the format has them."""
    task: str = "unknown"
    """Name of the environment, where the format says it."""


async def record_episodes(
    system: ActorSystem, config: EmbodiedConfig, wanted: Recording, told: Callable[[int, int], None]
) -> int:
    """Record a data set, in episodes that neither training nor trials begin with.

    Args:
        system: where.
        config: the environments, and the policy by `policy.path`.
        wanted: what.
        told: called with how many episodes are kept, and how many were played.

    Returns:
        How many were played.

    Raises:
        InputError: something cannot be made, or the format cannot hold it.
        RunFailure: no episode solves its task, or simulators are lost all the time.
    """
    roles = await _started(system, config, wanted.expert, wanted.form)
    rounds = wanted.directory.absolute().with_name(f".{wanted.directory.absolute().name}.recording")
    await asyncio.to_thread(shutil.rmtree, rounds, ignore_errors=True)  # of a call that was killed
    try:
        played = await record(
            roles[TRIALS], roles["policy"], rounds, wanted.episodes, greedy=wanted.greedy, solved=wanted.solved,
            patience=_PATIENCE, told=told,
        )  # fmt: skip
        await asyncio.to_thread(_moved, rounds, wanted)
    except NothingToKeep as error:
        raise RunFailure(str(error)) from error
    except EnvironmentLost as error:
        raise RunFailure(f"record: {error}") from error
    except (ValueError, FileExistsError, ImportError) as error:
        raise InputError(f"record: {error}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, rounds, ignore_errors=True)
    return played


async def _started(system: ActorSystem, config: EmbodiedConfig, expert: str | None, form: str) -> Roles:
    """Simulators with other starts than those of training and of trials, and who acts in them."""
    trials = replace(config.trials, episodes=config.env.num_envs, videos=0, options={}, suites={}, seed=None)
    config = replace(config, seed=config.seed + (1 << 32), trials=trials)
    placed = place(replace(config.placement, mode=None, plan=None), CONTROL[:2], system.hosts)
    hosts = placed.seats["env"].hosts
    # what is learned from never begins as what is evaluated
    suite = suites_of(config)[""]
    simulation = {**_simulation(config, suite.options), **_trials(config, "", suite, None), "held_out": False}
    try:
        roles = await spawn_roles(system, placed, {TRIALS: Role(EnvActor, simulation, hosts=hosts)})
        acting = {"policy": Role(Scripted, {"function": expert}, hosts=hosts)}
        if expert is None:
            acting = await learners_of(config, None, roles)
        roles |= await spawn_roles(system, placed, acting)
        # one decision: what does not fit is told before anything is played
        decided = await roles["policy"][0].act((0, 0), await roles[TRIALS][0].reset(0, 0), keep=False)
        actions = decided.actions if isinstance(decided, Decision) else decided
        size = (await roles[TRIALS][0].shapes())["action_size"]
        if actions.shape[-1] != size:
            raise ValueError(f"actions have {actions.shape[-1]} numbers, and the environment takes {size}")
        if actions.shape[1] > 1 and form != "rlinf":
            raise ValueError(
                f"{form} keeps single actions, and {actions.shape[1]} are decided at a time, between which nothing is "
                "seen: record in rlinf's format, which keeps chunks"
            )
        return roles
    except (CannotSimulate, ChildDied, OSError, ImportError, TypeError, UserError, ValueError) as error:
        who = "env, policy" if expert is None else f"env, {expert}"
        raise InputError(f"{who}: {_cause(error)}") from error


def _moved(rounds: Path, wanted: Recording) -> None:
    """Save what was recorded, in its format and at its place."""
    found = open_episodes(rounds)
    save_demonstrations(
        wanted.directory,
        chosen_of(found, counted(range(len(found)), f"writing {wanted.directory}", unit="episodes")),
        wanted.form,
        fps=wanted.fps,
        videos=wanted.videos,
        task=wanted.task,
    )
