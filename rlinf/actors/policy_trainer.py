"""The trainers of policies that act: from trajectories, or from demonstrations alone, on one rank or many.

Consume the trajectories of a step, or batches of decisions that follow from its number; produce metrics, versioned
weights and checkpoints; unblocked by the last trajectory, or by the disk. Every rank has the whole policy and all rows,
and computes on its share of each minibatch, or, where the policy is small, on all of it; all take the same optimizer
steps (`training/embodied/ppo.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from rlinf.actors.base import BaseTrainer, Delta, HostCopy, at_least_one, settings_of
from rlinf.algos.algorithms import Gae
from rlinf.algos.loss_sum import LossSum, Mean
from rlinf.data.demonstrations import DecisionStream, DemonstrationSet, Window, open_parts
from rlinf.data.rng import permutation
from rlinf.data.weights import Weights
from rlinf.envs.environment import NothingHappened
from rlinf.models.policy.base import Policy
from rlinf.models.policy.build import make_policy, save_policy
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.checkpoint import Restored, Source
from rlinf.training.embodied.cloning import get_used_to, imitate, imitating, loss_on, losses_of
from rlinf.training.embodied.ppo import PolicyLearner, PolicySettings, Preparation, cut, exported, origin_of, prepare
from rlinf.training.embodied.trajectories import (
    GroupFilter,
    RewardScale,
    Trajectory,
    TrajectoryBatch,
    ages_of,
    batch_of,
    check,
    joined,
    metrics_of,
)
from rlinf.training.optimizer import minimize
from rlinf.training.policy import Algorithm, algorithm_of
from rlinf.training.weight_sync import gathered, publish, reshard

POLICY = "policy"
"""Directory of a checkpoint with the policy for everybody else."""

SMALL = 1 << 23
"""Parameters x decisions of a minibatch up to which every rank computes it whole: half of it would take nearly as long,
since what costs is the number of operations, and ranks that share one exchange gradients and sums at every step."""
_PICKED_BYTES = 1 << 26
"""Bytes of a batch's rows that are picked at once for some of an epoch's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How trajectories of a step become optimizer steps."""

    epochs: int = 8
    """Passes over each step's decisions."""
    minibatch: int = 100
    """Decisions per optimizer step, over all ranks."""
    micro_batch: int | None = None
    """Decisions that a rank computes at once, which bounds its memory and changes nothing else; None for all that it
    has of a minibatch."""
    critic_warmup: int = 0
    """So many batches teach the critic alone; all else of the policy stays as it is."""
    kl_stop: float | None = None
    """Take no more steps on a batch once the estimated KL divergence from the policy that acted, nats per token, is
    larger; None never stops."""
    group_size: int = 1
    """Neighbouring environments that began their episodes alike."""
    filter_returns: tuple[float, float] | None = None
    """Bounds of a group's mean return, see `GroupFilter`."""
    filter_success: tuple[float, float] | None = None
    """Bounds of the share of its episodes that solved the task."""
    reward_scaling: bool = False
    """Divide rewards by the running standard deviation of discounted returns, see `RewardScale`."""
    fresh: bool = True
    """Every step begins new episodes."""

    def __post_init__(self) -> None:
        micro_batch = 1 if self.micro_batch is None else self.micro_batch
        at_least_one("trainer", epochs=self.epochs, minibatch=self.minibatch, micro_batch=micro_batch)


