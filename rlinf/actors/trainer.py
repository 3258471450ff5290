"""The trainer: turns scored groups into better weights, on one rank or on many.

Consumes groups, or worked examples, as they come; computes on each micro-batch as soon as it is full, so training
overlaps with the generation of the rest. Produces metrics, versioned weights, and checkpoints. The ranks answer as one:
a flow calls the group and reads one answer. Rank 0 reads the input and deals it out (`feed.py`); what they all do
together, and when, is settled in `joint.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from transformers import PreTrainedModel

from rlinf.actors.batch_report import describe, rescue, show_samples
from rlinf.actors.feed import Feed
from rlinf.actors.joint import JointActor
from rlinf.actors.learner import Learner, Schedule
from rlinf.actors.micro_batches import InOrder
from rlinf.actors.modeling import ModelSource
from rlinf.actors.orders import Learn, Order, PolicyOrders, answer_orders
from rlinf.actors.policy_building import Build, build_policy
from rlinf.actors.publishing import publish
from rlinf.actors.sharding import dtype_of, move
from rlinf.actors.snapshot import STATE, load_state, save_checkpoint
from rlinf.algos.sums import LossSum
from rlinf.data.sample import Example, Group
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.data.weights import Weights
from rlinf.runtime.actor import Actor, endpoint
from rlinf.runtime.stream import Stream

Groups = Iterable[Group] | AsyncIterable[Group]
Taken = tuple[LossSum, dict[str, float]]
"""An optimizer step: what gathered for it, and its loss, gradient norm and learning rate."""
R = TypeVar("R")
Batches = Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]]


class Trainer(JointActor):
    """Owns the weights that learn."""

    async def setup(  # type: ignore[override]
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        seed: int = 0,
        lr: float = 1e-6,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        total_steps: int | None = None,
        min_lr_ratio: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        epochs: int = 1,
        minibatches: int = 1,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        advantage_scale: Literal["std", "none"] = "std",
        micro_batch_tokens: int = 2048,
        order: Literal["prompt", "arrival"] = "prompt",
        dtype: str = "float32",
        gradient_checkpointing: bool = False,
        lora: Mapping[str, Any] | None = None,
        logprob_chunk: int = 1024,
        rescue_dir: str | None = None,
    ) -> None:
        """Make the model, spread it over the ranks, and make its optimizer.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; saved with every checkpoint.
            seed: of a new model's weights, of adapters, and of the order of minibatches.
            lr, warmup_steps, schedule, total_steps, min_lr_ratio, betas, weight_decay, grad_clip: see `Learner`.
            epochs: passes over each batch of groups.
            minibatches: optimizer steps in each pass, each on a part of the groups; with more than one, training begins
                when the whole batch has come.
            clip_low, clip_high, dual_clip: of the loss, see `losses.policy`.
            advantage_scale: see `advantages.group_relative`.
            micro_batch_tokens: tokens (prompts included) that a rank computes at once; a longer sample stands alone.
            order: "prompt" computes on groups in the order of their prompts' ids, so that a run can be repeated bit for
                bit; "arrival" as they come, which waits for nobody when one answer takes long.
            dtype: to compute in, "float32" or "bfloat16"; weights, gradients' sums and the optimizer are float32.
            gradient_checkpointing: keep only the input of each layer and compute the rest twice.
            lora: `{"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}` trains adapters; None all weights.
            logprob_chunk: response tokens whose logits exist at a time.
            rescue_dir: where a batch is kept whose loss or gradient is not finite; None keeps none.

        Raises:
            ValueError: a model or tokenizer that cannot be made, a setting that does not exist, or two ranks on a host.
        """
        _check(order, epochs=epochs, minibatches=minibatches, micro_batch_tokens=micro_batch_tokens)
        computes_in = dtype_of(dtype)
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        await self._open_mesh(computes_in != torch.float32)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        build = Build(model, seed, lora, computes_in, device, self.mesh, gradient_checkpointing, logprob_chunk)
        self.policy = await self.compute(build_policy, build, self._tokenizer)
        self._learner = Learner(
            self.policy,
            mesh=self.mesh,
            lr=lr,
            warmup_steps=warmup_steps,
            schedule=schedule,
            total_steps=total_steps,
            min_lr_ratio=min_lr_ratio,
            betas=betas,
            weight_decay=weight_decay,
            grad_clip=grad_clip,
        )
        self.device = device
        self.version = 0
        self._clip: dict[str, Any] = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
        self._epochs, self._minibatches, self._budget, self._seed = epochs, minibatches, micro_batch_tokens, seed
        self._advantage_scale: Literal["std", "none"] = advantage_scale
        self._in_order = InOrder() if order == "prompt" else None
        self._rescue_dir = rescue_dir
        self._batch: PolicyOrders | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model; spread over the ranks if there are several."""
        return self.policy.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of `train`; `sft` has one of its own."""
        return self._learner.optimizer

    @property
    def schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        """Of `optimizer`."""
        return self._learner.schedule

    # Learning ----------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def train(self, groups: Groups) -> dict[str, float]:
        """Learn from a batch of scored groups: GRPO, `epochs` x `minibatches` optimizer steps.

        The first epoch computes on groups as they arrive and takes its step when the last one has. The engine's
        log-probs stand for the old policy's; how far they are from ours is measured before the first step. Samples
        without a reward count as not drawn.

        Args:
            groups: a list or a stream of them, judged.

        Returns:
            Metrics of the batch; the weights' version has gone up by one.

        Raises:
            ValueError: a group that was not judged, or nothing to learn from.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        batch = PolicyOrders(
            ranks=self.world_size,
            in_order=self._in_order,
            budget=self._budget,
            epochs=self._epochs,
            minibatches=self._minibatches,
            scale=self._advantage_scale,
            seed=(self._seed, self.version),
        )
        steps = await self._learn_together(self._learner, batch.orders(groups), rescued=batch)
        if self.rank > 0:
            return {}
        self._batch = batch
        sums = [gathered for gathered, _ in steps]
        return {**await self.compute(describe, batch.groups), **sum(sums[1:], sums[0]).values(), **steps[-1][1]}

    @endpoint(device=True, joint=True)
    async def sft(self, batches: Batches, *, lr: float = 2e-3) -> dict[str, float]:
        """Learn from worked examples, one optimizer step per batch, with an optimizer of its own.

        Args:
            batches: a list or a stream of batches.
            lr: constant learning rate of AdamW.

        Returns:
            `sft/loss_first` and `sft/loss`, of the first and last batch, nats per token, and `sft/steps`; the weights'
            version has gone up by one per batch.

        Raises:
            ValueError: there was no batch, or one with nothing to learn.
            FloatingPointError: the loss or its gradient is not finite.
        """
        learner = Learner(self.policy, mesh=self.mesh, lr=lr)
        orders = answer_orders(batches, self.world_size, self._budget)
        steps = await self._learn_together(learner, orders)
        if self.rank > 0:
            return {}
        if not steps:
            raise ValueError("sft: not one batch came")
        losses = [numbers["loss"] for _, numbers in steps]
        return {"sft/loss_first": losses[0], "sft/loss": losses[-1], "sft/steps": float(len(losses))}

    async def _learn_together(
        self,
        learner: Learner,
        orders: AsyncGenerator[tuple[Order, ...], None],
        rescued: PolicyOrders | None = None,
    ) -> list[Taken]:
        """Have all ranks carry out orders; returns what gathered for each optimizer step, and its numbers."""
        feed = Feed(orders, self.world_size)

        async def carry_out(mine: Stream[Order]) -> list[Taken]:
            return await self._carry_out(mine, learner, feed, rescued)

        return await self.jointly(carry_out, feed.streams, feed.stop)

    async def _carry_out(
        self, orders: Stream[Order], learner: Learner, feed: Feed, rescued: PolicyOrders | None
    ) -> list[Taken]:
        """This rank's part. Ranks learn together that a step cannot be taken, and skip the orders that are out."""
        steps: list[Taken] = []
        failed: FloatingPointError | None = None
        met = self.version
        learner.begin()
        async for order in orders:
            try:
                if failed is not None:
                    pass
                elif isinstance(order, Learn):
                    await self.computed(self._learn, learner, order)
                else:
                    steps.append(await self.computed(learner.step))
                    self.version += learner is not self._learner
            except FloatingPointError as error:
                failed = error
                feed.stop()
            feed.done()
        self.version += learner is self._learner and bool(steps)
        if self.rank == 0 and failed is not None:  # the others leave it to rank 0, which has the batch
            raise await self._kept(failed, rescued, met)
        if self.rank == 0 and feed.error is not None:
            ended, feed.error = feed.error, None
            raise ended
        return steps

    def _learn(self, learner: Learner, order: Learn) -> None:
        batch = order.packed().to(self.device)
        if learner is self._learner:
            learner.learn_policy(batch, **self._clip, compare=order.compare)
        else:
            learner.learn_answers(batch)

    async def _kept(self, error: FloatingPointError, batch: PolicyOrders | None, met: int) -> FloatingPointError:
        """The error, with where the batch was kept."""
        if batch is None or self._rescue_dir is None:
            return error
        path = await self.compute(rescue, batch.groups, batch.rows, Path(self._rescue_dir), met)
        return FloatingPointError(f"{error}. The batch was kept in {path} and, with its texts, in the .json beside it")

    # Weights and checkpoints -------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def weights(self) -> Weights | None:
        """The weights as they are between two batches; a copy, so that training may go on. None but on rank 0."""

        async def published(_: None) -> Weights | None:
            return await publish(self, self.model, self.version)

        return await self.jointly(published)

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
        await save_checkpoint(
            cast(Actor, _Between(self)),
            path,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            version=self.version,
            tokenizer=self._tokenizer,
            extra={} if self._in_order is None else {"prompts": self._in_order.state},
        )
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
            found = await self.computed(load_state, self.model, self.optimizer, self.schedule, state, rank=self.rank)
            self.version = found.version
            if self._in_order is not None and "prompts" in found.extra:
                self._in_order = InOrder(found.extra["prompts"])
            return found.version

        return await self.jointly(read)

    @endpoint(joint=True)
    async def samples(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples by (prompt id, index) of the last batch, as plain values for people.

        Returns:
            For each `prompt_id`, `index`, `prompt`, `response`, `answer`, `reward`, `outcome`, `scores`, `remark`,
            `advantage`, `length` (tokens) and `versions` (of the weights that made it: lowest, highest).
        """
        batch = self._batch
        return [] if batch is None else await self.compute(show_samples, batch.groups, batch.rows, count)

    # Devices -----------------------------------------------------------------------------------------------------

    async def offload(self) -> None:
        """Keep model and optimizer in host memory until `onload`; nothing happens on the CPU."""
        await self.compute(move, self.policy, self.optimizer, torch.device("cpu"))

    async def onload(self) -> None:
        """Bring model and optimizer back to the device."""
        await self.compute(move, self.policy, self.optimizer, self.device)

    async def _open_mesh(self, always: bool) -> None:
        """The device mesh of all ranks; for a single one only if `always`, as mixed precision needs it."""
        hosts = self.group.hosts
        if len(set(hosts)) < len(hosts):
            raise ValueError(
                f"{self.group.names[0].partition('[')[0]}: two ranks on one host, {hosts}: each needs a process of its "
                "own, so name every host once"
            )
        if self.world_size > 1 or always:
            name = "{}.{}.{}".format(self.group.names[0], *self.group[0]._actor)  # of this spawn, and no other
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            self.mesh = await self.system.collectives.mesh(name, hosts, kind)


class _Between:
    """The trainer as `save_checkpoint` needs it: what it computes is done in turn, between batches."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self.rank, self.world_size = trainer.rank, trainer.world_size

    async def compute(self, fn: Callable[[], R]) -> R:
        async def body(_: None) -> R:
            return await self._trainer.computed(fn)

        return await self._trainer.jointly(body)


def _check(order: str, **counts: int) -> None:
    if order not in ("prompt", "arrival"):
        raise ValueError(f"trainer: order={order!r} is neither 'prompt' nor 'arrival'")
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"trainer: {name}={count} must be at least 1")
