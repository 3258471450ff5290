"""The back end for Hugging Face models as they are: in slices by FSDP2, in whole copies, or in copies of slices.

In: a model's settings, and the ranks that train it. Out: a `BackEnd`, each rank of which has its own share of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinf.config.learning import ParallelConfig
from rlinf.data.packing import Packed
from rlinf.data.weights import Export
from rlinf.models.language.build import Build, build_policy, build_scores, build_values, place
from rlinf.models.language.fsdp import Layout, dtype_of
from rlinf.models.language.load import own_dtype
from rlinf.models.language.lora import POLICY, using
from rlinf.models.language.mixture.replay import Mixture
from rlinf.models.language.parallel.arrangement import Sharding, arranged
from rlinf.models.language.parallel.mistakes import stages_refused
from rlinf.models.language.parallel.tokens import Division
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.language.value_model import HEAD
from rlinf.training.backend import HostCopy, ModelSettings, Optimization, Outputs, Ranks
from rlinf.training.learner import Learner
from rlinf.weights.adapter_export import ADAPTER, copy_adapter
from rlinf.weights.hf_export import MODEL, copy_model
from rlinf.weights.publish import exported, reshard
from rlinf.weights.state_tensors import held
from rlinf.weights.train_state import STATE, Restored, Source, StateCopy, copy_state, load_state


class FsdpBackEnd:
    """See `BackEnd`."""

    def __init__(
        self, module: PolicyModel, layout: Layout, ranks: Ranks, model: ModelSettings, saved_dtype: torch.dtype
    ) -> None:
        self.module, self.layout, self._saved_dtype = module, layout, saved_dtype
        self._base = model.source if isinstance(model.source, str) and model.lora is not None else None
        self._adapted = model.lora is not None
        where = arranged(model.sharding, ranks.machines, model.parallel)
        self.data_ranks, self.copies_of_ranks = where.shares, where.copies
        self._rank, self._ranks = ranks.rank, ranks.world_size

    @classmethod
    async def make(cls, ranks: Ranks, model: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> Self:
        if refused := "; ".join(stages_refused(model.parallel)):
            raise ValueError(refused)
        layout = await laid_out(ranks, model.sharding, model.parallel, mixed=dtype_of(model.dtype) != torch.float32)
        module = await ranks.compute(cls.build, model, layout, ranks.device, tokenizer)
        auto = model.saved_dtype == "auto"
        saved = await ranks.compute(own_dtype, model.source) if auto else dtype_of(model.saved_dtype)
        return cls(module, layout, ranks, model, saved)

    @classmethod
    def build(
        cls, model: ModelSettings, layout: Layout, device: torch.device, tokenizer: PreTrainedTokenizerBase
    ) -> PolicyModel:
        """The module; blocking, and a collective where it lies in slices."""
        made = Build(
            model.source,
            model.seed,
            model.lora,
            dtype_of(model.dtype),
            device,
            layout.slices,
            model.gradient_checkpointing,
            model.logprob_chunk,
            model.adapters,
            model.attention,
            model.compiled,
            layout.ranks,
            layout.division,
            layout.matrices,
            layout.experts,
            model.router_replay,
        )
        makes = {"logprobs": build_policy, "values": build_values, "scores": build_scores}
        return makes[model.head](made, tokenizer)

    @property
    def words(self) -> str:
        """How the model is run, for people; empty where that is as usual."""
        return self.module.unusual

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model."""
        return self.module.model

    @property
    def mixture(self) -> Mixture:
        """The model's experts, as far as they are watched."""
        return self.module.mixture

    def optimization(self, **settings: Any) -> Learner:
        return Learner(self.module, layout=self.layout, **settings)

    @torch.no_grad()
    def outputs(self, batch: Packed, *, adapter: str | None = POLICY) -> Outputs:
        here = batch.to(next(self.module.parameters()).device)
        if adapter != POLICY:  # another policy, which routes by itself
            here = here.routed(None)
        with nullcontext() if adapter == POLICY else using(self.module, adapter):
            found: Outputs = self.module(here)
        reshard(self.module)  # without a backward pass the whole weights would stay, and grow old
        return found

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | Export]]:
        return exported(self.model, dtype, self.layout.slices) if self.layout.first_copy else iter(())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._layers()}

    def take(self, named: Mapping[str, Tensor]) -> None:
        reshard(self.module)
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
        first, state = self.layout.first_copy, self.state(optimization, version, extra)
        lead = self._rank == 0
        at_hand = state.copies if lead else None
        whole = alone = None
        if first:
            how: dict[str, Any] = {"dtype": self._saved_dtype, "at_hand": at_hand, "pictures": self.module.pictures}
            whole = copy_model(self.model, tokenizer, lead=lead, **how)
        if first and self._adapted:
            alone = copy_adapter(self.model, self._base, lead=lead)
        parts = {STATE: state, MODEL: whole, ADAPTER: alone}
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
        found = load_state(self.model, learner.optimizer, learner.schedule, source, rank=self._rank)
        learner.resumed()
        return found

    def held(self, *optimizations: Optimization) -> Iterator[Tensor]:
        reshard(self.module)  # a forward that failed leaves whole weights behind
        return held(self.module, *(_ours(optimization).optimizer for optimization in optimizations))


async def laid_out(ranks: Ranks, sharding: Sharding, parallel: ParallelConfig | None = None, *, mixed: bool) -> Layout:
    """How a model lies on its ranks.

    Args:
        ranks: the ranks; each calls this.
        sharding: as it was configured.
        parallel: how one copy is split; None for not.
        mixed: the model computes in another dtype than its weights': FSDP2's work, on a single rank too.

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
        )
    return Layout(
        ranks.mesh,
        await mesh(own, "slices") if len(own) > 1 or mixed else None,
        await some(alike, "copies"),
        division,
        await parts(split.tensor, "matrices"),
        await parts(split.expert, "experts"),
    )


def _ours(optimization: Optimization) -> Learner:
    assert isinstance(optimization, Learner)
    return optimization
