"""The trainer of a world model, which others act in as in environments.

Consumes trajectories of true environments, produces metrics, versioned weights and checkpoints; unblocked by the flow's
calls. Every rank has all transitions and takes the same steps: such a network is too small to be shared.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.actors.base import BaseTrainer, HostCopy, at_least_one, settings_of
from rlinf.algos.loss_sum import LossSum
from rlinf.data.demonstrations import Demonstration, read_demonstrations
from rlinf.data.rng import mix
from rlinf.data.weights import Weights
from rlinf.envs.environment import NothingHappened
from rlinf.envs.learned import ENSEMBLE, make_world, write_world
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.checkpoint import OpenState, Restored, Source, StateCopy, host_copy
from rlinf.training.embodied.replay import ReplayBuffer, Rows
from rlinf.training.embodied.trajectories import Trajectory, joined, summary, summary_by_task
from rlinf.training.optimizer import adamw_of_parts, minimize
from rlinf.training.weight_sync import publish

WORLD = "world"
"""Directory of a checkpoint with the world model for everybody else."""
RECORDED = "recorded"
"""Directory of a checkpoint with the transitions."""
_MEASURED = 1 << 16
"""Transitions that scales and ranges are taken from: enough for any percentile, and a copy of a few MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How a world model learns from transitions."""

    updates: int = 500
    """Optimizer steps of each `fit`."""
    batch: int = 256
    """Transitions in each, for each network of an ensemble."""
    lr: float = 1e-3
    """Learning rate of AdamW."""
    weight_decay: float = 1e-4
    """Decoupled weight decay: few transitions are learned by heart soon."""
    capacity: int = 1_000_000
    """Transitions that are remembered."""
    demonstrations: str | None = None
    """Directory of recorded episodes to begin with; None for none."""

    def __post_init__(self) -> None:
        at_least_one("world_trainer", updates=self.updates, batch=self.batch, capacity=self.capacity)


class WorldTrainer(BaseTrainer):
    """Owns the weights of a world model, and all true transitions so far."""

    async def setup(  # type: ignore[override]
        self, *, world: Mapping[str, Any], model: str = ENSEMBLE, seed: int = 0, **settings: Any
    ) -> None:
        """Make the model and its optimizer, and read recorded episodes.

        Args:
            world: keyword arguments of the model.
            model: dotted path of its class, which says what it `looks_at` and has a `loss` of transitions and a
                `measure` of them, as `EnsembleWorld` does.
            seed: of batches.
            settings: of `FitSettings`.

        Raises:
            ValueError: an argument or a setting that there is not, or cannot be; episodes that do not fit the model.
            FileNotFoundError: the directory holds no episodes.
        """
        (self._fitting,) = settings_of(settings, FitSettings)
        self._about, self._seed, self._updates = {"model": model, "settings": dict(world)}, seed, 0
        await self._open_mesh()
        self._world: Any = (await self.compute(make_world, model, world)).to(self.device)
        parameters = [*self._world.parameters()]
        how = self._fitting
        optimizer = adamw_of_parts([(parameters, how.lr)], betas=(0.9, 0.999), weight_decay=how.weight_decay)
        self._own(self._world, optimizer)
        self._recorded = ReplayBuffer(how.capacity)
        if how.demonstrations is not None:
            await self.compute(self._read_episodes, Path(how.demonstrations))

    @endpoint(device=True, joint=True)
    async def fit(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Remember trajectories of true environments, and learn from all so far.

        Args:
            trajectories: of all slices of all environments, in any order; none to learn from what was recorded alone.

        Returns:
            Metrics of the trajectories, as a trainer of a policy gives them; `world/state_error`, `world/reward_error`
            and `world/end_error` over the last tenth of the optimizer steps, and as `world/new/…` of the trajectories
            before anything was learned from them. The weights' version has gone up by one.

        Raises:
            NothingHappened: there is no transition at all.
            ValueError: trajectories do not say what followed, or of chunks of several actions.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        return await self.compute_spmd(self._fit, list(trajectories))

    def _fit(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        metrics = self._remember(trajectories) if trajectories else {"env_steps": 0.0}
        if not len(self._recorded):
            raise NothingHappened("there is nothing to learn from: no action was done in an episode that was kept")
        how = self._fitting
        self._world.measure(self._drawn(_MEASURED, 0))
        parameters = [*self._world.parameters()]
        parts: list[LossSum] = []
        for _ in range(how.updates):
            self._updates += 1
            batch = self._drawn(how.batch * self._world.members, 1)
            rows = {name: each.unflatten(0, (self._world.members, -1)) for name, each in batch.items()}
            parts.append(minimize(self._world.loss(rows), parameters, self.optimizer)[0])
        self.version += 1
        newest = parts[-max(1, how.updates // 10) :]
        numbers = sum(newest[1:], newest[0]).values()
        return {**metrics, **_errors(numbers, "world/"), "world/transitions": float(len(self._recorded))}

    def _remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        whole = joined(trajectories)
        chunks, valid = whole.chunks, whole.chunks.valid.bool()
        if whole.following is None or whole.actions is None:
            raise ValueError(
                "world_trainer: trajectories do not say what followed each decision: spawn the PolicyActor with "
                "keep_following=True"
            )
        if whole.actions.shape[2] != 1:
            raise ValueError(
                f"world_trainer: decisions are chunks of {whole.actions.shape[2]} actions, and nobody saw what came "
                "between: let policy.settings.chunk be 1"
            )
        done = valid.any(-1)
        rows = {
            "actions": whole.actions[:, :, 0],
            "reward": torch.where(valid, chunks.rewards, 0.0).sum(-1).float(),
            "terminated": (chunks.terminated.bool() & valid).any(-1),
        }
        for name in self._world.looks_at:
            rows |= {name: whole.stored[name], f"following.{name}": whole.following[name]}
        steps = float(valid.sum())
        new = {name: each[done] for name, each in rows.items()}
        errors = self._add(new)
        return {
            "env_steps": steps,
            "decisions": float(done.sum()),
            "reward/step": float(rows["reward"].sum()) / max(steps, 1.0),
            "episodes/lost": float(whole.lost),
            **errors,
            **summary(whole.episodes),
            **summary_by_task(whole.episodes),
        }

    def _add(self, rows: Rows) -> dict[str, float]:
        """Remember transitions; how wrong the model was about them, if it had learned before."""
        errors: dict[str, float] = {}
        if self.version and len(rows["reward"]):
            with torch.no_grad():
                each = {name: row[None].expand(self._world.members, *row.shape) for name, row in self._on(rows).items()}
                errors = _errors(self._world.loss(each).values(), "world/new/")
        if len(rows["reward"]):
            self._recorded.add(rows)
        return errors

    def _read_episodes(self, directory: Path) -> None:
        for episode in read_demonstrations(directory.expanduser(), solved=False):
            self._recorded.add(self._of_episode(episode))

    def _of_episode(self, episode: Demonstration) -> Rows:
        if episode.actions.shape[1] != 1:
            raise ValueError(
                f"world_trainer: recorded episodes have chunks of {episode.actions.shape[1]} actions, and nobody saw "
                "what came between: record them action by action"
            )
        terminated = torch.zeros(len(episode.actions), dtype=torch.bool)
        terminated[-1] = episode.terminated
        rows = {"actions": episode.actions[:, 0], "reward": episode.rewards[:, 0].float(), "terminated": terminated}
        for name in self._world.looks_at:
            observed = episode.observation[name]
            rows |= {name: observed[:-1], f"following.{name}": observed[1:]}
        return rows

    def _drawn(self, count: int, what: int) -> Rows:
        return self._on(self._recorded.draw(count, mix(self._seed, self._updates), what))

    def _on(self, rows: Rows) -> Rows:
        return {name: row.to(self.device) for name, row in rows.items()}

    async def _published(self, exact: bool, whole: bool) -> Weights | None:
        state = self._world.state_dict()
        size = sum(tensor.numel() for tensor in state.values())
        how = self._published_how(size, None, exact=exact)
        return await publish(self, lambda _: state.items(), self.version, **how)

    # Checkpoints -------------------------------------------------------------------------------------------------

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        parts = super()._copies(directory)
        if self.rank:
            return parts
        self._recorded.write(directory / RECORDED)  # at once: a copy could take as much memory as the buffer itself
        state = {name: host_copy(tensor) for name, tensor in self._world.state_dict().items()}
        return {**parts, WORLD: WorldCopy(self._about, state)}

    def _extra(self) -> Mapping[str, Any]:
        return {"updates": self._updates}

    def _read(self, directory: Path) -> Restored:
        restored = super()._read(directory)
        self._recorded.read(directory / RECORDED)
        return restored

    def _exported(self) -> StateCopy:
        state = super()._exported()
        if self.rank:  # all have the same
            return state
        recorded = {f"{RECORDED}.{name}": tensor for name, tensor in self._recorded.tensors().items()}
        offsets = {key: (0,) * tensor.dim() for key, tensor in recorded.items()}
        return replace(state, shards={**state.shards, **recorded}, offsets={**state.offsets, **offsets})

    def _take_parked(self, source: OpenState) -> Restored:
        restored = super()._take_parked(source)
        self._recorded.take(source.whole(f"{RECORDED}."))
        return restored

    def _take(self, source: Path | Source) -> Restored:
        restored = super()._take(source)
        self._updates = int(restored.extra["updates"])
        return restored


@dataclass(frozen=True, slots=True, eq=False)
class WorldCopy:
    """A world model in host memory, ready to be written for everybody else; a `HostCopy`."""

    about: Mapping[str, Any]
    """`model` and `settings` that make it."""
    state: Mapping[str, Tensor]
    """Its tensors."""

    def write(self, directory: Path, stop: threading.Event | None = None) -> None:
        """Write everything and wait until the disk has it.

        Raises:
            OSError: it cannot be written; the text says what is missing.
        """
        write_world(directory, self.about, self.state)


def _errors(numbers: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The errors among a loss's numbers; those of state and reward as roots of mean squares."""
    return {
        f"{prefix}{name}": value if name == "end_error" else math.sqrt(value)
        for name, value in numbers.items()
        if name.endswith("_error")
    }
