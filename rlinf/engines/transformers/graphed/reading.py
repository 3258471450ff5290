"""Prompts, and whatever else has to be read, one text behind another and without padding, straight into pages.

Flows in: texts, and keys and values of their beginnings where these were kept. Flows out: the logits after each text.
Plain blocking code that wakes nobody. Equal texts come once, and go to the pages of all answers that begin with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.engines.transformers.conversations import Reader
from rlinf.engines.transformers.graphed.attention import prompt_attention
from rlinf.engines.transformers.graphed.paged_cache import PagedCache
from rlinf.engines.transformers.llama_forward import LeanForward

_TOKENS = 8192
"""Tokens read at once: enough to keep a GPU busy, and a bound on the memory it takes."""


def runs(readers: Iterable[Reader]) -> Iterator[list[Reader]]:
    """Which texts to read together, in the order in which they came: at most `_TOKENS` tokens, or a single text."""
    run: list[Reader] = []
    tokens = 0
    for reader in readers:
        if run and tokens + len(reader.unread) > _TOKENS:
            yield run
            run, tokens = [], 0
        run.append(reader)
        tokens += len(reader.unread)
    if run:
        yield run


def read(forward: LeanForward, cache: PagedCache, readers: Sequence[Reader]) -> Tensor:
    """Read texts into the pages of their answers, which are there.

    Returns:
        Logits after each text, [texts, vocabulary].
    """
    device = forward.device
    unread = np.array([len(reader.unread) for reader in readers])
    whole = np.array([len(reader.text) for reader in readers])
    asked, given = (np.concatenate([[0], np.cumsum(lengths)]) for lengths in (unread, whole))

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    ids = on_device(np.concatenate([reader.unread for reader in readers]))
    spans = zip(whole - unread, whole, strict=True)
    positions = on_device(np.concatenate([np.arange(first, last) for first, last in spans]))
    source = on_device(_sources(readers, given))
    place = on_device(np.concatenate([cache.places(slot, len(one.text)) for one in readers for slot in one.slots]))
    bounds = on_device(asked.astype(np.int32)), on_device(given.astype(np.int32))
    most = int(unread.max()), int(whole.max())
    hidden = F.embedding(ids, forward.embedding)
    cos, sin = forward.angles(positions, most[1])
    for number, block in enumerate(forward.blocks):
        turned, values = block.heads(hidden, cos, sin)
        keys, values = _with_past(readers, asked, number, turned[:, block.queries :], values)
        for pool, fresh in ((cache.keys[number], keys), (cache.values[number], values)):
            pool.index_copy_(0, place, fresh.index_select(0, source))
        query = turned[:, : block.queries].contiguous()
        attended = prompt_attention(query, keys, values, *bounds, *most, block.window or 0, block.scale)
        hidden = block.finish(hidden, attended.flatten(1))
    return forward.logits(hidden.index_select(0, on_device(asked[1:] - 1)))


def _sources(readers: Sequence[Reader], given: np.ndarray) -> np.ndarray:
    """Which of the tokens, those read before included, goes to each place, int64."""
    parts = [
        np.arange(first, first + len(reader.text))
        for first, reader in zip(given[:-1].tolist(), readers, strict=True)
        for _ in reader.slots
    ]
    return np.concatenate(parts)


def _with_past(
    readers: Sequence[Reader], asked: np.ndarray, layer: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values with those that were kept before them, [tokens, key-value heads, head size]."""
    if all(reader.kept is None for reader in readers):
        return keys.contiguous(), values.contiguous()
    joined: tuple[list[Tensor], list[Tensor]] = [], []
    for reader, first, last in zip(readers, asked[:-1].tolist(), asked[1:].tolist(), strict=True):
        shared = len(reader.text) - len(reader.unread)
        for which, fresh in enumerate((keys, values)):
            if reader.kept is not None and shared:
                joined[which].append(reader.kept.pairs[layer][which][:, :shared].transpose(0, 1))
            joined[which].append(fresh[first:last])
    return torch.cat(joined[0]), torch.cat(joined[1])
