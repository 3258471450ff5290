"""RLPD with somebody who intervenes (HIL-SERL) beside RLPD without: environment steps until 90 % of trials are solved.

    python -m benchmarks.people_in_the_loop --seeds 3 --most 6000

On the toy in two dimensions, which rewards nothing but success: a point goes to a target within 12 steps. Both
learn from the same demonstrations with the same settings, and are tried after every 96 steps by their likeliest
actions, on 64 starts of their own. Somebody takes over after so many steps of an episode. Steps of both, the policy's
and the person's, count.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
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

TOY: Mapping[str, Any] = {
    "simulator": "rlinf.envs.toy.Reach",
    "options": {"dims": 2, "sparse": True},
    "workers": 0,
}
POLICY: Mapping[str, Any] = {
    "type": "soft",
    "state_size": 4,
    "action_size": 2,
    "hidden": [64, 64],
    "critics": 4,
    "layer_norm": True,
}
LEARNING: Mapping[str, Any] = {
    "batch": 64,
    "warmup": 48,
    "utd": 1.0,
    "subset": 2,
    "lr": 1e-3,
    "gamma": 0.9,
    "tau": 0.02,
    "alpha": 0.02,
}
_HORIZON = 96
"""Decisions between trials: eight episodes at least."""
_ENOUGH = 0.9
"""Share of trials that are to be solved."""


def person(observation: Mapping[str, Tensor], steps: Tensor, *, patience: int) -> tuple[Tensor, Tensor]:
    """Stands in for a person: goes to the target where the point is not there after so many steps."""
    return expert(observation)[:, 0], steps >= patience


async def learned(seed: int, patience: int | None, demonstrations: Path, most: int) -> tuple[int, float, float]:
    """A run until enough trials are solved: environment steps, the share of trials, the share of steps intervened.

    Args:
        seed: of everything.
        patience: steps after which somebody takes over; None: nobody does.
        demonstrations: directory that a part of every batch is drawn from.
        most: environment steps after which it is given up.
    """
    simulation = dict(TOY)
    if patience is not None:
        options = {**TOY, "intervener": person, "arguments": {"patience": patience}}
        del options["workers"]
        simulation = {"simulator": "rlinf.envs.interventions.Overridable", "options": options, "workers": 0}
    policy = {**POLICY, "seed": seed}
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", **simulation, num_envs=1, seed=seed)
        acting = await system.spawn(PolicyActor, name="policy", policy=policy, keep_following=True)
        trainer = await system.spawn(
            SacTrainer, name="trainer", policy=policy, **LEARNING, seed=seed, demonstrations=str(demonstrations)
        )
        tried = await system.spawn(EnvActor, name="trials", **TOY, num_envs=64, auto_reset=False, held_out=True)
        steps, by_people, solved = 0.0, 0.0, 0.0
        while steps < most and solved < _ENOUGH:
            metrics = await sac(EmbodiedStep(int(steps) // _HORIZON, _HORIZON, fresh=False), env, acting, trainer)
            steps += metrics["env_steps"]
            by_people += metrics["env_steps"] * metrics.get("interventions/share", 0.0)
            solved = sum(bool(episode.success_once) for episode in await trials(tried, acting, 64)) / 64
    return int(steps), solved, by_people / steps


async def demonstrated(directory: Path, episodes: int) -> None:
    """Record the expert."""
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", **TOY, num_envs=episodes, auto_reset=False, seed=1000)
        script = await system.spawn(Scripted, name="expert", function="rlinf.envs.toy.expert")
        await record(env, script, directory, episodes)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=2, help="demonstrations; default: 2")
    parser.add_argument("--patience", type=int, default=4, help="steps of the policy in each episode; default: 4")
    parser.add_argument("--most", type=int, default=6000, help="environment steps of a run at most; default: 6000")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        shown = Path(directory, "shown")
        asyncio.run(demonstrated(shown, options.episodes))
        for seed in range(options.seeds):
            for name, patience in (("with interventions", options.patience), ("without", None)):
                steps, solved, share = asyncio.run(learned(seed, patience, shown, options.most))
                print(f"seed {seed}, {name}: {steps} steps, {solved:.0%} solved, {share:.0%} by the person", flush=True)


if __name__ == "__main__":
    main()
