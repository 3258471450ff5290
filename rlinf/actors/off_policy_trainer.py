"""The trainers of off-policy learning, with a replay buffer beside the weights and in checkpoints.

`SacTrainer` learns by soft actor-critic, REDQ, RLPD, CrossQ or IQL; `DaggerTrainer` takes supervised steps on all that
an expert answered so far (DAgger, arXiv:1011.0686), which `DaggerPolicy` asks, or on all that somebody did who
intervened (HG-DAgger). What these did is also remembered by `SacTrainer`, beside demonstrations (HIL-SERL).

Consume trajectories as they come, produce metrics, versioned weights and checkpoints; unblocked by the flow's calls.
Every rank has all rows, samples the same batches and computes on its share of each, so all take the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.actors.base import Delta, HostCopy, at_least_one, settings_of
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.algos.loss_sum import LossSum, one_of
from rlinf.data.demonstrations import decisions, read_demonstrations
from rlinf.data.rng import mix
from rlinf.models.policy.base import Stored
from rlinf.models.policy.sac import SoftPolicy
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.checkpoint import OpenState, Restored, Source, StateCopy
from rlinf.training.embodied.cloning import demonstrated_transitions
from rlinf.training.embodied.replay import ReplayBuffer, Rows, transitions
from rlinf.training.embodied.sac import CrossQLearner, IqlLearner, SacLearner
from rlinf.training.embodied.trajectories import (
    Trajectory,
    ages_of,
    intervened_in,
    joined,
    summary,
    summary_by_task,
)
from rlinf.training.optimizer import adamw_of_parts, minimize, share_of

REPLAY, CORRECTIONS = "replay", "corrections"
"""Directories of a checkpoint with the replay buffer, and with what somebody did who intervened."""


class RememberingTrainer(PolicyTrainer):
    """Owns the weights of a policy, and a replay buffer."""

    _replay: ReplayBuffer
    _updates: int
    """Optimizer steps so far, from which follows what is drawn next."""

    @endpoint(device=True, joint=True)
    async def remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Put trajectories into the replay buffer, without learning from them yet.

        Args:
            trajectories: of all slices of all environments, in any order.

        Returns:
            Metrics of the trajectories.

        Raises:
            ValueError: there are none, or they do not fit those before.
        """
        return await self.compute_spmd(self._remember, list(trajectories))

    @endpoint(device=True, joint=True)
    async def learn(self) -> dict[str, float]:
        """Take the optimizer steps that are due for what is remembered; none during the warm-up.

        Returns:
            Metrics; the weights' version has gone up by one.

        Raises:
            FloatingPointError: a loss or its gradient is not finite; that step was not taken.
        """
        return await self.compute_spmd(self._catch_up)

    def _learn(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The work of `train`: remember the trajectories, then take the optimizer steps that are due."""
        return {**self._remember(trajectories), **self._catch_up()}

    def _remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        raise NotImplementedError

    def _catch_up(self) -> dict[str, float]:
        raise NotImplementedError

    def _learned(self, parts: Sequence[LossSum]) -> dict[str, float]:
        """Count the steps that were taken as one version."""
        self.version += 1
        metrics = sum(parts[1:], parts[0]).values() if parts else {}
        return {**metrics, "optimizer_steps": float(len(parts))}

    @property
    def _buffers(self) -> Mapping[str, ReplayBuffer]:
        """All that is remembered, by its directory of a checkpoint."""
        return {REPLAY: self._replay}

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        for name, buffer in self._buffers.items() if self.rank == 0 else ():
            buffer.write(directory / name)  # at once: a copy could take as much memory as the buffer itself
        return super()._copies(directory)

    def _extra(self) -> Mapping[str, Any]:
        return {"updates": self._updates}

    def _read(self, directory: Path) -> Restored:
        restored = super()._read(directory)
        for name, buffer in self._buffers.items():
            if name == REPLAY or (directory / name).is_dir():  # earlier versions have no others
                buffer.read(directory / name)
        return restored

    def _exported(self) -> StateCopy:
        state = super()._exported()
        if self.rank:  # all have the same
            return state
        # not copied: this actor ends before it could write to them again
        replay = {
            f"{directory}.{name}": tensor
            for directory, buffer in self._buffers.items()
            for name, tensor in buffer.tensors().items()
        }
        offsets = {key: (0,) * tensor.dim() for key, tensor in replay.items()}
        return replace(state, shards={**state.shards, **replay}, offsets={**state.offsets, **offsets})

    def _take_parked(self, source: OpenState) -> Restored:
        restored = super()._take_parked(source)
        for name, buffer in self._buffers.items():
            buffer.take(source.whole(f"{name}."))
        return restored

    def _take(self, source: Path | Source) -> Restored:
        restored = super()._take(source)
        self._updates = int(restored.extra["updates"])
        return restored


LEARNERS: Mapping[str, Any] = {"sac": SacLearner, "crossq": CrossQLearner, "iql": IqlLearner}
"""The class that takes the optimizer steps of each algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How transitions are remembered, and when they are learned from."""

    batch: int = 256
    """Transitions per optimizer step, over all ranks."""
    capacity: int = 1_000_000
    """Transitions in the replay buffer."""
    warmup: int = 1_000
    """Transitions that are collected before the first step."""
    utd: float = 1.0
    """Optimizer steps of the critics per transition that came after the warm-up."""
    actor_every: int = 1
    """Steps of the critics for each of the actor."""
    n_step: int = 1
    """Decisions that a transition spans."""
    solved_only: bool = False
    """Remember only episodes that were solved, and that ended in the step in which they began."""
    demonstrations: str | None = None
    """Directory of demonstrations that a part of each batch is drawn from (RLPD); None for none."""
    demo_share: float = 0.5
    """That part, 0 to 1; it is also drawn from what somebody did who intervened (HIL-SERL, arXiv:2410.21845)."""
    failed_demonstrations: bool = False
    """Learn from those that did not solve their task, too."""
    offline_updates: int = 1_000
    """Optimizer steps of each `study`."""

    def __post_init__(self) -> None:
        names = ("batch", "actor_every", "n_step", "offline_updates")
        at_least_one("trainer", **{name: getattr(self, name) for name in names})
        if not 0.0 <= self.demo_share <= 1.0 or self.utd <= 0.0 or self.warmup < 0:
            raise ValueError(
                f"trainer: demo_share={self.demo_share} must be from 0 to 1, utd={self.utd} above 0, "
                f"warmup={self.warmup} not below"
            )


class SacTrainer(RememberingTrainer):
    """Owns the weights of a policy, its critics, and a replay buffer."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        path: str | None = None,
        algorithm: str = "sac",
        seed: int = 0,
        delta: Delta = "auto",
        **settings: Any,
    ) -> None:
        """Make the policy and its optimizer.

        Args:
            policy: its configuration, see `models.policy.build`; a `SoftPolicy`.
            path: directory of a saved one that is taken instead.
            algorithm: of `LEARNERS`.
            seed: of batches and of what is drawn in learning.
            delta: what other machines get, see `weights.delta`.
            settings: of `ReplaySettings`, and of the algorithm's `Settings`.

        Raises:
            ValueError: a policy or settings that cannot be had, or two ranks on a host.
            FileNotFoundError: the directory holds no demonstrations.
        """
        one_of("trainer", "algorithm", algorithm, LEARNERS)
        learner, self._delta = LEARNERS[algorithm], delta
        self._replay_settings, learning = settings_of(settings, ReplaySettings, learner.Settings)
        await self._open_mesh()
        self.policy = await self._made(policy, path)
        if not isinstance(self.policy, SoftPolicy):
            raise ValueError(
                f"trainer: a {type(self.policy).__name__} has no critics of actions; take policy.type="
                "rlinf.models.policy.sac.SoftPolicy, or a class derived from it"
            )
        self._sac: Any = learner(self.policy, learning, self.mesh)
        self._own(self._sac.module, self._sac.optimizer)
        self._replay = ReplayBuffer(self._replay_settings.capacity)
        self._corrections = ReplayBuffer(self._replay_settings.capacity)
        self._seed, self._updates, self._studied = seed, 0, 0
        self._demos: ReplayBuffer | None = None
        if (demonstrations := self._replay_settings.demonstrations) is not None:
            self._demos = await self.compute(self._read_demos, Path(demonstrations))

    @property
    def _buffers(self) -> Mapping[str, ReplayBuffer]:
        return {**super()._buffers, CORRECTIONS: self._corrections}

    @endpoint(device=True, joint=True)
    async def study(self) -> dict[str, float]:
        """Learn from demonstrations alone: `offline_updates` optimizer steps.

        Returns:
            Metrics; the weights' version has gone up by one.

        Raises:
            ValueError: there are no demonstrations.
            FloatingPointError: a loss or its gradient is not finite; that step was not taken.
        """
        return await self.compute_spmd(self._study)

    def _study(self) -> dict[str, float]:
        if self._demos is None:
            raise ValueError("trainer: there are no demonstrations to learn from: set off_policy.demonstrations")
        parts: list[LossSum] = []
        for _ in range(self._replay_settings.offline_updates):
            seed = mix(self._seed, self._studied, 1)
            self._studied += 1
            demos = self._demos.draw(self._replay_settings.batch, seed)
            demos["others"] = torch.ones(len(demos["steps"]), dtype=torch.bool)
            parts.append(self._sac.learn(demos, seed, actor=self._studied % self._replay_settings.actor_every == 0))
        return {**self._learned(parts), **self._sac.numbers()}

    def _remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        settings = self._replay_settings
        whole, rows = transitions(trajectories, n_step=settings.n_step, solved_only=settings.solved_only)
        intervened = rows.pop("intervened", None)
        if len(rows["steps"]):
            self._replay.add(rows)
        if intervened is not None and bool(intervened.any()):
            self._corrections.add({name: row[intervened] for name, row in rows.items()})
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
            **({} if intervened is None else {"replay/corrections": float(len(self._corrections))}),
            **intervened_in(whole),
            **summary(whole.episodes),
            **summary_by_task(whole.episodes),
        }

    def _catch_up(self) -> dict[str, float]:
        due = int(self._replay_settings.utd * max(0, self._replay.added - self._replay_settings.warmup)) - self._updates
        parts: list[LossSum] = []
        for _ in range(max(0, due)):
            seed = mix(self._seed, self._updates)
            self._updates += 1
            parts.append(
                self._sac.learn(self._drawn(seed), seed, actor=self._updates % self._replay_settings.actor_every == 0)
            )
        return {**self._learned(parts), **self._sac.numbers()}

    def _drawn(self, seed: int) -> Rows:
        """A batch; the part that others did comes last, drawn evenly over demonstrations and corrections."""
        settings = self._replay_settings
        others = [each for each in (self._demos, self._corrections) if each is not None and len(each)]
        count = round(settings.demo_share * settings.batch) if others else 0
        counts = [count]
        if len(others) > 1:
            share = len(others[1]) / (len(others[0]) + len(others[1]))
            corrected = int(np.random.default_rng((seed, 2)).binomial(count, share))
            counts = [count - corrected, corrected]
        drawn = [(self._replay, settings.batch - count, 0), *zip(others, counts, (1, 3), strict=False)]
        parts = [buffer.draw(rows, seed, place) for buffer, rows, place in drawn if rows]
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {**rows, "others": torch.arange(settings.batch) >= settings.batch - count}

    def _read_demos(self, directory: Path) -> ReplayBuffer:
        demonstrations = read_demonstrations(
            directory.expanduser(), solved=not self._replay_settings.failed_demonstrations
        )
        rows = demonstrated_transitions(self.policy, demonstrations, self.device, n_step=self._replay_settings.n_step)
        demos = ReplayBuffer(len(rows["steps"]))
        demos.add(rows)
        return demos

    def _extra(self) -> Mapping[str, Any]:
        return {**super()._extra(), "studied": self._studied}

    def _take(self, source: Path | Source) -> Restored:
        restored = super()._take(source)
        self._studied = int(restored.extra.get("studied", 0))  # checkpoints of earlier versions have none
        return restored