class PolicyTrainer(BaseTrainer):
    """Owns the weights of a policy that learns by acting."""

    policy: Policy
    _origin: str
    """`Weights.origin` of what is published."""
    _settings = UpdateSettings()
    _how = Preparation()
    _handed_out = False
    """True once those who act have weights of all parameters."""
    _sharing = (0, 1)
    """Which this rank is among so many that divide a minibatch."""
    _batches = 0
    """Batches that were learned from."""
    _scale: RewardScale | None = None

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        path: str | None = None,
        algorithm: Algorithm = "ppo",
        seed: int = 0,
        delta: Delta = "auto",
        **settings: Any,
    ) -> None:
        """Make the policy and its optimizer.

        Args:
            policy: its configuration, see `models.policy.build`.
            path: directory of a saved one that is taken instead.
            algorithm: a recipe's name, `{"name": "ppo", "overrides": {...}}`, or a spec: ppo and its like with a
                critic, grpo and its like without.
            seed: of the order of decisions.
            delta: what other machines get, see `weights.delta`.
            settings: of `UpdateSettings`, `Preparation` and `PolicySettings`.

        Raises:
            ValueError: a policy, a setting or an algorithm that cannot be had, or two ranks on a host.
        """
        self._spec, self._seed, self._batches, self._scale = algorithm_of(algorithm, acting=True), seed, 0, None
        self._delta = delta
        kinds = (UpdateSettings, Preparation, PolicySettings)
        self._settings, self._how, optimizer = settings_of({**settings, "seed": seed}, *kinds)
        await self._open_mesh()
        self.policy = await self._made(policy, path, self._how.kept_in)
        self._check_critic(self.policy.config.value_level is not None, self._settings.group_size)
        if self._settings.critic_warmup and not self.policy.of_critic():
            raise ValueError(
                f"trainer: critic_warmup={self._settings.critic_warmup}, and the policy has no critic of its own"
            )
        spread = self._how.slices(self.policy, self.world_size)
        slices = (self.mesh or await self.mesh_of([0], "slices")) if spread else None
        await self.compute(prepare, self.policy, self._how, slices)
        alone = not spread and self._is_small()
        self._sharing = (0, 1) if alone else (self.rank, self.world_size)
        self._learner = PolicyLearner(self.policy, optimizer, None if alone else self.mesh)
        if self._settings.reward_scaling and isinstance(self._spec.advantage, Gae):
            self._scale = RewardScale(self._spec.advantage.gamma, goes_on=not self._settings.fresh)
        self._own(self.policy, self._learner.optimizer)

    def _is_small(self) -> bool:
        """True if no rank would be done with its share of a minibatch much sooner than with all of it."""
        return self._settings.minibatch * sum(each.numel() for each in self.policy.parameters()) <= SMALL

    async def _made(self, policy: Mapping[str, Any], path: str | None, dtype: Any = torch.float32) -> Policy:
        """The policy, as those who act make it by the same settings; `dtype` is as for `make_policy`."""
        self._origin = origin_of(policy, path)
        return await self.compute(make_policy, policy, path, self.device, dtype)

    @endpoint(device=True, joint=True)
    async def train(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Learn from the trajectories of one step: `epochs` x minibatches optimizer steps.

        Args:
            trajectories: of all slices of all environments, in any order.

        Returns:
            Metrics; the weights' version has gone up by one. No optimizer step was taken if no group of episodes had
            both good and bad ones.

        Raises:
            NothingHappened: no action was done in an episode that was kept.
            ValueError: the trajectories do not fit together.
            FloatingPointError: a reward, the loss or its gradient is not finite; that step was not taken.
        """
        return await self.compute_spmd(self._learn, list(trajectories))

    def _learn(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        whole = joined(trajectories)
        rewards = whole.chunks.rewards[whole.chunks.valid.bool()]
        if not len(rewards):
            raise NothingHappened("there is nothing to learn from: no action was done in an episode that was kept")
        learned = whole
        if self._scale is not None and bool(rewards.isfinite().all()):
            learned = replace(whole, chunks=self._scale.scaled(whole.chunks))
        groups = GroupFilter(self._settings.filter_returns, self._settings.filter_success)
        batch = batch_of(learned, self._spec, self._settings.group_size, self.policy.sequence, groups)
        if not bool(batch.advantages.isfinite().all()):  # before any step: a later minibatch would have it too late
            raise FloatingPointError("a reward or a value is not finite, so nothing was learned from this step")
        if batch.returns is not None and batch.value_mask is not None:
            self.policy.adapt_values(batch.returns[batch.value_mask].to(self.device))
        gathered, steps, stopped = self._update(batch)
        length = self.policy.sequence
        observed = {name: rows if length == 1 else rows.flatten(0, 1) for name, rows in batch.stored.items()}
        counted = batch.mask.reshape(len(batch) * length, -1).any(1)
        self.policy.adapt({name: rows.to(self.device) for name, rows in observed.items()}, counted)
        self.version += 1
        self._batches += 1
        return {
            **metrics_of(trajectories, whole, batch),
            **gathered,
            "optimizer_steps": float(steps),
            "stopped_early": float(stopped),
            **ages_of(trajectories, self.version - 1),
            **({} if self._scale is None else {"reward/scale": self._scale.deviation}),
        }

    def _update(self, batch: TrajectoryBatch) -> tuple[dict[str, float], int, bool]:
        """All steps on a batch: what gathered and the last one's numbers, how many, whether `kl_stop` ended them."""
        parts: list[LossSum] = []
        last: dict[str, float] = {}
        stopped = False
        spec = self._learner.begin(self._batches, self._spec)
        warming_up = self._batches < self._settings.critic_warmup
        for minibatch in self._minibatches(batch):
            mine = self._mine(minibatch)
            gathered, numbers = self._learner.learn(mine, spec, whole=minibatch, critic_only=warming_up)
            if not numbers:  # a minibatch of decisions that count for nothing
                continue
            parts.append(gathered)
            last = numbers
            moved = gathered.metrics.get("approx_kl")
            if self._settings.kl_stop is not None and isinstance(moved, Mean) and moved.value > self._settings.kl_stop:
                stopped = True
                break
        whole = sum(parts[1:], parts[0]).values() if parts else {}
        return {**whole, **last}, len(parts), stopped

    def _minibatches(self, batch: TrajectoryBatch) -> Iterator[TrajectoryBatch]:
        """Yield the rows that each optimizer step learns from, on all ranks; rows are picked for as many steps at once
        as memory allows, since each pick costs as much as a small layer."""
        size = max(1, self._settings.minibatch // self.policy.sequence)
        at_once = size * max(1, _PICKED_BYTES * len(batch) // (size * batch.nbytes))
        for epoch in range(self._settings.epochs):
            order = torch.from_numpy(permutation(len(batch), self._seed, self.version, epoch))
            for part in order.split(at_once):
                picked = batch.rows(part)
                for first in range(0, len(part), size):
                    yield picked.rows(slice(first, first + size))

    def _mine(self, minibatch: TrajectoryBatch) -> list[TrajectoryBatch]:
        """This rank's micro-batches of a minibatch: as many as every rank has, of which the last may be silent. An
        episode that is averaged over stays on one of them."""
        rank, ranks = self._sharing
        if ranks == 1 and self._settings.micro_batch is None:
            return [minibatch]
        rows_of_ranks = (
            torch.arange(len(minibatch)) if minibatch.sequences is None else minibatch.sequences[:, 0]
        ) % ranks
        shares = [(rows_of_ranks == each).nonzero()[:, 0] for each in range(ranks)]
        ids, length = minibatch.sequences, self.policy.sequence
        most = None if self._settings.micro_batch is None else max(1, self._settings.micro_batch // length)
        cuts = [cut(share, most, None if ids is None else ids[share, 0]) for share in shares]
        idle = max(map(len, cuts)) - len(cuts[rank])
        return [*map(minibatch.rows, cuts[rank]), *[minibatch.rows(slice(1)).silent()] * idle]

    def _check_critic(self, has_critic: bool, group_size: int) -> None:
        """Check that the algorithm can do with the policy and the environments; raises ValueError if not."""
        check(self._spec, has_critic=has_critic, group_size=group_size, sequence=self.policy.sequence)

    @endpoint(device=True, joint=True)
    async def imitate(
        self,
        path: str | Path | DemonstrationSet,
        *,
        steps: int,
        batch: int = 64,
        lr: float = 1e-3,
        fixed: Sequence[str] = ("log_std",),
    ) -> dict[str, float]:
        """Learn to act as in demonstrations, with an optimizer of its own.

        Args:
            path: demonstrations, where every rank can read them: a directory in any format, or several data sets.
            steps: optimizer steps.
            batch: decisions in each, over all ranks.
            lr: learning rate of AdamW.
            fixed: parameters that stay as they are. A standard deviation that imitates an expert goes to 0, and leaves
                nothing to explore with.

        Returns:
            Metrics: `imitation/loss`, the mean over all steps, nats per number; `imitation/last`, over the last epoch's
            worth of them. The weights' version has gone up by one.

        Raises:
            FileNotFoundError: the directory holds no demonstrations.
            ValueError: they do not fit the policy.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        demonstrations = path if isinstance(path, DemonstrationSet) else DemonstrationSet.at(path)
        return await self.compute_spmd(self._imitate, demonstrations, steps, batch, lr, tuple(fixed))

    def _imitate(
        self, demonstrations: DemonstrationSet, steps: int, batch: int, lr: float, fixed: tuple[str, ...]
    ) -> dict[str, float]:
        at_least_one("imitate", batch=batch)
        learned, _ = open_parts(demonstrations, self._seed)
        stream = self._stream_of(learned, demonstrations, batch)
        how: dict[str, Any] = {"mesh": self.mesh, "micro_batch": self._settings.micro_batch}
        losses = imitate(self.policy, stream, self.device, steps=steps, lr=lr, fixed=fixed, **how)
        self.version += 1
        return losses

    def _stream_of(self, learned: Sequence[Any], demonstrations: DemonstrationSet, batch: int) -> DecisionStream:
        before, length = self.policy.lesson
        how = {"before": before, "seed": self._seed, "memory": demonstrations.memory}
        return DecisionStream(learned, length, batch=batch, **how)

    def _extra(self) -> Mapping[str, Any]:
        scale = {} if self._scale is None else {"reward_scale": self._scale.state()}
        return {"batches": self._batches, **scale}

    def _take(self, source: Path | Source) -> Restored:
        restored = super()._take(source)
        # a policy that was made by the same settings need not have what a checkpoint has
        self._handed_out, self._origin = False, f"{self._origin}, restored {uuid4().hex}"
        self._batches = int(restored.extra.get("batches", restored.version))
        if self._scale is not None and "reward_scale" in restored.extra:
            self._scale.restore(restored.extra["reward_scale"])
        return restored

    def _held(self) -> Iterable[Tensor]:
        reshard(self.policy)  # a forward that failed leaves whole weights behind
        return super()._held()

    async def _published(self, exact: bool, whole: bool) -> Weights | None:
        """With running statistics; after the first time without what does not change here, unless it is asked for."""
        dtype = None if exact else self._how.computes_in
        changing = self._handed_out and not (exact or whole)
        export = partial(exported, self.policy, changing=changing)
        size = sum(parameter.numel() for parameter in self.policy.parameters())
        weights = await publish(self, export, self.version, **self._published_how(size, dtype, exact=exact))
        self._handed_out |= not exact
        if weights is None:
            return None
        there = weights.shapes
        names = (name for name, _ in exported(self.policy, dtype)) if changing else ()
        return replace(weights, left_out=tuple(name for name in names if name not in there), origin=self._origin)

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        named: dict[str, Tensor] = {}
        for name, tensor in gathered(exported(self.policy, self._how.computes_in)):
            if self.rank == 0:
                named[name] = tensor.to("cpu", copy=True)
        parts = super()._copies(directory)
        return {**parts, POLICY: PolicyCopy(self.policy, named)} if self.rank == 0 else parts


@dataclass(frozen=True, slots=True, eq=False)
class PolicyCopy:
    """A policy in host memory, ready to be written for everybody else; a `HostCopy`."""

    policy: Policy
    """Whose form it is written in; of its tensors none is read."""
    state: Mapping[str, Tensor]
    """The tensors, whole, under the names of the policy's state."""

    def write(self, directory: Path, stop: threading.Event | None = None) -> None:
        """Write everything and wait until the disk has it.

        Raises:
            OSError: it cannot be written; the text says what is missing.
        """
        save_policy(self.policy, directory, self.state)


_ROWS = 256  # decisions on the device at a time where no micro-batch is set


class ImitationTrainer(PolicyTrainer):
    """Owns the weights of a policy that learns from demonstrations."""

    async def setup(  # type: ignore[override]
        self,
        *,
        demonstrations: DemonstrationSet,
        batch: int = 64,
        fixed: Sequence[str] = ("log_std",),
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Make the policy and its optimizer, and open the demonstrations.

        Args:
            demonstrations: what is learned from, where every rank can read it.
            batch: decisions per optimizer step, over all ranks.
            fixed: parameters that stay as they are, see `PolicyTrainer.imitate`.
            seed: of what is drawn, and of which episodes are held out.
            settings: of `PolicyTrainer`, as far as they are about the policy and its optimizer.

        Raises:
            FileNotFoundError: demonstrations are not there.
            ValueError: they are broken; or a policy or a setting that cannot be had.
        """
        at_least_one("trainer", batch=batch)
        await super().setup(seed=seed, **settings)
        self._imitating = imitating(self.policy, fixed)
        self._stream, self._watched = await self.compute(self._opened, demonstrations, batch)

    def _check_critic(self, has_critic: bool, group_size: int) -> None:
        """A critic is neither needed nor in the way."""

    def _opened(self, demonstrations: DemonstrationSet, batch: int) -> tuple[DecisionStream, list[Any]]:
        learned, watched = open_parts(demonstrations, self._seed)
        return self._stream_of(learned, demonstrations, batch), watched

    @endpoint(device=True, joint=True)
    async def imitate_steps(self, first: int, count: int) -> dict[str, float]:
        """Take optimizer steps.

        Args:
            first: number of the first one in the run, from which follows what is learned; before step 0 the policy
                learns the scale of what it looks at.
            count: how many.

        Returns:
            Metrics: `loss`, the mean over these steps, nats per number; the weights' version has gone up by one.

        Raises:
            ValueError: the demonstrations do not fit the policy, or are broken.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        return await self.compute_spmd(self._imitate_steps, first, count)

    def _imitate_steps(self, first: int, count: int) -> dict[str, float]:
        if first == 0:
            get_used_to(self.policy, self._stream, self.device)
        learner = self._learner
        learner.begin(first // count, self._spec)
        parts, norms = [], []
        for step in range(first, first + count):
            losses = losses_of(self.policy, self._stream, step, self.device, self.mesh, self._settings.micro_batch)
            loss, norm = minimize(
                losses, self._imitating, learner.optimizer, mesh=self.mesh, grad_clip=learner.settings.grad_clip
            )
            parts.append(loss)
            norms.append(norm)
        self.version += 1
        return {
            "loss": float(sum(parts[1:], parts[0]).mean()),
            "grad_norm": sum(norms) / count,
            "lr": float(learner.optimizer.param_groups[0]["lr"]),
            "optimizer_steps": float(count),
            "imitation/epochs": (first + count) * self._stream.batch / self._stream.decisions,
        }

    @endpoint(device=True, joint=True)
    async def held_out(self) -> dict[str, float]:
        """The loss on what is not learned from, nats per number, and the decisions in it; {} where nothing is."""
        return await self.compute_spmd(self._held_out)

    def _held_out(self) -> dict[str, float]:
        total: LossSum | None = None
        count = 0
        for part in self._watched:
            for place in part.places:  # one episode in memory at a time
                before, length = self.policy.lesson
                window = Window([part.read(place)], length, before)
                for number in range(0, len(window), size := self._settings.micro_batch or _ROWS):
                    rows = window.between(number, number + size)
                    loss = loss_on(self.policy, rows, self.device, seed=count)
                    total, count = loss if total is None else total + loss, count + len(rows)
        return {} if total is None else {"held_out/loss": float(total.mean()), "held_out/decisions": float(count)}
