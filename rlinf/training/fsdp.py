"""Training of Hugging Face models as they are: in slices by FSDP2, in whole copies, or in copies of slices.

A whole copy is a plain module that knows nothing of FSDP2; in bfloat16 it computes with a `WorkingCopy`.

`Learner` gathers the gradients of micro-batches and takes optimizer steps; `FsdpBackEnd` is the model on the ranks that
train it. All of it blocks and knows no actor. Ranks must call the same methods in the same order: each is a collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinf.algos.loss_sum import LossSum, counted
from rlinf.algos.token_losses import TokenLoss
from rlinf.config.learning import LearningSettings, ParallelConfig
from rlinf.data.packing import Packed, beside
from rlinf.data.safetensors_io import make_room, settle, write_tensors
from rlinf.data.weights import Export, misfits
from rlinf.models.language import lora as adapters
from rlinf.models.language.arrangement import Sharding, arranged, stages_refused
from rlinf.models.language.build import ModelSpec, build_model, build_module, own_dtype, place
from rlinf.models.language.fsdp import ALONE, Layout, dtype_of
from rlinf.models.language.moe import Mixture
from rlinf.models.language.policy_model import HEAD, PolicyModel
from rlinf.models.language.tenants import Apart, Tenant, WholeWeights, rows_apart, rows_by
from rlinf.models.language.tensor_parallel import Division
from rlinf.models.language.truth import Way
from rlinf.training.backend import HostCopy, Loss, Optimization, Outputs, Ranks
from rlinf.training.checkpoint import STATE, Restored, Source, StateCopy, copy_state, go_on, held, kept_by, load_state
from rlinf.training.export import ADAPTER, MODEL, copy_adapter, copy_model
from rlinf.training.muon import Muon, hidden_matrices
from rlinf.training.optimizer import ScheduledOptimizer, optimizer_step, sum_over_copies
from rlinf.training.weight_sync import exported, reshard


class ModelPass(NamedTuple):
    """A micro-batch of one of several models."""

    learner: Learner
    """The model's."""
    batch: Packed
    """Without shared prompts."""
    loss: TokenLoss | None
    """Its gradient is added; None: there is none."""


OPTIMIZER = "optimizer.safetensors"
"""File beside a saved model: what its optimizer keeps."""


class Learner(ScheduledOptimizer):
    """Trains one model that every rank has whole or in slices.

    Args:
        module: trained in place; its frozen parameters stay as they are.
        settings: of the optimizer and its schedule.
        layout: how the module lies on the ranks that train it.
        adapter: name of the adapters that it computes with and trains; None: what the module computes with.
        whole: weights that it trains in place of adapters, under that name.

    Raises:
        ValueError: an unknown schedule, or one that falls without knowing when it ends.
    """

    def __init__(
        self,
        module: PolicyModel,
        settings: LearningSettings,
        layout: Layout = ALONE,
        adapter: str | None = None,
        whole: WholeWeights | None = None,
    ):
        own = None if adapter is None else [parameter for _, parameter in adapters.saved_names(module, adapter)]
        if whole is not None:
            own = [each for each in whole.named.values() if each.requires_grad]
        self._policy, self._layout, self.adapter, self.whole = module, layout, adapter or adapters.POLICY, whole
        super().__init__(module, settings, own)
        self._leads = layout.ranks is None or layout.ranks.get_local_rank() == 0

    def _new_optimizer(self) -> Optimizer:
        if self._settings.kind != "muon":
            return super()._new_optimizer()
        return Muon(self._parameters, hidden_matrices(self._policy.model), self._settings, self._layout.copies)

    @property
    def remaining(self) -> int | None:
        """Steps to come; None: nobody knows how many."""
        total = self._settings.total_steps
        return None if total is None else max(0, total - self.schedule.last_epoch)

    def accumulate(self, batches: Sequence[Packed], loss: Loss, *, entropy_slope: bool = False) -> None:
        """Add the gradients of some micro-batches, one after the other; each rank must, for as many.

        Args:
            batches: moved to the model's device if they are elsewhere.
            loss: of a micro-batch and the outputs for it.
            entropy_slope: it differentiates entropies too.
        """
        device = next(self.module.parameters()).device
        with self._policy.computing():
            for batch in (batch.to(device) for batch in batches):
                with rows_by(self.module, batch.tenants) if batch.tenants else nullcontext():
                    total = loss(batch, self.module(batch, entropy_slope=True) if entropy_slope else self.module(batch))
                    total.total.backward()  # type: ignore[no-untyped-call]
                self._add(total)

    def _take_step(self, mine: LossSum) -> tuple[LossSum, float]:
        layout = self._layout
        if layout.copies is not None:
            sum_over_copies(self._parameters, layout.copies)
        self._policy.invalidate()
        return optimizer_step(
            mine if layout.owns_metrics else mine.zeros_like(),
            self._parameters,
            self.optimizer,
            ranks=layout.ranks,
            leads=lambda _: layout.first_copy,
            grad_clip=self._grad_clip,
            named=self.module.named_parameters() if self.whole is None else self.whole.named.items(),
        )


