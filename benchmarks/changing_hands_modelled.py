"""A trainer of which only the time is modelled: the real queue, turns, leases and micro-batches, around no model.

A micro-batch takes seconds per token, an optimizer step seconds of its own. In place of gradients it adds up a number
per row, so that a test can tell who learned what. Virtual time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.rescale_modelled import ModelledEngine, ModelledRollout
from rlinf.actors.text_trainer import TextTrainer
from rlinf.data.packing import Row
from rlinf.data.sample import Group
from rlinf.engines.base import Completion, EngineSetup
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import lease_here
from rlinf.training.micro_batches import ForwardBackward, InOrder
from rlinf.training.policy import LearnedRows
from rlinf.training.schedule import BatchSchedule


@dataclass(slots=True, eq=False)
class Together:
    """Where ranks meet: what stands for a collective. All come, or none goes on."""

    ranks: int
    """How many."""
    came: dict[int, Any] = field(default_factory=dict)
    """What each brought."""
    all_here: asyncio.Event = field(default_factory=asyncio.Event)
    """All have come."""

    async def meet(self, rank: int, brings: Any = None) -> dict[int, Any]:
        """Wait for the others; what each brought."""
        came, all_here = self.came, self.all_here
        assert rank not in came, "a rank came twice: ranks differ in what they compute together"
        came[rank] = brings
        if len(came) == self.ranks:
            self.came, self.all_here = {}, asyncio.Event()
            all_here.set()
        await all_here.wait()
        return came


@dataclass(slots=True)
class Gathered:
    """The sums of one rank."""

    rows: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How often each sample was learned from, by prompt and length."""
    total: np.ndarray = field(default_factory=lambda: np.zeros(4, np.float32))
    """Of the numbers of rows, in the order of computing, float32 [4]."""
    at: list[float] = field(default_factory=list)
    """When each micro-batch ended."""


class Learner:
    """What stands for an optimizer.

    Args:
        value: the numbers of a row, float32 [4].
        taken: where every optimizer step is noted: what each rank had gathered.
    """

    def __init__(self, rank: int, value: Callable[[Row], np.ndarray], taken: list[dict[int, Gathered]]):
        self.rank, self.taken, self._value = rank, taken, value
        self.gathered: Gathered | None = None

    def begin(self) -> None:
        """Forget what gathered."""
        self.gathered = None

    def add(self, rows: Sequence[Row], now: float) -> None:
        """Gather rows; none makes sums of 0."""
        self.gathered = self.gathered or Gathered()
        for row in rows:
            self.gathered.rows[int(row.prompt_ids[0]), len(row.response_ids)] += 1
            self.gathered.total += self._value(row)
        self.gathered.at += [now] if rows else []

    def pass_over(self, count: int) -> None:
        """It has no schedule of learning rates."""

    def step(self) -> dict[int, Gathered]:
        """Its part of a step is over."""
        raise AssertionError("done in `ModelledTrainer.computed`")


def one(row: Row) -> np.ndarray:
    """Every row counts alike."""
    return np.ones(4, np.float32)


