"""The runtime's cost per environment step: the embodied flow around a simulator and a policy that do nothing.

Everything between them is real: flow, promises, worker processes, chunks, trajectories, weights. In: how many
environments and slices. Out: seconds per environment step, wall and processor time of the process that runs the flow.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.data.step import EmbodiedStep
from rlinf.data.weights import Weights
from rlinf.envs.base import ActionSpec, ArraySpec, Observation, Simulator, State, Transition
from rlinf.flows.embodied import embodied
from rlinf.models.policy.base import Drawn, Evaluated, Policy, PolicyConfig, Stored
from rlinf.models.policy.build import build_policy_model
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectories import Trajectory

HORIZON = 50
STATE, ACTION = 35, 4
"""Numbers in an observation and in an action: PullCube's."""


class Still(Simulator):
    """Environments in which nothing moves."""

    def __init__(self, num_envs: int):
        self.num_envs, self.max_steps = num_envs, HORIZON
        self.observation_spec = {"state": ArraySpec((STATE,), torch.float32)}
        self.action_spec = ActionSpec(-torch.ones(ACTION), torch.ones(ACTION))
        self._state, self._never = torch.zeros(num_envs, STATE), torch.zeros(num_envs, dtype=torch.bool)
        self._reward = torch.zeros(num_envs)

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        return {"state": self._state[env_ids]}

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        return Transition({"state": self._state}, self._reward, self._never, self._never, self._never)

    def save(self) -> list[State]:
        return [None] * self.num_envs

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        """Nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleConfig(PolicyConfig):
    """Settings of `Idle`."""


class Idle(Policy):
    """Always decides the same, at no cost."""

    Config: ClassVar[type[PolicyConfig]] = IdleConfig

    def __init__(self, config: IdleConfig):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        return {"state": observation["state"]}

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        return actions

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        nothing = torch.zeros(len(inputs["state"]), self.config.chunk, self.config.action_size)
        return Drawn(nothing, nothing, nothing, nothing[:, 0, 0])

    def score(self, stored: Stored) -> Evaluated:
        raise NotImplementedError("nothing is learned here")

    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        return torch.zeros(len(observation["state"]))


class Publishing(Actor):
    """A trainer that learns nothing and publishes its weights."""

    async def setup(self, *, policy: Mapping[str, Any]) -> None:  # type: ignore[override]
        self._policy, self._version = build_policy_model(policy), 0

    @endpoint(joint=True)
    async def train(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        self._version += 1
        return {"env_steps": float(sum(int(each.chunks.valid.sum()) for each in trajectories))}

    @endpoint(joint=True)
    async def weights(self) -> Weights:
        return Weights.pack(self._policy.state_dict().items(), self._version)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds per environment step, the median over steps of the flow."""

    wall: float
    """Time by the clock."""
    cpu: float
    """Processor time of the process that runs the flow; of its workers nothing."""


def overhead(num_envs: int, slices: int, *, steps: int, workers: int = 2, horizon: int = HORIZON) -> Overhead:
    """Run some steps of the flow, after one to warm up.

    Args:
        num_envs: environments, N.
        slices: parts that are acted on independently.
        steps: of the flow that are measured.
        workers: processes.
        horizon: decisions of each environment per step of the flow.
    """
    return asyncio.run(_measured(num_envs, slices, steps, workers, horizon))


async def _measured(num_envs: int, slices: int, steps: int, workers: int, horizon: int) -> Overhead:
    policy = {"type": "benchmarks.embodied_overhead.Idle", "action_size": ACTION}
    async with ActorSystem.local() as system:
        roles: dict[str, Any] = {
            "env": await system.spawn(
                EnvActor, name="env", simulator="benchmarks.embodied_overhead.Still", num_envs=num_envs,
                workers=workers, slices=slices,
            ),
            "policy": await system.spawn(PolicyActor, name="policy", policy=policy),
            "trainer": await system.spawn(Publishing, name="trainer", policy=policy),
        }  # fmt: skip
        wall, cpu = [], []
        for index in range(steps + 1):
            began = time.perf_counter(), time.process_time()
            found = await embodied(EmbodiedStep(index, horizon, slices), **roles)
            if found["env_steps"] != num_envs * horizon:
                raise RuntimeError(f"{found['env_steps']:.0f} steps were done, not {num_envs} x {horizon}")
            wall.append((time.perf_counter() - began[0]) / found["env_steps"])
            cpu.append((time.process_time() - began[1]) / found["env_steps"])
    return Overhead(statistics.median(wall[1:]), statistics.median(cpu[1:]))
