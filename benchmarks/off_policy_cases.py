"""Cases of `benchmarks.off_policy_learning`: shipped configurations, and what they learn from besides acting.

In: names of cases. Out: overrides of a configuration, and directories of demonstrations or policies that are made once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.rng import mix
from rlinf.envs.experts import mountain_car, pendulum, pull_cube, scripted
from rlinf.envs.toy import expert
from rlinf.flows.imitate import imitate
from rlinf.flows.record import record
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.system.system import ActorSystem

GYM = "rlinf.envs.gymnasium.Gymnasium"
TOY = "rlinf.envs.toy.Reach"
CAR: dict[str, Any] = {"simulator": GYM, "options": {"id": "MountainCarContinuous-v0"}}
PENDULUM: dict[str, Any] = {"simulator": GYM, "options": {"id": "Pendulum-v1"}}
PULL_CUBE: dict[str, Any] = {
    "simulator": "rlinf.envs.maniskill.ManiSkill", "options": {"id": "PullCube-v1", "control": "pd_ee_delta_pos"},
    "max_steps": 50, "ignore_terminations": True,
}  # fmt: skip
DRAWER: dict[str, Any] = {
    "simulator": "rlinf.envs.metaworld.MetaWorld", "options": {"tasks": ["drawer-open-v3"]},
    "max_steps": 100, "ignore_terminations": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One algorithm on one task."""

    task: str
    """For people."""
    panel: str
    """Title of the panel that it is drawn in."""
    label: str
    """Label of its curve."""
    config: str
    """A file of configs/embodied."""
    measure: str
    """Metric of trials: success_once or reward/mean."""
    every: int
    """Trials after so many steps."""
    overrides: tuple[str, ...] = ()
    """Changes to the configuration; {made} is the directory of what was prepared."""
    prepare: Callable[[Path, int], Awaitable[None]] | None = None
    """Makes that directory, for a seed."""


class Script(Actor):
    """Acts by a function, with noise, or the wrong way in some episodes."""

    async def setup(self, script: str, noise: float = 0.0, wrong: float = 0.0) -> None:  # type: ignore[override]
        """Take one of `SCRIPTS`; `noise` is a standard deviation, `wrong` a share of environments."""
        self._script, self._noise, self._wrong = SCRIPTS[script], noise, wrong
        self._generator = torch.Generator().manual_seed(0)

    @endpoint
    async def act(self, key: Any, output: Any, *, greedy: bool = False, keep: bool = True) -> torch.Tensor:
        """Chunks of one action, float32 [N, 1, A]."""
        found = self._script(output.observation, output.instructions)
        count = len(found)
        if self._wrong:
            found[: round(self._wrong * count)] *= -1.0
        return (found + self._noise * torch.randn(found.shape, generator=self._generator)).clamp(-1.0, 1.0)


SCRIPTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "mountain_car": mountain_car, "pendulum": pendulum, "expert": expert, "pull_cube": pull_cube,
    "metaworld": scripted,
}  # fmt: skip


async def _recorded(
    system: ActorSystem, directory: Path, simulator: dict[str, Any], episodes: int, seed: int, **script: Any
) -> None:
    name = f"{script['script']} {script.get('noise', 0.0)}"
    about = {"num_envs": min(episodes, 16), "workers": 0, "auto_reset": False, "seed": mix(seed, 7)}
    env = await system.spawn(EnvActor, name=f"env of {name}", **simulator, **about)
    expert = await system.spawn(Script, name=name, **script)
    await record(env, expert, directory, episodes, solved=False)


def shown(simulator: dict[str, Any], episodes: int, script: str) -> Callable[[Path, int], Awaitable[None]]:
    """Command that records so many episodes of a script, those that it does not solve too.

    Args:
        simulator: "simulator", its "options" and "max_steps", as `EnvActor` takes them.
        episodes: how many.
        script: of `SCRIPTS`.
    """

    async def make(directory: Path, seed: int) -> None:
        async with ActorSystem.local() as system:
            await _recorded(system, directory, simulator, episodes, seed, script=script)

    return make


async def two_minds(directory: Path, seed: int) -> None:
    """160 episodes of points, of which half go to the target and half away from it."""
    async with ActorSystem.local() as system:
        await _two_minds(system, directory, seed)


async def _two_minds(system: ActorSystem, directory: Path, seed: int) -> None:
    simulator = {"simulator": TOY, "options": {"dims": 2}, "max_steps": 6}
    await _recorded(system, directory, simulator, 160, seed, script="expert", noise=0.2, wrong=0.5)


