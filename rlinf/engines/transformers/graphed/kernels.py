"""Triton kernels of a decode step: attention over pages, each row's pages shared out among several programs.

Flows in: as `attention.paged_attention`. Flows out: the same. One program has the queries that share a key-value head
of one row, and a share of its pages (Dao et al., "Flash-Decoding", 2023); a second kernel joins the shares. A program
reads what its row really holds, whatever the others hold.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # comes with torch for CUDA
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_PROGRAMS = 528
"""Programs that keep a GPU busy: four for each of the 132 multiprocessors of an H100 or H200."""
_MOST = 32
"""Shares of a row at most: joining them costs more than it brings."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend(
    query, keys, values, table, lengths, sums, peaks, totals, out, scale, width,
    PAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SHARES: tl.constexpr, GROUPS: tl.constexpr, SIZES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    begin = first // PAGE
    pages = tl.cdiv(length, PAGE) - begin
    each = tl.cdiv(pages, SHARES)
    end = tl.minimum(begin + pages, begin + (share + 1) * each)
    begin += share * each
    members, parts, columns = tl.arange(0, GROUPS), tl.arange(0, SIZES), tl.arange(0, PAGE)
    real = (members[:, None] < GROUP) & (parts[None, :] < SIZE)
    at = (row * HEADS * GROUP + head * GROUP + members).to(tl.int64)
    asked = tl.load(query + at[:, None] * SIZE + parts[None, :], mask=real, other=0.0)
    peak = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    attended = tl.zeros([GROUPS, SIZES], tl.float32)
    for number in range(begin, end):
        page = tl.load(table + row.to(tl.int64) * width + number).to(tl.int64)
        place = number * PAGE + columns
        seen = (place < length) & (place >= first)
        where = ((page * PAGE + columns) * HEADS + head) * SIZE
        key = tl.load(keys + where[None, :] + parts[:, None], mask=seen[None, :] & (parts[:, None] < SIZE), other=0.0)
        scores = tl.dot(asked, key, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrunk = tl.exp(peak - higher)
        total = total * shrunk + tl.sum(weights, 1)
        value = tl.load(
            values + where[:, None] + parts[None, :], mask=seen[:, None] & (parts[None, :] < SIZE), other=0.0
        )
        attended = attended * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        peak = higher
    if SHARES == 1:
        attended = attended / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at[:, None] * SIZE + parts[None, :], attended.to(out.dtype.element_ty), mask=real)
    else:
        own = at * SHARES + share
        tl.store(sums + own[:, None] * SIZE + parts[None, :], attended, mask=real)
        tl.store(peaks + own, peak, mask=members < GROUP)
        tl.store(totals + own, total, mask=members < GROUP)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _join(sums, peaks, totals, out, SIZE: tl.constexpr, SHARES: tl.constexpr, SIZES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    shares, parts = tl.arange(0, SHARES), tl.arange(0, SIZES)
    peak = tl.load(peaks + at * SHARES + shares)
    weight = tl.where(
        peak == float("-inf"), 0.0, tl.exp(peak - tl.max(tl.where(peak == float("-inf"), -1e30, peak), 0))
    )
    total = tl.sum(tl.load(totals + at * SHARES + shares) * weight, 0)
    where = (at * SHARES + shares)[:, None] * SIZE + parts[None, :]
    attended = tl.sum(tl.load(sums + where, mask=parts[None, :] < SIZE, other=0.0) * weight[:, None], 0)
    attended = attended / tl.where(total > 0, total, 1.0)
    tl.store(out + at * SIZE + parts, attended.to(out.dtype.element_ty), mask=parts < SIZE)


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, window: int, scale: float
) -> Tensor:
    """See `attention.paged_attention`; `page` is a power of 2 and at least 16."""
    rows, every, size = query.shape
    heads = keys.shape[1]
    query = query.contiguous()
    out = torch.empty_like(query)
    shares = shares_of(rows * heads)
    some = (rows, every, shares) if shares > 1 else (1,)
    sums = torch.empty((*some, size), dtype=torch.float32, device=query.device)
    peaks, totals = (torch.empty(some, dtype=torch.float32, device=query.device) for _ in range(2))
    sizes = max(16, triton.next_power_of_2(size))
    _attend[(rows, heads, shares)](
        query, keys, values, table, lengths, sums, peaks, totals, out, scale, table.stride(0),
        PAGE=page, HEADS=heads, GROUP=every // heads, SIZE=size, WINDOW=window, SHARES=shares,
        GROUPS=max(16, triton.next_power_of_2(every // heads)), SIZES=sizes,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    if shares > 1:
        _join[(rows * every,)](sums, peaks, totals, out, SIZE=size, SHARES=shares, SIZES=sizes, num_warps=4)
    return out


def shares_of(programs: int) -> int:
    """Into how many shares, a power of 2, the pages of a row are cut where there are so many programs without that."""
    return min(_MOST, triton.next_power_of_2(max(1, -(-_PROGRAMS // programs))))
