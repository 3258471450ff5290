"""What `benchmarks.off_policy_learning` runs: shipped configurations, and what they learn from besides acting.

In: names of cases. Out: overrides of a configuration, and directories of demonstrations or policies that are made once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlinf.actors.embodied.env import EnvActor
from rlinf.actors.embodied.policy import PolicyActor
from rlinf.actors.embodied.policy_trainer import PolicyTrainer
from rlinf.data.rng import mix
from rlinf.envs.gymnasium.experts import mountain_car, pendulum
from rlinf.envs.toy import straight
from rlinf.flows.imitate import imitate
from rlinf.flows.record import record
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.system.system import ActorSystem

GYM = "rlinf.envs.gymnasium.Gymnasium"
TOY = "rlinf.envs.toy.Reach"


@dataclass(frozen=True, slots=True)
class Case:
    """One algorithm on one task."""

    task: str
    """For people."""
    panel: str
    """Title of the panel that it is drawn in."""
    label: str
    """Of its curve."""
    config: str
    """A file of configs/embodied."""
    measure: str
    """What trials are measured by: success_once or reward/mean."""
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
        found = self._script(output.observation)
        count = len(found)
        if self._wrong:
            found[: round(self._wrong * count)] *= -1.0
        return (found + self._noise * torch.randn(found.shape, generator=self._generator)).clamp(-1.0, 1.0)


SCRIPTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "mountain_car": mountain_car, "pendulum": pendulum, "straight": straight,
}  # fmt: skip


async def _recorded(
    system: ActorSystem, directory: Path, simulator: dict[str, Any], episodes: int, seed: int, **script: Any
) -> None:
    name = f"{script['script']} {script.get('noise', 0.0)}"
    about = {"num_envs": min(episodes, 16), "workers": 0, "auto_reset": False, "seed": mix(seed, 7)}
    env = await system.spawn(EnvActor, name=f"env of {name}", **simulator, **about)
    expert = await system.spawn(Script, name=name, **script)
    await record(env, expert, directory, episodes, solved=False)


async def few_climbs(directory: Path, seed: int) -> None:
    """Five episodes in which the car gets up the mountain."""
    async with ActorSystem.local() as system:
        simulator = {"simulator": GYM, "options": {"id": "MountainCarContinuous-v0"}}
        await _recorded(system, directory, simulator, 5, seed, script="mountain_car")


async def mixed_swings(directory: Path, seed: int) -> None:
    """40 episodes of a pendulum: 16 by the expert with some noise, 24 by its opposite."""
    async with ActorSystem.local() as system:
        simulator = {"simulator": GYM, "options": {"id": "Pendulum-v1"}}
        await _recorded(system, directory, simulator, 16, seed, script="pendulum", noise=0.5)
        await _recorded(system, directory, simulator, 24, seed + 1, script="pendulum", noise=0.7, wrong=1.0)


def labelled_swings(episodes: int) -> Callable[[Path, int], Awaitable[None]]:
    """So many episodes of the expert, of 200 decisions each."""

    async def make(directory: Path, seed: int) -> None:
        async with ActorSystem.local() as system:
            simulator = {"simulator": GYM, "options": {"id": "Pendulum-v1"}}
            await _recorded(system, directory, simulator, episodes, seed, script="pendulum")

    return make


async def two_minded_flow(directory: Path, seed: int) -> None:
    """A flow policy that imitates points of which half go to the target and half away from it."""
    async with ActorSystem.local() as system:
        simulator = {"simulator": TOY, "options": {"dims": 2}, "max_steps": 6}
        shown = directory / "shown"
        await _recorded(system, shown, simulator, 160, seed, script="straight", noise=0.2, wrong=0.5)
        policy = {"type": "flow", "state_size": 4, "action_size": 2, "hidden": [128, 128], "value_level": None}
        actor = await system.spawn(PolicyActor, name="policy", policy={**policy, "seed": seed})
        trainer = await system.spawn(
            PolicyTrainer, name="trainer", policy={**policy, "seed": seed}, algorithm="grpo", group_size=2
        )
        for episode in shown.glob("*.json"):  # half of them failed, on purpose
            episode.write_text(episode.read_text(encoding="utf-8").replace('"success": false', '"success": null'))
        await imitate(actor, trainer, shown, steps=1500, batch=128, lr=1e-3)
        await trainer.save(str(directory / "saved"))


SWING = {"task": "Pendulum-v1, return", "measure": "reward/mean"}
CASES: Mapping[str, Case] = {
    "sac": Case(**SWING, panel="Pendulum: SAC and CrossQ", label="SAC", config="pendulum_sac", every=20,
                overrides=("steps=80",)),
    "crossq": Case(**SWING, panel="Pendulum: SAC and CrossQ", label="CrossQ", config="pendulum_crossq", every=20),
    "sac_pixels": Case("toy, 2D, pictures of 16 x 16, success", "Toy from pictures: SAC", "SAC, pixels",
                       "toy_pixels_sac", "success_once", 20),
    "rlpd": Case("MountainCarContinuous-v0, return", "Mountain car, rewarded at the top", "RLPD, 5 episodes",
                 "mountaincar_rlpd", "reward/mean", 10, ("off_policy.demonstrations={made}",), few_climbs),
    "rlpd_none": Case("MountainCarContinuous-v0, return", "Mountain car, rewarded at the top", "without them",
                      "mountaincar_rlpd", "reward/mean", 10),
    "iql": Case(**SWING, panel="Pendulum: 40 mixed episodes", label="IQL", config="pendulum_iql", every=5,
                overrides=("off_policy.demonstrations={made}", "off_policy.offline_steps=5"), prepare=mixed_swings),
    "iql_bc": Case(**SWING, panel="Pendulum: 40 mixed episodes", label="imitation", config="pendulum_iql", every=5,
                   overrides=("off_policy.demonstrations={made}", "off_policy.offline_steps=5", "off_policy.beta=0",
                              "steps=5"), prepare=mixed_swings),
    "dagger": Case(**SWING, panel="Pendulum: 400 answers", label="DAgger", config="pendulum_dagger", every=1,
                   overrides=("steps=4", "trials.episodes=20")),
    "dagger_bc": Case(**SWING, panel="Pendulum: 400 answers", label="2 episodes imitated", config="pendulum_dagger",
                      every=1, overrides=("steps=4", "trials.episodes=20", "off_policy.demonstrations={made}",
                                          "policy.horizon=1", "env.num_envs=1", "off_policy.capacity=400"),
                      prepare=labelled_swings(2)),
    "steered": Case("toy, 2D, success", "Toy: a flow of two minds, steered", "SAC over its noise", "toy_sac",
                    "success_once", 5, ("policy.type=steered", "policy.settings.base={made}/saved/policy"),
                    two_minded_flow),
}  # fmt: skip
"""What is run, by name."""
