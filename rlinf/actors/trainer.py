"""The trainer: turns scored groups into better weights, on one rank or on many.

Consumes groups, or worked examples, as they come; computes on each micro-batch as soon as it is full, so training
overlaps with the generation of the rest. Produces metrics, versioned weights, and checkpoints. The ranks answer as one:
a flow calls the group and reads one answer; how they work together is `base_trainer.py`'s business.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf.actors.base.base_trainer import LearningActor
from rlinf.data.packing import Packed
from rlinf.data.sample import Example, Group
from rlinf.data.tokenizer import TokenizerSource
from rlinf.data.weights import Weights
from rlinf.models.language.fsdp import Sharding
from rlinf.models.language.load import ModelSource
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.backend import ModelSettings, Optimization
from rlinf.training.learner import Schedule, learn_answers, learn_policy
from rlinf.training.text.batch_metrics import describe, rescue, show_samples
from rlinf.training.text.commands import Learn, Score
from rlinf.training.text.policy_schedule import PolicyOrders, answer_orders
from rlinf.training.text.requirements import REFERENCE, Algorithm, algorithm_of, asked_beside
from rlinf.weights.publish import publish

Groups = Iterable[Group] | AsyncIterable[Group]
Batches = Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]]


class Trainer(LearningActor):
    """Owns the weights that learn."""

    async def setup(  # type: ignore[override]
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        algorithm: Algorithm = "grpo",
        reference: Literal["adapters_off"] | None = None,
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
        micro_batch_tokens: int = 2048,
        order: Literal["prompt", "arrival"] = "prompt",
        dtype: str = "float32",
        sharding: Sharding = "shard",
        gradient_checkpointing: bool = False,
        lora: Mapping[str, Any] | None = None,
        logprob_chunk: int = 1024,
        backend: str = "fsdp",
        rescue_dir: str | None = None,
    ) -> None:
        """Make the model on the ranks, and its optimizer.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; saved with every checkpoint.
            algorithm: a recipe's name; `{"name": "dapo", "overrides": {"loss.clip_high": 0.3}}`, see `spec.get`; or a
                spec.
            reference: who says what a reference policy thinks of each token, if the algorithm asks for that: None for a
                role of its own (`ref_logprobs` of the samples), "adapters_off" for this model without its adapters.
            seed: of a new model's weights, of adapters, and of the order of minibatches.
            lr, warmup_steps, schedule, total_steps, min_lr_ratio, betas, weight_decay, grad_clip: see `Learner`.
            epochs: passes over each batch of groups.
            minibatches: optimizer steps in each pass, each on a part of the groups; with more than one, training begins
                when the whole batch has come.
            micro_batch_tokens: tokens (prompts included) that a rank computes at once; a longer sample stands alone.
            order: "prompt" computes on groups in the order of their prompts' ids, so that a run can be repeated bit for
                bit; "arrival" as they come, which waits for nobody when one answer takes long.
            dtype: to compute in, "float32" or "bfloat16"; weights, gradients' sums and the optimizer are float32.
            sharding: how model and optimizer lie on the ranks: "shard" spreads one copy over all of them, "replicate"
                gives each rank a copy, "hybrid" each machine. What is learned does not depend on it.
            gradient_checkpointing: keep only the input of each layer and compute the rest twice.
            lora: `{"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}` trains adapters; None all weights.
            logprob_chunk: response tokens whose logits exist at a time.
            backend: what trains: "fsdp", or the dotted path of a `BackEnd`.
            rescue_dir: where a batch is kept whose loss or gradient is not finite; None keeps none.

        Raises:
            ValueError: a model or tokenizer that cannot be made, a setting that does not exist, or two ranks on a host.
        """
        _check(epochs=epochs, minibatches=minibatches, micro_batch_tokens=micro_batch_tokens)
        spec = algorithm_of(algorithm)
        if reference not in (None, "adapters_off"):
            raise ValueError(f"{self._role}: reference={reference!r} is neither None nor 'adapters_off'")
        if reference is not None and lora is None:
            raise ValueError(
                f"{self._role}: reference='adapters_off' needs adapters: set lora, or give the reference policy a role "
                "of its own"
            )

        settings = ModelSettings(
            model,
            seed=seed,
            lora=lora,
            dtype=dtype,
            sharding=sharding,
            gradient_checkpointing=gradient_checkpointing,
            logprob_chunk=logprob_chunk,
        )
        learner = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "schedule": schedule,
            "total_steps": total_steps,
            "min_lr_ratio": min_lr_ratio,
            "betas": betas,
            "weight_decay": weight_decay,
            "grad_clip": grad_clip,
        }
        await self._make(settings, tokenizer=tokenizer, order=order, learner=learner, backend=backend)
        self._spec, self._adapters_off, self._minibatches = spec, reference is not None, minibatches
        self._beside = asked_beside(spec, minibatches=minibatches, adapters_off=self._adapters_off)
        self._epochs, self._budget, self._seed = epochs, micro_batch_tokens, seed
        self._rescue_dir = rescue_dir
        self._batch: PolicyOrders | None = None

    # Learning ----------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def train(self, groups: Groups) -> dict[str, float]:
        """Learn from a batch of scored groups: `epochs` x `minibatches` optimizer steps.

        The first epoch computes on groups as they arrive and takes its step when the last one has, unless the algorithm
        must know the whole batch first. The engine's log-probs stand for the old policy's unless the algorithm says
        otherwise; how far they are from ours is measured before the first step. Samples without a reward count as not
        drawn.

        Args:
            groups: a list or a stream of them, judged.

        Returns:
            Metrics of the batch; the weights' version has gone up by one.

        Raises:
            ValueError: a group that was not judged, nothing to learn from, or something that the algorithm needs to
                know of tokens and nobody said.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        met = self.version
        batch = PolicyOrders(
            self._spec,
            ranks=self._shares,
            in_order=self._in_order,
            budget=self._budget,
            epochs=self._epochs,
            minibatches=self._minibatches,
            seed=(self._seed, self.version),
            adapters_off=self._adapters_off,
            compute=self.compute,
        )

        async def explain(error: FloatingPointError, met: int) -> FloatingPointError:
            return await self._kept(error, batch, met)

        steps = await self._work_together(batch.orders(groups), self._learner, explain)
        if self.rank > 0:
            return {}
        self._batch = batch
        sums = [gathered for gathered, _ in steps]
        shaped = None if self._spec.shaping is None else batch.lesson.rewards
        described = await self.compute(describe, batch.groups, met, shaped)
        return {**described, **sum(sums[1:], sums[0]).values(), **steps[-1][1]}

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
        learner = self._back.optimization(lr=lr)
        orders = answer_orders(batches, self._shares, self._budget)
        steps = await self._work_together(orders, learner)
        if self.rank > 0:
            return {}
        if not steps:
            raise ValueError("sft: not one batch came")
        losses = [numbers["loss"] for _, numbers in steps]
        return {"sft/loss_first": losses[0], "sft/loss": losses[-1], "sft/steps": float(len(losses))}

    def _learn(self, learner: Optimization, order: Learn, *, again: bool = False) -> None:
        batch = order.packed()
        if learner is not self._learner:
            learn_answers(learner, batch)
            return
        if REFERENCE in self._beside and REFERENCE not in order.kept:
            order.kept[REFERENCE] = self._logprobs(batch, REFERENCE)
        compare = order.compare and not again
        learn_policy(learner, batch, self._spec, version=self.version, compare=compare, kept=order.kept)

    def _score(self, order: Score) -> Tensor:
        batch = order.packed()
        return torch.stack([self._logprobs(batch, name) for name in order.columns])

    def _logprobs(self, batch: Packed, column: str) -> Tensor:
        """Log-probs under our weights as they are or, for the reference, as they were before there were adapters."""
        return self._back.outputs(batch, adapters=column != REFERENCE)[0]

    async def _kept(self, error: FloatingPointError, batch: PolicyOrders, met: int) -> FloatingPointError:
        """The error, with where the batch was kept."""
        if self._rescue_dir is None:
            return error
        path = await self.compute(rescue, batch.groups, batch.lesson.advantages, Path(self._rescue_dir), met)
        return FloatingPointError(f"{error}. The batch was kept in {path} and, with its texts, in the .json beside it")

    # What it gives -----------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def weights(self) -> Weights | None:
        """The weights as they are between two batches; a copy, so that training may go on. None but on rank 0."""
        # a device that is shared has no room for the copy beside whoever comes next
        in_host_memory = self._cell.leased or self.device.type == "cpu"

        async def published(_: None) -> Weights | None:
            return await publish(self, self._back.export, self.version, in_host_memory=in_host_memory)

        return await self.jointly(published)

    @endpoint(joint=True)
    async def samples(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples by (prompt id, index) of the last batch, as plain values for people.

        Returns:
            For each `prompt_id`, `index`, `prompt`, `response`, `answer`, `reward`, `outcome`, `scores`, `remark`,
            `advantage`, `length` (tokens) and `versions` (of the weights that made it: lowest, highest).
        """
        batch = self._batch
        return [] if batch is None else await self.compute(show_samples, batch.groups, batch.lesson.advantages, count)


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"trainer: {name}={count} must be at least 1")
