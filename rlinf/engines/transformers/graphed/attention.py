"""Attention of a decode step over pages, and of prompts that lie one behind another; operations that torch knows.

Flows in: queries, and keys and values in pages or in a row. Flows out: what attention gives. On a GPU kernels do it
(`kernels`, and torch's variable-length attention); elsewhere the same is written out, as what they are compared with.
Being operations of torch's, they can be recorded, faked and counted like any other.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("rlinf::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, window: int, scale: float
) -> Tensor:
    """One query per row over the tokens of that row.

    Args:
        query: [rows, heads, size].
        keys, values: the pool, [tokens of the pool, key-value heads, size].
        table: pages of each row in order, int32 [rows, width]; entries beyond the row's length are never followed.
        lengths: tokens of each row, int64 [rows]; 0 gives zeros.
        page: tokens of a page.
        window: tokens that a row sees at most, its last; 0 for all.
        scale: of the scores.

    Returns:
        [rows, heads, size]
    """
    rows, heads, size = query.shape
    columns = torch.arange(table.shape[1] * page, device=query.device)
    seen = columns < lengths[:, None]
    if window:
        seen &= columns >= lengths[:, None] - window
    pages = table.long()[:, :, None] * page + columns[:page]
    places = torch.where(seen, pages.flatten(1), 0)
    there = seen[:, :, None, None]  # elsewhere lies whatever was left there, which may not be finite
    key, value = (part[places].masked_fill(~there, 0).transpose(1, 2) for part in (keys, values))
    asked = query.view(rows, keys.shape[1], -1, size)
    attended = F.scaled_dot_product_attention(asked, key, value, attn_mask=seen[:, None, None], scale=scale)
    return attended.masked_fill((lengths == 0)[:, None, None, None], 0).reshape(rows, heads, size)


@paged_attention.register_kernel("cuda")
def _paged_on_cuda(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, window: int, scale: float
) -> Tensor:
    from rlinf.engines.transformers.graphed import kernels  # needs Triton

    return kernels.paged_attention(query, keys, values, table, lengths, page, window, scale)


@paged_attention.register_fake
def _paged_shapes(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, window: int, scale: float
) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("rlinf::turn_and_keep", mutates_args=("keys", "values"))
def turn_and_keep(
    turning: Tensor, fresh: Tensor, cos: Tensor, sin: Tensor, place: Tensor, keys: Tensor, values: Tensor, queries: int
) -> Tensor:
    """Rotate the queries and keys of one token per row, and put keys and values where they belong in the pool.

    Args:
        turning: queries, then keys, [rows, heads + key-value heads, size].
        fresh: values, [rows, key-value heads, size].
        cos, sin: of each row's position, [rows, 1, size]; the sines of the first half carry a minus sign.
        place: where each row's token goes, int64 [rows].
        keys, values: the pool, [tokens of the pool, key-value heads, size], which is written.
        queries: heads of them.

    Returns:
        The queries, [rows, heads, size].
    """
    turned = torch.addcmul(turning * cos, turning.roll(turning.shape[-1] // 2, dims=-1), sin)
    keys.index_copy_(0, place, turned[:, queries:])
    values.index_copy_(0, place, fresh)
    return turned[:, :queries].contiguous()


@turn_and_keep.register_kernel("cuda")
def _turned_on_cuda(
    turning: Tensor, fresh: Tensor, cos: Tensor, sin: Tensor, place: Tensor, keys: Tensor, values: Tensor, queries: int
) -> Tensor:
    from rlinf.engines.transformers.graphed import kernels  # needs Triton

    return kernels.turn_and_keep(turning, fresh, cos, sin, place, keys, values, queries)


@turn_and_keep.register_fake
def _turned_shapes(
    turning: Tensor, fresh: Tensor, cos: Tensor, sin: Tensor, place: Tensor, keys: Tensor, values: Tensor, queries: int
) -> Tensor:
    return turning.new_empty((len(turning), queries, turning.shape[-1]))


@torch.library.custom_op("rlinf::prompt_attention", mutates_args=())
def prompt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    asked: Tensor,
    given: Tensor,
    most_asked: int,
    most_given: int,
    window: int,
    scale: float,
) -> Tensor:
    """Causal attention within each of the texts that lie one behind another, aligned at their ends.

    Args:
        query: [tokens, heads, size].
        keys, values: [tokens with those read before, key-value heads, size].
        asked, given: where each text begins in `query` and in `keys`, and the end of the last, int32 [texts + 1].
        most_asked, most_given: of a text.
        window: tokens that a token sees at most, itself included; 0 for all.
        scale: of the scores.

    Returns:
        [tokens, heads, size]
    """
    attended = torch.empty_like(query)
    repeats = query.shape[1] // keys.shape[1]
    ends = zip(asked[1:].tolist(), given[1:].tolist(), strict=True)
    first = before = 0
    for last, end in ends:
        columns = torch.arange(end - before, device=query.device)
        looking = columns[columns.numel() - (last - first) :, None]
        seen = columns <= looking
        if window:
            seen &= columns > looking - window
        own = query[first:last].transpose(0, 1)
        key, value = (part[before:end].repeat_interleave(repeats, dim=1).transpose(0, 1) for part in (keys, values))
        found = F.scaled_dot_product_attention(own, key, value, attn_mask=seen, scale=scale)
        attended[first:last] = found.transpose(0, 1)
        first, before = last, end
    return attended


_by_text = prompt_attention._init_fn


@prompt_attention.register_kernel("cuda")
def _prompts_on_cuda(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    asked: Tensor,
    given: Tensor,
    most_asked: int,
    most_given: int,
    window: int,
    scale: float,
) -> Tensor:
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % 8 or query.shape[-1] > 256:
        found: Tensor = _by_text(query, keys, values, asked, given, most_asked, most_given, window, scale)
        return found
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

    # torch 2.11 takes fewer heads of keys without being told; later ones want to be told.
    more: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    limits = (window - 1 if 0 < window < most_given else -1, 0)
    bounds = (asked, given, most_asked, most_given)
    attended = varlen_attn(query, keys, values, *bounds, scale=scale, window_size=limits, **more)
    assert isinstance(attended, Tensor)  # without the extras that were not asked for
    return attended


@prompt_attention.register_fake
def _prompt_shapes(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    asked: Tensor,
    given: Tensor,
    most_asked: int,
    most_given: int,
    window: int,
    scale: float,
) -> Tensor:
    return torch.empty_like(query)
