"""A pipeline stage of a model for Megatron-core: its layers, packed attention between them, and the heads at its end.

A `Stage` is a stage of the model, or one of several parts of the layers that a stage has. It takes a `Reading` of a
micro-batch and, but for the first stage, the hidden states of the stage before; it gives hidden states for the next
one, or, if it is the last, what `training.backend.Outputs` is made of. Layers, parallel linear maps and experts are
Megatron-core's; attention, norms, the angles of rotary embeddings and the head are ours.

Attention reads the `Reading` where Megatron passes a mask. Where a context is whole, it is computed as for FSDP
(`packed_attention`). Where it is split, keys and values of all ranks are gathered, and the gradient of each goes back
to the rank that it came from. A rank of `size` has pieces r and 2 size - 1 - r of 2 size equal pieces (zig-zag), so
that all have about as many keys to look at: early tokens see few, late ones many.

The head turns hidden states that predict learned tokens into values, or into log-probs and entropies by rows of a
vocabulary that ranks share: the same on all ranks, who compute the loss alike. Logits are made chunk by chunk, used,
and made again for the gradient, as where one rank has the whole vocabulary (`models/language/policy_model.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlinf.algos.loss_sum import wide
from rlinf.data.packing import Packed
from rlinf.models.language.attention import ARGUMENT, Layout, packed_attention
from rlinf.models.language.policy_model import token_logprobs
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.transport.process_groups import all_gather, reduce_scatter
from rlinf.training.megatron.layout import Groups, head_size


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Neighbouring tokens of one sequence that this rank has, and the keys that they see."""

    mine: slice
    """Where they are among this rank's tokens."""
    context: slice
    """All of their sequence up to the last of them, among the tokens of all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One rank's part of a micro-batch."""

    ids: Tensor
    """Its tokens, int64 [1, tokens]; every rank of a context has as many."""
    positions: Tensor
    """Position of each token in its own sequence, int64 [tokens]."""
    layout: Layout | None
    """Where the sequences lie; None where the context is split."""
    stretches: tuple[Stretch, ...]
    """Where it is split: what is computed here."""
    order: Tensor | None
    """Where it is split: for each token of the micro-batch, where it is among those of all ranks, int64."""
    predicting: Tensor
    """Which of its tokens predict those learned tokens that it predicts, int64 [predicted here]."""
    targets: Tensor
    """Those learned tokens, int64 [predicted here]."""
    temperature: Tensor | None
    """Theirs, float32 [predicted here]."""
    spread: tuple[Tensor, int] | None
    """Where the context is split: for each learned token, its place in what the ranks predict, int64 [learned], each
    rank's filled up to so many."""


def read(batch: Packed, dtype: torch.dtype, multiple: int, context: int, rank: int) -> Reading:
    """Take a rank's part of a micro-batch.

    Args:
        batch: on the device to compute on.
        dtype: in which attention is computed.
        multiple: a rank's tokens are filled up to a multiple of it, by a sequence of their own.
        context: over how many ranks its tokens are split.
        rank: which of those this is.
    """
    if batch.images:
        raise WrongSetting(
            f"trainer.backend=megatron reads no pictures, and prompts have {len(batch.images)}: take backend fsdp"
        )
    if context == 1:
        return _whole(batch, dtype, multiple)
    return _split(batch, multiple, context, rank)


def _whole(batch: Packed, dtype: torch.dtype, multiple: int) -> Reading:
    ids, positions, lengths, places, stands = batch.ids, batch.positions, batch.lengths, batch.places, batch.stands
    if fill := -len(ids) % multiple:
        more = torch.arange(fill, device=ids.device)
        if places is not None:
            places = torch.cat([places, more + len(ids)])
            stands = None
        ids, positions, lengths = F.pad(ids, (0, fill)), torch.cat([positions, more]), (*lengths, fill)
    layout = Layout.of(lengths, ids.device, dtype, places, stands=stands)
    return Reading(ids[None], positions, layout, (), None, batch.predicting(), batch.targets, batch.temperature, None)


def _split(batch: Packed, multiple: int, context: int, rank: int) -> Reading:
    ids, positions = batch.ids, batch.positions
    if batch.places is not None:  # what sequences share is read for each of them
        ids, positions = ids[batch.places], positions[batch.places]
    fill = -len(ids) % (2 * context * multiple)
    more = torch.arange(fill, device=ids.device)
    ids, positions = F.pad(ids, (0, fill)), torch.cat([positions, more])
    total, piece = len(ids), len(ids) // (2 * context)
    every = torch.arange(total, device=ids.device)
    number = every // piece
    owner = torch.minimum(number, 2 * context - 1 - number)
    local = every % piece + piece * (number >= context)
    mine = torch.nonzero(owner == rank).squeeze(1)
    kept_by, kept_at = owner[batch.predictors], local[batch.predictors]
    here = kept_by == rank
    counts = torch.bincount(kept_by, minlength=context)
    room = int(counts.max())
    among = torch.zeros_like(batch.predictors)
    for one in range(context):
        theirs = kept_by == one
        among[theirs] = torch.arange(int(counts[one]), device=ids.device)
    return Reading(
        ids[mine][None],
        positions[mine],
        None,
        tuple(_stretches(batch.lengths + ((fill,) if fill else ()), piece, (rank, 2 * context - 1 - rank))),
        owner * (2 * piece) + local,
        kept_at[here],
        batch.targets[here],
        None if batch.temperature is None else batch.temperature[here],
        (kept_by * room + among, room),
    )


