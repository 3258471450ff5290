"""Triton kernels of a decode step: rotating keys and storing them, and attention over pages, whose programs share them.

They take and give what the operations of `paged_attention` do. In attention one program has those queries of a row
that share a key-value head, and a share of the row's pages (Dao et al., "Flash-Decoding", 2023); a second kernel joins
the shares. A program reads what its row really holds, whatever the others hold.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # comes with torch for CUDA
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_PROGRAMS = 528
"""Programs that keep a GPU busy: four for each of the 132 multiprocessors of an H100 or H200."""
_MOST = 32
"""Shares of a row at most: joining them costs more than it brings."""


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator,unused-ignore]  # it grows with the texts
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
    queries_of_group = tl.load(query + at[:, None] * SIZE + parts[None, :], mask=real, other=0.0)
    peak = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    attended = tl.zeros([GROUPS, SIZES], tl.float32)
    for number in range(begin, end):
        page = tl.load(table + row.to(tl.int64) * width + number).to(tl.int64)
        place = number * PAGE + columns
        mask = (place < length) & (place >= first)
        where = ((page * PAGE + columns) * HEADS + head) * SIZE
        key = tl.load(keys + where[None, :] + parts[:, None], mask=mask[None, :] & (parts[:, None] < SIZE), other=0.0)
        scores = tl.dot(queries_of_group, key, input_precision=PRECISION) * scale
        scores = tl.where(mask[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrunk = tl.exp(peak - higher)
        total = total * shrunk + tl.sum(weights, 1)
        value = tl.load(
            values + where[:, None] + parts[None, :], mask=mask[:, None] & (parts[None, :] < SIZE), other=0.0
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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _turn(
    turning, fresh, cos, sin, place, keys, values, query, turning_row, fresh_row,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, SIZES)
    real = parts < SIZE
    if head < QUERIES + HEADS:
        begin = turning + row * turning_row + head * SIZE
        own = tl.load(begin + parts, mask=real, other=0.0).to(tl.float32)
        other = tl.load(begin + (parts + SIZE // 2) % SIZE, mask=real, other=0.0).to(tl.float32)
        along = tl.load(cos + row * SIZE + parts, mask=real, other=0.0).to(tl.float32)
        across = tl.load(sin + row * SIZE + parts, mask=real, other=0.0).to(tl.float32)
        turned = (own * along + other * across).to(query.dtype.element_ty)
        if head < QUERIES:
            tl.store(query + (row * QUERIES + head) * SIZE + parts, turned, mask=real)
        else:
            where = (tl.load(place + row) * HEADS + head - QUERIES) * SIZE
            tl.store(keys + where + parts, turned, mask=real)
    else:
        member = head - QUERIES - HEADS
        value = tl.load(fresh + row * fresh_row + member * SIZE + parts, mask=real, other=0.0)
        where = (tl.load(place + row) * HEADS + member) * SIZE
        tl.store(values + where + parts, value, mask=real)


def turn_and_keep(
    turning: Tensor, fresh: Tensor, cos: Tensor, sin: Tensor, place: Tensor, keys: Tensor, values: Tensor, queries: int
) -> Tensor:
    """See `attention.turn_and_keep`; the heads of a row lie one behind another."""
    rows, _, size = turning.shape
    heads = keys.shape[1]
    query = torch.empty((rows, queries, size), dtype=turning.dtype, device=turning.device)
    tensors = (turning, fresh, cos.contiguous(), sin.contiguous(), place, keys, values, query)
    sizes = {"QUERIES": queries, "HEADS": heads, "SIZE": size, "SIZES": triton.next_power_of_2(size)}
    _turn[(rows, queries + 2 * heads)](*tensors, turning.stride(0), fresh.stride(0), **sizes, num_warps=1)
    return query


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
    tensors = (query, keys, values, table, lengths, sums, peaks, totals, out)
    group = every // heads
    constants = {"PAGE": page, "HEADS": heads, "GROUP": group, "SIZE": size, "WINDOW": window, "SHARES": shares}
    constants |= {"GROUPS": max(16, triton.next_power_of_2(group)), "SIZES": sizes}
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    launch = _attend[(rows, heads, shares)]
    launch(*tensors, scale, table.stride(0), **constants, PRECISION=precision, num_warps=4, num_stages=3)
    if shares > 1:
        _join[(rows * every,)](sums, peaks, totals, out, SIZE=size, SHARES=shares, SIZES=sizes, num_warps=4)
    return out


def shares_of(programs: int) -> int:
    """Into how many shares, a power of 2, the pages of a row are cut where there are so many programs without that."""
    return min(_MOST, triton.next_power_of_2(max(1, -(-_PROGRAMS // programs))))
