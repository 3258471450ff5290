"""A stage of the model, or one of several parts of the layers that a stage has: Megatron's layers between our ends.

In: a `Reading` of a micro-batch, and, but for the first stage, what the stage before gave. Out: hidden states for the
next one; from the last, what `training.backend.Outputs` is made of. Layers, parallel linear maps and experts are
Megatron-core's; attention, norms, the angles of rotary embeddings and the head are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlinf.models.language.logprob_head import token_logprobs
from rlinf.training.megatron.families import head_size
from rlinf.training.megatron.layers.attention import CoreAttention, Reading
from rlinf.training.megatron.layers.head import Collected, shared_logprobs
from rlinf.training.megatron.layout import Groups


class Norm(nn.RMSNorm):
    """Megatron's own refuses where tokens are spread over the ranks of a tensor."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **more: Any):
        super().__init__(hidden_size, eps=eps)


class Angles(nn.Module):
    """Rotary embeddings' angles at given positions, by transformers' frequencies for the model.

    Args:
        config: of Hugging Face.

    Raises:
        ValueError: a kind of scaling that changes the size of queries too.
    """

    def __init__(self, config: Any):
        super().__init__()
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if kind == "default":
            size, base = head_size(config), config.rope_parameters["rope_theta"]
            frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
            scale = 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if scale != 1.0:
            raise ValueError(f"rope_type={kind} scales queries by {scale}, which is not carried over to Megatron-core")
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and sines, which `turned` takes, [2, tokens, 1, 1, numbers of a query]."""
        angles = positions[:, None].float() * self.get_buffer("frequencies").float()
        angles = torch.cat([angles, angles], dim=-1)[:, None, None, :]
        return torch.stack([angles.cos(), angles.sin()]).to(dtype)


class Stage(nn.Module):
    """Some of the layers; the first has the input embedding, the last the head.

    Args:
        config: Megatron's.
        model: Hugging Face's.
        groups: this rank's.
        part: which of the parts that a stage has; None where stages are not interleaved.
        head: see `ModelSettings.head`.
        chunk: see `ModelSettings.logprob_chunk`.
    """

    def __init__(self, config: Any, model: Any, groups: Groups, part: int | None, head: str, chunk: int):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
        from megatron.core.transformer.enums import ModelType
        from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

        super().__init__()
        parallel, at = groups.grid.parallel, groups.place
        self.config, self.vp_stage = config, part
        self.model_type = ModelType.encoder_or_decoder  # which Megatron's schedules ask for
        self.first = at.stage == 0 and not part
        self.last = at.stage == parallel.pipeline - 1 and part in (None, parallel.interleave - 1)
        self._groups, self._head, self._chunk = groups, head, chunk
        self._fed: Tensor | None = None
        given = groups.collection()
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        inner = layer.submodules
        inner.input_layernorm = inner.pre_mlp_layernorm = Norm
        inner.self_attention.submodules.core_attention = CoreAttention
        if config.qk_layernorm:
            inner.self_attention.submodules.q_layernorm = inner.self_attention.submodules.k_layernorm = Norm
        count = config.num_layers // (parallel.pipeline * parallel.interleave)
        self.decoder = TransformerBlock(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm),
            pre_process=self.first,
            post_process=self.last,
            pg_collection=given,
            vp_stage=part,
        )
        self.angles = Angles(model)
        tensor = parallel.tensor
        self.rows = -(-model.vocab_size // tensor)
        """Of the vocabulary, that a rank has; the last may have fewer."""
        self.own_rows = max(0, min(self.rows, model.vocab_size - at.tensor * self.rows))
        self._embeds = model.tie_word_embeddings
        self._padding = -1 if model.pad_token_id is None else model.pad_token_id
        if self.first:
            self.embedding = VocabParallelEmbedding(
                self.rows * tensor,
                config.hidden_size,
                init_method=config.init_method,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=given.tp,
            )
        if self.last and head == "values":
            self.score = nn.Linear(config.hidden_size, 1)
        elif self.last and not (self.first and model.tie_word_embeddings):
            self.head = nn.Parameter(torch.empty(self.rows, config.hidden_size))

    def computed_with(self) -> Iterator[tuple[nn.Module, str]]:
        """Its parameters that are in the dtype to compute in, by module and name there: all but those of the critic's
        head, whose values are float32 as under FSDP."""
        for module in self.modules():
            if module is not getattr(self, "score", None):
                yield from ((module, name) for name, _ in module.named_parameters(recurse=False))

    def set_input_tensor(self, fed: Any) -> None:
        """What the stage before gave; Megatron's schedules call this."""
        self._fed = fed[0] if isinstance(fed, list) else fed

    def forward(self, reading: Reading, entropy_slope: bool = False) -> Tensor:
        """Hidden states [tokens here, 1, width]; from the last stage [learned, 2] of log-prob and entropy, or
        [learned, 1 + width] of the value and what it is read from."""
        if self.first:
            hidden = self._embedded(reading.ids)
        else:
            self.decoder.set_input_tensor(self._fed)
            hidden = None
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=reading,
            rotary_pos_emb=self.angles(reading.positions, self.config.pipeline_dtype),
        )
        return self._ended(hidden, reading, entropy_slope) if self.last else hidden

    def _embedded(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        padding = ids[0] == self._padding
        if self.config.sequence_parallel:
            padding = padding.chunk(self._groups.grid.parallel.tensor)[self._groups.place.tensor]
        else:
            hidden = hidden.transpose(0, 1).contiguous()
        # transformers' embeddings do not learn what padding is read as
        return torch.where(padding[:, None, None], hidden.detach(), hidden)

    def _ended(self, hidden: Tensor, reading: Reading, entropy_slope: bool) -> Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        tensor = self._groups.group("tensor")
        values = self._head == "values"
        if self.config.sequence_parallel:
            # of a head that ranks share each rank's gradient is a part, of one that all have it is the whole
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not values, group=tensor)
        hidden = hidden[:, 0].index_select(0, reading.predicting)
        if values:
            hidden = hidden.to(self.score.weight.dtype)
            found = torch.cat([self.score(hidden), hidden], dim=1)
        else:
            weight = (self.embedding.weight if self.first and self._embeds else self.head)[: self.own_rows]
            if tensor.size() == 1:
                pair = token_logprobs(
                    hidden, weight, None, reading.targets, reading.temperature,
                    chunk=self._chunk, entropy_slope=entropy_slope,
                )  # fmt: skip
            else:
                pair = shared_logprobs(
                    hidden, weight, reading.targets, reading.temperature, first=self._groups.place.tensor * self.rows,
                    ranks=tensor, chunk=self._chunk, entropy_slope=entropy_slope,
                )  # fmt: skip
            found = torch.stack(pair, dim=1)
        if reading.spread is not None:
            found = Collected.apply(found, *reading.spread, self._groups.group("context"))
        return found


def outputs_of(found: Tensor, head: str) -> tuple[Tensor, Tensor]:
    """What a last stage gave, as `training.backend.Outputs`."""
    if head == "values":
        return found[:, 0], found[:, 1:]
    return found[:, 0], found[:, 1]
