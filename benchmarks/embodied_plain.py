"""The opponent of `benchmarks.embodied`: PPO in a plain loop, as ManiSkill's own baseline is built.

`python -m benchmarks.embodied_plain JOB --simulator ours|theirs`. One process collects the horizon from worker
processes over pipes, all environments at a time; then it computes advantages; then come the epochs; and again. Network,
sizes, seeds and noise are those of our flow, and the workers are as many with as many environments each. What differs
is who steps ManiSkill: `ours` has our adapter in the workers, `theirs` has ManiSkill's own environments in ManiSkill's
own wrapper. In: a job as JSON. Out: one JSON line, see `grpo_job`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.grpo_job import Result, Stopwatch
from rlinf.data.rng import mix, permutation
from rlinf.models.policy.base import Policy
from rlinf.models.policy.build import build_policy_model

CLIP, VALUE_COEF = 0.2, 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """One training run: that of a configuration, in numbers."""

    options: dict[str, Any]
    """Arguments of `rlinf.envs.maniskill.ManiSkill`."""
    policy: dict[str, Any]
    """For `models.policy.build`, complete."""
    seed: int
    """Seed of starts, noise and the order of minibatches."""
    steps: int
    """Times that the loop goes round."""
    num_envs: int
    """Environments in all."""
    workers: int
    """Processes that they are divided over."""
    horizon: int
    """Decisions of each environment per round; whole episodes."""
    epochs: int
    """Passes over each round's decisions."""
    minibatch: int
    """Decisions per optimizer step."""
    kl_stop: float | None
    """The round is over when the policy has moved so far, nats."""
    gamma: float
    """Discount."""
    lam: float
    """Lambda of GAE."""
    lr: float
    """Learning rate of AdamW."""
    grad_clip: float
    """Bound of the gradient's norm."""

    def write(self, path: Path) -> None:
        """Save it as JSON."""
        path.write_text(json.dumps(asdict(self)))


class Workers:
    """Processes with environments, asked all at once."""

    def __init__(self, job: Job, simulator: str) -> None:
        context = multiprocessing.get_context("spawn")
        share = job.num_envs // job.workers
        self._pipes: list[Connection] = []
        for number in range(job.workers):
            mine, theirs = context.Pipe()
            arguments = (theirs, simulator, job.options, share, job.horizon)
            context.Process(target=_serve, args=arguments, name=f"simulator.{number}", daemon=True).start()
            self._pipes.append(mine)

    def reset(self, seeds: np.ndarray) -> Tensor:
        """First states of new episodes."""
        return self._ask("reset", seeds)[0]

    def step(self, actions: np.ndarray) -> list[Tensor]:
        """States and rewards after an action each."""
        return self._ask("step", actions)

    def _ask(self, what: str, rows: np.ndarray) -> list[Tensor]:
        for pipe, part in zip(self._pipes, np.split(rows, len(self._pipes)), strict=True):
            pipe.send((what, part))
        answers = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return [torch.from_numpy(np.concatenate(parts)) for parts in answers]


def _serve(pipe: Connection, simulator: str, options: dict[str, Any], count: int, horizon: int) -> None:
    os.setsid()  # as our workers: a busy machine shares its time out by sessions, so both must have as many
    torch.set_num_threads(1)
    made = (_Ours if simulator == "ours" else _Theirs)(options, count, horizon)
    while True:
        what, rows = pipe.recv()
        pipe.send(getattr(made, what)(rows))


class _Ours:
    """Our adapter."""

    def __init__(self, options: dict[str, Any], count: int, horizon: int) -> None:
        from rlinf.envs.maniskill import ManiSkill

        self._simulator = ManiSkill(count, **options)
        self._all, self._active = torch.arange(count), torch.ones(count, dtype=torch.bool)

    def reset(self, seeds: np.ndarray) -> Sequence[np.ndarray]:
        return (self._simulator.reset(torch.from_numpy(seeds), self._all)["state"].numpy(),)

    def step(self, actions: np.ndarray) -> Sequence[np.ndarray]:
        scaled = self._simulator.action_spec.scaled(torch.from_numpy(actions))
        found = self._simulator.step(scaled, self._active)
        return found.observation["state"].numpy(), found.reward.numpy()


