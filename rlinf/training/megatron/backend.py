"""The back end for models that Megatron-core splits: over tensors, stages, contexts and experts.

`MegatronBackEnd` is a `BackEnd`. The ranks of a copy have the same share of the data; all names that leave here are
those of transformers' model, as under FSDP.

Stand-ins for the parts of Megatron-core 0.16.1 that only CUDA has, where there is no CUDA.

They let modules of Megatron-core make tensors on the CPU where they would on a GPU. No tensor operation is replaced, so
the arithmetic and the collectives are Megatron's own; `docs/training.md` lists the stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Packed
from rlinf.data.rng import ONE_AT_A_TIME
from rlinf.data.tokenizer import pretrained, without_own_code
from rlinf.data.weights import Export
from rlinf.models.language.attention import checkpoint_blocks
from rlinf.models.language.build import ModelSpec, build_model, own_dtype, saved_files
from rlinf.models.language.fsdp import dtype_of
from rlinf.models.language.lora import POLICY
from rlinf.models.language.policy_model import HEAD, without_head
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.transport.process_groups import all_gather, reduce_scatter
from rlinf.training.backend import HostCopy, Optimization, Outputs, Ranks
from rlinf.training.checkpoint import STATE, Restored, Source, StateCopy, held
from rlinf.training.export import MODEL, SHARD_BYTES, ModelCopy, skeleton_of
from rlinf.training.megatron import layout
from rlinf.training.megatron.layers import Stage, outputs_of
from rlinf.training.megatron.layout import Grid, Groups, grouped
from rlinf.training.megatron.schedule import Pipeline, SplitLearner
from rlinf.training.megatron.state import (
    Files,
    Piece,
    SplitModel,
    copy_split_state,
    fill,
    load_split_state,
    pieces_of,
    sharing,
)
from rlinf.training.weight_sync import Held, Scattered, gathered

_REACHING = (
    *("tensor_parallel.layers", "tensor_parallel.mappings", "tensor_parallel.utils", "tensor_parallel.random"),
    *("pipeline_parallel.schedules", "pipeline_parallel.p2p_communication"),
    *("transformer.moe.router", "transformer.moe.experts", "transformer.moe.moe_utils"),
    *("transformer.moe.token_dispatcher", "transformer.mlp", "transformer.attention"),
)
"""Modules of Megatron-core, of those used here, that ask for CUDA by name."""

_ASKED = "get_tensor_model_parallel_group_if_none"


class _Stream:
    """A stream that needs no waiting for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


