"""The trainer of runs without generation: supervised training, DPO, reward models.

Consumes batches of groups that nobody sampled (`data.conversations`), one optimizer step each; produces metrics,
versioned weights and checkpoints, and for held-out groups the loss without learning. The ranks answer as one; how they
work together is `text_trainer.py`'s business.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlinf.actors.base import configured
from rlinf.actors.text_trainer import TextTrainer
from rlinf.algos.loss_sum import LossSum
from rlinf.config.learning import SupervisedSettings
from rlinf.data.datasets.rendering import REF
from rlinf.data.packing import Packed, Row
from rlinf.data.sample import Group
from rlinf.data.tokenizer import TokenizerSource
from rlinf.models.language.build import ModelSource, ModelSpec
from rlinf.models.language.lora import POLICY
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.streams.stream import each
from rlinf.training.backend import Optimization, Outputs
from rlinf.training.policy import ADAPTERS_OFF
from rlinf.training.schedule import Forward, ForwardBackward, supervised_commands
from rlinf.training.supervised import OUTPUT, Objective, described, shown

Groups = Iterable[Group] | AsyncIterable[Group]


class SupervisedTrainer(TextTrainer):
    """Owns the weights that learn from given texts."""

    @configured(SupervisedSettings)
    async def setup(
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        settings: SupervisedSettings,
        objective: Objective,
        chat_template: str | None = None,
        seed: int = 0,
        lora: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
    ) -> None:
        """Make the model on the ranks, and its optimizer.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; saved with every checkpoint.
            settings: how it computes and learns; or any of its keys, such as lr=1e-4.
            objective: what is learned; it says which head the model gets.
            chat_template: see `Trainer`.
            seed: of a new model's weights, of a new head, and of adapters.
            lora, freeze: see `Trainer`.

        Raises:
            ValueError: a model or tokenizer that cannot be made, a setting that does not exist, or two ranks on a host.
        """
        reference = settings.reference
        if reference is not None and lora is None:
            raise ValueError(f"{self._role}: reference={reference!r} needs adapters: set lora")
        saved = {} if reference in (None, ADAPTERS_OFF) else {REF: str(reference)}
        self._reference = REF if saved else None
        await self._make(
            ModelSpec(model, objective.head, seed=seed, lora=lora, adapters=saved, freeze=freeze, compute=settings),
            tokenizer,
            chat_template,
        )
        self._objective = objective
        self._own_columns = (
            frozenset({REF}) if reference is not None and objective.needs_reference else frozenset[str]()
        )
        self._batch: list[Group] = []

    # Learning ----------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True, late=True)
    async def train(self, groups: Groups) -> dict[str, float]:
        """Learn from a batch: one optimizer step on the mean loss of all of it.

        Args:
            groups: a list or a stream of them; computed in the order of their ids, whichever came first.

        Returns:
            `loss`, `grad_norm`, `lr` and what the objective watches; `samples`, `tokens` (read, prompts included) and
            `response_tokens` (learned). The weights' version has gone up by one.

        Raises:
            ValueError: there is nothing to learn from, or something that the objective needs is missing.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        batch: list[Group] = []

        async def rows() -> AsyncIterator[list[Row]]:
            batch.extend(sorted([group async for group in each(groups)], key=lambda group: group.id))
            yield await self.compute(self._objective.rows, batch)

        packing = replace(self._packing, together=self._objective.together)
        commands = supervised_commands(rows(), packing, where="train", columns=self._own_columns)
        steps = await self._work(commands, self._learner)
        if self.rank > 0:
            return {}
        self._batch = batch
        gathered, metrics = steps[-1]
        return {**described(batch), **gathered.values(), **metrics}

    def _learn(self, learner: Optimization, command: ForwardBackward, *, again: bool = False) -> None:
        batch = command.packed()
        cached_columns = {name: self._back.outputs(batch, adapter=self._reference)[0] for name in command.columns}

        def loss(batch: Packed, outputs: Outputs) -> LossSum:
            return self._objective.loss(batch, outputs, cached_columns)

        learner.accumulate([batch], loss)

    # Without learning --------------------------------------------------------------------------------------------

    @endpoint(device=True, gang=True, late=True)
    async def outputs(self, groups: Groups) -> AsyncIterator[Group]:
        """Groups with what the model says of each learned token: log-probs, or the score.

        Args:
            groups: a list or a stream of them.

        Yields:
            Each group as soon as it is complete, with the numbers in `per_token`, of which `measured` makes the loss.
        """
        async with aclosing(self._annotated(groups, (OUTPUT, *sorted(self._own_columns)))) as annotated:
            async for group in annotated:
                yield group

    def _score(self, command: Forward) -> Tensor:
        batch = command.packed()
        return torch.stack(
            [
                self._back.outputs(batch, adapter=self._reference if name == REF else POLICY)[0]
                for name in command.columns
            ]
        )

    # What it gives -----------------------------------------------------------------------------------------------

    @endpoint(joint=True)
    async def samples(self, count: int, tokens: int = 0) -> list[dict[str, Any]]:
        """The first `count` samples of the last batch, as plain values for people; see `shown`."""
        return await self.compute(shown, self._batch, self._tokenizer, count, tokens)
