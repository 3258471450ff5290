"""A trainer and a rollout of which only the time is modelled, in virtual time.

The trainer has the real queue, turns, leases and micro-batches, around no model: a micro-batch takes seconds per token,
an optimizer step seconds of its own. In place of gradients it adds up a number per row, so that a test can tell who
learned what. The rollout is the real one around modelled engines: a step of n rows takes `step + row·n` seconds, and
each row gets a token of it; reading takes `token` seconds per token and holds up all rows. How long an answer becomes
is a function of its seed, as in a real engine.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlinf.actors.rollout import PartialGroup, Rollout
from rlinf.actors.text_trainer import TextTrainer
from rlinf.data.packing import Row
from rlinf.data.sample import Group, Sample
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Engine, EngineSetup, Request
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import lease_here
from rlinf.runtime.streams.stream import each
from rlinf.training.policy import LearnedRows
from rlinf.training.schedule import BatchPlan, BatchSchedule, ForwardBackward, InOrder


@dataclass(slots=True, eq=False)
class Together:
    """Where ranks meet: what stands for a collective. All come, or none goes on."""

    ranks: int
    """How many."""
    came: dict[int, Any] = field(default_factory=dict)
    """Result that each brought."""
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
    """Sum of the numbers of rows, in the order of computing, float32 [4]."""
    at: list[float] = field(default_factory=list)
    """When each micro-batch ended."""


class Learner:
    """A stand-in for an optimizer.

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
        self._epochs, self._minibatches = epochs, minibatches
        self.version, self._optimizer_steps = 0, 0
        self._in_order = InOrder() if order == "prompt" else None
        self._copies_apart(order == "free", budget)
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
            _rows,
            BatchPlan("train", (0, self.version), self._epochs, self._minibatches),
            self._packing,
            _at_once,
            in_order=self._in_order,
        )
        await self._work(batch.commands(groups), self._learner)
        return len(batch.groups)

    @endpoint(device=True, joint=True)
    async def weights(self) -> Any:
        """Their version, when it is this call's turn."""

        async def now(_: None) -> int:
            return self.version

        return await self.run_spmd(now)

    async def computed(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the time that it would take."""
        lease = lease_here()
        async with lease.computing() if lease is not None else nullcontext():
            if getattr(fn, "__name__", "") == "_step":
                return await self._stepped()
            command = next((arg for arg in args if isinstance(arg, ForwardBackward)), None)
            if command is not None and len(self._mine) > 1:
                await self._together("copy", self._mine).meet(self.rank)
            await asyncio.sleep(self._token * sum(row.size for row in command.rows) if command is not None else 0.0)
            return fn(*args, **kwargs)

    async def on_model(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it on one rank alone."""
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


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of an engine: `step + row·n` for a decode step with n rows, `token` for a token that is read."""

    step: float
    row: float
    token: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of answers: log-normal, with a factor that all answers to a prompt share, and cut at a limit."""

    median: float
    """Tokens."""
    spread: float
    """Deviation of the logarithm."""
    limit: int
    """Tokens."""
    alike: float = 0.5
    """Share of the variance that is the prompt's."""

    def of(self, prompt: int, seed: int) -> int:
        """Tokens of one answer."""
        own, theirs = random.Random(seed).gauss(0, 1), random.Random(prompt).gauss(0, 1)
        deviation = math.sqrt(self.alike) * theirs + math.sqrt(1 - self.alike) * own
        return max(2, min(self.limit, round(self.median * math.exp(self.spread * deviation))))


@dataclass(slots=True, eq=False)
class _Call:
    reading: bool = True
    rows: int = 0
    finished: list[Completion] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Row:
    request: Request
    call: _Call
    ends: float
    """Tokens that rows have got since the beginning, when it will end."""


class ModelledEngine(Engine):
    """An engine without a model: it has no weights, cannot be paused, and aborts nothing."""

    version = 0

    def __init__(self, setup: EngineSetup, *, law: DecodeCost, lengths: Lengths):
        self.max_rows = setup.max_rows
        self._law, self._lengths = law, lengths
        self._rows: dict[int, _Row] = {}
        self._tokens = 0.0  # that a row has got that was always there
        self._since = 0.0
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def batches(self, requests: Any) -> AsyncGenerator[list[Completion], None]:
        call = _Call()
        reader = asyncio.create_task(self._read(call, requests))
        try:
            while call.reading or call.rows or call.finished:
                changed = self._changed
                if call.finished:
                    finished, call.finished = call.finished, []
                    yield finished
                else:
                    await changed.wait()
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, call: _Call, requests: Any) -> None:
        try:
            async for request in each(requests):
                while len(self._rows) >= self.max_rows:
                    await self._changed.wait()
                self._pass()
                self._since += self._law.token * len(request.prompt_ids)
                length = self._lengths.of(int(request.prompt_ids[0]), request.seed)
                self._rows[request.id] = _Row(request, call, self._tokens + length)
                call.rows += 1
                self._wake()
        finally:
            call.reading = False
            self._wake()

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        raise NotImplementedError

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def check(self, weights: Weights) -> None:
        raise NotImplementedError

    async def load(self, weights: Weights) -> None:
        raise NotImplementedError

    def _pass(self) -> None:
        """Account for the steps since the last time."""
        now = asyncio.get_running_loop().time()
        rows = len(self._rows)
        if not rows:
            self._since = max(self._since, now)
        elif now > self._since:
            seconds = self._law.step + self._law.row * rows
            steps = (now - self._since) / seconds
            self._tokens += steps
            self._since = now

    def _wake(self) -> None:
        """Hand out what has ended, and wait for the next end."""
        loop = asyncio.get_running_loop()
        self._pass()
        for id in [id for id, row in self._rows.items() if row.ends <= self._tokens + 1e-6]:
            row = self._rows.pop(id)
            row.call.rows -= 1
            row.call.finished.append(_completion(row.request, self._lengths))
        if self._timer is not None:
            self._timer.cancel()
        if self._rows:
            seconds = self._law.step + self._law.row * len(self._rows)
            left = min(row.ends for row in self._rows.values()) - self._tokens
            self._timer = loop.call_at(max(self._since, loop.time()) + max(left, 0) * seconds, self._wake)
        self._changed.set()
        self._changed = asyncio.Event()