class _Cuda:
    """`torch.cuda` of a machine without."""

    Stream = Event = _Stream
    current_device = staticmethod(lambda: torch.device("cpu"))
    synchronize = staticmethod(lambda *_, **__: None)
    current_stream = staticmethod(lambda *_: _Stream())
    stream = staticmethod(lambda *_: contextlib.nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """`torch`, as those modules see it: what they make on "cuda" is made on the CPU."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _here(make: Any) -> Any:
        def made(*arguments: Any, **keywords: Any) -> Any:
            if str(keywords.get("device")).startswith("cuda"):
                keywords["device"] = "cpu"
            return make(*arguments, **keywords)

        return staticmethod(made)


for _name in ("empty", "ones", "tensor", "zeros"):
    setattr(_Torch, _name, _Torch._here(getattr(torch, _name)))


class _Memory:
    """Memory for what is gathered before a product: new each time. Megatron's is one buffer per process, which trainer
    and critic of one process would write to at the same time."""

    def get_tensor(self, shape: Any, dtype: torch.dtype, name: str, *_: Any) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(tuple(shape), dtype=dtype, device=device)


@cache
def prepare() -> None:
    """Have Megatron-core work in this process; to be called before anything of it is.

    Raises:
        ValueError: it is not installed.
    """
    try:
        # each of a dozen packages for GPUs is missed aloud, and streams on CPUs
        warnings.filterwarnings("ignore", module=r"megatron\.")
        modules: dict[str, Any] = {name: importlib.import_module(f"megatron.core.{name}") for name in _REACHING}
    except ModuleNotFoundError as error:
        raise WrongSetting(
            f"trainer.backend=megatron: {error.name} is not installed; pip install 'rlinf[megatron]'"
        ) from None
    memory = _Memory()
    for name in ("tensor_parallel.layers", "tensor_parallel.mappings"):
        modules[name].get_global_memory_buffer = lambda: memory
        modules[name].dist_all_gather_func, modules[name].dist_reduce_scatter_func = all_gather, reduce_scatter
    for module in modules.values():
        if hasattr(module, _ASKED):
            setattr(module, _ASKED, _given)
    # nothing in our layers is random, so no generator of Megatron's needs a seed
    modules["tensor_parallel.random"].CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    modules["transformer.attention"].apply_rotary_pos_emb = turned
    experts = modules["transformer.moe.moe_utils"]
    if not hasattr(experts, "te_general_gemm"):
        experts.te_general_gemm = None  # which 0.16.1 forgets to define where TransformerEngine is not installed
    if torch.cuda.is_available():
        return
    for module in modules.values():
        module.torch = _Torch("torch")
    dispatcher = modules["transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = _on_host


def _given(group: Any, *_: Any, **__: Any) -> Any:
    """The group that is given, which Megatron's own leaves out where the process has no default group."""
    return group


def turned(parts: Tensor, waves: Tensor, *_: Any, **__: Any) -> Tensor:
    """Queries or keys, [tokens, 1, heads, size], turned by their positions (RoPE, arXiv:2104.09864, eq. 34).

    Megatron's own makes cosines and sines anew in each layer and copies what it does not turn, which is nothing here.

    Args:
        parts: the queries or keys.
        waves: cosines and sines, [2, tokens, 1, 1, size].
    """
    first, second = parts.chunk(2, dim=-1)
    return parts * waves[0] + torch.cat([-second, first], dim=-1) * waves[1]


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens as the dispatcher wants them: Megatron's own leaves alone what is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class MegatronBackEnd:
    """See `BackEnd`."""

    def __init__(self, stages: Sequence[Stage], whole: PreTrainedModel, groups: Groups, ranks: Ranks, spec: ModelSpec):
        self.module = nn.ModuleList(stages)
        self._whole, self._groups, self._head = whole, groups, spec.head
        self._mesh = ranks.mesh
        self._pipeline = Pipeline(stages, groups)
        pieces = tuple(pieces_of(stages, whole.config, groups))
        shapes = dict(whole.named_parameters())
        self._split = SplitModel(self.module, pieces, shapes, ranks.rank, ranks.world_size)
        grid = groups.grid
        self.data_ranks: Sequence[int] = [grid.place(rank).data for rank in range(grid.ranks)]
        self.copies_of_ranks: Sequence[Sequence[int]] = [range(grid.ranks)]  # experts may be spread over all of them
        saved_dtype = spec.compute.saved_dtype
        self._saved_dtype = dtype_of(saved_dtype) if saved_dtype != "auto" else own_dtype(spec.source)
        self._held: dict[str, list[Held]] = {}
        self._told: dict[tuple[str, Held], Piece] = {}

    @classmethod
    async def make(cls, ranks: Ranks, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> Self:
        for setting, value in {"lora": spec.lora, "adapters": spec.adapters, "freeze": spec.freeze}.items():
            if value:
                raise ValueError(f"model.{setting}: trainer.backend=megatron trains all weights; take fsdp")
        if spec.watches_routing and spec.compute.router_replay is True:
            raise WrongSetting("trainer.router_replay: trainer.backend=megatron does not replay routes; take fsdp")
        if spec.head == "scores":
            raise WrongSetting("trainer.backend=megatron trains no reward models; take fsdp")
        grid = Grid(spec.compute.parallel, ranks.world_size)
        await ranks.compute(prepare)
        groups = await grouped(grid, ranks.rank, ranks.mesh_of, ranks.mesh)
        return await ranks.compute(partial(cls.build, ranks, spec, tokenizer, groups))  # type: ignore[no-any-return]

    @classmethod
    def build(cls, ranks: Ranks, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase, groups: Groups) -> Self:
        """All but the groups; blocking, and a collective."""
        with ONE_AT_A_TIME:
            files = saved_files(spec.source)
            initial = None if files else build_model(spec.source, tokenizer, seed=spec.seed)
            config = pretrained(AutoConfig, str(spec.source)) if initial is None else initial.config
            if wrong := layout.mistakes(config, spec.compute.parallel):
                raise WrongSetting(f"trainer.backend=megatron: {'; '.join(wrong)}")
            whole = _empty(config, spec)
            if initial is not None:
                whole.generation_config = initial.generation_config
            parts = range(spec.compute.parallel.interleave) if spec.compute.parallel.interleave > 1 else (None,)
            inner = layout.inner_config(config, spec.compute.parallel, dtype_of(spec.compute.dtype))
            stages = [Stage(inner, config, groups, part, spec.head, spec.compute.logprob_chunk) for part in parts]
        for stage in stages:
            if stage.last and spec.head == "values":
                for parameter in stage.score.parameters():
                    nn.init.zeros_(parameter)  # until it has learned, a critic should not make advantages worse
            _blank(stage)
            if spec.compute.gradient_checkpointing:
                checkpoint_blocks(list(stage.decoder.layers))
        back_end = cls(stages, whole, groups, ranks, spec)
        named = None if initial is None else dict(initial.named_parameters())
        missing = [
            name for name in fill(back_end._split.pieces, Files(files) if files else named or {}) if HEAD not in name
        ]
        if missing:
            raise WrongSetting(
                f"model.path: the files of {spec.source} have no {missing[0]} (and lack {len(missing) - 1} more) by "
                "transformers' names, by which trainer.backend=megatron reads them: take fsdp, or save the model again "
                "by transformers' save_pretrained"
            )
        back_end.module.to(ranks.device)
        back_end._exchange()
        return back_end

    def _exchange(self) -> None:
        """Tell all ranks who has what; once, since it does not change."""
        mine = [(piece.name, piece.offset, piece.shape) for piece in self._split.pieces if piece.first]
        messages: list[Any] = [mine]
        if self._mesh is not None:
            messages = [None] * self._split.ranks
            dist.all_gather_object(messages, mine, group=self._mesh.get_group())
        for rank, theirs in enumerate(messages):
            for name, offset, shape in theirs:
                self._held.setdefault(name, []).append(Held(rank, offset, shape))
        owned = {(piece.name, piece.offset): piece for piece in self._split.pieces if piece.first}
        for name, all_held in self._held.items():
            for each in all_held:
                if each.rank == self._split.rank:
                    self._told[name, each] = owned[name, each.offset]

    @property
    def words(self) -> str:
        """Words for people on how the model is run."""
        split = {name: size for name, size in vars(self._groups.grid.parallel).items() if size > 1}
        how = " x ".join(f"{name} {size}" for name, size in split.items()) or "whole"
        return f"by Megatron-core, {how}, {self._groups.grid.shares} shares of the data"

    def optimization(self, settings: LearningSettings) -> SplitLearner:
        tied = self._whole.config.tie_word_embeddings and self._head == "logprobs"
        shared = {
            f"{number}.{name}": sharing(name, self._groups, tied)
            for number, stage in enumerate(self._pipeline.stages)
            for name, _ in stage.named_parameters()
        }
        return SplitLearner(self.module, settings, self._pipeline, shared, self._groups, self._head, self._named)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each tensor of the model, flat, in the model's order."""
        mine: dict[str, list[Tensor]] = {}
        for piece in self._split.pieces:
            mine.setdefault(piece.name, []).append(piece.of(piece.parameter.detach()).reshape(-1))
        device = next(self.module.parameters()).device
        for name in self._split.shapes:
            yield name, torch.cat(mine[name]) if name in mine else torch.empty(0, device=device)

    @torch.no_grad()
    def outputs(self, batch: Packed, *, adapter: str | None = POLICY) -> Outputs:
        if adapter != POLICY:
            raise WrongSetting("trainer.backend=megatron has no adapters")
        parts: list[Tensor] = []
        blank = [batch] * (self._pipeline.depth - 1) if self._pipeline.interleaved else []

        def ended(_: int, output: Tensor) -> None:
            parts.append(output)

        self._pipeline.run([batch, *blank], ended, learns=False)
        line = self._groups.meshes["pipeline"]
        if line is None:
            return outputs_of(parts[0], self._head)
        # all ranks of a copy answer, as they do where each has the whole model
        group, width = line.get_group(), 2 if self._head == "logprobs" else 1 + self._whole.config.hidden_size
        whole = parts[0].contiguous() if parts else None
        if whole is None:
            parameter = next(self.module.parameters())
            whole = torch.empty(len(batch.targets), width, dtype=parameter.dtype, device=parameter.device)
        if len(whole):
            dist.broadcast(whole, dist.get_global_rank(group, group.size() - 1), group=group)
        return outputs_of(whole, self._head)

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | Export]]:
        for name, shape in self._split.shapes.items():
            wanted = dtype or next(self.module.parameters()).dtype
            yield name, Export(tuple(shape.shape), wanted, partial(self._scattered, name))

    def _scattered(self, name: str) -> Any:
        def write(piece: Held, start: int, into: Tensor) -> None:
            self._told[name, piece].write(start, into)

        return Scattered(tuple(self._split.shapes[name].shape), self._held[name], write, self._mesh)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self._split.shapes.items() if not name.startswith(HEAD)}

    def take(self, named: Mapping[str, Tensor]) -> None:
        fill([piece for piece in self._split.pieces if not piece.name.startswith(HEAD)], named)
        self._pipeline.working.invalidate()

    def copies(
        self,
        optimization: Optimization,
        version: int,
        extra: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Mapping[str, HostCopy]:
        state = self.state(optimization, version, extra)
        tensors: dict[str, Tensor] = {}
        for name, tensor in gathered(self.export(self._saved_dtype)):
            if self._split.rank == 0:
                tensors[name] = tensor.to("cpu", copy=True)
        if self._split.rank:
            return {STATE: state}
        skeleton = skeleton_of(self._whole, self._saved_dtype)
        return {STATE: state, MODEL: ModelCopy(skeleton, tensors, tokenizer, None, SHARD_BYTES)}

    def state(self, optimization: Optimization, version: int, extra: Mapping[str, Any]) -> StateCopy:
        learner = _ours(optimization)
        return copy_split_state(self._split, learner.optimizer, learner.schedule, version, extra)

    def restore(self, optimization: Optimization, source: Path | Source) -> Restored:
        learner = _ours(optimization)
        restored = load_split_state(self._split, learner.optimizer, learner.schedule, source)
        learner.resumed()
        self._pipeline.working.invalidate()
        return restored

    def held(self, *optimizations: Optimization) -> Iterator[Tensor]:
        self._pipeline.working.free()
        return held(self.module, *(_ours(optimization).optimizer for optimization in optimizations))


def _empty(config: Any, spec: ModelSpec) -> PreTrainedModel:
    """The whole model without memory: its names, shapes and configuration."""
    with torch.device("meta"):
        whole: PreTrainedModel = without_own_code(AutoModelForCausalLM, config, dtype=torch.float32)
        if spec.head == "values":
            without_head(whole)
            whole.add_module("score", nn.Linear(config.hidden_size, 1))
    if isinstance(spec.source, str) and (Path(spec.source) / "generation_config.json").exists():
        whole.generation_config = GenerationConfig.from_pretrained(spec.source)
    return whole


@torch.no_grad()
def _blank(stage: Stage) -> None:
    """Rows of a vocabulary beyond its end are 0, and stay so: they have no gradient."""
    for tensor in (stage.embedding.weight if stage.first else None, getattr(stage, "head", None)):
        if tensor is not None:
            tensor[stage.own_rows :].zero_()


def _ours(optimization: Optimization) -> SplitLearner:
    assert isinstance(optimization, SplitLearner)
    return optimization