@dataclass(frozen=True, slots=True, kw_only=True)
class DaggerSettings:
    """How labelled decisions are remembered and learned from."""

    batch: int = 256
    """Labelled decisions per optimizer step, over all ranks."""
    capacity: int = 1_000_000
    """Labelled decisions that are remembered."""
    updates: int = 200
    """Optimizer steps per step of the flow."""
    corrections: bool = False
    """Learn from the actions of somebody who intervened, and from nothing else (HG-DAgger, arXiv:1810.02890); otherwise
    from what the expert said everywhere."""
    demonstrations: str | None = None
    """Directory of demonstrations to begin with; None for none."""
    failed_demonstrations: bool = False
    """Begin with those that did not solve their task, too."""
    lr: float = 3e-4
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip: float = 0.5
    """A gradient with a larger global norm is scaled down to it."""

    def __post_init__(self) -> None:
        at_least_one("trainer", batch=self.batch, updates=self.updates)


class DaggerTrainer(RememberingTrainer):
    """Owns the weights of a policy, and all that the expert ever said."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        path: str | None = None,
        seed: int = 0,
        delta: Delta = "auto",
        **settings: Any,
    ) -> None:
        """Make the policy and its optimizer.

        Args:
            policy: its configuration, see `models.policy.build`.
            path: directory of a saved one that is taken instead.
            seed: of batches.
            delta: what other machines get, see `weights.delta`.
            settings: of `DaggerSettings`.

        Raises:
            ValueError: a policy or a setting that cannot be had, or two ranks on a host.
            FileNotFoundError: the directory holds no demonstrations.
        """
        (how,) = (self._dagger,) = settings_of(settings, DaggerSettings)
        self._delta = delta
        await self._open_mesh()
        self.policy = await self._made(policy, path)
        acting = {id(each) for each in self.policy.without_critic()}
        # A standard deviation that imitates an expert goes to 0, and leaves nothing to explore with afterwards.
        self._learning = [p for name, p in self.policy.named_parameters() if id(p) in acting and name != "log_std"]
        optimizer = adamw_of_parts([(self._learning, how.lr)], betas=how.betas, weight_decay=how.weight_decay)
        self._own(self.policy, optimizer)
        self._replay = ReplayBuffer(how.capacity)
        self._seed, self._updates = seed, 0
        if how.demonstrations is not None:
            await self.compute(self._begin_with, Path(how.demonstrations), not how.failed_demonstrations)

    def _begin_with(self, directory: Path, solved: bool) -> None:
        rows = decisions(read_demonstrations(directory.expanduser(), solved=solved), self.policy.config.chunk)
        observation = {name: each.to(self.device) for name, each in rows.observation.items()}
        stored = self.policy.demonstrated(observation, rows.actions.to(self.device), rows.instructions)
        self._keep(stored, rows.valid)

    def _keep(self, stored: Stored, valid: Tensor) -> None:
        """Take in labelled decisions; what is learned by other means than gradients is learned at once."""
        self.policy.adapt({name: rows.to(self.device) for name, rows in stored.items()})
        self._replay.add({**stored, "valid": valid})

    def _remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        whole = joined(trajectories)
        valid = whole.chunks.valid.bool()
        done = valid.any(-1)
        # the expert answered with whole chunks, however much of them was done
        taught = done[..., None].expand_as(valid)
        if self._dagger.corrections:
            taught = torch.zeros_like(valid) if whole.intervened is None else whole.intervened & valid
        if bool(taught.any()):
            rows = taught.any(-1)
            self._keep({name: stored[rows] for name, stored in whole.stored.items()}, taught[rows])
        return {
            "env_steps": float(valid.sum()),
            "decisions": float(done.sum()),
            "dagger/labels": float(self._replay.added),
            "episodes/lost": float(whole.lost),
            **ages_of(trajectories, self.version),
            **intervened_in(whole),
            **summary(whole.episodes),
        }

    def _catch_up(self) -> dict[str, float]:
        parts: list[LossSum] = []
        for _ in range(self._dagger.updates if len(self._replay) else 0):
            seed = mix(self._seed, self._updates)
            self._updates += 1
            parts.append(self._imitated(self._replay.draw(self._dagger.batch, seed), seed))
        metrics = self._learned(parts)
        return {**metrics, **({"dagger/loss": float(sum(parts[1:], parts[0]).mean())} if parts else {})}

    def _imitated(self, batch: Rows, seed: int) -> LossSum:
        share, counts = share_of(torch.arange(len(batch["valid"])), self.mesh)
        stored = {name: rows[share].to(self.device) for name, rows in batch.items()}
        seeds = torch.tensor([mix(seed, row) for row in share.tolist()], device=self.device)
        loss = self.policy.imitate(stored, stored.pop("valid") & counts, seeds)
        return minimize(loss, self._learning, self.optimizer, mesh=self.mesh, grad_clip=self._dagger.grad_clip)[0]
