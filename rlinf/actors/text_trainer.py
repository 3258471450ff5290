"""What trainer and critic share: a language model that learns from a stream of groups, on one rank or on many.

In: commands that rank 0 makes from its input, handed to every rank (`commands.py`). Out: optimizer steps, scores of
tokens, weights, checkpoints. The ranks carry commands out together and answer as one.

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
            steps = await self._work_together(commands_of(groups), self._learner)

        @endpoint(device=True, gang=True, late=True)
        async def values(self, groups):
            async for group in self._told(groups, ("values",), budget): yield group

Everything that a rank computes in `_learn` and `_score` may be a collective of its copy's ranks, so each does so for
every command, for an empty one too. With `order: free` copies of the model compute at their own pace (`own_pace.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.actors.async_replicas import OwnPace
from rlinf.algos.loss_sum import LossSum
from rlinf.data.sample import Group
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.data.weights import Weights
from rlinf.metrics.explain import MICRO_BATCH
from rlinf.models.language.build import ModelSpec
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.streams.stream import Stream
from rlinf.training.backend import Optimization, back_end_of
from rlinf.training.checkpoint import HostCopy, Restored, Source, StateCopy
from rlinf.training.micro_batches import (
    Command,
    CommandStream,
    Forward,
    ForwardBackward,
    InOrder,
    OptimizerStep,
    Recompute,
)
from rlinf.training.schedule import Groups, LogprobPass, gathered
from rlinf.training.weight_sync import has_room, publish
from rlinf.training.work_queue import Meeting

Taken = tuple[LossSum, dict[str, float]]
"""An optimizer step: what gathered for it, and its loss, gradient norm and learning rate."""
Explain = Callable[[FloatingPointError, int], Awaitable[FloatingPointError]]
"""Adds to an error what became of the batch, given the version of the weights that the batch met."""
_END: Any = object()


class TextTrainer(OwnPace):
    """Trains a language model by orders."""

    _publishes = torch.float32
    """Precision in which those compute who take its weights over."""

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
        self._budget = settings.micro_batch_tokens
        self._coming_again: list[ForwardBackward] = []
        self.version = 0
        self._optimizer_steps = 0
        self._in_order = InOrder() if settings.order == "prompt" else None
        copies = self._back.copies_of_ranks if settings.order == "free" else ()
        alone = len({*self._back.data_ranks}) == self.world_size  # ranks of one share of the data keep step
        self._apart = copies if len(copies) > 1 and alone else ()

    @property
    def _shares(self) -> int:
        """Micro-batches of a round: one for each rank, or for those that are one model; where copies go at their own
        pace, for each rank of a copy."""
        return len(self._apart[0]) if self._apart else max(self._back.data_ranks) + 1

    @property
    def _side_by_side(self) -> int:
        """Rounds that are computed at the same time."""
        return len(self._apart) or 1

    # What a subclass says ----------------------------------------------------------------------------------------

    def _learn(self, learner: Optimization, command: ForwardBackward, *, again: bool = False) -> None:
        """Add a micro-batch to the gradient; blocking, on all ranks together.

        Args:
            learner: what to add it to.
            command: the micro-batch; `command.kept` is for what later epochs need of this one.
            again: it came before, in an earlier epoch.
        """
        raise NotImplementedError(f"{type(self).__name__} learns nothing: define _learn")

    def _score(self, command: Forward) -> Tensor:
        """The columns of each learned token, float32 [columns, learned], without gradient; blocking, on all ranks
        together."""
        raise NotImplementedError(f"{type(self).__name__} scores nothing: define _score")

    # Working together --------------------------------------------------------------------------------------------

    async def _work_together(
        self, commands: AsyncGenerator[tuple[Command, ...], None], learner: Optimization, explain: Explain | None = None
    ) -> list[Taken]:
        """Have all ranks carry out commands; to be called in a joint device endpoint, on every rank.

        Args:
            commands: for every round, what each rank shall do; read on rank 0 alone.
            learner: whose steps are taken. All of a call make one version, unless a command says otherwise.
            explain: on rank 0, says more about a loss that is not finite.

        Returns:
            Every optimizer step; none, where there was nothing to learn from.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        if self._apart:
            return await self._work_apart(commands, learner, explain)
        stream = CommandStream(commands, self._back.data_ranks)

        async def carry_out(mine: Stream[Command]) -> list[Taken]:
            return await self._carry_out(mine, learner, stream, explain)

        return await self.jointly(carry_out, stream.streams, stream.stop)

    async def _carry_out(
        self, commands: Stream[Command], learner: Optimization, stream: CommandStream, explain: Explain | None
    ) -> list[Taken]:
        """This rank's part. Ranks learn together that a step cannot be taken, and skip the commands that are out."""
        steps: list[Taken] = []
        failed: FloatingPointError | None = None
        met = self.version
        self._at_work, self._coming_again = learner, []
        learner.begin()
        unnumbered = False
        async for command in commands:
            try:
                if failed is not None:
                    pass
                elif isinstance(command, ForwardBackward):
                    await self._learned_from(learner, command)
                    self._coming_again += [command] if command.keep else []
                elif isinstance(command, Recompute):
                    await self._learned_from(learner, self._coming_again[command.number], again=True)
                elif isinstance(command, Forward):
                    command.tell(await self.computed(self._scored, command))
                elif isinstance(command, OptimizerStep):
                    steps += await self._take_step(learner, command)
                    self.version += command.new_version
                    unnumbered |= not command.new_version
            except FloatingPointError as error:
                failed = error
                stream.stop()
            stream.done()
        self._at_work, self._coming_again = self._learner, []
        self.version += unnumbered
        if self.rank == 0 and failed is not None:  # the others leave it to rank 0, which has the batch
            raise failed if explain is None else await explain(failed, met)
        if self.rank == 0 and stream.error is not None:
            ended, stream.error = stream.error, None
            raise ended
        return steps

    async def _learned_from(self, learner: Optimization, command: ForwardBackward, *, again: bool = False) -> None:
        """Add a micro-batch to the gradient, and note what it took."""
        began = time.perf_counter()
        await self.computed(self._learn, learner, command, again=again)
        self.note(MICRO_BATCH, time.perf_counter() - began, sum(row.size for row in command.rows))

    async def _take_step(self, learner: Optimization, command: OptimizerStep) -> list[Taken]:
        """Take an optimizer step, unless there is nothing to learn from; the step, if there was one."""
        steps = [] if command.empty else [await self.computed(learner.step)]
        self._optimizer_steps += len(steps)
        if command.left_out:
            learner.pass_over(command.left_out)
        return steps

    async def _work_apart(
        self, commands: AsyncGenerator[tuple[Command, ...], None], learner: Optimization, explain: Explain | None
    ) -> list[Taken]:
        """The same, each copy of the model at its own pace."""
        steps: list[Taken] = []
        met = self.version
        unnumbered = False

        @contextmanager
        def turn() -> Iterator[None]:
            nonlocal met
            met, self._at_work = self.version, learner
            learner.begin()
            try:
                yield
            finally:
                self._at_work = self._learner
                self.version += unnumbered

        def carry_out(command: Command) -> Any:
            if isinstance(command, Forward):
                return self._score(command).float().cpu().numpy()
            assert isinstance(command, ForwardBackward)
            kept = {name: torch.as_tensor(column, device=self.device) for name, column in command.kept.items()}
            mine = replace(command, kept=kept)
            self._learn(learner, mine, again=command.again)
            return {name: column.cpu().numpy() for name, column in mine.kept.items()} if command.keep else {}

        async def meet(meeting: Meeting) -> None:
            nonlocal unnumbered
            if meeting.blank is not None:
                await self.computed(carry_out, meeting.blank)
            assert meeting.step is not None
            steps.extend(await self._take_step(learner, meeting.step))
            self.version += meeting.step.new_version
            unnumbered |= not meeting.step.new_version

        try:
            await self.at_own_pace(commands, self._apart, carry_out, meet, turn())
        except FloatingPointError as error:
            if self.rank == 0:  # the others leave it to rank 0, which has the batch
                raise error if explain is None else await explain(error, met) from None
        return steps

    def _scored(self, command: Forward) -> list[Any]:
        mine = self._score(command)
        return gathered(mine, command.tokens, self.mesh, self._back.data_ranks)

    async def _told(self, groups: Groups, columns: tuple[str, ...], budget: int) -> AsyncGenerator[Group, None]:
        """Groups with what this actor says of their tokens; to be called in a gang device endpoint, on every rank.

        Args:
            groups: a list or a stream of them; read on rank 0 alone.
            columns: names in `Sample.per_token`, for the rows of what `_score` returns.
            budget: tokens (prompts included) that a rank computes at once.

        Yields:
            On rank 0, each group as soon as it is complete, in the order of computing. On other ranks, none.
        """
        passing = LogprobPass(self._shares, budget, columns, self._side_by_side)
        commands = passing.commands(groups, self._in_order)
        work = asyncio.create_task(self._work_together(commands, self._learner), name="forward pass")
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
    async def computes(self) -> str:
        """How the model is run, for people; empty where that is as usual, or the back end does not say."""
        return str(getattr(self._back, "words", ""))

    # Checkpoints and devices -------------------------------------------------------------------------------------

    async def _published(self, exact: bool, whole: bool) -> Weights | None:
        dtype = None if exact or self._publishes == torch.float32 else self._publishes
        size = sum(map(prod, self._back.shapes().values())) * (dtype or torch.float32).itemsize
        in_host = not has_room(self.device, size)
        return await publish(self, self._back.export, self.version, dtype=dtype, in_host_memory=in_host)

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        return self._back.copies(self._learner, self.version, self._extra(), self._tokenizer)

    def _state(self) -> StateCopy:
        return self._back.state(self._learner, self.version, self._extra())

    def _extra(self) -> Mapping[str, Any]:
        return {} if self._in_order is None else {"prompts": self._in_order.state}

    def _take(self, source: Path | Source) -> Restored:
        found = self._back.restore(self._learner, source)
        self.version = found.version
        if self._in_order is not None and "prompts" in found.extra:
            self._in_order = InOrder(found.extra["prompts"])
        return found

    def _held(self) -> Iterator[Tensor]:
        """Gradients too: a call that waits for input has given its devices away in the middle of a batch."""
        yield from self._back.held(self._learner, self._at_work)
        for command in self._coming_again:
            yield from command.kept.values()
