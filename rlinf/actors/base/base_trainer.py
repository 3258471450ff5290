"""An actor whose weights learn, on one rank or on many: what trainers of language models and of policies share.

In: calls on the whole group, which its ranks carry out together. Out: the weights and their version, checkpoints, and
a device that is free between calls. Who wakes whom: see `spmd.py`.

A subclass makes its module and optimizer in `setup` and hands them to `_own`; it says how its weights are published
(`_published`), and adds to its state what else it has (`_extra`, `_state`, `_take`), and to checkpoints what has files
of its own there (`_copies`, `_read`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlinf.actors.base.model_actor import ModelActor
from rlinf.actors.base.spmd import JointActor
from rlinf.data.weights import Weights
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import lease_here
from rlinf.weights.parked_state import OpenState, ParkedState
from rlinf.weights.state_tensors import held, hyperparameters, set_hyperparameters
from rlinf.weights.train_state import (
    STATE,
    HostCopy,
    Restored,
    Source,
    StateCopy,
    copy_state,
    load_state,
    write_checkpoint,
)

R = TypeVar("R")
S = TypeVar("S")


def settings_of(kind: type[S], given: Mapping[str, Any]) -> S:
    """A dataclass of settings from keyword arguments.

    Raises:
        ValueError: there is no setting of some name.
    """
    known = sorted(inspect.signature(kind).parameters)
    if unknown := sorted({*given} - {*known}):
        raise ValueError(f"trainer: there is no setting {unknown[0]!r}; there are {', '.join(known)}")
    return kind(**given)


def at_least_one(role: str, **counts: int) -> None:
    """Check settings that count something.

    Raises:
        ValueError: one is less than 1.
    """
    if wrong := [f"{name}={count}" for name, count in counts.items() if count < 1]:
        raise ValueError(f"{role}: {' and '.join(wrong)} must be at least 1")


class BaseTrainer(ModelActor, JointActor):
    """Owns a module, its optimizer, and the version of its weights."""

    trained: nn.Module
    """What checkpoints hold, under its own names; spread over the ranks, or the same on each."""
    optimizer: Optimizer
    """Of its parameters, or of some of them."""
    schedule: LRScheduler | None
    """Of the optimizer's learning rate; None if that stays."""
    version: int
    """Of the weights: how often they were changed."""

    def _own(self, trained: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None = None) -> None:
        """Take over what was made; the end of `setup`."""
        self.trained, self.optimizer, self.schedule, self.version = trained, optimizer, schedule, 0
        self._hyperparameters = hyperparameters(optimizer)

    def _held(self) -> Iterable[Tensor]:
        return held(self.trained, self.optimizer)

    async def computed(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`compute` for work on weights, of all ranks together."""
        return await super().computed(self._parking.needed(fn), *args, **kwargs)

    async def computed_jointly(self, fn: Callable[..., R], *args: Any) -> R:
        """`computed`, when it is this call's turn on all ranks."""

        async def work(_: None) -> R:
            return await self.computed(fn, *args)

        return await self.jointly(work)

    # Weights -----------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def weights(self, *, exact: bool = False, whole: bool = False) -> Weights | None:
        """The weights as they are between two batches; a copy, so that training may go on. None but on rank 0.

        Args:
            exact: as they are kept here; otherwise in the precision in which those compute who take them over, if the
                trainer was told.
            whole: with what never changes, too, which trainers may otherwise leave out after the first time: for
                receivers that are new.
        """

        async def published(_: None) -> Weights | None:
            return await self._published(exact, whole)

        return await self.jointly(published)

    async def _published(self, exact: bool, whole: bool) -> Weights | None:
        """What `weights` returns; called on all ranks in turn."""
        raise NotImplementedError(f"{type(self).__name__} publishes no weights: define _published")

    # Checkpoints -------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def save(self, path: str | Path) -> str:
        """Write a checkpoint: `path`/state to go on from, and beside it the weights for everybody else.

        Training can go on as soon as everything was copied, while the files are still being written. Cancelled, it
        stops writing and leaves what is there.

        Args:
            path: a directory that nobody reads yet, on a disk that all ranks see; the caller renames it.

        Returns:
            The path.

        Raises:
            OSError: it cannot be written; the text says what is missing.
        """
        directory = Path(path)
        copies = await self.computed_jointly(self._copies, directory)
        if (lease := lease_here()) is not None:
            lease.give()  # the writing needs no device, and other roles may be waiting for it

        await write_checkpoint(directory, copies, lead=self.rank == 0)
        return str(path)

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        """Copies of all that this rank writes, by the directory in the checkpoint; blocking, on all ranks together.

        Args:
            directory: the checkpoint, for what can be written at once.
        """
        return {STATE: self._state()}

    def _state(self) -> StateCopy:
        """A copy of what this rank knows; blocking, on all ranks together."""
        return copy_state(
            self.trained,
            self.optimizer,
            self.schedule,
            self.version,
            rank=self.rank,
            ranks=self.world_size,
            extra=self._extra(),
        )

    def _extra(self) -> Mapping[str, Any]:
        """JSON values that belong to the state; `_take` finds them in `Restored.extra`."""
        return {}

    @endpoint(device=True, joint=True)
    async def restore(self, path: str | Path) -> int:
        """Go on from a checkpoint that any number of ranks saved; returns the weights' version.

        Args:
            path: as given to `save`, or its `state`.

        Raises:
            FileNotFoundError: there is no complete state.
            ValueError: it does not fit what learns here, or is damaged.
        """
        directory = Path(path).parent if Path(path).name == STATE else Path(path)
        return (await self.computed_jointly(self._read, directory)).version

    def _read(self, directory: Path) -> Restored:
        """Take over a checkpoint; blocking, on all ranks together."""
        return self._take(directory / STATE)

    # Moving ------------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def export_state(self) -> StateCopy:
        """A copy of what this rank knows, in host memory, for ranks that go on elsewhere; see `parked_state.park`."""
        return await self.computed_jointly(self._exported)

    @endpoint(device=True, joint=True)
    async def import_state(self, parked: ParkedState) -> int:
        """Go on from what other ranks exported, however many they were; returns the weights' version.

        Raises:
            ValueError: it does not fit what learns here.
        """
        return (await self.computed_jointly(self._take_parked, parked.open())).version

    def _exported(self) -> StateCopy:
        """`_state`, and what checkpoints have in files of its own; blocking, on all ranks together."""
        return self._state()

    def _take_parked(self, source: OpenState) -> Restored:
        """Take over what `_exported` gave; blocking, on all ranks together."""
        return self._take(source)

    def _take(self, source: Path | Source) -> Restored:
        """Take over a state, all but the optimizer's hyperparameters; blocking, on all ranks together."""
        found = load_state(self.trained, self.optimizer, self.schedule, source, rank=self.rank)
        if self.schedule is None:  # a schedule's learning rate may follow from the last one
            set_hyperparameters(self.optimizer, self._hyperparameters)
        self.version = found.version
        return found
