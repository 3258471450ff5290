"""The trainer: turns scored groups into better weights, on one rank or on many.

Consumes groups, or worked examples, as they come; computes on each micro-batch as soon as it is full, so training
overlaps with the generation of the rest. Produces metrics, versioned weights, and checkpoints. The ranks answer as one:
a flow calls the group and reads one answer; how they work together is `text_trainer.py`'s business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.actors.async_replicas import AsyncReplicas
from rlinf.actors.base import configured
from rlinf.actors.replicas.helpers import JoinedHelpers
from rlinf.actors.replicas.joined import JoinedReplicas
from rlinf.actors.replicas.members import Replicas
from rlinf.actors.text_trainer import TextTrainer
from rlinf.algos.algorithms import Divergence
from rlinf.algos.token_losses import TokenLoss
from rlinf.config.learning import LearningSettings, TrainerSettings, own_adapters, past_adapters
from rlinf.data.face import GroupFace, faces, shown_of, wholes
from rlinf.data.packing import Packed, Row, cut, pack
from rlinf.data.sample import Datum, Example, Group, Learned
from rlinf.data.tokenizer import TokenizerSource
from rlinf.data.weights import Weights
from rlinf.joining.listener import listens_at
from rlinf.models.distillation import TeacherHead
from rlinf.models.language.build import ModelSource, ModelSpec, output_embedding
from rlinf.models.language.fsdp import dtype_of
from rlinf.models.language.lora import POLICY, apart
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.language.tenants import Tenant
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.errors import UserError, WrongSetting
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.streams.handles import Holding
from rlinf.runtime.streams.stream import Stream
from rlinf.training.backend import Optimization
from rlinf.training.batch_metrics import describe, rescue, show_samples, taken_steps
from rlinf.training.checkpoint import Restored, Source
from rlinf.training.fsdp import FsdpBackEnd, ModelPass
from rlinf.training.optimizer import Adam
from rlinf.training.policy import (
    ADAPTERS_OFF,
    REFERENCE,
    TEACHER,
    Algorithm,
    OwnColumns,
    advantage_rows,
    algorithm_of,
    asks_rewards_alone,
    learn_answers,
    learn_policy,
    learn_tokens,
    needed_of_policy,
    own_columns,
    teaches,
)
from rlinf.training.schedule import (
    BatchPlan,
    BatchSchedule,
    Command,
    Forward,
    ForwardBackward,
    MicroBatchPacker,
    OptimizerStep,
    TokenPass,
    example_rows,
    supervised_commands,
    token_rounds,
)
from rlinf.training.weight_sync import gathered, publish

Groups = Iterable[Group] | AsyncIterable[Group]
Batches = Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]]
_REMEMBERED = 1024
"""Batches whose samples a trainer remembers until it is asked: a program that never asks shall not fill memory."""


class Trainer(TextTrainer):
    """Owns the weights that learn."""

    _joined: Replicas | None = None
    """Those that may join, where they do."""

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
        self._check_joining(settings)
        own = _own_columns(self._role, settings, adapters=lora is not None)
        saved = {column: source for column, source in own.items() if source != ADAPTERS_OFF}
        self._adapters = {column: column if column in saved else None for column in own}
        """The adapters that this model takes in place of its own, by the column that they compute."""
        self._adapter_of = own_adapters(settings.own_weights)
        """Adapters of agents that have their own."""
        self._further = (*past_adapters(settings.past), *self._adapter_of.values())
        """Those that go with the weights."""
        if self._further and lora is None:
            raise ValueError(f"{self._role}: past and own_weights are adapters: set lora")
        spec = ModelSpec(model, seed=seed, lora=lora, freeze=freeze, watches_routing=True, compute=settings)
        spec = replace(spec, adapters={**saved, **dict.fromkeys(self._further)}, learning=[*self._adapter_of.values()])
        self._models: dict[str, Optimization] = {}
        """Optimizers by the adapters that they train."""
        self._gathered: set[str] = set()
        """Models of which gradients wait for `optim_step`."""
        await self._make(spec, tokenizer, chat_template)
        if self._adapter_of:  # rows of several agents read nothing together
            self._packing = replace(self._packing, trees=False)
        self._publishes, self._load_of = dtype_of(settings.publishes), self._loads(settings)
        self._lends, self._delta = settings.lends, settings.delta
        if self._lends:
            from rlinf.engines.transformers.model import join_parts

            await self.compute(join_parts, self._back.model)  # type: ignore[attr-defined]  # fsdp's
        if isinstance(self._spec.loss, Divergence):
            await self.compute(self._take_heads, self._spec.loss, settings)
        self._models[POLICY] = self._learner
        if self._adapter_of and (problem := self._refuses_own(settings)):
            raise WrongSetting(f"agent.own_weights: adapters of single agents need {problem}")
        self._batch: tuple[Sequence[Group], Sequence[float | np.ndarray]] | None = None
        self._learned: deque[Learned] = deque(maxlen=_REMEMBERED)
        if settings.join is not None:
            away = replace(settings, join=None, lends=False, rescue_dir=None)
            same = {"algorithm": self._spec, "chat_template": chat_template, "seed": seed, "lora": lora}
            await self._let_join({"model": model, "tokenizer": tokenizer, "settings": away, "freeze": freeze, **same})

    async def _let_join(self, made_of: Mapping[str, Any]) -> None:
        """Let replicas join.

        Raises:
            UserError: it cannot listen there.
        """
        if self.rank:
            return
        if isinstance(self._runner, AsyncReplicas):
            self._runner.helpers = helpers = JoinedHelpers(self, self._fsdp(), made_of)
            self._joined = helpers.replicas
        else:
            self._runner = runner = JoinedReplicas(self, self._fsdp(), made_of)
            self._joined = runner.replicas
        await self._joined.listen(listens_at(str(self._settings.join)), self._settings.rescue_dir)

    def _check_joining(self, settings: TrainerSettings) -> None:
        """See that replicas may help.

        Raises:
            UserError: they cannot.
        """
        several = self.world_size > 1
        apart = (settings.order == "free") == several and (settings.sharding == "replicate" or not several)
        if settings.join is not None and not (apart and settings.backend == "fsdp" and not settings.own_weights):
            raise UserError(
                f"trainer.join={settings.join}: replicas join a trainer with trainer.backend=fsdp and without "
                "agent.own_weights; of several processes with trainer.sharding=replicate and trainer.order=free, of "
                f"one with any other order. This one has {self.world_size} and {settings.backend}, "
                f"{settings.sharding}, {settings.order}: set these, or leave trainer.join out"
            )

    async def close(self) -> None:
        """End with replicas that joined."""
        if self._joined is not None:
            await self._joined.close()

    def _take(self, source: Path | Source) -> Restored:
        restored = super()._take(source)
        if self._joined is not None:
            self._joined.changed()
        return restored

    def _take_heads(self, part: Divergence, settings: TrainerSettings) -> None:
        """Have the model compute divergences from teachers' distributions.

        Raises:
            ValueError: it cannot, or nobody says which teachers they are.
        """
        module = getattr(self._back, "module", None)
        if not isinstance(module, PolicyModel) or module.divided:
            raise WrongSetting(
                "loss 'divergence' needs trainer.backend=fsdp, and a model that is not split (trainer.parallel)"
            )
        if part.top_k is None and not settings.teacher_models:
            raise WrongSetting(
                "loss 'divergence' over the whole vocabulary needs `teacher_models`, the saved teachers; or set top_k"
            )
        heads = [output_embedding(str(each)) for each in settings.teacher_models] if part.top_k is None else []
        on_device = [(weight.to(self.device), None if bias is None else bias.to(self.device)) for weight, bias in heads]
        module.teacher = TeacherHead(part, settings.logprob_chunk, on_device)

    def _refuses_own(self, settings: TrainerSettings) -> str:
        """Names what is lacking for rows of one batch to be computed with adapters of their own; "" if nothing is."""
        if self.world_size > 1 or settings.dtype != "float32" or settings.backend != "fsdp":
            return "a trainer of one rank with trainer.dtype=float32 and trainer.backend=fsdp"
        module = self._fsdp().module
        plain = module.packs and module.plain_head and module.mixture is None and module.pictures is None
        return "" if plain else "a model of text that packs sequences, without experts"

    def _loads(self, settings: TrainerSettings) -> Callable[[Sequence[Row]], np.ndarray] | None:
        """A function that counts how busy experts were, for the loss that balances them; None if there is none.

        Raises:
            ValueError: routes are to be replayed, and nothing can.
        """
        mixture: Any = getattr(self._back, "mixture", None)
        if settings.router_replay is True and mixture is None:
            raise WrongSetting(
                f"trainer.router_replay=true: trainer.backend={settings.backend} does not replay routes; auto trains "
                "without"
            )
        if not settings.router_aux_loss:
            return None
        if mixture is None or not mixture.replays:
            raise WrongSetting(
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
        self._refuse_gathered("train")
        own = own_columns(self._spec, minibatches=self._settings.minibatches, own=self._adapters)
        settings, seed = self._settings, (self._seed, self.version)
        holding = Holding(groups) if isinstance(groups, Stream) and self._plans_by_faces(own) else None
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

        accounts = asyncio.create_task(self._accounts(batch, met), name="accounts of the batch")
        accounts.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen, if learning failed too
        try:
            source = groups if holding is None else faces(holding)
            steps = await self._work(batch.commands(source), self._learner, explain)
            if self.rank > 0:
                return {}
            learned, described = await accounts
            groups = batch.groups if holding is None else await shown_of(batch.groups, settings.shown_samples)
            self._batch = groups, batch.learned.advantages
        finally:
            await cancel_all([accounts])
            if holding is not None:
                holding.release()
        self._learned.append(learned)
        return {**described, **batch.packer.numbers(), **taken_steps(steps)}

    def _plans_by_faces(self, own: OwnColumns) -> bool:
        """True if rank 0 needs of groups only what their faces tell, so that each rank fetches what it computes on."""
        spec = self._spec
        enough = needed_of_policy(spec) <= own.first_pass and not self._adapter_of and self._load_of is None
        return self.world_size > 1 and self.rank == 0 and enough and not own.whole_batch and asks_rewards_alone(spec)

    async def _accounts(self, batch: BatchSchedule, met: int) -> tuple[Learned, dict[str, float]]:
        """Say what a batch was, beside the learning: which samples, and its metrics."""
        await batch.complete.wait()

        def accounts() -> tuple[Learned, dict[str, float]]:
            leaves_out = self._spec.sampling is not None
            parts: tuple[list[Group], list[Group]] = ([], [])
            for group in batch.groups:
                parts[leaves_out and not teaches(self._spec, group)].append(group)
            described = describe(batch.groups, met, self._spec, oldest=self._settings.staleness)
            return Learned.of(*parts), described

        return await asyncio.to_thread(accounts)

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
        self._refuse_gathered("sft")
        learner = self._back.optimization(LearningSettings(lr=lr, betas=(0.9, 0.999)))
        commands = supervised_commands(example_rows(batches), self._packing)
        steps = await self._work(commands, learner)
        if self.rank > 0:
            return {}
        if not steps:
            raise ValueError("sft: not one batch came")
        losses = [numbers["loss"] for _, numbers in steps]
        return {"sft/loss_first": losses[0], "sft/loss": losses[-1], "sft/steps": float(len(losses))}

    # Steps that a program puts together itself ---------------------------------------------------------------------

    @endpoint(device=True, joint=True, late=True)
    async def forward_backward(self, data: Sequence[Datum], loss: TokenLoss, model: str = POLICY) -> list[np.ndarray]:
        """Add the gradient of a sum over tokens to what the next `optim_step` takes; the log-probs of each datum's
        targets, float32 [tokens].

        Args:
            data: checked, see `Datum.check`.
            loss: of each token.
            model: which one learns, of those that `open_model` made.

        Raises:
            ValueError: there is no such model, or this trainer does not compute so.
        """
        (logprobs,) = await self._token_passes([TokenPass(data, loss, model)])
        return logprobs

    @endpoint(device=True, joint=True, late=True)
    async def forward(self, data: Sequence[Datum], model: str = POLICY) -> list[np.ndarray]:
        """The log-probs of each datum's targets, float32 [tokens]; arguments as of `forward_backward`."""
        (logprobs,) = await self._token_passes([TokenPass(data, None, model)])
        return logprobs

    @endpoint(device=True, joint=True, late=True)
    async def likeliest(
        self, rows: Sequence[Row], count: int, model: str = POLICY
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The tokens that a model holds likeliest in place of each learned one of rows, the likeliest first: int64
        [learned, count], and their log-probs, float32; of each row."""
        self._model(model)
        results: list[tuple[np.ndarray, np.ndarray]] = []
        for some in cut(rows, [row.size for row in rows], self._packing.budget):
            how = partial(self._fsdp().likeliest, count=count, adapter=model)
            tokens, logprobs, *_ = await self.compute_spmd(how, pack(some))
            ends = np.cumsum([row.learned for row in some])[:-1]
            arrays = (np.split(each.cpu().numpy(), ends) for each in (tokens, logprobs.float()))
            results += zip(*arrays, strict=True)
        return results if self.rank == 0 else []

    @endpoint(device=True, joint=True, late=True)
    async def token_passes(self, passes: Sequence[TokenPass]) -> list[list[np.ndarray]]:
        """`forward_backward`, and without a loss `forward`, of several models that `open_model` made, in common batches
        where no model's results can depend on the others'.

        Args:
            passes: one for each model.

        Returns:
            Of each pass what `forward_backward` returns.

        Raises:
            ValueError: see there; two are of the same model.
        """
        return await self._token_passes(passes)

    @endpoint(device=True, joint=True)
    async def why_alone(self) -> str:
        """Why `token_passes` computes models one after the other, and what helps; empty: it has common batches."""
        return await self.compute_spmd(lambda: self._fsdp().apart.why)

    async def _token_passes(self, passes: Sequence[TokenPass]) -> list[list[np.ndarray]]:
        names = [each.model for each in passes]
        learners = [self._model(name) for name in names]
        if len({*names}) < len(names) or (len(names) > 1 and POLICY in names):
            raise ValueError(f"token_passes: {', '.join(names)} must be different models that open_model made")
        rows = [
            [Row.of_datum(datum, () if loss is None else loss.inputs) for datum in data] for data, loss, _ in passes
        ]
        scores: dict[Row, np.ndarray] = {}
        learn = {each.model for each in passes if each.loss is not None}
        try:
            if names == [POLICY]:
                commands = token_rounds(rows[0], self._packing, passes[0].loss, scores)
                await self._work(commands, learners[0], goes_on=True)
            else:
                await self.run_spmd(partial(self._beside, passes, rows, scores))
        except BaseException:
            for name in learn & self._models.keys():  # what half a call left is no gradient of anything
                self._models[name].begin()
                self._gathered.discard(name)
            raise
        self._gathered |= learn
        return [[scores[row][0] for row in some] for some in rows] if self.rank == 0 else []

    async def _beside(
        self, passes: Sequence[TokenPass], rows: Sequence[Sequence[Row]], into: dict[Row, np.ndarray], nothing: None
    ) -> None:
        """Compute passes of several models, each cut into the micro-batches that it has alone."""
        back, packing = self._fsdp(), replace(self._packing, trees=False)
        cuts = [[share for (share,) in MicroBatchPacker(packing).close(some)] for some in rows]
        budget = packing.budget if back.apart.multiple else 0
        alone = {one.model for one in passes if not back.shares_base(self._models[one.model])}  # type: ignore[arg-type]
        for at_once in zip_longest(*cuts):  # never two of one model, whose gradients add up one after the other
            present = [(one, mine) for one, mine in zip(passes, at_once, strict=True) if mine]
            sizes = [budget + 1 if one.model in alone else sum(row.size for row in mine) for one, mine in present]
            for some in cut(present, sizes, budget):
                parts = [
                    ModelPass(self._models[one.model], pack(mine, shares=False), one.loss)  # type: ignore[arg-type]
                    for one, mine in some
                ]
                logprobs = await self.computed(back.passes, parts)
                for (one, mine), (_, batch, _), numbers in zip(some, parts, logprobs, strict=True):
                    self._note_work(batch.lengths, len(batch.targets), len(batch.ids), learns=one.loss is not None)
                    ends = np.cumsum([row.learned for row in mine])[:-1]
                    into.update(zip(mine, np.split(numbers.float().cpu().numpy()[None], ends, axis=1), strict=True))

    @endpoint(device=True, joint=True, late=True)
    async def optim_step(self, adam: Adam, model: str = POLICY) -> dict[str, float]:
        """Take a step with what gathered since the last; nothing is divided.

        Args:
            adam: hyperparameters of this step.
            model: as of `forward_backward`.

        Returns:
            `loss` (the sum), `grad_norm` (before clipping) and `lr`; the weights' version has gone up by one.

        Raises:
            ValueError: nothing gathered.
            FloatingPointError: the loss or its gradient is not finite; the step was not taken.
        """
        learner = self._model(model)
        if model not in self._gathered:
            raise ValueError("optim_step: no gradient has gathered since the last step; call forward_backward first")
        self._gathered.discard(model)

        async def command() -> AsyncGenerator[tuple[Command, ...], None]:
            yield (OptimizerStep(new_version=model == POLICY, adam=adam),) * self._packing.ranks

        steps = await self._work(command(), learner, goes_on=True)
        return steps[0][1] if self.rank == 0 else {}

    @endpoint(device=True, joint=True)
    async def forget_gradients(self, model: str = POLICY) -> None:
        """Drop what gathered since the last step."""
        await self.compute_spmd(self._model(model).begin)
        self._gathered.discard(model)

    def _model(self, name: str) -> Optimization:
        """The optimizer of adapters."""
        if name not in self._models:
            raise ValueError(f"there is no model {name!r}; those that are open are {', '.join(self._models)}")
        if self._settings.backend != "fsdp" or self._packing.rounds_at_once > 1:
            raise ValueError(
                f"trainer.backend={self._settings.backend}, trainer.order={self._settings.order}: gradients of single "
                "calls need backend=fsdp, and ranks in step (order=prompt or any)"
            )
        return self._models[name]

    def _refuse_gathered(self, call: str) -> None:
        if POLICY in self._gathered:
            raise ValueError(f"{call}: gradients of forward_backward wait for optim_step; call that first")

    @endpoint(device=True, joint=True)
    async def open_model(self, name: str, lora: Mapping[str, Any] | None, seed: int = 0) -> None:
        """Give the base model further adapters, which learn by an optimizer of their own; or all of its weights once
        more.

        Args:
            name: of the model that they make of it: letters and digits, new.
            lora: see `add_adapters`; None: all weights, as the base has them.
            seed: of the adapters' values.

        Raises:
            ValueError: the name is in use, or there can be no such model.
        """
        if name in self._models or not name.isalnum():
            raise ValueError(f"open_model: {name!r} must be letters and digits, and new")
        settings = LearningSettings(kind=self._settings.kind)
        self._models[name] = await self.compute_spmd(self._fsdp().open, name, lora, seed, settings)

    @endpoint(device=True, joint=True)
    async def close_model(self, name: str) -> None:
        """Forget a model that `open_model` made, its optimizer and its gradients."""
        self._model(name)
        await self.compute_spmd(self._fsdp().close, name)
        del self._models[name]
        self._gathered.discard(name)

    @endpoint(device=True, joint=True)
    async def save_model(self, name: str, path: str, optimizer: bool = True) -> None:
        """Write a model's adapters, in peft's format, or all its weights, for transformers, and what their optimizer
        keeps; on the disk when it returns."""
        await self.compute_spmd(partial(self._fsdp().save, optimizer=optimizer), self._model(name), Path(path))

    @endpoint(device=True, joint=True)
    async def load_model(self, name: str, path: str, optimizer: bool = True) -> None:
        """Take over what `save_model` wrote, in place of what the model has and of its gradients.

        Raises:
            ValueError: it is of other layers or another rank, or of adapters where this is all weights, or was saved
                without its optimizer.
        """
        await self.compute_spmd(partial(self._fsdp().load, optimizer=optimizer), self._model(name), Path(path))
        self._gathered.discard(name)

    @endpoint(device=True, joint=True)
    async def model_weights(self, name: str | None, version: int) -> Weights | None:
        """The weights of a model, its adapters merged in, or, for None, of the base; as a copy.

        Args:
            name: of the model.
            version: that they are published as.
        """
        dtype, merged = (
            None if self._publishes == torch.float32 else self._publishes,
            partial(self._fsdp().merged, name),
        )

        async def published(_: None) -> Weights | None:
            return await publish(self, merged, version, dtype=dtype, differences=self._differences)

        return await self.run_spmd(published)

    # Earlier versions of the policy --------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def keep_past(self, name: str) -> None:
        """Keep the adapters as they are now, in place of an earlier version; `weights` bring it from then on.

        Args:
            name: `past0` and so on, as many as `settings.past`; or of adapters of a single agent, which begin there.
        """
        if name not in self._further:
            raise ValueError(f"keep_past: there is no {name!r}; those that are kept are {', '.join(self._further)}")
        await self.compute_spmd(self._fsdp().keep_as, name)

    async def _published(self, exact: bool, whole: bool) -> Weights | None:
        weights = await super()._published(exact, whole)
        if exact or not self._further:
            return weights
        now, *further = await self.compute(self._versions)
        if weights is None:
            return None
        packed = (Weights.pack(apart(each, now).items(), self.version) for each in further)
        named = (replace(each, adapter=name) for each, name in zip(packed, self._further, strict=True))
        return replace(weights, adapters=tuple(named))

    def _versions(self) -> list[dict[str, Tensor]]:
        """The policy's adapters, and all others that go with the weights, whole and scaled; a collective."""
        back = self._fsdp()
        return [
            {name: tensor.cpu() for name, tensor in gathered(back.scaled(each))} for each in (POLICY, *self._further)
        ]

    def _packed(self, command: ForwardBackward | Forward) -> Packed:
        """A micro-batch, of which each row is computed with the adapters of the agent that said it."""
        if not self._adapter_of:
            return command.packed()
        batch, tenants, tokens, learned = pack(command.rows, shares=False), list[Tenant](), 0, 0
        for row, length in zip(command.rows, batch.lengths, strict=False):  # without rows there is a single token
            rows, targets = slice(tokens, tokens := tokens + length), slice(learned, learned := learned + row.learned)
            name = self._adapter_of.get(row.agent, POLICY)
            if tenants and tenants[-1].adapter == name:
                before = tenants.pop()
                rows, targets = slice(before.rows.start, tokens), slice(before.learned.start, learned)
            tenants.append(Tenant(name, rows, targets, True))
        return replace(batch, tenants=tuple(tenants))

    def _fsdp(self) -> FsdpBackEnd:
        if not isinstance(self._back, FsdpBackEnd):
            raise ValueError(f"trainer.backend={self._settings.backend}: several models on one base need backend=fsdp")
        return self._back

    def _held(self) -> Iterator[Tensor]:
        yield from super()._held()
        yield from self._back.held(*self._models.values())

    def _learn(self, learner: Optimization, command: ForwardBackward, *, again: bool = False) -> None:
        batch = self._packed(command)
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
        batch = self._packed(command)
        if command.loss is not None:
            return learn_tokens(self._at_work, batch, command.loss)[None]
        return torch.stack([self._logprobs(batch, name) for name in command.columns])

    def _logprobs(self, batch: Packed, column: str) -> Tensor:
        """Log-probs under the weights or, for another policy, with its adapters in place of theirs."""
        return self._back.outputs(batch, adapter=self._adapters.get(column, POLICY))[0]

    async def _kept(self, error: FloatingPointError, batch: BatchSchedule, met: int) -> FloatingPointError:
        """The error, with where the batch was kept."""
        if self._settings.rescue_dir is None:
            return error
        path = await self.compute(
            rescue, await wholes(batch.groups), batch.learned.advantages, Path(self._settings.rescue_dir), met
        )
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
        groups, learned = batch
        if any(isinstance(group, GroupFace) for group in groups):
            count = min(count, self._settings.shown_samples)
        return await self.compute_briefly(show_samples, groups, learned, count, self._tokenizer, tokens)

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