class FsdpBackEnd:
    """See `BackEnd`."""

    def __init__(
        self,
        module: PolicyModel,
        layout: Layout,
        ranks: Ranks,
        spec: ModelSpec,
        tokenizer: PreTrainedTokenizerBase,
        saved_dtype: torch.dtype,
    ) -> None:
        self.module, self.layout, self._tokenizer, self._saved_dtype = module, layout, tokenizer, saved_dtype
        self._base = spec.source if isinstance(spec.source, str) and spec.lora is not None else None
        self._learning = {name: f"{ADAPTER}_{name}" for name in spec.learning}
        self._adapted, self._frozen = spec.lora is not None, spec.freeze
        self._whole: dict[str, WholeWeights] = {}
        """Of models that learn all weights, by name."""
        where = arranged(spec.compute.sharding, ranks.machines, spec.compute.parallel)
        self.data_ranks, self.copies_of_ranks = where.shares, where.copies
        self._rank, self._ranks = ranks.rank, ranks.world_size
        self.context = spec.compute.parallel.context
        """Ranks among which whole sequences are spread, and those that are too long for one are cut."""

    @classmethod
    async def make(cls, ranks: Ranks, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> Self:
        compute = spec.compute
        if refused := "; ".join(stages_refused(compute.parallel)):
            raise ValueError(refused)
        casts = dtype_of(compute.dtype) != torch.float32 and compute.working_copy is False
        layout = await laid_out(
            ranks, compute.sharding, compute.parallel, casts=casts, tokens=compute.micro_batch_tokens
        )
        module = await ranks.compute(cls.build, spec, tokenizer, ranks.device, layout)
        auto = compute.saved_dtype == "auto"
        saved = await ranks.compute(own_dtype, spec.source) if auto else dtype_of(compute.saved_dtype)
        return cls(module, layout, ranks, spec, tokenizer, saved)

    build = staticmethod(build_module)
    """Makes the module; blocking, and a collective where it lies in slices."""

    @property
    def way(self) -> Way:
        """How the model is run."""
        return self.module.way

    @property
    def reads_trees(self) -> bool:
        """Beginnings that texts of a micro-batch share are read once."""
        return self.module.packs

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model."""
        return self.module.model

    @property
    def mixture(self) -> Mixture | None:
        """The model's experts, where they are watched."""
        return self.module.mixture

    def optimization(self, settings: LearningSettings) -> Learner:
        return Learner(self.module, settings, self.layout)

    def weigh_compiling(self, optimization: Optimization, seconds: float) -> None:
        """Compile the model from here on if that pays, after a step that computed so long."""
        self.module.weigh_compiling(seconds, _ours(optimization).remaining)

    def outputs(self, batch: Packed, *, adapter: str | None = adapters.POLICY) -> Outputs:
        return self._forward(batch, adapter)

    def likeliest(self, batch: Packed, count: int, *, adapter: str | None = adapters.POLICY) -> Outputs:
        """The likeliest tokens in place of each learned one, and their log-probs; see `PolicyModel.forward`."""
        return self._forward(batch, adapter, likeliest=count)

    @torch.no_grad()
    def _forward(self, batch: Packed, adapter: str | None, **how: Any) -> Outputs:
        here = batch.to(next(self.module.parameters()).device)
        if adapter != adapters.POLICY:  # another policy, which routes by itself
            here = here.routed(None)
        own = rows_by(self.module, here.tenants) if here.tenants else nullcontext()
        with self._weights_of(adapter), own if adapter == adapters.POLICY else adapters.using(self.module, adapter):
            outputs: Outputs = self.module(here, **how)
        reshard(self.module)  # without a backward pass the whole weights would stay, and grow old
        return outputs

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | Export]]:
        return self.merged(adapters.POLICY, dtype)

    def merged(self, adapter: str | None, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | Export]]:
        """`export` with adapters of a name added in, or, for None, with none; or of the model that has that name and
        weights of its own."""
        if not self.layout.first_copy:
            return iter(())
        with self._weights_of(adapter):  # each is named here, and made later
            return iter([*exported(self.model, dtype, self.layout.slices, self._merges(adapter))])

    # Further models -----------------------------------------------------------------------------------------------

    @contextmanager
    def _weights_of(self, name: str | None) -> Iterator[None]:
        """Compute with the weights of a model: its own if it has all of them, and otherwise the base's."""
        if name not in self._whole:
            yield
            return
        with self._whole[name].in_place():
            self.module.invalidate(renew=True)
            try:
                yield
            finally:
                self.module.invalidate(renew=True)

    def _merges(self, name: str | None) -> str | None:
        """Adapters of a model of that name; None: it has none."""
        return None if name in self._whole else name

    def shares_base(self, learner: Learner) -> bool:
        """The learner's model is adapters, which can be computed with beside others."""
        return learner.whole is None

    @torch.no_grad()
    def keep_as(self, name: str) -> None:
        """Give adapters of a name, of the same layers and rank, the values that those that learn have now."""
        settle()
        reshard(self.module)
        mine, theirs = (adapters.saved_names(self.model, each) for each in (adapters.POLICY, name))
        for (_, now), (_, copy) in zip(mine, theirs, strict=True):
            copy.copy_(now)
        self.module.invalidate()

    def scaled(self, name: str) -> Iterator[tuple[str, Export]]:
        """Adapters of a name, scaled, to be made and gathered one after the other."""
        reshard(self.model)
        for key, parameter, scale in adapters.scaled_parts(self.model, name) if self.layout.first_copy else ():
            yield key, Export(tuple(parameter.shape), parameter.dtype, partial(torch.mul, parameter.detach(), scale))

    def open(self, name: str, lora: Mapping[str, Any] | None, seed: int, settings: LearningSettings) -> Learner:
        """Give the base further adapters, or all of its weights once more, with an optimizer of their own.

        Args:
            name: of the model that they make.
            lora, seed: see `open_adapters`; None: all weights, which begin as the base's.
            settings: of the optimizer.

        Raises:
            ValueError: adapters that there cannot be, or a model that has none or is not whole on one rank.
        """
        if not self._adapted or self._ranks > 1 or self.layout.slices is not None:
            raise ValueError(
                "further adapters need model.lora.r above 0, and a trainer of one rank without "
                "trainer.working_copy=false, for which FSDP casts each layer"
            )
        if lora is None:
            self._whole[name] = WholeWeights(self.model, self._frozen)
            return Learner(self.module, settings, self.layout, name, self._whole[name])
        adapters.open_adapters(self.model, lora, name, seed)
        self.module.invalidate(renew=True)
        return Learner(self.module, settings, self.layout, name)

    @cached_property
    def apart(self) -> Apart:
        """Micro-batches of several models can be computed as one whose tokens are a multiple of this; or each alone,
        since their results would depend on one another."""
        module = self.module
        if not (module.packs and module.plain_head and module.mixture is None and module.pictures is None):
            return Apart(None, "texts of such a model are not laid beside one another in one batch")
        with module.computing():  # in the dtype that counts
            return rows_apart(self.model)

    def passes(self, passes: Sequence[ModelPass]) -> list[Tensor]:
        """Log-probs of micro-batches of several models, [learned] each; adds the gradients of those that have a loss.

        Args:
            passes: one for each model; more than one only where they are `apart`, and of adapters.
        """
        device = next(self.module.parameters()).device
        batches = [each.batch.to(device) for each in passes]
        places = [[slice(None)], [slice(None)]]
        if self.apart.multiple:
            places = [_consecutive([len(b.ids) for b in batches]), _consecutive([len(b.targets) for b in batches])]
        tenants = [
            Tenant(each.learner.adapter, mine, learned, each.loss is not None)
            for each, mine, learned in zip(passes, *places, strict=True)
        ]
        learns = any(each.loss is not None for each in passes)
        own = self._weights_of(passes[0].learner.adapter)
        with own, rows_by(self.model, tenants), self.module.computing(), torch.set_grad_enabled(learns):
            sizes = [len(each.targets) for each in batches]
            whole = self.module(beside(batches, self.apart.multiple or 1))[0]
            *logprobs, _ = whole.split([*sizes, len(whole) - sum(sizes)])
            losses = {
                each.learner: each.loss(mine, batch.columns, counted(batch.sequences, len(batch.lengths)))
                for each, mine, batch in zip(passes, logprobs, batches, strict=True)
                if each.loss is not None
            }
            if losses:
                torch.stack([loss.total for loss in losses.values()]).sum().backward()  # type: ignore[no-untyped-call]
        for learner, loss in losses.items():
            learner._add(loss)
        return [each.detach() for each in logprobs]

    def close(self, name: str) -> None:
        """Forget the adapters of that name, or the weights."""
        if self._whole.pop(name, None) is None:
            adapters.close_adapters(self.model, name)
        self.module.invalidate(renew=True)

    def _learned(self, learner: Learner) -> dict[str, nn.Parameter]:
        """Parameters of a model, by the names that its files have for its optimizer."""
        return dict(adapters.saved_names(self.model, learner.adapter)) if learner.whole is None else learner.whole.named

    def save(self, learner: Learner, directory: Path, *, optimizer: bool) -> None:
        """Write adapters in peft's format, or all weights for `from_pretrained`, and, beside them, what their optimizer
        keeps; on the disk when it returns."""
        copy: HostCopy | None
        if learner.whole is None:
            copy = copy_adapter(self.model, self._base, lead=True, name=learner.adapter)
        else:
            how: dict[str, Any] = {"dtype": torch.float32, "pictures": self.module.pictures, "adapter": None}
            with learner.whole.in_place():
                copy = copy_model(self.model, self._tokenizer, lead=True, **how)
        assert copy is not None  # it leads
        if optimizer:
            state = {
                f"{name}.{key}": value.detach().reshape(value.shape or (1,)).cpu()
                for name, parameter in self._learned(learner).items()
                for key, value in kept_by(learner.optimizer, parameter).items()
            }
            make_room(directory, sum(value.nbytes for value in state.values()))
            write_tensors(directory / OPTIMIZER, state, {"format": "pt"})
        copy.write(directory)

    @torch.no_grad()
    def load(self, learner: Learner, directory: Path, *, optimizer: bool) -> None:
        """Take over what `save` wrote; with what its optimizer kept, or with a new one.

        Raises:
            ValueError: it is of another rank or other layers, or adapters where these are all weights or the other way
                round, or nothing of an optimizer was saved.
        """
        if optimizer and not (directory / OPTIMIZER).is_file():
            raise ValueError(f"{directory.name} was saved without its optimizer")
        if (directory / adapters.ADAPTER_CONFIG).is_file() != (learner.whole is None):
            kinds = ("adapters", "all weights")[:: 1 if learner.whole is not None else -1]
            raise ValueError(f"{directory.name} is {kinds[0]}, and this model is {kinds[1]}")
        if learner.whole is None:
            adapters.check_shapes(self.model, learner.adapter, directory)
        for parameter, value in self._saved_values(learner, directory):
            parameter.copy_(value)
        self.module.invalidate()
        learner.begin()
        learner.optimizer.state.clear()
        if not optimizer:
            return
        names, states = self._learned(learner), defaultdict[str, dict[str, Tensor]](dict)
        with safe_open(directory / OPTIMIZER, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # no mapping
                name, _, part = key.rpartition(".")
                value, parameter = file.get_tensor(key), names[name]
                whole = value.reshape(()) if value.shape != parameter.shape else value
                states[name][part] = whole.to(parameter.device)
        for name, state in states.items():
            go_on(learner.optimizer, names[name], state)

    def _saved_values(self, learner: Learner, directory: Path) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The values that a model's parameters have in a directory.

        Raises:
            ValueError: all weights of another model.
        """
        if learner.whole is None:
            yield from adapters.saved_values(self.model, learner.adapter, str(directory))
            return
        own, saved = learner.whole.named, dict(build_model(str(directory), self._tokenizer).named_parameters())
        arrived = {name: tuple(each.shape) for name, each in saved.items()}
        if odd := misfits({name: tuple(each.shape) for name, each in own.items()}, arrived):
            raise ValueError(f"{directory.name} is of another model: {odd}")
        yield from ((parameter, saved[name]) for name, parameter in own.items())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._layers()}

    def trained(self, *, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """Parameters as they are here, by their names here; for copies of this one alone.

        Args:
            whole: with those that do not learn.
        """
        return ((name, one.detach()) for name, one in self.module.named_parameters() if whole or one.requires_grad)

    @torch.no_grad()
    def overwrite(self, named: Mapping[str, Tensor]) -> None:
        """Take over what `trained` of a model that was made in the same way gave."""
        settle()
        self.module.invalidate()
        own = dict(self.module.named_parameters())
        for name, tensor in named.items():
            own[name].copy_(tensor)

    def take(self, named: Mapping[str, Tensor]) -> None:
        settle()
        reshard(self.module)
        self.module.invalidate()
        for name, parameter in self._layers():
            place(parameter, named[name])

    def _layers(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if not name.startswith(HEAD)]

    def copies(
        self,
        optimization: Optimization,
        version: int,
        extra: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Mapping[str, HostCopy]:
        state, lead = self.state(optimization, version, extra), self._rank == 0
        parts: dict[str, HostCopy | None] = {STATE: state}
        if self.layout.first_copy:
            how: dict[str, Any] = {"at_hand": state.copies, "pictures": self.module.pictures}
            parts[MODEL] = copy_model(self.model, tokenizer, lead=lead, dtype=self._saved_dtype, **how)
            for name, place in {adapters.POLICY: ADAPTER, **self._learning}.items() if self._adapted else ():
                parts[place] = copy_adapter(self.model, self._base, lead=lead, name=name)
        return {name: part for name, part in parts.items() if part is not None}

    def state(self, optimization: Optimization, version: int, extra: Mapping[str, Any]) -> StateCopy:
        learner = _ours(optimization)
        return copy_state(
            self.model,
            learner.optimizer,
            learner.schedule,
            version,
            rank=self._rank,
            ranks=self._ranks,
            extra=extra,
            first_copy=self.layout.first_copy,
        )

    def restore(self, optimization: Optimization, source: Path | Source) -> Restored:
        learner = _ours(optimization)
        self.module.invalidate()
        restored = load_state(self.model, learner.optimizer, learner.schedule, source, rank=self._rank)
        learner.resumed()
        return restored

    def held(self, *optimizations: Optimization) -> Iterator[Tensor]:
        reshard(self.module)  # a forward that failed leaves whole weights behind
        self.module.invalidate(free=True)
        yield from held(self.module, *(_ours(optimization).optimizer for optimization in optimizations))
        for whole in self._whole.values():
            for parameter in whole.named.values():
                yield parameter
                yield from () if parameter.grad is None else (parameter.grad,)


async def laid_out(
    ranks: Ranks, sharding: Sharding, parallel: ParallelConfig | None = None, *, casts: bool, tokens: int = 0
) -> Layout:
    """Make the layout of a model on its ranks; a collective.

    Args:
        ranks: the ranks; each calls this.
        sharding: as it was configured.
        parallel: how one copy is split; None for not.
        casts: FSDP2 casts layers, on a single rank too.
        tokens: of a micro-batch, so that a context's ranks know what they have room for.

    Raises:
        ValueError: see `arranged`.
    """
    split = parallel or ParallelConfig()
    where, me = arranged(sharding, ranks.machines, split), ranks.rank
    own, alike, together = where.copy_of(me), where.alike(me), where.together[where.shares[me]]

    async def mesh(members: Sequence[int], purpose: str) -> DeviceMesh:
        everybody = len(members) == ranks.world_size > 1 and ranks.mesh is not None
        return ranks.mesh if everybody else await ranks.mesh_of(members, purpose)  # type: ignore[return-value]

    async def some(members: Sequence[int], purpose: str) -> DeviceMesh | None:
        return await mesh(members, purpose) if len(members) > 1 else None

    async def parts(count: int, purpose: str) -> DeviceMesh | None:
        return await ranks.mesh_of(own, purpose, len(own) // count) if count > 1 else None

    share, part = divmod(together.index(me), split.tensor)
    division = None
    if len(together) > 1:
        all_of_it, first = await mesh(together, "together"), share * split.tensor
        division = Division(
            all_of_it,
            all_of_it if split.tensor == 1 else await some(together[part :: split.tensor], "context"),
            all_of_it if split.context == 1 else await some(together[first : first + split.tensor], "tensor"),
            tokens // split.context,
        )
    return Layout(
        ranks.mesh,
        await mesh(own, "slices") if len(own) > 1 or casts else None,
        await some(alike, "copies"),
        division,
        await parts(split.tensor, "matrices"),
        await parts(split.expert, "experts"),
    )


def _consecutive(sizes: Iterable[int]) -> list[slice]:
    """Slices of these sizes, one behind another."""
    ends = accumulate(sizes, initial=0)
    return [slice(start, end) for start, end in pairwise(ends)]


def _ours(optimization: Optimization) -> Learner:
    assert isinstance(optimization, Learner)
    return optimization
