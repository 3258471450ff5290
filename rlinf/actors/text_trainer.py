"""The base of trainers and critics: a language model that learns from a stream of groups, on one rank or on many.

Rank 0 makes commands of its input (`training/schedule.py`), a `CommandRunner` has every rank carry them out, and out
come optimizer steps, scores of tokens, weights and checkpoints. The ranks answer as one. There are two runners, of
which `setup` takes one: `InStep` has all ranks carry out every command together; with `order: free`, `AsyncReplicas`
lets copies of the model go at their own pace between optimizer steps.

A subclass says what is learned:

    class Critic(TextTrainer):
        @configured(CriticSettings)
        async def setup(self, *, model, tokenizer, settings):
            await self._make(ModelSpec(model, "values", compute=settings), tokenizer)

        def _learn(self, learner, command, *, again=False):     # blocking
            learner.accumulate([command.packed()], loss)
        def _score(self, command):                              # blocking; [columns, learned tokens]
            return self._back.outputs(command.packed())[0][None]

        @endpoint(device=True, joint=True, late=True)
        async def train(self, groups):
            steps = await self._work(commands_of(groups), self._learner)

        @endpoint(device=True, gang=True, late=True)
        async def values(self, groups):
            async for group in self._annotated(groups, ("values",)): yield group

Everything that a rank computes in `_learn` and `_score` may be a collective of its copy's ranks, so each does so for
every command, for an empty one too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf.actors.async_replicas import AsyncReplicas, SyncPoint, carry_out
from rlinf.actors.base import BaseTrainer
from rlinf.algos.loss_sum import LossSum
from rlinf.data.sample import Group
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.data.weights import Weights
from rlinf.metrics.explain import MICRO_BATCH
from rlinf.metrics.limits import COMPUTE
from rlinf.models.language.build import ModelSpec, cost_of
from rlinf.models.language.cost import ModelCost
from rlinf.models.language.truth import Way
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import Gang
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.streams.stream import Stream
from rlinf.training.backend import BackEnd, Optimization, back_end_of
from rlinf.training.checkpoint import HostCopy, Restored, Source, StateCopy
from rlinf.training.optimizer import Sums
from rlinf.training.schedule import (
    Command,
    CommandHandler,
    CommandStream,
    Forward,
    ForwardBackward,
    Groups,
    InOrder,
    LogprobPass,
    OptimizerStep,
    Packing,
    Recompute,
    gathered,
    here,
)
from rlinf.training.weight_sync import publish

Commands = AsyncGenerator[tuple[Command, ...], None]
"""For every round, what each share of the ranks does."""
StepResult = tuple[LossSum, dict[str, float]]
"""An optimizer step: what gathered for it, and its loss, gradient norm and learning rate."""
Explain = Callable[[FloatingPointError, int], Awaitable[FloatingPointError]]
"""Adds to an error what became of the batch, given the version of the weights that the batch met."""
_END: Any = object()


class CommandRunner(Protocol):
    """Has the ranks of a trainer carry out the commands of a call."""

    @property
    def shares(self) -> int:
        """Micro-batches of a round."""
        ...

    @property
    def rounds_at_once(self) -> int:
        """Rounds that are computed at the same time."""
        ...

    def held(self) -> Iterator[Tensor]:
        """Tensors on the device that outlive a command."""
        ...

    async def run(self, commands: Commands, handler: CommandHandler) -> None:
        """Have all ranks carry out commands; to be called in a joint device endpoint, on every rank.

        Args:
            commands: read on rank 0 alone.
            handler: carries commands out on this rank.

        Raises:
            FloatingPointError: on rank 0 at least: a loss or gradient is not finite; that step was not taken.
            Exception: whatever `commands` raised, on rank 0.
        """


class InStep:
    """A `CommandRunner` whose ranks carry out every command together.

    Args:
        trainer: the actor.
        data_ranks: of each rank, which share of a round it computes, see `BackEnd`.
    """

    rounds_at_once = 1

    def __init__(self, trainer: BaseTrainer, data_ranks: Sequence[int]):
        self._trainer, self._data_ranks = trainer, data_ranks
        self._repeated: list[ForwardBackward] = []
        """Commands that come again in later epochs."""

    @property
    def shares(self) -> int:
        """Micro-batches of a round: one for each rank, or for those that are one model."""
        return max(self._data_ranks) + 1

    def held(self) -> Iterator[Tensor]:
        """Columns for later epochs: a call that waits for input gives its devices away in the middle of a batch."""
        for command in self._repeated:
            yield from command.cached_columns.values()

    async def run(self, commands: Commands, handler: CommandHandler) -> None:
        """See `CommandRunner`."""
        stream = CommandStream(commands, self._data_ranks)

        async def body(mine: Stream[Command]) -> None:
            try:
                with handler.turn():
                    error = await self._carry_out(mine, stream, handler)
            finally:
                self._repeated = []
            if self._trainer.rank == 0 and (error or stream.error) is not None:  # which has the batch
                stream.error, ended = None, error or stream.error
                raise ended  # type: ignore[misc]

        await self._trainer.run_spmd(body, stream.streams, stream.stop)

    async def _carry_out(
        self, commands: Stream[Command], stream: CommandStream, handler: CommandHandler
    ) -> FloatingPointError | None:
        """This rank's part. Ranks learn together that a step cannot be taken, and skip the commands that are out."""
        failed: FloatingPointError | None = None
        async for planned in commands:
            try:
                command = planned if failed is not None else await here(planned)
                if failed is not None:
                    pass
                elif isinstance(command, ForwardBackward):
                    await self._learn(handler, command)
                    self._repeated += [command] if command.keep else []
                elif isinstance(command, Recompute):
                    await self._learn(handler, self._repeated[command.number], again=True)
                elif isinstance(command, Forward):
                    command.deliver(await self._trainer.computed(self._scores, handler, command))
                elif isinstance(command, OptimizerStep):
                    await handler.step(command)
            except FloatingPointError as error:
                failed = error
                stream.stop()
            stream.done()
        return failed

    async def _learn(self, handler: CommandHandler, command: ForwardBackward, *, again: bool = False) -> None:
        """Add a micro-batch to the gradient, and note what it took."""
        start = time.perf_counter()
        await self._trainer.computed(handler.learn, command, again=again)
        self._trainer.note(MICRO_BATCH, time.perf_counter() - start, sum(row.size for row in command.rows))

    def _scores(self, handler: CommandHandler, command: Forward) -> list[Any]:
        return gathered(handler.score(command), command.tokens, self._trainer.mesh, self._data_ranks)


