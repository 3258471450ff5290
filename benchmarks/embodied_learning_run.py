"""One run of `benchmarks.embodied_learning`: demonstrations, supervised learning, reinforcement learning, trials.

In: a case and a seed. Out: an `Outcome`. The roles and flows are those of a run by launch.py, all in this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.embodied_learning_cases import Case, Expert, parameters
from examples import tiny_checkpoints
from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.step import EmbodiedStep
from rlinf.flows.embodied import embodied
from rlinf.flows.evaluate import trials
from rlinf.flows.imitate import imitate
from rlinf.flows.record import record
from rlinf.models.policy.build import fitted, make_policy
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectories import summary

_SHOWN, _TRIED = 1 << 20, 1 << 21
"""First seeds of demonstrations and of trials, so that starts are others than those that are learned from."""
_WRITERS: Mapping[str, Any] = {
    "pi05": tiny_checkpoints.write_tiny_flow,
    "pi0_fast": tiny_checkpoints.write_tiny_fast,
    "openvla-oft": tiny_checkpoints.write_tiny_openvla,
}
"""Writers of checkpoints by type of the policy."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run."""

    case: str
    """Its name."""
    seed: int
    """Seed of weights, episodes and actions; trials have the same starts in all runs of a case."""
    parameters: int
    """Number of the policy's parameters."""
    before: float
    """Share of trials solved by the likeliest actions after imitation."""
    after: float
    """That share after reinforcement learning."""
    curve: tuple[float, ...]
    """Share of episodes solved with drawn actions, in every step."""
    env_steps: int
    """Environment steps of reinforcement learning."""
    minutes: float
    """From the first demonstration to the last trial."""
    processor_minutes: float
    """Processor time of its computing."""
    load: float
    """The machine's load average over the last five minutes."""


async def outcome(name: str, case: Case, seed: int, directory: Path, episodes: int) -> Outcome:
    """Learn, and see what was learned.

    Args:
        name, case: what to do.
        seed: of the run.
        directory: takes the demonstrations.
        episodes: trials before and after.
    """
    began, computed = time.monotonic(), time.process_time()
    async with ActorSystem.local() as system:
        env, config = await _environments(system, case, seed)
        path = None
        if case.checkpoint is not None:
            write_tiny = _WRITERS[config["type"]]
            path = str(write_tiny(directory / "checkpoint", config["type"], seed=seed, **case.checkpoint))
        learning = {"algorithm": case.algorithm, "group_size": case.group_size, "seed": seed, **case.learning}
        policy = await system.spawn(PolicyActor, name="policy", policy=config, path=path)
        trainer = await system.spawn(PolicyTrainer, name="trainer", policy=config, path=path, **learning)
        expert = await system.spawn(Expert, name="expert")
        shown = await _simulation(system, case, "demonstrations", num_envs=8, auto_reset=False, seed=_SHOWN + seed)
        await record(shown, expert, directory / "shown", case.demonstrations)
        tried = await _simulation(system, case, "trials", num_envs=episodes, auto_reset=False, seed=_TRIED)
        for _ in range(case.parts):
            await imitate(policy, trainer, directory / "shown", **case.imitation)
            before = await _solved(tried, policy, episodes)
            if before >= case.enough:
                break
        curve, env_steps = await _steps(case, env, policy, trainer)
        after = await _solved(tried, policy, episodes)
        size = parameters(make_policy(config, path, torch.device("cpu")))
    return Outcome(
        name,
        seed,
        size,
        before,
        after,
        tuple(curve),
        env_steps,
        (time.monotonic() - began) / 60,
        (time.process_time() - computed) / 60,
        os.getloadavg()[1],
    )


async def _environments(system: ActorSystem, case: Case, seed: int) -> tuple[ActorGroup, dict[str, Any]]:
    """Environments to learn in, and the configuration of a policy that fits them."""
    env = await _simulation(
        system, case, "env", num_envs=case.num_envs, slices=2, group_size=case.group_size, seed=seed
    )
    sizes = await env[0].shapes()
    config = {**case.policy, "seed": seed}
    return env, fitted(config, sizes["shapes"], sizes["action_size"], sizes["choices"], sizes["bounds"])


async def _simulation(system: ActorSystem, case: Case, name: str, **settings: Any) -> ActorGroup:
    about = {"simulator": case.simulator, "options": dict(case.options), "max_steps": case.max_steps, "workers": 0}
    return await system.spawn(EnvActor, name=name, **about, **settings)


async def _steps(case: Case, env: ActorGroup, policy: ActorGroup, trainer: ActorGroup) -> tuple[Sequence[float], int]:
    """Take the steps; what was solved in each, and how many steps environments did in all."""
    curve, env_steps = [], 0.0
    for index in range(case.steps):
        metrics = await embodied(EmbodiedStep(index, case.max_steps, 2), env, policy, trainer)
        curve.append(metrics["success_once"])
        env_steps += metrics["env_steps"]
    return curve, int(env_steps)


async def _solved(env: ActorGroup, policy: ActorGroup, episodes: int) -> float:
    return summary(await trials(env, policy, episodes))["success_once"]
