"""Layout of a Megatron run: which rank has which part of the model, and the model's configuration for Megatron-core.

From `ParallelConfig` and the number of ranks come a place for each rank, in Megatron's order, and process groups by
what they are for. Neighbours in rank are neighbours in tensors first, then in context, then in data; stages of a
pipeline are furthest apart, since they say least to one another.

A Hugging Face configuration becomes a `TransformerConfig`, for the families whose results were held against
transformers; or there are reasons, in words, why it cannot. Whatever a configuration may say that is not carried over
is refused, since Megatron would leave it out without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from rlinf.config.learning import ParallelConfig
from rlinf.data.routes import experts_of
from rlinf.runtime.base.errors import WrongSetting


class Alone:
    """The process group of one rank, which has nobody to communicate with."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a rank in each direction, from 0."""

    tensor: int
    context: int
    data: int
    stage: int
    expert: int
    """Which share of a mixture's experts it has."""
    twin: int
    """Which of the ranks with these experts of this stage it is."""


class Grid:
    """All ranks of one model.

    Args:
        parallel: how a copy is split.
        ranks: how many there are.

    Raises:
        ValueError: see `misfits`.
    """

    def __init__(self, parallel: ParallelConfig, ranks: int):
        if wrong := misfits(parallel, ranks):
            raise WrongSetting(f"trainer.parallel: {'; '.join(wrong)}")
        self.parallel, self.ranks = parallel, ranks
        self.shares = ranks // parallel.copy
        """Number of shares of the data."""

    def place(self, rank: int) -> Place:
        """Coordinates of a rank."""
        sizes = (self.parallel.tensor, self.parallel.context, self.shares)
        tensor, rest = rank % sizes[0], rank // sizes[0]
        context, rest = rest % sizes[1], rest // sizes[1]
        data, stage = rest % sizes[2], rest // sizes[2]
        within = rank % (self.ranks // self.parallel.pipeline)
        return Place(tensor, context, data, stage, within % self.parallel.expert, within // self.parallel.expert)

    def alike(self, rank: int, same: Callable[[Place], Any]) -> tuple[int, ...]:
        """The ranks that are in the same place as `rank` in what `same` looks at, in order."""
        mine = same(self.place(rank))
        return tuple(other for other in range(self.ranks) if same(self.place(other)) == mine)


def misfits(parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot be laid out in this way; none if they can."""
    wrong = []
    if ranks % parallel.copy:
        wrong.append(
            f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} takes "
            f"{parallel.copy} processes per copy of the model, which does not divide {ranks}"
        )
    elif (ranks // parallel.pipeline) % parallel.expert:
        wrong.append(f"expert={parallel.expert} does not divide the {ranks // parallel.pipeline} processes of a stage")
    if parallel.interleave > 1 and parallel.pipeline == 1:
        wrong.append(f"interleave={parallel.interleave} needs a pipeline of at least 2 stages")
    return wrong


_KINDS: dict[str, Callable[[Place], Any]] = {
    "tensor": lambda at: (at.context, at.data, at.stage),
    "context": lambda at: (at.tensor, at.data, at.stage),
    "pipeline": lambda at: (at.tensor, at.context, at.data),
    "copy": lambda at: at.data,
    "data": lambda at: (at.tensor, at.context, at.stage),
    "same": lambda at: (at.tensor, at.stage),
    "stage": lambda at: at.stage,
    "part": lambda at: (at.data, at.stage),
    "expert": lambda at: (at.twin, at.stage),
    "twins": lambda at: (at.expert, at.stage),
}
"""Groups by what their members have in common. `same`: those with the same tensors; `part`: those of one stage of one
copy; `twins`: those with the same experts."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that a rank is in."""

    grid: Grid
    rank: int
    place: Place
    meshes: dict[str, DeviceMesh | None]
    """By kind; None where this rank is alone."""

    def group(self, kind: str) -> Any:
        """Megatron's view of a group."""
        mesh = self.meshes[kind]
        return ALONE if mesh is None else mesh.get_group()

    def collection(self) -> Any:
        """Process groups as Megatron-core asks for them."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        names = {
            "tp": "tensor",
            "cp": "context",
            "pp": "pipeline",
            "ep": "expert",
            "tp_ep": "expert",
            "tp_cp": "part",
            "tp_dp_cp": "stage",
            "dp": "data",
            "dp_cp": "same",
            "expt_dp": "twins",
        }
        groups = {name: self.group(kind) for name, kind in names.items()}
        return ProcessGroupCollection(**groups, expt_tp=ALONE, embd=None, pos_embd=None)


async def grouped(
    grid: Grid, rank: int, mesh_of: Callable[[Sequence[int], str], Any], whole: DeviceMesh | None
) -> Groups:
    """Make a rank's groups; every rank calls this, and they are made in one order.

    Args:
        grid: of all ranks.
        rank: this one.
        mesh_of: makes a mesh of some ranks, for a purpose.
        whole: the mesh of all ranks, if there are several.
    """
    by_ranks: dict[tuple[int, ...], DeviceMesh | None] = {(rank,): None, tuple(range(grid.ranks)): whole}
    meshes: dict[str, DeviceMesh | None] = {}
    for kind, members in _members(grid, rank):
        if members not in by_ranks:
            by_ranks[members] = await mesh_of(members, kind)
        meshes[kind] = by_ranks[members]
    line = grid.alike(rank, _KINDS["pipeline"])
    meshes["way back"] = await mesh_of(line, "way back") if len(line) > 1 else None
    return Groups(grid, rank, grid.place(rank), meshes)


def _members(grid: Grid, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind, same in _KINDS.items():
        yield kind, grid.alike(rank, same)
    line = grid.alike(rank, _KINDS["pipeline"])
    ends = (line[0], line[-1]) if len(line) > 1 and rank in (line[0], line[-1]) else (rank,)
    yield "ends", ends


FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Types of models that are trained by Megatron-core."""
_BY_DEFAULT: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "attention_dropout": 0.0,
}
"""Keys of their configurations that must be as they are by default."""


def mistakes(config: Any, parallel: ParallelConfig) -> list[str]:
    """Why a model cannot be split so, or not be trained by Megatron-core at all; none if it can.

    Args:
        config: a Hugging Face configuration, or anything with its attributes.
        parallel: how it is to be split.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        return [f"model_type={kind} is none of {', '.join(FAMILIES)}: take trainer.backend=fsdp"]
    wrong = []
    for key, usual in _BY_DEFAULT.items():
        if getattr(config, key, usual) != usual:
            wrong.append(f"{key}={getattr(config, key)} is not carried over to Megatron-core")
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or getattr(
        config, "use_sliding_window", False
    ):
        wrong.append("attention in sliding windows is not carried over to Megatron-core")
    counts = {
        "attention heads": (config.num_attention_heads, "tensor", parallel.tensor),
        "key-value heads": (config.num_key_value_heads, "tensor", parallel.tensor),
        "layers": (config.num_hidden_layers, "pipeline x interleave", parallel.pipeline * parallel.interleave),
    }
    experts = experts_of(config)
    if experts:
        counts["experts"] = experts, "expert", parallel.expert
        if parallel.expert % parallel.tensor:
            wrong.append(
                f"expert={parallel.expert} must be a multiple of tensor={parallel.tensor}: experts are spread whole"
            )
    else:
        counts["columns of the MLP"] = config.intermediate_size, "tensor", parallel.tensor
        if parallel.expert > 1:
            wrong.append(f"expert={parallel.expert}: a {kind} has no experts")
    for what, (count, key, size) in counts.items():
        if count % size:
            wrong.append(f"{key}={size} does not divide the model's {count} {what}")
    return wrong


def head_size(config: Any) -> int:
    """Numbers of a query."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def inner_config(config: Any, parallel: ParallelConfig, dtype: torch.dtype) -> Any:
    """Megatron-core's configuration of a model.

    Args:
        config: a Hugging Face configuration without `mistakes`.
        parallel: how it is split.
        dtype: to compute in, and of what stages send one another; parameters are float32.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    interleaved = parallel.interleave if parallel.interleave > 1 else None
    mixture: dict[str, Any] = {}
    if experts := experts_of(config):
        mixture = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            # softmax over the chosen experts alone is the softmax over all, normalised over the chosen
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=interleaved,
        microbatch_group_size_per_vp_stage=parallel.pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.tensor > 1,
        params_dtype=torch.float32,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the one that goes with it
        calculate_per_token_loss=True,  # nothing is divided here; the optimizer step divides once
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=True,
        **mixture,
    )
