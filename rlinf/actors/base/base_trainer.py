"""An actor with weights that learn, on one rank or on many: the trainer, and the critic.

In: orders that rank 0 makes from its input (`commands.py`), handed to every rank (`command_stream.py`). Out: optimizer
steps, scores of tokens, weights' versions, checkpoints. The ranks carry orders out together and answer as one.

A subclass says what is learned:

    class Critic(LearningActor):
        async def setup(self, *, model, tokenizer, lr=1e-5, dtype="float32", ...):
            settings = ModelSettings(model, "values", dtype=dtype, ...)
            await self._make(settings, tokenizer=tokenizer, order=order, learner={"lr": lr, ...})

        def _learn(self, learner, order, *, again=False):     # blocking
            learner.accumulate([order.packed()], loss)
        def _score(self, order):                              # blocking; [columns, response tokens]
            return self._back.outputs(order.packed())[0][None]

        @endpoint(device=True, joint=True)
        async def train(self, groups):
            steps = await self._work_together(orders_of(groups), self._learner)

        @endpoint(device=True, gang=True)
        async def values(self, groups):
            async for group in self._told(groups, ("values",), budget): yield group

Everything that a rank computes in `_learn` and `_score` may be a collective, so each does so for every order, for an
empty one too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rlinf.actors.base.spmd import JointActor
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.offload import Parking
from rlinf.data.sample import Group
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import lease_here
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.streams.stream import Stream
from rlinf.training.backend import HostCopy, ModelSettings, Optimization, back_end_of
from rlinf.training.text.command_stream import Feed
from rlinf.training.text.commands import Again, Learn, Order, Score, Step
from rlinf.training.text.logprob_pass import Groups, Scoring, gathered
from rlinf.training.text.micro_batches import InOrder
from rlinf.weights.train_state import STATE, write_checkpoint

R = TypeVar("R")
Taken = tuple[LossSum, dict[str, float]]
"""An optimizer step: what gathered for it, and its loss, gradient norm and learning rate."""
Explain = Callable[[FloatingPointError, int], Awaitable[FloatingPointError]]
"""Adds to an error what became of the batch, given the version of the weights that the batch met."""
_END: Any = object()


class LearningActor(JointActor):
    """Owns a model, its optimizer, and the version of its weights."""

    version: int
    """Of the weights: how often they were changed."""
    device: torch.device
    """Where the module is, unless it is parked."""

    async def _make(
        self,
        model: ModelSettings,
        *,
        tokenizer: TokenizerSource,
        order: Literal["prompt", "arrival"],
        learner: Mapping[str, Any],
        backend: str = "fsdp",
    ) -> None:
        """Make the model and its optimizer; part of `setup`.

        Args:
            model: what is trained, and how.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`.
            order: "prompt" works on groups in the order of their prompts' ids, "arrival" as they come.
            learner: settings of `Learner`.
            backend: see `back_end_of`.

        Raises:
            ValueError: a tokenizer that cannot be made, a setting that does not exist, or two ranks on a host.
        """
        if order not in ("prompt", "arrival"):
            raise ValueError(f"{self._role}: order={order!r} is neither 'prompt' nor 'arrival'")
        kind = back_end_of(backend)
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        await self._open_mesh()
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._back = await kind.make(self, model, self._tokenizer)
        self._learner = self._at_work = self._back.optimization(**learner)
        self._coming_again: list[Learn] = []
        self._parking = Parking(self._held)
        self.version = 0
        self._in_order = InOrder() if order == "prompt" else None

    @property
    def _shares(self) -> int:
        """Micro-batches that are computed at the same time: one for each rank, or for those that are one model."""
        return max(self._back.data_ranks) + 1

    # What a subclass says ----------------------------------------------------------------------------------------

    def _learn(self, learner: Optimization, order: Learn, *, again: bool = False) -> None:
        """Add a micro-batch to the gradient; blocking, on all ranks together.

        Args:
            learner: what to add it to.
            order: the micro-batch; `order.kept` is for what later epochs need of this one.
            again: it came before, in an earlier epoch.
        """
        raise NotImplementedError(f"{type(self).__name__} learns nothing: define _learn")

    def _score(self, order: Score) -> Tensor:
        """What is to be said of each response token, float32 [columns, response tokens], without gradient; blocking, on
        all ranks together."""
        raise NotImplementedError(f"{type(self).__name__} scores nothing: define _score")

    # Working together --------------------------------------------------------------------------------------------

    async def _work_together(
        self, orders: AsyncGenerator[tuple[Order, ...], None], learner: Optimization, explain: Explain | None = None
    ) -> list[Taken]:
        """Have all ranks carry out orders; to be called in a joint device endpoint, on every rank.

        Args:
            orders: for every round, what each rank shall do; read on rank 0 alone.
            learner: whose steps are taken. With `self._learner` all steps of a call make one version, with another
                each makes one.
            explain: on rank 0, says more about a loss that is not finite.

        Returns:
            Every optimizer step.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        feed = Feed(orders, self._back.data_ranks)

        async def carry_out(mine: Stream[Order]) -> list[Taken]:
            return await self._carry_out(mine, learner, feed, explain)

        return await self.jointly(carry_out, feed.streams, feed.stop)

    async def _carry_out(
        self, orders: Stream[Order], learner: Optimization, feed: Feed, explain: Explain | None
    ) -> list[Taken]:
        """This rank's part. Ranks learn together that a step cannot be taken, and skip the orders that are out."""
        steps: list[Taken] = []
        failed: FloatingPointError | None = None
        met = self.version
        self._at_work, self._coming_again = learner, []
        learner.begin()
        async for order in orders:
            try:
                if failed is not None:
                    pass
                elif isinstance(order, Learn):
                    await self.computed(self._learn, learner, order)
                    self._coming_again += [order] if order.keep else []
                elif isinstance(order, Again):
                    await self.computed(self._learn, learner, self._coming_again[order.number], again=True)
                elif isinstance(order, Score):
                    order.tell(await self.computed(self._scored, order))
                elif isinstance(order, Step):
                    steps.append(await self.computed(learner.step))
                    self.version += learner is not self._learner
            except FloatingPointError as error:
                failed = error
                feed.stop()
            feed.done()
        self._at_work, self._coming_again = self._learner, []
        self.version += learner is self._learner and bool(steps)
        if self.rank == 0 and failed is not None:  # the others leave it to rank 0, which has the batch
            raise failed if explain is None else await explain(failed, met)
        if self.rank == 0 and feed.error is not None:
            ended, feed.error = feed.error, None
            raise ended
        return steps

    def _scored(self, order: Score) -> list[Any]:
        shares = self._back.data_ranks
        found = gathered(self._score(order), [order.tokens[share] for share in shares], self.mesh)
        return [found[shares.index(share)] for share in range(self._shares)]

    async def _told(self, groups: Groups, columns: tuple[str, ...], budget: int) -> AsyncGenerator[Group, None]:
        """Groups with what this actor says of their tokens; to be called in a gang device endpoint, on every rank.

        Args:
            groups: a list or a stream of them; read on rank 0 alone.
            columns: names in `Sample.per_token`, for the rows of what `_score` returns.
            budget: tokens (prompts included) that a rank computes at once.

        Yields:
            On rank 0, each group as soon as it is complete, in the order of computing. On other ranks, none.
        """
        scoring = Scoring(self._shares, budget, columns)
        orders = scoring.orders(groups, self._in_order)
        work = asyncio.create_task(self._work_together(orders, self._learner), name="scoring")
        work.add_done_callback(lambda _: scoring.finished.put_nowait(_END))
        try:
            while (group := await scoring.finished.get()) is not _END:
                yield group
            await work
        finally:
            work.cancel()
            await finish(work)
            if not work.cancelled():
                work.exception()  # seen: raised above, unless nobody listens any more

    # Checkpoints -------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def save(self, path: str | Path) -> str:
        """Write a checkpoint: `path`/state to go on from, `path`/hf for `from_pretrained`.

        Training can go on as soon as everything was copied, while the files are still being written.

        Args:
            path: a directory that nobody reads yet, on a disk that all ranks see; the caller renames it.

        Returns:
            The path.

        Raises:
            OSError: it cannot be written; the text says what is missing.
        """
        extra = {} if self._in_order is None else {"prompts": self._in_order.state}

        async def copied(_: None) -> Mapping[str, HostCopy]:
            return await self.computed(self._back.copies, self._learner, self.version, extra, self._tokenizer)

        copies = await self.jointly(copied)
        if (lease := lease_here()) is not None:
            lease.give()  # the writing needs no device, and other roles may be waiting for it
        await write_checkpoint(path, copies)
        return str(path)

    @endpoint(device=True, joint=True)
    async def restore(self, path: str | Path) -> int:
        """Go on from a checkpoint that any number of ranks saved; returns the weights' version.

        Args:
            path: as given to `save`, or its `state`.

        Raises:
            FileNotFoundError: there is no complete state.
            ValueError: it does not fit this model, or is damaged.
        """
        state = Path(path) if Path(path).name == STATE else Path(path) / STATE

        async def read(_: None) -> int:
            found = await self.computed(self._back.restore, self._learner, state)
            self.version = found.version
            if self._in_order is not None and "prompts" in found.extra:
                self._in_order = InOrder(found.extra["prompts"])
            return found.version

        return await self.jointly(read)

    # Devices -----------------------------------------------------------------------------------------------------

    async def offload(self) -> None:
        """Keep weights, gradients and what optimizers remember in host memory until `onload`.

        A call that waits for input has given its devices away in the middle of a batch, so gradients go along.
        """
        await self.compute(self._parking.park)

    async def onload(self) -> None:
        """Bring back what `offload` moved."""
        await self.compute(self._parking.unpark)

    async def computed(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`compute` for work on weights, of all ranks together."""
        return await super().computed(self._parking.needed(fn), *args, **kwargs)

    def _held(self) -> Iterator[Tensor]:
        yield from self._back.held(self._learner, self._at_work)
        for order in self._coming_again:
            yield from order.kept.values()
