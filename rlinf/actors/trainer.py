"""The trainer: turns scored groups into better weights, on one rank or on many.

Consumes groups, or worked examples, as they come; computes on each micro-batch as soon as it is full, so training
overlaps with the generation of the rest. Produces metrics, versioned weights, and checkpoints. The ranks answer as one:
a flow calls the group and reads one answer; how they work together is `text_trainer.py`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.actors.base import configured
from rlinf.actors.text_trainer import TextTrainer
from rlinf.config.learning import LearningSettings, TrainerSettings
from rlinf.data.packing import Packed, Row
from rlinf.data.sample import Example, Group, Learned
from rlinf.data.tokenizer import TokenizerSource
from rlinf.models.language.build import ModelSource, ModelSpec
from rlinf.models.language.fsdp import dtype_of
from rlinf.models.language.lora import POLICY
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.backend import Optimization
from rlinf.training.batch_metrics import describe, rescue, show_samples, taken_steps
from rlinf.training.policy import (
    ADAPTERS_OFF,
    REFERENCE,
    TEACHER,
    Algorithm,
    advantage_rows,
    algorithm_of,
    learn_answers,
    learn_policy,
    own_columns,
    teaches,
)
from rlinf.training.schedule import (
    BatchPlan,
    BatchSchedule,
    Forward,
    ForwardBackward,
    example_rows,
    supervised_commands,
)

Groups = Iterable[Group] | AsyncIterable[Group]
Batches = Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]]
_REMEMBERED = 1024
"""Batches whose samples a trainer remembers until it is asked: a program that never asks shall not fill memory."""


class Trainer(TextTrainer):
    """Owns the weights that learn."""

    @configured(TrainerSettings)
    async def setup(
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        settings: TrainerSettings,
        algorithm: Algorithm = "grpo",
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
            algorithm: a recipe's name; `{"name": "dapo", "overrides": {"loss.clip_high": 0.3}}`, see `recipes.get`; or
                spec.
            chat_template: the one that prompts were made with, saved with the tokenizer in place of its own; None keeps
                that.
            seed: of a new model's weights, of adapters, and of the order of minibatches.
            lora: `{"r": 8, "alpha": 16, "target_modules": "auto"}` trains adapters, see `add_adapters`; None all
                weights.
            freeze: modules whose weights do not learn, see `ModelConfig.freeze`.

        Raises:
            ValueError: a model or tokenizer that cannot be made, a setting that does not exist, or two ranks on a host.
        """
        self._spec, self._settings, self._seed = algorithm_of(algorithm), settings, seed
        own = _own_columns(self._role, settings, adapters=lora is not None)
        saved = {column: source for column, source in own.items() if source != ADAPTERS_OFF}
        self._adapters = {column: column if column in saved else None for column in own}
        """The adapters that this model takes in place of its own, by the column that they compute."""
        spec = ModelSpec(
            model, seed=seed, lora=lora, adapters=saved, freeze=freeze, watches_routing=True, compute=settings
        )
        await self._make(spec, tokenizer, chat_template)
        self._publishes, self._load_of = dtype_of(settings.publishes), self._loads(settings)
        self._lends = settings.lends
        if self._lends:
            from rlinf.engines.transformers.model import join_parts

            await self.compute(join_parts, self._back.model)  # type: ignore[attr-defined]  # fsdp's
        self._batch: BatchSchedule | None = None
        self._learned: deque[Learned] = deque(maxlen=_REMEMBERED)

    def _loads(self, settings: TrainerSettings) -> Callable[[Sequence[Row]], np.ndarray] | None:
        """A function that counts how busy experts were, for the loss that balances them; None if there is none.

        Raises:
            ValueError: routes are to be replayed, and nothing can.
        """
        mixture: Any = getattr(self._back, "mixture", None)
        if settings.router_replay is True and mixture is None:
            raise ValueError(
                f"trainer.router_replay=true: trainer.backend={settings.backend} does not replay routes; auto trains "
                "without"
            )
        if not settings.router_aux_loss:
            return None
        if mixture is None or not mixture.replays:
            raise ValueError(
                f"algorithm.router_aux_loss={settings.router_aux_loss:g} balances experts by what the engine chose: it "
                "needs a mixture of experts, trainer.router_replay and a trainer.backend that replays routes; set it "
                "to 0"
            )
        return mixture.load_of  # type: ignore[no-any-return]

    # Learning ----------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True, late=True)
    async def train(self, groups: Groups) -> dict[str, float]:
        """Learn from a batch of scored groups: `epochs` x `minibatches` optimizer steps.

        The first epoch computes on groups as they arrive and takes its step when the last one has, unless the algorithm
        must know the whole batch first. The engine's log-probs stand for the old policy's unless the algorithm says
        otherwise; how far they are from ours is measured before the first step. Samples without a reward count as not
        drawn.

        Args:
            groups: a list or a stream of them, judged.

        Returns:
            Metrics of the batch; the weights' version has gone up by one. A batch that gives no gradient, since no
            group of it teaches or every answer was cut and is masked, makes no update: `update/skipped` is 1.

        Raises:
            NotScored: not one answer has a reward.
            ValueError: a group that was not judged, nothing to learn from, or something that the algorithm needs to
                know of tokens and nobody said.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        met = self.version
        own = own_columns(self._spec, minibatches=self._settings.minibatches, own=self._adapters)
        settings, seed = self._settings, (self._seed, self.version)
        batch = BatchSchedule(
            partial(advantage_rows, self._spec, later=own.first_pass, ages=settings.staleness > 0),
            BatchPlan("train", seed, settings.epochs, settings.minibatches, self._spec.needs_whole_batch),
            self._packing,
            self.compute,
            in_order=self._in_order,
            own=own,
            load_of=self._load_of,
        )

        async def explain(error: FloatingPointError, met: int) -> FloatingPointError:
            return await self._kept(error, batch, met)

        steps = await self._work(batch.commands(groups), self._learner, explain)
        if self.rank > 0:
            return {}
        self._batch = batch
        leaves_out = self._spec.sampling is not None
        parts: tuple[list[Group], list[Group]] = ([], [])
        for group in batch.groups:
            parts[leaves_out and not teaches(self._spec, group)].append(group)
        self._learned.append(Learned.of(*parts))
        described = await self.compute(describe, batch.groups, met, self._spec, oldest=self._settings.staleness)
        return {**described, **taken_steps(steps)}

    @endpoint(device=True, joint=True, late=True)
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
        learner = self._back.optimization(LearningSettings(lr=lr, betas=(0.9, 0.999)))
        commands = supervised_commands(example_rows(batches), self._packing)
        steps = await self._work(commands, learner)
        if self.rank > 0:
            return {}
        if not steps:
            raise ValueError("sft: not one batch came")
        losses = [numbers["loss"] for _, numbers in steps]
        return {"sft/loss_first": losses[0], "sft/loss": losses[-1], "sft/steps": float(len(losses))}

    def _learn(self, learner: Optimization, command: ForwardBackward, *, again: bool = False) -> None:
        batch = command.packed()
        if command.supervised:
            learn_answers(learner, batch)
            return
        for name in self._adapters.keys() & command.columns - command.cached_columns.keys():
            command.cached_columns[name] = self._logprobs(batch, name)
        compare = command.compare and not again
        learn_policy(
            learner,
            batch,
            self._spec,
            version=self.version,
            compare=compare,
            cached_columns=command.cached_columns,
            oldest=self._settings.staleness,
            balance=self._settings.router_aux_loss,
        )

    def _score(self, command: Forward) -> Tensor:
        batch = command.packed()
        return torch.stack([self._logprobs(batch, name) for name in command.columns])

    def _logprobs(self, batch: Packed, column: str) -> Tensor:
        """Log-probs under our weights as they are or, for another policy, with its adapters in place of ours."""
        return self._back.outputs(batch, adapter=self._adapters.get(column, POLICY))[0]

    async def _kept(self, error: FloatingPointError, batch: BatchSchedule, met: int) -> FloatingPointError:
        """The error, with where the batch was kept."""
        if self._settings.rescue_dir is None:
            return error
        path = await self.compute(rescue, batch.groups, batch.learned.advantages, Path(self._settings.rescue_dir), met)
        return FloatingPointError(f"{error}. The batch was kept in {path} and, with its texts, in the .json beside it")

    # What it gives -----------------------------------------------------------------------------------------------

    @endpoint(joint=True)
    async def samples(self, count: int, tokens: int = 0) -> list[dict[str, Any]]:
        """The first `count` samples by (prompt id, index) of the last batch, as plain values for people.

        Returns:
            For each `prompt_id`, `index`, `prompt`, `response`, `answer`, `reward`, `outcome`, `scores`, `remark`,
            `advantage`, `length` (tokens), `versions` (of the weights that made it: lowest, highest) and `group` (how
            many answers its prompt had, of which some may not be here); for the first `tokens` of them their `tokens`,
            see `token_rows`; of a conversation what was only `read`, see `read_spans`.
        """
        if (batch := self._batch) is None:
            return []
        learned = batch.learned.advantages
        return await self.compute(show_samples, batch.groups, learned, count, self._tokenizer, tokens)

    @endpoint(joint=True)
    async def learned(self) -> Learned:
        """Which samples were learned from in the batches since this was last asked; a batch whose step was not taken is
        none of them."""
        learned = sum(self._learned, Learned())
        self._learned.clear()
        return learned


def _own_columns(role: str, settings: TrainerSettings, *, adapters: bool) -> dict[str, str]:
    """Columns of log-probs that this model computes by adapters other than those that learn, and their source.

    Raises:
        ValueError: there are some, and the model has no adapters.
    """
    columns: dict[str, str] = {}
    for name, column in (("reference", REFERENCE), ("teacher", TEACHER)):
        source: str | None = getattr(settings, name)
        if source is not None and not adapters:
            raise ValueError(
                f"{role}: {name}={source!r} needs adapters: set lora, or give the {name} a role of its own"
            )
        if source is not None:
            columns[column] = source
    return columns
