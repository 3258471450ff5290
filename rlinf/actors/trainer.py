"""The trainer: turns scored groups into better weights.

Consumes groups, or worked examples, as they come; computes on each micro-batch as soon as it is full, so training
overlaps with the generation of the rest. Produces metrics, versioned weights, and checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch

from rlinf.actors.learner import Learner
from rlinf.actors.modeling import ModelSource, build_model
from rlinf.algos.advantages import group_relative
from rlinf.algos.losses import LossSum
from rlinf.data.batch import cut, pad, policy_batch
from rlinf.data.iterate import each
from rlinf.data.sample import Example, Group, Sample
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.data.weights import Weights
from rlinf.runtime.actor import Actor, endpoint

Scored = tuple[Sample, float]
"""A sample and its advantage."""


class Trainer(Actor):
    """Owns the weights that learn."""

    async def setup(  # type: ignore[override]
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        seed: int = 0,
        lr: float = 1e-6,
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        epochs: int = 1,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        advantage_scale: Literal["std", "none"] = "std",
        micro_batch_tokens: int = 2048,
    ) -> None:
        """Make the model and its optimizer.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; saved with every checkpoint.
            seed: of a new model's weights.
            lr, warmup_steps, betas, weight_decay, grad_clip: of AdamW, see `Learner`.
            epochs: optimizer steps on each batch of groups.
            clip_low, clip_high, dual_clip: of the loss, see `losses.policy`.
            advantage_scale: see `advantages.group_relative`.
            micro_batch_tokens: tokens (prompts included) that are computed at once; a longer sample stands alone.

        Raises:
            ValueError: a model or tokenizer that cannot be made, or more than one rank.
        """
        if self.world_size > 1:
            raise ValueError(
                f"trainer: {self.world_size} hosts were given, but it trains on one host so far: name a single host"
            )
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        self._model = await self.compute(build_model, model, self._tokenizer, seed=seed)
        self._learner = Learner(
            self._model, lr=lr, warmup_steps=warmup_steps, betas=betas, weight_decay=weight_decay, grad_clip=grad_clip
        )
        self._epochs = epochs
        self._clip_low, self._clip_high, self._dual_clip = clip_low, clip_high, dual_clip
        self._advantage_scale: Literal["std", "none"] = advantage_scale
        self._budget = micro_batch_tokens
        self._version = 0

    @endpoint(device=True)
    async def train(self, groups: Iterable[Group] | AsyncIterable[Group]) -> dict[str, float]:
        """Learn from a batch of scored groups: GRPO, `epochs` optimizer steps.

        The first epoch computes on groups as they arrive and takes its step when the last one has. The engine's
        log-probs stand for the old policy's; how far they are from ours is measured before the first step.

        Args:
            groups: a list or a stream of them, each sample with its reward.

        Returns:
            Metrics of the batch; the weights' version has gone up by one.

        Raises:
            ValueError: a group without rewards, or no group at all.
            FloatingPointError: the loss or its gradient is not finite.
        """
        self._learner.begin()
        arrived: list[Group] = []
        scored: list[Scored] = []
        waiting: list[Group] = []
        held = 0  # tokens waiting
        async for group in each(groups):
            arrived.append(group)
            waiting.append(group)
            held += sum(map(_size, group.samples))
            if held >= self._budget:
                scored += await self.compute(self._learn_fresh, waiting)
                waiting, held = [], 0
        if not arrived:
            raise ValueError("train: not one group came: were there prompts?")
        total, last = await self.compute(self._finish, waiting, scored)
        return {**_describe(arrived), **total.values(), **last}

    @endpoint(device=True)
    async def sft(
        self, batches: Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]], *, lr: float = 2e-3
    ) -> dict[str, float]:
        """Learn from worked examples, one optimizer step per batch, with an optimizer of its own.

        Args:
            batches: a list or a stream of batches.
            lr: constant learning rate of AdamW.

        Returns:
            `sft/loss_first` and `sft/loss`, of the first and last batch, nats per token, and `sft/steps`; the weights'
            version has gone up by one per batch.

        Raises:
            ValueError: there was no batch.
            FloatingPointError: the loss or its gradient is not finite.
        """
        learner = Learner(self._model, lr=lr)
        step_losses = [await self.compute(self._learn_examples, learner, batch) async for batch in each(batches)]
        if not step_losses:
            raise ValueError("sft: not one batch came")
        return {
            "sft/loss_first": step_losses[0],
            "sft/loss": step_losses[-1],
            "sft/steps": float(len(step_losses)),
        }

    @endpoint
    async def weights(self) -> Weights:
        """The weights as they are now; a copy, so that training may go on."""
        return await self.compute(self._pack)

    @endpoint
    async def save(self, path: str | Path) -> str:
        """Write a Hugging Face checkpoint: model and tokenizer, for `from_pretrained`.

        Written beside `path` and renamed, so that `path` is whole or not there.

        Returns:
            The path.
        """
        await self.compute(self._save, Path(path))
        return str(path)

    def _learn_fresh(self, groups: Sequence[Group]) -> list[Scored]:
        """Add groups that have just come to the gradient; returns their samples with advantages."""
        samples = [sample for group in groups for sample in group.samples]
        rewards = torch.tensor([reward for group in groups for reward in group.rewards])
        members = torch.tensor([number for number, group in enumerate(groups) for _ in group.samples])
        advantages: list[float] = group_relative(rewards, members, scale=self._advantage_scale).tolist()
        scored = list(zip(samples, advantages, strict=True))
        self._learn(scored, True)
        return scored

    def _learn(self, scored: Sequence[Scored], first: bool) -> None:
        """Add samples to the gradient, in micro-batches."""
        sizes = [_size(sample) for sample, _ in scored]
        for piece in cut(scored, sizes, self._budget):
            batch = policy_batch([sample for sample, _ in piece], [advantage for _, advantage in piece])
            self._learner.learn_policy(
                batch,
                clip_low=self._clip_low,
                clip_high=self._clip_high,
                dual_clip=self._dual_clip,
                compare=first,
            )

    def _finish(self, waiting: Sequence[Group], scored: list[Scored]) -> tuple[LossSum, dict[str, float]]:
        """The rest of the first epoch, its step, and the other epochs; sums over all, and the last step's numbers."""
        scored = scored + self._learn_fresh(waiting)
        total, last = self._learner.step()
        for _ in range(1, self._epochs):
            self._learn(scored, False)
            more, last = self._learner.step()
            total = total + more
        self._version += 1
        return total, last

    def _learn_examples(self, learner: Learner, batch: Sequence[Example]) -> float:
        sizes = [len(example.prompt_ids) + len(example.response_ids) for example in batch]
        for piece in cut(batch, sizes, self._budget):
            learner.learn_answers(pad([(example.prompt_ids, example.response_ids) for example in piece]))
        loss = learner.step()[1]["loss"]
        self._version += 1
        return loss

    def _pack(self) -> Weights:
        # In the compute thread, where both change: so a version never names another's weights.
        return Weights.pack(self._model.named_parameters(), self._version)

    def _save(self, path: Path) -> None:
        aside = path.with_name(f".{path.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        self._model.save_pretrained(aside)
        self._tokenizer.save_pretrained(aside)
        if path.exists():
            replaced = path.with_name(f".{path.name}.old")
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(path, replaced)
            os.replace(aside, path)
            shutil.rmtree(replaced)
        else:
            os.replace(aside, path)


def _size(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + len(sample.response_ids)


def _describe(groups: Sequence[Group]) -> dict[str, float]:
    """What the batch looked like, apart from learning."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
    lengths = torch.tensor([len(sample.response_ids) for sample in samples], dtype=torch.float64)
    uniform = sum(len(set(group.rewards)) == 1 for group in groups)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "truncated": sum(sample.truncated for sample in samples) / len(samples),
        "groups": float(len(groups)),
        "groups/uniform": uniform / len(groups),
        "samples": float(len(samples)),
        "tokens": float(sum(_size(sample) for sample in samples)),
        "response_tokens": float(lengths.sum()),
    }