def _completion(request: Request, lengths: Lengths) -> Completion:
    count = lengths.of(int(request.prompt_ids[0]), request.seed)
    ids, logprobs, versions = (np.broadcast_to(dtype(0), count) for dtype in (np.int64, np.float32, np.int32))
    return Completion(request.id, ids, logprobs, versions, "length" if count == lengths.limit else "stop")


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


class LeasedRollout(Rollout):
    """The real rollout around modelled engines, on devices that are shared; its answers are all judged at once."""

    async def setup(self, *, law: DecodeCost, lengths: Lengths, switch: float, max_rows: int) -> None:  # type: ignore[override]
        """Make the engine.

        Args:
            law, lengths: of the engine, and of its answers.
            switch: seconds to leave the device, and to come back.
            max_rows: see `Rollout`.
        """
        self._switch = switch
        await super().setup(
            model={"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
            tokenizer={"characters": "0"},
            engine=f"{__name__}.LeasedEngine",
            engine_args={"law": law, "lengths": lengths},
            max_new_tokens=lengths.limit,
            max_rows=max_rows,
        )

    async def offload(self) -> None:
        """Take the time of it."""
        await asyncio.sleep(self._switch)

    async def onload(self) -> None:
        """Take the time of it."""
        await asyncio.sleep(self._switch)

    async def _groups(self, answered: Any) -> list[Group]:
        return [Group(group.prompt, tuple(_judged(group, index) for index in sorted(group.done))) for group in answered]


def _judged(group: PartialGroup, index: int) -> Sample:
    done = group.done[index]
    sample = Sample(group.prompt, index, done.response_ids, done.logprobs, done.versions, "", done.truncated)
    return replace(sample, reward=1.0, outcome="ok")
