"""A policy that acts, trained over all ranks of a job: what it learned is written for a test to look at.

Usage: control.py OUT [BEGUN], a file, and the directory of a run with another number of ranks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rlinf
from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.algos import recipes
from rlinf.envs.base import Transition
from rlinf.envs.toy import Reach
from rlinf.models.policy.actor_critic import MlpConfig, MlpPolicy
from rlinf.models.policy.build import build_policy_model
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.embodied.trajectories import Trajectory, TrajectoryBatch, batch_of, joined
from tests.actors.programs.spread import BLOCKS, spread_over
from tests.envs.scripted import Scripted

REACH = "rlinf.envs.toy.Reach"
MLP: dict[str, Any] = {"type": "mlp", "state_size": 2, "action_size": 1, "hidden": [8], "log_std": 0.0, "seed": 3}


class Played(Scripted):
    """Scripts by a name that workers can import."""

    def __init__(self, num_envs: int, *, scripts: Any, tells_success: bool = True):
        super().__init__(scripts[:num_envs], tells_success=tells_success)


class Broken(Reach):
    """Its third step earns what is no number, in one environment of them all."""

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        moved = super().step(actions, active)
        return replace(moved, reward=torch.where((self._step == 3).cumsum(0) == 1, torch.nan, moved.reward))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingConfig(MlpConfig):
    """Of `Counting`."""


class Counting(MlpPolicy):
    """Expects the number that comes last in the state: with `Played`, how many steps the episode has had."""

    Config = CountingConfig

    def __init__(self, config: CountingConfig):
        super().__init__(config)
        self.critic = nn.Linear(config.state_size, 1, bias=False)
        with torch.no_grad():
            self.critic.weight.copy_(torch.tensor([[0.0] * (config.state_size - 1) + [1.0]]))


COUNTING = {**MLP, "type": "tests.actors.programs.control.Counting", "normalise": False}


async def collected(
    system: rlinf.ActorSystem, policy: dict[str, Any], steps: int, *, name: str = "", **env: Any
) -> list[Trajectory]:
    """What a new policy does in new environments, slice by slice; they are called by `name`."""
    settings = {"simulator": REACH, "workers": 0, "num_envs": 8, "max_steps": 6, **env}
    simulation = (await system.spawn(EnvActor, hosts=[0], name=f"env{name}", **settings))[0]
    decider = (await system.spawn(PolicyActor, hosts=[0], name=f"policy{name}", policy=policy))[0]
    found = []
    for number in range(settings.get("slices", 1)):
        seen = await simulation.reset(number, 0)
        for _ in range(steps):
            seen = await simulation.step(number, await decider.act((0, number), seen))
        found.append(await decider.trajectory((0, number), seen))
    return found


class Watched(PolicyTrainer):
    """Keeps weights and gradients of every optimizer step, as the optimizer saw them, of minibatches that are divided
    over ranks, although half of one takes as long."""

    def _is_small(self) -> bool:
        return False

    async def setup(self, **settings: Any) -> None:  # type: ignore[override]
        await super().setup(**settings)
        self.steps: list[dict[str, dict[str, Tensor]]] = []

        def look(*_: Any) -> None:
            weights = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
            gradient = {name: each.grad.clone() for name, each in self.policy.named_parameters() if each.requires_grad}
            self.steps.append({"weights": weights, "gradient": gradient})

        self._learner.optimizer.register_step_pre_hook(look)

    @endpoint(joint=True)
    async def inspect(self) -> list[dict[str, dict[str, Tensor]]]:
        return self.steps


CASES: dict[str, dict[str, Any]] = {
    "ppo": {
        "policy": {**MLP, "chunk": 2},
        "algorithm": {
            "name": "ppo",
            "overrides": {"loss": {"dual_clip": 3.0}, "critic": {"clip": 0.2, "error": "huber"},
                          "advantage": {"gamma": 1.0, "lam": 1.0}},
        },
    },
    "ppo of numbers, plain": {
        "policy": {**MLP, "chunk": 2, "level": "token", "value_level": "action", "shared": True},
        "algorithm": {
            "name": "ppo",
            "overrides": {"loss": {"dual_clip": None}, "critic": {"clip": None, "error": "square"},
                          "advantage": {"gamma": 0.9, "lam": 0.9}, "entropy_bonus": 0.01},
        },
    },
    "grpo of episodes": {
        "policy": {**MLP, "chunk": 2, "value_level": None},
        "algorithm": {"name": "grpo", "overrides": {"aggregation": {"how": "seq-mean-token-mean"}}},
        "group_size": 4,
    },
    "gspo": {"policy": {**MLP, "value_level": None}, "algorithm": "gspo", "group_size": 2},
}  # fmt: skip
SEEDS = {"grpo of episodes": 6, "gspo": 7}
"""Of environments in which some groups have both good and bad episodes."""
LEARNING = {"lr": 0.03, "critic_lr": 0.05, "grad_clip": 1e9, "epochs": 2, "minibatch": 11, "seed": 4}


def as_dict(found: TrajectoryBatch) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


async def whole(system: rlinf.ActorSystem) -> dict[str, Tensor]:
    """What a policy has learned that is so small that every rank computes all of a minibatch."""
    trajectories = await collected(system, CASES["ppo"]["policy"], 5, name="whole")
    trainer = await system.spawn(PolicyTrainer, name="whole", **LEARNING, **CASES["ppo"])
    await trainer.train(trajectories)
    return dict((await trainer.weights()).named())


async def main(system: rlinf.ActorSystem) -> None:
    out = Path(sys.argv[1])
    results: dict[str, Any] = {"not divided": await whole(system)}
    for number, (name, case) in enumerate(CASES.items()):
        group_size = case.get("group_size", 1)
        played = {"name": str(number), "group_size": group_size, "slices": 2, "seed": SEEDS.get(name, 0)}
        trajectories = await collected(system, case["policy"], 5, **played)
        trainer = await system.spawn(Watched, name=f"trainer{number}", **LEARNING, **case)
        metrics = await trainer.train(trajectories[::-1])
        algorithm = case["algorithm"]
        given = (algorithm,) if isinstance(algorithm, str) else tuple(algorithm.values())
        recipe = recipes.get(*given, acting=True)
        found: dict[str, Any] = {
            "metrics": metrics,
            "lesson": as_dict(batch_of(joined(trajectories), recipe, group_size)),
            "steps": await trainer.inspect(),
        }
        await trainer.save(str(out.parent / str(number)))
        await trainer.train(trajectories)
        found["continued"] = dict((await trainer.weights()).named())
        again = await system.spawn(Watched, name=f"again{number}", **LEARNING, **case)
        found["version"] = await again.restore(str(out.parent / str(number)))
        await again.train(trajectories)
        found["resumed"] = dict((await again.weights()).named())
        results[name] = found
    trajectories = await collected(system, BLOCKS, 4, name="blocks")
    begun = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    results["spread"] = await spread_over(system, trajectories, out.parent, begun)
    torch.save(results, out)


def policy_of(name: str) -> Any:
    """The untrained policy of a case."""
    return build_policy_model(CASES[name]["policy"])


if __name__ == "__main__":
    rlinf.run(main, stall_after=60.0)
