"""RLPD with somebody who intervenes (HIL-SERL) beside RLPD without: environment steps until 90 % of trials are solved.

    python -m benchmarks.people_in_the_loop --seeds 0 1 2
    python -m benchmarks.people_in_the_loop cube --seeds 0 1 2

With the cube that must be seen in two trials in a row.

Both learn from the same demonstrations with the same settings, and are tried every so many steps by their likeliest
actions, on starts of their own. Somebody takes over after so many steps of an episode. Steps of both, the policy's and
the person's, count; those of trials do not. Both tasks reward nothing but success:

    toy     a point in two dimensions goes to a target within 12 steps
    cube    gym-hil's Franka arm picks up a cube, from its state: `pick_cube.py`, with the settings of `pick_cube.yaml`
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rlinf.actors.env import EnvActor
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor, Scripted
from rlinf.data.step import EmbodiedStep
from rlinf.envs.toy import expert
from rlinf.flows.evaluate import trials
from rlinf.flows.record import record
from rlinf.flows.sac import sac
from rlinf.runtime.system.system import ActorSystem

_ENOUGH = 0.9
"""Share of trials that are to be solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, and how it is learned."""

    simulator: str
    options: Mapping[str, Any]
    expert: str
    """Who demonstrates."""
    person: Any
    """Who intervenes: see `rlinf.envs.interventions`."""
    patience: int
    """Steps of the policy in each episode before that, unless the command says others."""
    episodes: int
    """Demonstrations, unless the command says others."""
    policy: Mapping[str, Any]
    learning: Mapping[str, Any]
    """Settings of `SacTrainer`."""
    horizon: int
    """Decisions between new weights."""
    every: int
    """Environment steps between trials, at least."""
    trials: int
    """Episodes of each trial, of which the first so many come first: if half of those fail, it is over."""
    first: int
    times: int
    """Trials in a row of which enough must be solved."""


def person(observation: Mapping[str, Tensor], steps: Tensor, *, patience: int) -> tuple[Tensor, Tensor]:
    """Stands in for a person on the toy: goes to the target where the point is not there after so many steps."""
    return expert(observation)[:, 0], steps >= patience


def toy() -> Task:
    """A point in two dimensions."""
    return Task(
        simulator="rlinf.envs.toy.Reach",
        options={"dims": 2, "sparse": True},
        expert="rlinf.envs.toy.expert",
        person=person,
        patience=4,
        episodes=2,
        policy={"state_size": 4, "action_size": 2, "hidden": [64, 64], "critics": 4, "layer_norm": True},
        learning={
            "batch": 64,
            "warmup": 48,
            "utd": 1.0,
            "subset": 2,
            "lr": 1e-3,
            "gamma": 0.9,
            "tau": 0.02,
            "alpha": 0.02,
        },
        horizon=96,  # eight episodes at least
        every=96,
        trials=64,
        first=64,
        times=1,
    )


def cube() -> Task:
    """gym-hil's cube."""
    about = yaml.safe_load(Path(__file__).with_name("pick_cube.yaml").read_text(encoding="utf-8"))
    return Task(
        simulator=about["env"]["simulator"],
        options=about["env"]["options"],
        expert="benchmarks.pick_cube.expert",
        person="benchmarks.pick_cube.person",
        patience=25,
        episodes=2,
        policy={"state_size": 16, "action_size": 4, **about["policy"]["settings"]},
        learning={**about["off_policy"], "lr": about["optimizer"]["lr"]},
        horizon=about["policy"]["horizon"],
        every=300,
        trials=20,
        first=5,
        times=2,
    )


TASKS = {"toy": toy, "cube": cube}


def changed(task: Task, settings: Sequence[str]) -> Task:
    """A task with other settings of the trainer, KEY=VALUE, or of the policy, policy.KEY=VALUE."""
    policy, learning = dict(task.policy), dict(task.learning)
    for key, _, value in (each.partition("=") for each in settings):
        part = policy if key.startswith("policy.") else learning
        part[key.removeprefix("policy.")] = yaml.safe_load(value)
    return replace(task, policy=policy, learning=learning)