def _stretches(lengths: tuple[int, ...], piece: int, mine: tuple[int, int]) -> list[Stretch]:
    stretches, offset = [], 0
    for length in lengths:
        for place, number in enumerate(mine):
            first, last = max(offset, number * piece), min(offset + length, (number + 1) * piece)
            if first < last:
                shift = place * piece - number * piece
                stretches.append(Stretch(slice(first + shift, last + shift), slice(offset, last)))
        offset += length
    return sorted(stretches, key=lambda stretch: stretch.mine.start)


class CoreAttention(nn.Module):
    """Attention between the linear layers of Megatron's blocks.

    Args:
        pg_collection: Megatron's groups.
        softmax_scale: of the scores; None for 1 / sqrt(numbers of a query).
        more: what Megatron's own would take, too.
    """

    def __init__(self, pg_collection: Any = None, softmax_scale: float | None = None, **more: Any):
        super().__init__()
        self._ranks, self._scale = pg_collection.cp, softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            query: [tokens, 1, heads, size]
            key, value: [tokens, 1, key heads, size]
            attention_mask: the `Reading`.

        Returns:
            [tokens, 1, heads x size]
        """
        reading: Reading = attention_mask
        if reading.layout is not None:
            arguments: dict[str, Any] = {"scaling": self._scale, ARGUMENT: reading.layout}
            q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
            attended, _ = packed_attention(self, q, k, v, None, **arguments)
            return attended.flatten(2).transpose(0, 1)
        assert reading.order is not None
        keys, values = (_Gathered.apply(part, self._ranks)[reading.order] for part in (key, value))
        done = [self._attended(query, keys, values, stretch) for stretch in reading.stretches]
        return torch.cat(done).flatten(2)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, stretch: Stretch) -> Tensor:
        queries = query[stretch.mine].permute(1, 2, 0, 3)
        context = [part[stretch.context].permute(1, 2, 0, 3) for part in (key, value)]
        count, before = queries.shape[2], context[0].shape[2]
        sees = torch.ones(count, before, dtype=torch.bool, device=query.device).tril(before - count)
        attended = F.scaled_dot_product_attention(
            queries, context[0], context[1], sees, scale=self._scale, enable_gqa=True
        )
        return attended.permute(2, 0, 1, 3)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, one behind another; gradients are added up at the rank that a row came from."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, ranks: Any) -> Tensor:
        ctx.ranks = ranks
        everything = mine.new_empty((ranks.size() * mine.shape[0], *mine.shape[1:]))
        all_gather(everything, mine.contiguous(), group=ranks)
        return everything

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        gradient = gradient.contiguous()  # gloo sends strided tensors wrongly, without an error
        mine = gradient.new_empty((gradient.shape[0] // ctx.ranks.size(), *gradient.shape[1:]))
        reduce_scatter(mine, gradient, group=ctx.ranks)
        return mine, None


@dataclass(frozen=True, slots=True)
class SharedHead:
    """How log-probs are computed where each rank has some rows of the vocabulary."""

    first: int
    """This rank's first row in the vocabulary."""
    ranks: Any
    """The group."""
    chunk: int
    """Tokens whose logits exist at a time."""
    entropy_slope: bool
    """Entropies are differentiable too."""


