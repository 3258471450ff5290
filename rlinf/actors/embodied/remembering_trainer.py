"""A trainer that remembers: a replay buffer beside the weights, in checkpoints and wherever the trainer moves.

Consumes trajectories, keeps rows of them, and learns from rows drawn; what rows are is said by the trainers that derive
from it (`sac_trainer.py`, `dagger.py`). Every rank has all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.actors.base.base_trainer import HostCopy
from rlinf.actors.embodied.policy_trainer import PolicyTrainer
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.embodied.off_policy.replay_buffer import ReplayBuffer
from rlinf.training.embodied.trajectory import Trajectory
from rlinf.weights.parked_state import OpenState
from rlinf.weights.train_state import Restored, Source, StateCopy

REPLAY = "replay"
"""Directory of a checkpoint with the replay buffer."""


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
        return await self.computed_jointly(self._remember, list(trajectories))

    @endpoint(device=True, joint=True)
    async def learn(self) -> dict[str, float]:
        """Take the optimizer steps that are due for what is remembered; none during the warm-up.

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
        raise NotImplementedError

    def _catch_up(self) -> dict[str, float]:
        raise NotImplementedError

    def _learned(self, parts: Sequence[LossSum]) -> dict[str, float]:
        """Count the steps that were taken as one version."""
        self.version += 1
        found = sum(parts[1:], parts[0]).values() if parts else {}
        return {**found, "optimizer_steps": float(len(parts))}

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