class _Theirs:
    """ManiSkill's environments and wrapper, as its baseline makes them for the CPU."""

    def __init__(self, options: dict[str, Any], count: int, horizon: int) -> None:
        import gymnasium
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

        from rlinf.envs import maniskill

        if not maniskill.can_draw():
            maniskill.stand_in()
        arguments = {
            "obs_mode": options["observe"],
            "control_mode": options["control"],
            "reward_mode": options["reward"],
            "sim_backend": "physx_cpu",
            "render_backend": "none",
            "max_episode_steps": horizon,
        }
        self._envs = [
            CPUGymWrapper(gymnasium.make(options["id"], **arguments), ignore_terminations=True, record_metrics=True)
            for _ in range(count)
        ]

    def reset(self, seeds: np.ndarray) -> Sequence[np.ndarray]:
        found = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds.tolist(), strict=True)]
        return (np.stack(found),)

    def step(self, actions: np.ndarray) -> Sequence[np.ndarray]:
        found = [env.step(action) for env, action in zip(self._envs, actions, strict=True)]
        return np.stack([each[0] for each in found]), np.array([each[1] for each in found], np.float32)


class Loop:
    """Collect, compare, learn."""

    def __init__(self, job: Job, simulator: str) -> None:
        self.job = job
        self.workers = Workers(job, simulator)
        self.policy: Policy = build_policy_model(job.policy)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=job.lr, weight_decay=0.0)

    def round(self, index: int) -> float:
        """One step of the loop; returns the mean return of its episodes."""
        stored, logprobs, values, rewards, following = self._collect(index)
        advantages, returns = self._gae(rewards, values, following)
        flat = {name: rows.flatten(0, 1) for name, rows in stored.items()}
        whitened = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        self._learn(index, flat, logprobs.reshape(-1), whitened.reshape(-1), returns.reshape(-1))
        self.policy.adapt(flat)
        return float(rewards.sum(0).mean())

    def _collect(self, index: int) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]:
        job, key = self.job, mix(self.job.seed, 0)
        envs = range(job.num_envs)
        state = self.workers.reset(np.array([mix(key >> 33, index, env, 0) >> 32 for env in envs]))
        acts, rewards = [], []
        for time in range(job.horizon):
            noise = torch.tensor([mix(key, index, env, time) for env in envs])
            acts.append(self.policy.act({"state": state}, generator=noise))
            state, reward = self.workers.step(acts[-1].actions[:, 0].numpy())
            rewards.append(reward)
        values = torch.stack([act.values for act in acts if act.values is not None])
        stored = {name: torch.stack([act.stored[name] for act in acts]) for name in acts[0].stored}
        logprobs = torch.stack([act.logprobs for act in acts])
        return stored, logprobs, values, torch.stack(rewards), self.policy.value({"state": state})

    def _gae(self, rewards: Tensor, values: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Episodes end with the horizon by their time limit: what follows is worth what the critic says."""
        found, after = torch.zeros_like(rewards), torch.zeros_like(following)
        for time in reversed(range(len(rewards))):
            after = rewards[time] + self.job.gamma * following - values[time] + self.job.gamma * self.job.lam * after
            found[time], following = after, values[time]
        return found, found + values

    def _learn(
        self, index: int, stored: dict[str, Tensor], logprobs: Tensor, advantages: Tensor, returns: Tensor
    ) -> None:
        for epoch in range(self.job.epochs):
            order = torch.from_numpy(permutation(len(logprobs), self.job.seed, index, epoch))
            for rows in order.split(self.job.minibatch):
                found = self.policy.evaluate({name: each[rows] for name, each in stored.items()})
                assert found.values is not None
                change = found.logprobs.reshape(-1) - logprobs[rows]
                ratio = change.exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.minimum(ratio * advantages[rows], clipped * advantages[rows]).mean()
                loss = loss + VALUE_COEF * (found.values - returns[rows]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.job.grad_clip)
                self.optimizer.step()
                moved = float((ratio.detach() - 1 - change.detach()).mean())
                if self.job.kl_stop is not None and moved > self.job.kl_stop:
                    return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--simulator", choices=("ours", "theirs"), required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = Job(**json.loads(options.job.read_text()))
    result = Result(version=f"torch {torch.__version__}")
    loop, watch = Loop(job, options.simulator), Stopwatch(result)
    loop.workers.reset(np.arange(job.num_envs))  # returns when all simulators are made
    for index in range(job.steps):
        watch.next_step()
        result.rewards.append(loop.round(index))
    result.tell()


if __name__ == "__main__":
    main()