async def learned(task: Task, seed: int, patience: int | None, demonstrations: Path, most: int) -> None:
    """A run until enough trials are solved, which says after each how many steps there were.

    Args:
        task: what is learned.
        seed: of everything.
        patience: steps after which somebody takes over; None: nobody does.
        demonstrations: directory that a part of every batch is drawn from.
        most: environment steps after which it is given up.
    """
    plain = {"simulator": task.simulator, "options": task.options}
    simulation: dict[str, Any] = dict(plain)
    if patience is not None:
        options = {**plain, "intervener": task.person, "arguments": {"patience": patience}}
        simulation = {"simulator": "rlinf.envs.interventions.Overridable", "options": options}
    policy = {"type": "soft", **task.policy, "seed": seed}
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", **simulation, workers=0, num_envs=1, seed=seed)
        acting = await system.spawn(PolicyActor, name="policy", policy=policy, keep_following=True)
        trainer = await system.spawn(
            SacTrainer, name="trainer", policy=policy, **task.learning, seed=seed, demonstrations=str(demonstrations)
        )
        tries = {"workers": 0, "num_envs": task.first, "auto_reset": False, "held_out": True}
        tried = await system.spawn(EnvActor, name="trials", **plain, **tries)
        steps, by_people, times, due, number = 0, 0.0, 0, task.every, 0
        while steps < most and times < task.times:
            metrics = await sac(EmbodiedStep(number, task.horizon, fresh=False), env, acting, trainer)
            number += 1
            steps += int(metrics["env_steps"])
            by_people += metrics["env_steps"] * metrics.get("interventions/share", 0.0)
            if steps >= due:
                due += task.every
                good, count = await tried_out(tried, acting, task)
                times = times + 1 if good >= _ENOUGH * count else 0
                who = "without" if patience is None else "with"
                told = f"{steps} steps, {good} of {count} solved, {by_people / steps:.0%} by the person"
                print(f"seed {seed}, {who} interventions: {told}, {time.process_time():.0f} s", flush=True)


async def tried_out(env: Any, policy: Any, task: Task) -> tuple[int, int]:
    """How many trials are solved, and of how many: of the first alone where it is less than a half."""
    for count in (task.first, task.trials):
        solved = sum(bool(episode.success_once) for episode in await trials(env, policy, count))
        if solved < count / 2:
            break
    return solved, count


async def demonstrated(task: Task, directory: Path, episodes: int) -> None:
    """Record the expert."""
    async with ActorSystem.local() as system:
        simulation = {"simulator": task.simulator, "options": task.options, "workers": 0, "auto_reset": False}
        env = await system.spawn(EnvActor, name="env", **simulation, num_envs=episodes, seed=1000)
        script = await system.spawn(Scripted, name="expert", function=task.expert)
        await record(env, script, directory, episodes)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=TASKS, default="toy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, help="demonstrations; default: 2")
    parser.add_argument("--patience", type=int, help="steps of the policy in each episode; default: 4, 25")
    parser.add_argument("--most", type=int, default=6000, help="environment steps of a run at most; default: 6000")
    parser.add_argument("--only", choices=("with", "without"), help="one of the two; default: both")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="as utd=2, or policy.gripper=true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = changed(TASKS[options.task](), options.set)
    patience = task.patience if options.patience is None else options.patience
    with tempfile.TemporaryDirectory() as directory:
        shown = Path(directory, "shown")
        asyncio.run(demonstrated(task, shown, options.episodes or task.episodes))
        for seed in options.seeds:
            for name, who in (("with", patience), ("without", None)):
                if options.only in (None, name):
                    asyncio.run(learned(task, seed, who, shown, options.most))


if __name__ == "__main__":
    main()