class TextTrainer(BaseTrainer):
    """Trains a language model by commands."""

    _publishes = torch.float32
    """Precision in which those compute who take its weights over."""
    _lends = False
    """The rollout computes on its tensors."""
    _cost: ModelCost | None = None
    """Of its model by shape; None where that is not known."""
    _runner: CommandRunner
    _back: BackEnd

    async def _make(self, spec: ModelSpec, tokenizer: TokenizerSource, chat_template: str | None = None) -> None:
        """Make the model on the ranks, and its optimizer; part of `setup`.

        Args:
            spec: what is trained, and by which settings.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`.
            chat_template: the model learns with this one; saved with the tokenizer. None: with the tokenizer's own.

        Raises:
            ValueError: a tokenizer that cannot be made, a setting that does not exist, or two ranks on a host.
        """
        settings = spec.compute
        kind = back_end_of(settings.backend)
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        if chat_template is not None:  # whoever loads the saved model is to speak to it as it was taught
            self._tokenizer.chat_template = chat_template
        await self._open_mesh()
        self._back = await kind.make(self, spec, self._tokenizer)
        self._learner = self._at_work = self._back.optimization(settings)
        self._cost = await self.compute(cost_of, spec.source, self._tokenizer)
        self._model_spec = spec
        self.version = 0
        self._optimizer_steps = 0
        self._in_order = InOrder() if settings.order == "prompt" else None
        self._copies_apart(settings.order == "free", settings.micro_batch_tokens)

    @endpoint
    async def let_copies_part(self, free: bool) -> bool:
        """Have copies of the model go at their own pace from the next call on, or in step; see `ForwardConfig.order`.
        To be called on all ranks, between two calls that learn. False if they cannot: there is only one.
        """
        if self.world_size > 1:  # one alone may have replicas that joined it
            self._copies_apart(free, self._packing.budget)
        return isinstance(self._runner, AsyncReplicas) == free

    def _copies_apart(self, free: bool, budget: int) -> None:
        """Choose how ranks carry out commands.

        Args:
            free: copies of the model go at their own pace, where there are several.
            budget: tokens of a micro-batch.
        """
        shares = self._back.data_ranks
        copies = self._back.copies_of_ranks if free else ()
        alone = len({*shares}) == self.world_size  # ranks of one share of the data keep step
        free = len(copies) > 1 and alone
        self._runner = runner = AsyncReplicas(self, copies) if free else InStep(self, shares)
        self._packing = Packing(
            runner.shares,
            budget,
            rounds_at_once=runner.rounds_at_once,
            trees=getattr(self._back, "reads_trees", False),
            context=getattr(self._back, "context", 1),
        )

    # What a subclass says ----------------------------------------------------------------------------------------

    def _learn(self, learner: Optimization, command: ForwardBackward, *, again: bool = False) -> None:
        """Add a micro-batch to the gradient; blocking, on all ranks together.

        Args:
            learner: what to add it to.
            command: the micro-batch; `command.cached_columns` is for what later epochs need of this one.
            again: it came before, in an earlier epoch.
        """
        raise NotImplementedError(f"{type(self).__name__} learns nothing: define _learn")

    def _score(self, command: Forward) -> Tensor:
        """The columns of each learned token, float32 [columns, learned], without gradient; blocking, on all ranks
        together."""
        raise NotImplementedError(f"{type(self).__name__} scores nothing: define _score")

    # Working together --------------------------------------------------------------------------------------------

    async def _work(
        self, commands: Commands, learner: Optimization, explain: Explain | None = None, *, goes_on: bool = False
    ) -> list[StepResult]:
        """Have all ranks carry out commands; to be called in a joint device endpoint, on every rank.

        Args:
            commands: read on rank 0 alone.
            learner: whose steps are taken. All of a call make one version, unless a command says otherwise.
            explain: on rank 0, says more about a loss that is not finite.
            goes_on: with the gradients that earlier calls left; otherwise they are forgotten.

        Returns:
            Every optimizer step; none, where there was nothing to learn from.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        handler = _Handler(self, learner, goes_on=goes_on)
        try:
            await self._runner.run(commands, handler)
        except FloatingPointError as error:
            if self.rank == 0:  # the others leave it to rank 0, which has the batch
                raise error if explain is None else await explain(error, handler.version) from None
        return handler.steps

    @endpoint(device=True)
    async def sums(self, command: ForwardBackward | Forward, version: int) -> tuple[Sums, Any]:
        """Compute, in a replica that joined, a micro-batch by itself: its sums, and what is to be known of it.

        Args:
            command: the micro-batch.
            version: of the weights, which are there.
        """
        return await self.computed(self._sums, command, version)

    def _sums(self, command: ForwardBackward | Forward, version: int) -> tuple[Sums, Any]:
        learner: Any = self._learner  # fsdp's: replicas of others are refused
        self.version = version
        learner.begin()
        result = carry_out(_Handler(self, learner), command, self.device)
        sums = learner.hand_over()
        loss = None if sums.loss is None else sums.loss.to(torch.device("cpu"))
        return Sums(sums.gradients, loss), result

    @endpoint(device=True)
    async def overwrite(self, weights: Weights) -> None:
        """Take over, in a replica that joined, weights as the trainer has them."""
        back: Any = self._back  # fsdp's
        await self.computed(lambda: back.overwrite(dict(weights.named())))

    @endpoint
    async def work_next(self, gang: Gang, rank: int, steps: int, rounds: int) -> tuple[SyncPoint | None, int]:
        """On rank 0, of copies at their own pace: see `WorkQueue.work`."""
        return await self._replicas.next(gang, rank, steps, rounds)

    @endpoint
    async def work_drained(self, gang: Gang, rank: int, steps: int, rounds: int) -> None:
        """On rank 0: see `WorkQueue.drained`."""
        await self._replicas.drained(gang, rank, steps, rounds)

    @endpoint
    async def work_take(self, gang: Gang, rank: int, steps: int, rounds: int, result: Any) -> Command | None:
        """On rank 0: see `WorkQueue.take`."""
        return self._replicas.take(gang, rank, steps, rounds, result)

    @property
    def _replicas(self) -> AsyncReplicas:
        assert isinstance(self._runner, AsyncReplicas)
        return self._runner

    def _note_work(self, lengths: Sequence[int], predicted: int, tokens: int, *, learns: bool) -> None:
        """Note the products of a micro-batch: this rank's part, where several compute it.

        Args:
            lengths: tokens of each sequence.
            predicted: learned tokens of all.
            tokens: that are read, fewer than those of all sequences where some share a prompt.
            learns: there is a gradient.
        """
        if self._cost is None:
            return
        spec, shares = self._model_spec, self._back.data_ranks
        count, predicted = self._cost.forward_flops, predicted if spec.head == "logprobs" else 0
        if learns:
            count = partial(self._cost.training_flops, frozen=spec.lora is not None)
        flops = count(lengths, predicted, tokens=tokens) * len({*shares}) // len(shares)
        self.note(COMPUTE + spec.compute.dtype, bytes=flops)

    async def _annotated(self, groups: Groups, columns: tuple[str, ...]) -> AsyncGenerator[Group, None]:
        """Groups with columns that this actor computes; to be called in a gang device endpoint, on every rank.

        Args:
            groups: a list or a stream of them; read on rank 0 alone.
            columns: names in `Sample.per_token`, for the rows of what `_score` returns.

        Yields:
            On rank 0, each group as soon as it is complete, in the order of computing. On other ranks, none.
        """
        passing = LogprobPass(self._packing, columns)
        commands = passing.commands(groups, self._in_order)
        work = asyncio.create_task(self._work(commands, self._learner), name="forward pass")
        work.add_done_callback(lambda _: passing.finished.put_nowait(_END))
        try:
            while (group := await passing.finished.get()) is not _END:
                yield group
            await work
        finally:
            work.cancel()
            await finish(work)
            if not work.cancelled():
                work.exception()  # seen: raised above, unless nobody listens any more

    @endpoint
    async def optimizer_steps(self) -> int:
        """How many were taken here: whether the weights have changed since, also in the middle of a batch."""
        return self._optimizer_steps

    @endpoint
    async def computes(self) -> Way:
        """How the model is run, if the back end says it."""
        way: Way = getattr(self._back, "way", Way())
        return way

    # Checkpoints and devices -------------------------------------------------------------------------------------

    async def _published(self, exact: bool, whole: bool) -> Weights | None:
        if self._lends and not exact:
            named = ((name, each.make()) for name, each in self._back.export())  # type: ignore[union-attr]
            return Weights.lent(named, lambda: self.version)
        dtype = None if exact or self._publishes == torch.float32 else self._publishes
        how = self._published_how(sum(map(prod, self._back.shapes().values())), dtype, exact=exact)
        return await publish(self, self._back.export, self.version, **how)

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        return self._back.copies(self._learner, self.version, self._extra(), self._tokenizer)

    def _state(self) -> StateCopy:
        return self._back.state(self._learner, self.version, self._extra())

    def _extra(self) -> Mapping[str, Any]:
        return {} if self._in_order is None else {"prompts": self._in_order.state}

    def _take(self, source: Path | Source) -> Restored:
        restored = self._back.restore(self._learner, source)
        self.version = restored.version
        if self._in_order is not None and "prompts" in restored.extra:
            self._in_order = InOrder(restored.extra["prompts"])
        return restored

    def _held(self) -> Iterator[Tensor]:
        """Gradients too: a call that waits for input has given its devices away in the middle of a batch."""
        yield from self._back.held(self._learner, self._at_work)
        yield from self._runner.held()


class _Handler:
    """One rank's part of one call of a trainer, see `CommandHandler`.

    Args:
        trainer: the actor.
        learner: whose steps are taken.
        goes_on: see `TextTrainer._work`.
    """

    def __init__(self, trainer: TextTrainer, learner: Optimization, *, goes_on: bool = False):
        self._trainer, self._learner, self._goes_on = trainer, learner, goes_on
        self.steps: list[StepResult] = []
        """Optimizer steps that were taken."""
        self.version = trainer.version
        """Version of the weights that the batch met."""
        self._makes_version = False
        self._spent = 0.0
        """Seconds that were computed since the last optimizer step."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        trainer = self._trainer
        self.version, trainer._at_work = trainer.version, self._learner
        if not self._goes_on:
            self._learner.begin()
        try:
            yield
        finally:
            trainer._at_work = trainer._learner
            trainer.version += self._makes_version

    def learn(self, command: ForwardBackward, *, again: bool = False) -> None:
        start = time.perf_counter()
        self._trainer._learn(self._learner, command, again=again)
        self._spent += time.perf_counter() - start
        if command.rows:
            batch = command.packed()
            self._trainer._note_work(batch.lengths, len(batch.targets), len(batch.ids), learns=True)

    def score(self, command: Forward) -> Tensor:
        scores = self._trainer._score(command)
        if command.rows:
            batch = command.packed()
            self._trainer._note_work(batch.lengths, len(batch.targets), len(batch.ids), learns=False)
        return scores

    def _step(self, command: OptimizerStep) -> StepResult:
        start = time.perf_counter()
        own = () if command.adam is None else (command.adam,)  # back ends of users know no other
        result = self._learner.step(*own)  # which waits for what a GPU still computes of the micro-batches
        spent, self._spent = self._spent + time.perf_counter() - start, 0.0
        weigh = getattr(self._trainer._back, "weigh_compiling", None)  # of back ends that can
        if weigh is not None and self._learner is self._trainer._learner:
            weigh(self._learner, spent)
        return result

    async def step(self, command: OptimizerStep) -> None:
        trainer = self._trainer
        if not command.empty:
            self.steps.append(await trainer.computed(self._step, command))
            trainer._optimizer_steps += 1
        if command.left_out:
            self._learner.pass_over(command.left_out)
        trainer.version += command.new_version
        self._makes_version |= not command.new_version