def shared_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, head: SharedHead
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy, under softmax(hidden weightᵀ / temperature) over the rows of all ranks.

    Args:
        hidden: the same on all ranks, [tokens, width]; the gradient of each rank is what its rows ask for, to be added
            up over them.
        weight: this rank's rows, [rows, width].
        targets: int64 [tokens]
        temperature: float32 [tokens]; None for 1.
        head: how.

    Returns:
        Nats, [tokens] each, at least float32.
    """
    result: tuple[Tensor, Tensor] = _Shared.apply(hidden, weight, targets, temperature, head)
    return result


class _Shared(torch.autograd.Function):
    """With p = softmax(logits / T) of this rank's rows, of which m is the largest score, Z the sum over all ranks:

    log p_t = z_t - m - log Z, H = m + log Z - Σ p z; slopes as in `_TokenLogprobs`, row by row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        head: SharedHead,
    ) -> tuple[Tensor, Tensor]:
        count, ranks = len(hidden), head.ranks
        logprobs = torch.empty(count, dtype=wide(hidden[:0]).dtype, device=hidden.device)
        entropy, norms = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, count, head.chunk):
            part = slice(start, start + head.chunk)
            logits = _logits(hidden[part], weight, temperature, part)
            largest = logits.amax(dim=-1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks)
            raised = (logits - largest[:, None]).exp_()
            owned, rows = _own(targets[part], head.first, len(weight))
            sums = torch.stack(
                [
                    raised.sum(dim=-1),
                    (raised * torch.where(raised == 0, 0.0, logits)).sum(dim=-1),
                    torch.where(owned, logits.gather(1, rows[:, None]).squeeze(1), 0.0),
                ]
            )
            dist.all_reduce(sums, group=ranks)
            norms[part] = largest + sums[0].log()
            logprobs[part] = sums[2] - norms[part]
            entropy[part] = norms[part] - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, temperature, norms, entropy)
        ctx.head = head
        if not head.entropy_slope:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad, grad_entropy = gradients
        hidden, weight, targets, temperature, norms, entropy = ctx.saved_tensors
        for_hidden = torch.zeros_like(hidden)
        for_weight = torch.zeros(weight.shape, dtype=norms.dtype, device=weight.device)
        for start in range(0, len(hidden), ctx.head.chunk):
            part = slice(start, start + ctx.head.chunk)
            logp = _logits(hidden[part], weight, temperature, part).sub_(norms[part, None])
            p = logp.exp()
            slope = p * -grad[part, None]
            if ctx.head.entropy_slope:
                finite = logp.masked_fill_(logp == -torch.inf, 0.0)
                slope -= p * (finite + entropy[part, None]) * grad_entropy[part, None]
            owned, rows = _own(targets[part], ctx.head.first, len(weight))
            slope.scatter_add_(1, rows[:, None], torch.where(owned, grad[part], 0.0)[:, None])
            if temperature is not None:
                slope /= temperature[part, None]
            slope = slope.to(hidden.dtype)
            torch.mm(slope, weight, out=for_hidden[part])
            for_weight += slope.t() @ hidden[part]
        return for_hidden, for_weight.to(weight.dtype), None, None, None


def _own(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets are rows of this rank, and the rows; 0 for others."""
    owned = (targets >= first) & (targets < first + rows)
    return owned, torch.where(owned, targets - first, 0)


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor | None, part: slice) -> Tensor:
    logits = wide(F.linear(hidden, weight))
    return logits if temperature is None else logits.div_(temperature[part, None])


class Collected(torch.autograd.Function):
    """Results for learned tokens from all ranks of a context, in the order of the micro-batch, the same on all of them:
    each computes the whole loss, so the gradient of its own rows is all that goes back."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, places: Tensor, room: int, ranks: Any) -> Tensor:
        filled = mine.new_zeros((room, *mine.shape[1:]))
        filled[: len(mine)] = mine
        everything = mine.new_empty((ranks.size() * room, *mine.shape[1:]))
        if room:
            all_gather(everything, filled, group=ranks)
        own = (places >= ranks.rank() * room) & (places < (ranks.rank() + 1) * room)
        ctx.own = torch.nonzero(own).squeeze(1)
        return everything[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0][ctx.own], None, None, None


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
        head: see `ModelSpec.head`.
        chunk: see `LearningSettings.logprob_chunk`.
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
        process_groups = groups.collection()
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
            pg_collection=process_groups,
            vp_stage=part,
        )
        self.angles = Angles(model)
        tensor = parallel.tensor
        self.rows = -(-model.vocab_size // tensor)
        """Rows of the vocabulary that a rank has; the last rank may have fewer."""
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
                tp_group=process_groups.tp,
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
        """Take the output of the stage before; Megatron's schedules call this."""
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
            outputs = torch.cat([self.score(hidden), hidden], dim=1)
        else:
            weight = (self.embedding.weight if self.first and self._embeds else self.head)[: self.own_rows]
            if tensor.size() == 1:
                pair = token_logprobs(
                    hidden,
                    weight,
                    None,
                    reading.targets,
                    reading.temperature,
                    chunk=self._chunk,
                    entropy_slope=entropy_slope,
                )
            else:
                head = SharedHead(self._groups.place.tensor * self.rows, tensor, self._chunk, entropy_slope)
                pair = shared_logprobs(hidden, weight, reading.targets, reading.temperature, head)
            outputs = torch.stack(pair, dim=1)
        if reading.spread is not None:
            outputs = Collected.apply(outputs, *reading.spread, self._groups.group("context"))
        return outputs


def outputs_of(outputs: Tensor, head: str) -> tuple[Tensor, Tensor]:
    """Output of a last stage, as `training.backend.Outputs`."""
    if head == "values":
        return outputs[:, 0], outputs[:, 1:]
    return outputs[:, 0], outputs[:, 1]
