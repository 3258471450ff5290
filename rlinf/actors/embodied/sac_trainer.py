"""The trainer of off-policy learning, from a replay buffer: soft actor-critic, REDQ, RLPD, CrossQ, IQL.

Consumes trajectories as they come, produces metrics, versioned weights and checkpoints; unblocked by the flow's calls.
Every rank has all transitions, draws the same batches and computes on its share of each, so all take the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlinf.actors.base.base_trainer import at_least_one, settings_of
from rlinf.actors.embodied.remembering_trainer import RememberingTrainer
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.validation import one_of
from rlinf.data.demonstrations import read_demonstrations
from rlinf.data.rng import mix
from rlinf.models.policy.off_policy.soft import SoftPolicy
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.embodied.behavior_cloning import demonstrated_transitions
from rlinf.training.embodied.off_policy.iql_step import IqlLearner
from rlinf.training.embodied.off_policy.replay_buffer import ReplayBuffer, Rows
from rlinf.training.embodied.off_policy.sac_step import CrossQLearner, SacLearner
from rlinf.training.embodied.off_policy.transitions import transitions
from rlinf.training.embodied.trajectory import Trajectory
from rlinf.training.embodied.trajectory_batch import ages_of, summary, summary_by_task
from rlinf.weights.train_state import Restored, Source

LEARNERS: Mapping[str, Any] = {"sac": SacLearner, "crossq": CrossQLearner, "iql": IqlLearner}
"""Who takes the optimizer steps of each algorithm."""


class SacTrainer(RememberingTrainer):
    """Owns the weights of a policy, its critics, and a replay buffer."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        path: str | None = None,
        algorithm: str = "sac",
        seed: int = 0,
        batch: int = 256,
        capacity: int = 1_000_000,
        warmup: int = 1_000,
        utd: float = 1.0,
        actor_every: int = 1,
        n_step: int = 1,
        solved_only: bool = False,
        demonstrations: str | None = None,
        demo_share: float = 0.5,
        failed_demonstrations: bool = False,
        offline_updates: int = 1_000,
        **settings: Any,
    ) -> None:
        """Make the policy and its optimizer.

        Args:
            policy: its configuration, see `models.policy.build`; a `SoftPolicy`.
            path: directory of a saved one that is taken instead.
            algorithm: of `LEARNERS`.
            seed: of batches and of what is drawn in learning.
            batch: transitions per optimizer step, over all ranks.
            capacity: transitions in the replay buffer.
            warmup: transitions that are collected before the first step.
            utd: optimizer steps of the critics per transition that came after the warm-up.
            actor_every: steps of the critics for each of the actor.
            n_step: decisions that a transition spans.
            solved_only: remember only episodes that were solved, and that ended in the step in which they began.
            demonstrations: directory of demonstrations that a part of each batch is drawn from (RLPD); None for none.
            demo_share: that part, 0 to 1.
            failed_demonstrations: learn from those that did not solve their task, too.
            offline_updates: optimizer steps of each `study`.
            settings: of the algorithm's `Settings`.

        Raises:
            ValueError: a policy or settings that cannot be had, or two ranks on a host.
            FileNotFoundError: the directory holds no demonstrations.
        """
        one_of("trainer", "algorithm", algorithm, LEARNERS)
        learner = LEARNERS[algorithm]
        learning = settings_of(learner.Settings, settings)
        at_least_one("trainer", batch=batch, actor_every=actor_every, n_step=n_step, offline_updates=offline_updates)
        if not 0.0 <= demo_share <= 1.0 or utd <= 0.0 or warmup < 0:
            raise ValueError(
                f"trainer: demo_share={demo_share} must be from 0 to 1, {utd=} above 0, {warmup=} not below"
            )
        await self._open_mesh()
        self.policy = await self._made(policy, path)
        if not isinstance(self.policy, SoftPolicy):
            raise ValueError(
                f"trainer: a {type(self.policy).__name__} has no critics of actions; take policy.type="
                "rlinf.models.policy.off_policy.soft.SoftPolicy, or a class derived from it"
            )
        self._sac: Any = learner(self.policy, learning, self.mesh)
        self._own(self._sac.module, self._sac.optimizer)
        self._replay = ReplayBuffer(capacity)
        self._seed, self._batch, self._warmup, self._utd = seed, batch, warmup, utd
        self._actor_every, self._updates = actor_every, 0
        self._n_step, self._solved_only = n_step, solved_only
        self._demos: ReplayBuffer | None = None
        self._from_demos = 0
        self._per_study, self._studied = offline_updates, 0
        if demonstrations is not None:
            self._demos = await self.compute(self._read_demos, Path(demonstrations), not failed_demonstrations)
            self._from_demos = round(demo_share * batch)

    @endpoint(device=True, joint=True)
    async def study(self) -> dict[str, float]:
        """Learn from demonstrations alone: `offline_updates` optimizer steps.

        Returns:
            Metrics; the weights' version has gone up by one.

        Raises:
            ValueError: there are no demonstrations.
            FloatingPointError: a loss or its gradient is not finite; that step was not taken.
        """
        return await self.computed_jointly(self._study)

    def _study(self) -> dict[str, float]:
        if self._demos is None:
            raise ValueError("trainer: there are no demonstrations to learn from: set off_policy.demonstrations")
        parts: list[LossSum] = []
        for _ in range(self._per_study):
            seed = mix(self._seed, self._studied, 1)
            self._studied += 1
            drawn = self._demos.draw(self._batch, seed)
            parts.append(self._sac.learn(drawn, seed, actor=self._studied % self._actor_every == 0))
        return {**self._learned(parts), **self._sac.numbers()}

    def _remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        whole, rows = transitions(trajectories, n_step=self._n_step, solved_only=self._solved_only)
        if len(rows["steps"]):
            self._replay.add(rows)
        valid = whole.chunks.valid.bool()
        steps = float(valid.sum())
        earned = torch.where(valid, whole.chunks.rewards, 0.0).sum()
        return {
            "env_steps": steps,
            "decisions": float(valid.any(-1).sum()),
            "reward/step": float(earned) / max(steps, 1.0),
            "episodes/lost": float(whole.lost),
            **ages_of(trajectories, self.version),
            "replay/rows": float(len(self._replay)),
            **summary(whole.episodes),
            **summary_by_task(whole.episodes),
        }

    def _catch_up(self) -> dict[str, float]:
        due = int(self._utd * max(0, self._replay.added - self._warmup)) - self._updates
        parts: list[LossSum] = []
        for _ in range(max(0, due)):
            seed = mix(self._seed, self._updates)
            self._updates += 1
            parts.append(self._sac.learn(self._drawn(seed), seed, actor=self._updates % self._actor_every == 0))
        return {**self._learned(parts), **self._sac.numbers()}

    def _drawn(self, seed: int) -> Rows:
        """A batch, the demonstrations' part last."""
        own = self._batch - self._from_demos
        parts = [self._replay.draw(own, seed, 0)] if own else []
        if self._demos is not None and self._from_demos:
            parts.append(self._demos.draw(self._from_demos, seed, 1))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _read_demos(self, directory: Path, solved: bool) -> ReplayBuffer:
        found = read_demonstrations(directory.expanduser(), solved=solved)
        rows = demonstrated_transitions(self.policy, found, self.device, n_step=self._n_step)
        demos = ReplayBuffer(len(rows["steps"]))
        demos.add(rows)
        return demos

    def _extra(self) -> Mapping[str, Any]:
        return {**super()._extra(), "studied": self._studied}

    def _take(self, source: Path | Source) -> Restored:
        found = super()._take(source)
        self._studied = int(found.extra.get("studied", 0))  # checkpoints of earlier versions have none
        return found
