"""The trainer of off-policy learning, from a replay buffer: soft actor-critic, REDQ, RLPD.

Consumes trajectories as they come, produces metrics, versioned weights and checkpoints; unblocked by the flow's calls.
Every rank has all transitions, draws the same batches and computes on its share of each, so all take the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlinf.actors.base.base_trainer import HostCopy, at_least_one, settings_of
from rlinf.actors.embodied.policy_trainer import PolicyTrainer
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.demonstrations import read_demonstrations
from rlinf.data.rng import mix
from rlinf.models.policy.build import make_policy
from rlinf.models.policy.sac import SoftPolicy
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.embodied.behavior_cloning import demonstrated_transitions
from rlinf.training.embodied.replay_buffer import ReplayBuffer, Rows
from rlinf.training.embodied.sac_step import SacLearner, SacSettings
from rlinf.training.embodied.trajectory import Trajectory, transitions
from rlinf.training.embodied.trajectory_batch import ages_of, summary
from rlinf.weights.parked_state import OpenState
from rlinf.weights.train_state import Restored, Source, StateCopy

REPLAY = "replay"
"""Directory of a checkpoint with the replay buffer."""


class SacTrainer(PolicyTrainer):
    """Owns the weights of a policy, its critics, and a replay buffer."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        path: str | None = None,
        seed: int = 0,
        batch: int = 256,
        capacity: int = 1_000_000,
        warmup: int = 1_000,
        utd: float = 1.0,
        actor_every: int = 1,
        demonstrations: str | None = None,
        demo_share: float = 0.5,
        **settings: Any,
    ) -> None:
        """Make the policy and its optimizer.

        Args:
            policy: its configuration, see `models.policy.build`; a `SoftPolicy`.
            path: directory of a saved one that is taken instead.
            seed: of batches and of what is drawn in learning.
            batch: transitions per optimizer step, over all ranks.
            capacity: transitions in the replay buffer.
            warmup: transitions that are collected before the first step.
            utd: optimizer steps of the critics per transition that came after the warm-up.
            actor_every: steps of the critics for each of the actor.
            demonstrations: directory of demonstrations that a part of each batch is drawn from (RLPD); None for none.
            demo_share: that part, 0 to 1.
            settings: of `SacSettings`.

        Raises:
            ValueError: a policy or settings that cannot be had, or two ranks on a host.
            FileNotFoundError: the directory holds no demonstrations.
        """
        soft = settings_of(SacSettings, settings)
        at_least_one("trainer", batch=batch, actor_every=actor_every)
        if not 0.0 <= demo_share <= 1.0 or utd <= 0.0 or warmup < 0:
            raise ValueError(
                f"trainer: demo_share={demo_share} must be from 0 to 1, {utd=} above 0, {warmup=} not below"
            )
        await self._open_mesh()
        self.policy = await self.compute(make_policy, policy, path, self.device)
        if not isinstance(self.policy, SoftPolicy):
            raise ValueError(
                f"trainer: a {type(self.policy).__name__} has no critics of actions; take policy.type="
                "rlinf.models.policy.sac.SoftPolicy, or a class derived from it"
            )
        self._sac = SacLearner(self.policy, soft, self.mesh)
        self._own(self._sac.module, self._sac.optimizer)
        self._replay = ReplayBuffer(capacity)
        self._seed, self._batch, self._warmup, self._utd = seed, batch, warmup, utd
        self._actor_every, self._updates = actor_every, 0
        self._demos: ReplayBuffer | None = None
        self._from_demos = 0
        if demonstrations is not None:
            self._demos = await self.compute(self._read_demos, Path(demonstrations))
            self._from_demos = round(demo_share * batch)

    @endpoint(device=True, joint=True)
    async def remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Put trajectories into the replay buffer, without learning from them yet.

        Args:
            trajectories: of all slices of all environments, in any order, with what followed each decision.

        Returns:
            Metrics of the trajectories.

        Raises:
            ValueError: there are none, or they do not fit those before.
        """
        return await self.computed_jointly(self._remember, list(trajectories))

    @endpoint(device=True, joint=True)
    async def learn(self) -> dict[str, float]:
        """Take the optimizer steps that are due for the transitions so far; none during the warm-up.

        Returns:
            Metrics; the weights' version has gone up by one.

        Raises:
            FloatingPointError: a loss or its gradient is not finite; that step was not taken.
        """
        return await self.computed_jointly(self._catch_up)

    def _learn(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """What `train` does: both."""
        return {**self._remember(trajectories), **self._catch_up()}

    def _remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        whole, rows = transitions(trajectories)
        self._replay.add(rows)
        steps = float(rows["steps"].sum())
        return {
            "env_steps": steps,
            "decisions": float(len(rows["steps"])),
            "reward/step": float(rows["rewards"].sum()) / max(steps, 1.0),
            "episodes/lost": float(whole.lost),
            **ages_of(trajectories, self.version),
            "replay/rows": float(len(self._replay)),
            **summary(whole.episodes),
        }

    def _catch_up(self) -> dict[str, float]:
        due = int(self._utd * max(0, self._replay.added - self._warmup)) - self._updates
        parts: list[LossSum] = []
        for _ in range(max(0, due)):
            seed = mix(self._seed, self._updates)
            self._updates += 1
            parts.append(self._sac.learn(self._drawn(seed), seed, actor=self._updates % self._actor_every == 0))
        self.version += 1
        found = sum(parts[1:], parts[0]).values() if parts else {}
        return {**found, "optimizer_steps": float(len(parts)), "alpha": float(self._sac.alpha)}

    def _drawn(self, seed: int) -> Rows:
        """A batch, the demonstrations' part last."""
        own = self._batch - self._from_demos
        parts = [self._replay.draw(own, seed, 0)] if own else []
        if self._demos is not None and self._from_demos:
            parts.append(self._demos.draw(self._from_demos, seed, 1))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _read_demos(self, directory: Path) -> ReplayBuffer:
        rows = demonstrated_transitions(self.policy, read_demonstrations(directory.expanduser()), self.device)
        demos = ReplayBuffer(len(rows["steps"]))
        demos.add(rows)
        return demos

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        if self.rank == 0:  # at once: a copy could take as much memory as the buffer itself
            self._replay.write(directory / REPLAY)
        return super()._copies(directory)

    def _extra(self) -> Mapping[str, Any]:
        return {"updates": self._updates}

    def _read(self, directory: Path) -> Restored:
        found = super()._read(directory)
        self._replay.read(directory / REPLAY)
        return found

    def _exported(self) -> StateCopy:
        state = super()._exported()
        if self.rank:  # all have the same
            return state
        # not copied: this actor ends before it could write to them again
        replay = {f"{REPLAY}.{name}": tensor for name, tensor in self._replay.tensors().items()}
        offsets = {key: (0,) * tensor.dim() for key, tensor in replay.items()}
        return dataclasses.replace(state, shards={**state.shards, **replay}, offsets={**state.offsets, **offsets})

    def _take_parked(self, source: OpenState) -> Restored:
        found = super()._take_parked(source)
        self._replay.take(source.whole(f"{REPLAY}."))
        return found

    def _take(self, source: Path | Source) -> Restored:
        found = super()._take(source)
        self._updates = int(found.extra["updates"])
        return found
