"""The critic: predicts, before every token of an answer, the reward that is still to come, and learns from what came.

Consumes judged groups, twice: `values` tells them what it expects, on micro-batches as groups come; `train`, once a
batch has ended, learns from the returns of that batch. The ranks compute together and answer as one; how they do is
`base_trainer.py`'s business. `train` takes its turn after it has read its batch, so a `values` that makes this batch,
and is on its way still, goes first whichever of the two calls arrives first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Literal

import torch
from torch import Tensor

from rlinf.actors.base.base_trainer import LearningActor
from rlinf.algos.apply import value_loss_of
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.packing import Packed
from rlinf.data.sample import Group
from rlinf.data.tokenizer import TokenizerSource
from rlinf.data.weights import Weights
from rlinf.models.language.fsdp import Sharding
from rlinf.models.language.load import ModelSource
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import Call, current_call, lease_here
from rlinf.runtime.streams.stream import each
from rlinf.training.backend import ModelSettings, Optimization, Outputs
from rlinf.training.text.commands import Learn, Order, Score
from rlinf.training.text.requirements import VALUES, Algorithm, algorithm_of
from rlinf.training.text.value_schedule import RETURNS, ValueOrders

Groups = Iterable[Group] | AsyncIterable[Group]


class Critic(LearningActor):
    """Owns a model of what answers will earn."""

    async def setup(  # type: ignore[override]
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        algorithm: Algorithm = "ppo",
        seed: int = 0,
        lr: float = 1e-5,
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        epochs: int = 1,
        minibatches: int = 1,
        micro_batch_tokens: int = 2048,
        order: Literal["prompt", "arrival"] = "prompt",
        dtype: str = "float32",
        sharding: Sharding = "shard",
        gradient_checkpointing: bool = False,
        backend: str = "fsdp",
    ) -> None:
        """Make the model on the ranks, and its optimizer.

        Args:
            model: a policy's Hugging Face directory, or the configuration of a new one: the critic has its layers, and
                a head that says 0 until it has learned.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`.
            algorithm: a recipe's name, `{"name": "ppo", "overrides": {...}}`, or a spec: says what returns are, and the
                loss. The trainer's.
            seed: of a new model's weights, and of the order of minibatches.
            lr, warmup_steps, betas, weight_decay, grad_clip: see `Learner`; the learning rate stays after warm-up.
            epochs: passes over each batch of groups.
            minibatches: optimizer steps in each pass, each on a part of the groups.
            micro_batch_tokens: tokens (prompts included) that a rank computes at once; a longer sample stands alone.
            order: "prompt" values groups in the order of their prompts' ids, so that a run can be repeated bit for bit;
                "arrival" as they come.
            dtype: to compute in, "float32" or "bfloat16"; weights, gradients' sums, the optimizer and the head are
                float32.
            sharding: how model and optimizer lie on the ranks, see `Trainer.setup`.
            gradient_checkpointing: keep only the input of each layer and compute the rest twice.
            backend: what trains: "fsdp", or the dotted path of a `BackEnd`.

        Raises:
            ValueError: a model or tokenizer that cannot be made, a setting that does not exist, an algorithm without a
                critic, or two ranks on a host.
        """
        counts = {"epochs": epochs, "minibatches": minibatches, "micro_batch_tokens": micro_batch_tokens}
        if wrong := [f"{name}={count}" for name, count in counts.items() if count < 1]:
            raise ValueError(f"critic: {', '.join(wrong)} must be at least 1")
        self._spec = algorithm_of(algorithm)
        if self._spec.critic is None:
            raise ValueError(f"critic: algorithm {self._spec.name!r} has none: take 'ppo', or leave the role out")
        self._budget, self._seed = micro_batch_tokens, seed
        self._epochs, self._minibatches = epochs, minibatches

        settings = ModelSettings(
            model, "values", seed, dtype=dtype, sharding=sharding, gradient_checkpointing=gradient_checkpointing
        )
        optimizer = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "betas": betas,
            "weight_decay": weight_decay,
            "grad_clip": grad_clip,
        }
        await self._make(settings, tokenizer=tokenizer, order=order, learner=optimizer, backend=backend)

    # Predicting --------------------------------------------------------------------------------------------------

    @endpoint(device=True, gang=True)
    async def values(self, groups: Groups) -> AsyncIterator[Group]:
        """Groups with what is still to be expected before each token of their answers, under `values`.

        Args:
            groups: a list or a stream of them, judged.

        Yields:
            Each group as soon as it is complete, in the order of prompts' ids (or, with order "arrival", as they come).
            Answers whose judging failed have NaN, for nobody learns from them.
        """
        async with aclosing(self._told(groups, (VALUES,), self._budget)) as told:
            async for group in told:
                yield group

    def _score(self, order: Score) -> Tensor:
        return self._back.outputs(order.packed())[0][None]

    # Learning ----------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def train(self, groups: Groups) -> dict[str, float]:
        """Learn from a batch of groups that `values` has seen: `epochs` x `minibatches` optimizer steps.

        Args:
            groups: a list or a stream of them, judged, with values. Samples without a reward count as not drawn.

        Returns:
            `critic/loss`, `critic/grad_norm` and `critic/lr` of the last optimizer step; `critic/clip_frac`, the share
            of predictions that had moved beyond the bound; of the values that came with the batch `values/mean`,
            `returns/mean` and `critic/explained_variance`; and `reward/mean`. None on other ranks than 0.

        Raises:
            ValueError: a group that was not judged or has no values, or nothing to learn from.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        if (lease := lease_here()) is not None:
            lease.give()  # every rank does, and they take the devices together again when it is their turn
        made = await asyncio.create_task(self._made(groups), name="batch") if self.rank == 0 else None
        steps = await self._work_together(self._orders(made), self._learner, _of_critic)
        if made is None:
            return {}
        sums = [gathered for gathered, _ in steps]
        found, last = sum(sums[1:], sums[0]).values(), steps[-1][1]
        return {
            **made.metrics,
            **{f"critic/{name}": last[name] for name in ("loss", "grad_norm", "lr")},
            "critic/clip_frac": found.get("value_clip_frac", 0.0),
        }

    async def _made(self, groups: Groups) -> ValueOrders:
        """Read the batch, in a task of its own: it waits without a claim on the devices, which rank 0 alone could not
        take again."""
        if (call := current_call.get()) is not None:
            current_call.set(Call(f"batch of {call.name}", call.caller, call.number, call.parent, None, call.since))
        batch = [group async for group in each(groups)]
        return await self.compute(ValueOrders, batch, self._spec)

    def _orders(self, made: ValueOrders | None) -> AsyncGenerator[tuple[Order, ...], None]:
        """The orders of a call; other ranks than 0 have none to give."""
        if made is None:
            return _none()
        return made.orders(
            ranks=self._shares,
            budget=self._budget,
            epochs=self._epochs,
            minibatches=self._minibatches,
            seed=(self._seed, self.version),
        )

    def _learn(self, learner: Optimization, order: Learn, *, again: bool = False) -> None:
        def loss(batch: Packed, outputs: Outputs) -> LossSum:
            values = outputs[0]
            old, returns = (
                batch.columns.get(name, values.detach()) for name in (VALUES, RETURNS)
            )  # none without a row
            counted = torch.ones_like(values, dtype=torch.bool)
            return value_loss_of(self._spec, values, old, returns, counted, batch.sequences)

        learner.accumulate([order.packed()], loss)

    # Starting from a policy --------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def load(self, weights: Weights) -> int:
        """Take a policy's weights for the layers, on all ranks or, with an error, on none; the head stays as it is.

        For the time before the critic has learned: what its optimizer remembers stays, too.

        Args:
            weights: published by a trainer of the same model.

        Returns:
            Their version; the critic's own does not change.

        Raises:
            ValueError: they are damaged, or do not fit.
        """
        await self.compute(self._fits, weights)  # a rank that finds fault never takes its turn, so no other does

        async def take(_: None) -> int:
            await self.computed(self._back.take, dict(weights.named()))
            return weights.version

        return await self.jointly(take)

    def _fits(self, weights: Weights) -> None:
        weights.verify()
        offered = {name: tuple(tensor.shape) for name, tensor in weights.named()}
        wanted = self._back.shapes()
        wrong = [
            f"{name} is {offered.get(name)}, not {shape}"
            for name, shape in wanted.items()
            if offered.get(name) != shape
        ]
        if wrong:
            raise ValueError(
                f"critic.load: {len(wrong)} of the policy's {len(wanted)} tensors do not fit ({'; '.join(wrong[:3])}). "
                "A critic whose model (critic.model) is not the policy's starts from its own files instead"
            )


async def _none() -> AsyncGenerator[tuple[Order, ...], None]:
    return
    yield ()


async def _of_critic(error: FloatingPointError, met: int) -> FloatingPointError:
    return FloatingPointError(f"critic, version {met}: {error}")