async def two_minded_flow(directory: Path, seed: int) -> None:
    """A flow policy that imitates these."""
    async with ActorSystem.local() as system:
        shown = directory / "shown"
        await _two_minds(system, shown, seed)
        for episode in shown.glob("*.json"):  # half of them failed, on purpose
            episode.write_text(episode.read_text(encoding="utf-8").replace('"success": false', '"success": null'))
        policy = {"type": "flow", "state_size": 4, "action_size": 2, "hidden": [128, 128], "value_level": None}
        roles = {"policy": {**policy, "seed": seed}}
        actor = await system.spawn(PolicyActor, name="policy", **roles)
        trainer = await system.spawn(PolicyTrainer, name="trainer", **roles, algorithm="grpo", group_size=2)
        await imitate(actor, trainer, shown, steps=1500, batch=128, lr=1e-3)
        await trainer.save(str(directory / "saved"))


GIVEN = ("off_policy.demonstrations={made}",)
SWING = {"task": "Pendulum-v1, return", "measure": "reward/mean"}
CASES: Mapping[str, Case] = {
    "sac": Case(**SWING, panel="Pendulum: SAC and CrossQ", label="SAC", config="pendulum_sac", every=20,
                overrides=("steps=80",)),
    "crossq": Case(**SWING, panel="Pendulum: SAC and CrossQ", label="CrossQ", config="pendulum_crossq", every=20),
    "sac_pixels": Case("toy, 2D, pictures of 16 x 16, success", "Toy from pictures: SAC", "SAC, pixels",
                       "toy_pixels_sac", "success_once", 20, ("steps=100",)),
    "rlpd": Case("MountainCarContinuous-v0, return", "Mountain car, rewarded at the top", "RLPD, 5 episodes",
                 "mountaincar_rlpd", "reward/mean", 10, GIVEN, shown(CAR, 5, "mountain_car")),
    "rlpd_none": Case("MountainCarContinuous-v0, return", "Mountain car, rewarded at the top", "without them",
                      "mountaincar_rlpd", "reward/mean", 10),
    "iql": Case("toy, 2D, success", "Toy: 160 episodes, half of them away", "IQL, then acting", "toy_iql",
                "success_once", 2, (*GIVEN, "off_policy.offline_steps=8"), two_minds),
    "iql_bc": Case("toy, 2D, success", "Toy: 160 episodes, half of them away", "imitation", "toy_iql", "success_once",
                   2, (*GIVEN, "off_policy.offline_steps=8", "off_policy.beta=0", "steps=8"), two_minds),
    "dagger": Case(**SWING, panel="Pendulum: 400 answers", label="DAgger", config="pendulum_dagger", every=1,
                   overrides=("steps=4", "trials.episodes=20")),
    "dagger_bc": Case(**SWING, panel="Pendulum: 400 answers", label="2 episodes imitated", config="pendulum_dagger",
                      every=1, overrides=("steps=4", "trials.episodes=20", "off_policy.demonstrations={made}",
                                          "policy.horizon=1", "env.num_envs=1", "off_policy.capacity=400"),
                      prepare=shown(PENDULUM, 2, "pendulum")),
    "rlpd_pull": Case("PullCube-v1, state, success", "ManiSkill: a cube is pulled", "RLPD, 20 episodes",
                      "maniskill_pullcube_rlpd", "success_once", 50, GIVEN, shown(PULL_CUBE, 20, "pull_cube")),
    "rlpd_drawer": Case("Meta-World drawer-open, success", "Meta-World: a drawer is opened", "RLPD, 10 episodes",
                        "metaworld_drawer_rlpd", "success_once", 50, GIVEN, shown(DRAWER, 10, "metaworld")),
    "dagger_pull": Case("PullCube-v1, state, success", "ManiSkill: a cube is pulled", "DAgger",
                        "maniskill_pullcube_dagger", "success_once", 4),
    "dagger_metaworld": Case("Meta-World, three tasks, success", "Meta-World: three tasks, one policy", "DAgger",
                             "metaworld_dagger", "success_once", 4),
    "steered": Case("toy, 2D, success", "Toy: a flow of two minds, steered", "SAC over its noise", "toy_sac",
                    "success_once", 10, ("steps=80", "policy.type=steered", "policy.settings.base={made}/saved/policy"),
                    two_minded_flow),
}  # fmt: skip
"""Cases by name."""