class ModelledTrainer(TextTrainer):
    """Learns from groups without a model."""

    async def setup(  # type: ignore[override]
        self,
        *,
        copies: Sequence[Sequence[int]],
        taken: list[dict[int, Gathered]],
        meetings: dict[Any, Together],
        order: str = "free",
        token: float = 0.0,
        step: float = 0.0,
        switch: float = 0.0,
        budget: int = 1024,
        epochs: int = 1,
        minibatches: int = 1,
        value: Callable[[Row], np.ndarray] = one,
    ) -> None:
        """Make nothing.

        Args:
            copies: the ranks of each copy of the model.
            taken: where rank 0 notes every optimizer step.
            meetings: shared by all ranks: where they meet.
            order: as in `trainer.order`.
            token, step: seconds of a token of a micro-batch, and of an optimizer step.
            switch: seconds to leave the device, and to come back.
            budget, epochs, minibatches: as in the trainer's settings.
            value: see `Learner`.
        """
        back: Any = SimpleNamespace(data_ranks=range(self.world_size), copies_of_ranks=copies)
        self._back = back
        learner: Any = Learner(self.rank, value, taken)
        self._learner = self._at_work = learner
        self._token, self._step, self._switch = token, step, switch
        self._budget, self._epochs, self._minibatches = budget, epochs, minibatches
        self._coming_again, self.version, self._optimizer_steps = [], 0, 0
        self._in_order = InOrder() if order == "prompt" else None
        self._apart = copies if order == "free" and len(copies) > 1 else ()
        self._mine = next(ranks for ranks in copies if self.rank in ranks)
        self._meetings = meetings

    async def offload(self) -> None:
        """Take the time of it."""
        await asyncio.sleep(self._switch)

    async def onload(self) -> None:
        """Take the time of it."""
        await asyncio.sleep(self._switch)

    @endpoint(device=True, joint=True, late=True)
    async def train(self, groups: Any) -> int:
        """Learn from a batch; how many groups it had."""
        batch = BatchSchedule(
            _rows, where="train", ranks=self._shares, in_order=self._in_order, budget=self._budget,
            epochs=self._epochs, minibatches=self._minibatches, seed=(0, self.version), compute=_at_once,
            copies=self._side_by_side,
        )  # fmt: skip
        await self._work_together(batch.commands(groups), self._learner)
        return len(batch.groups)

    @endpoint(device=True, joint=True)
    async def weights(self) -> Any:
        """Their version, when it is this call's turn."""

        async def now(_: None) -> int:
            return self.version

        return await self.jointly(now)

    async def computed(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the time that it would take."""
        lease = lease_here()
        async with lease.computing() if lease is not None else nullcontext():
            if getattr(fn, "__name__", "") == "step":
                return await self._stepped()
            command = next((arg for arg in args if isinstance(arg, ForwardBackward)), None)
            if command is not None and len(self._mine) > 1:
                await self._together("copy", self._mine).meet(self.rank)
            await asyncio.sleep(self._token * sum(row.size for row in command.rows) if command is not None else 0.0)
            return fn(*args, **kwargs)

    async def on_model(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """The same, of one rank alone."""
        return await self.computed(fn, *args, **kwargs)

    async def _stepped(self) -> Any:
        learner: Any = self._at_work
        assert learner.gathered is not None, "a rank came to the optimizer step with nothing, not even a 0"
        came = await self._together("step", range(self.world_size)).meet(self.rank, learner.gathered)
        await asyncio.sleep(self._step)
        learner.begin()
        if self.rank == 0:
            learner.taken.append(came)
        return None, {}

    def _together(self, what: str, ranks: Sequence[int]) -> Together:
        return self._meetings.setdefault((what, *ranks), Together(len(ranks)))

    def _learn(self, learner: Any, command: ForwardBackward, *, again: bool = False) -> None:
        learner.add(command.rows, asyncio.get_running_loop().time())


async def _at_once(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def _rows(groups: Sequence[Group]) -> LearnedRows:
    rows = [[Row.of(sample, 1.0) for sample in group.samples] for group in groups]
    return LearnedRows(rows, [1.0 for some in rows for _ in some], [1.0 for some in rows for _ in some])


class LeasedEngine(ModelledEngine):
    """A modelled engine that keeps its device as long as it has rows."""

    def __init__(self, setup: EngineSetup, **law: Any):
        super().__init__(setup, **law)
        self._on_device = setup.on_device

    async def batches(self, requests: Any) -> AsyncGenerator[list[Completion], None]:
        came = super().batches(requests)
        try:
            while True:
                coming = asyncio.ensure_future(anext(came, None))
                while not coming.done():
                    changed = asyncio.ensure_future(self._changed.wait())
                    async with self._on_device() if self._rows else nullcontext():
                        await asyncio.wait([coming, changed], return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                if (some := coming.result()) is None:
                    return
                yield some
        finally:
            await came.aclose()


class LeasedRollout(ModelledRollout):
    """Modelled engines on devices that are shared, whose answers are all judged at once."""

    engine = f"{__name__}.LeasedEngine"

    async def setup(self, *, switch: float = 0.0, **settings: Any) -> None:  # type: ignore[override]
        """As the modelled rollout.

        Args:
            switch: seconds to leave the device, and to come back.
            settings: see there.
        """
        self._switch = switch
        await super().setup(**settings)

    async def offload(self) -> None:
        """Take the time of it."""
        await asyncio.sleep(self._switch)

    async def onload(self) -> None:
        """Take the time of it."""
        await asyncio.sleep(self._switch)

    async def _groups(self, answered: Any) -> list[Group]:
        groups = await super()._groups(answered)
        return [
            Group(group.prompt, tuple(replace(sample, reward=1.0, outcome="ok") for sample in group.samples))
            for group in groups
        ]
