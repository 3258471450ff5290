"""Choosing tokens.

Random choices come from a counter-based generator: the number for token t of a request is a function of (seed, t)
alone. So a request gives the same answer whatever shares its batch, and one number per row is enough.

vLLM's processes, which have no rlinf, load this file by its path: it imports `data.rng` and nothing else of rlinf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.data.rng import uniforms

DRAWS = np.dtype(
    [("seed", np.int64), ("temperature", np.float32), ("top_k", np.int64), ("top_p", np.float32), ("min_p", np.float32)]
)
"""How one row draws: its seed and these fields of `Sampling`, for arrays of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """How each row of a batch draws, ready for use: what no row needs is None and costs nothing."""

    seeds: Tensor
    """int64 [rows]"""
    temperatures: Tensor | None
    """Divisors of the logits, float32 [rows, 1]; None if 1 throughout."""
    greedy: Tensor | None
    """Takes the likeliest token, bool [rows]; None if nobody does."""
    top_k: Tensor | None
    """Tokens to draw from, 0 for all, int64 [rows, 1]; this and the next two are None if no row limits what it draws
    from."""
    top_p: Tensor | None
    """Probability to draw from, float32 [rows, 1]."""
    min_p: Tensor | None
    """Least probability relative to the likeliest, float32 [rows, 1]."""

    @staticmethod
    def of(draws: np.ndarray, device: torch.device) -> Rules:
        """The rules of rows that draw so, `DRAWS` [rows]."""

        def column(name: str) -> Tensor:
            return torch.from_numpy(draws[name].copy()).to(device)[:, None]

        temperatures = draws["temperature"]
        greedy = temperatures == 0
        limited = bool(((draws["top_k"] > 0) | (draws["top_p"] < 1) | (draws["min_p"] > 0)).any())
        return Rules(
            seeds=column("seed")[:, 0],
            temperatures=None
            if bool((greedy | (temperatures == 1)).all())
            else torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(device)[:, None],
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            top_k=column("top_k") if limited else None,
            top_p=column("top_p") if limited else None,
            min_p=column("min_p") if limited else None,
        )


_BLOCK = 128
"""Tokens of a block whose weights are added up as one: vocabularies are usually multiples of it."""
_LARGE = 8192
"""Tokens of a vocabulary from which on blocks are faster on a CPU, too."""


def choose(
    logits: Tensor, rules: Rules, positions: Tensor, *, blocks: bool | None = None, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), or take the likeliest where temperature is 0.

    Where `top_k`, `top_p` or `min_p` leave tokens out, the draw is among the others in proportion to their
    probabilities; the log-prob told is still that under the whole softmax.

    Args:
        logits: [rows, vocabulary].
        rules: of the rows.
        positions: which token of its answer each row draws, from 0, int64 [rows].
        blocks: look for the token among blocks of the vocabulary first, then in its block, which spares a running sum
            over everything, and gives the same token up to rounding in float64. Default: on GPUs, and of `_LARGE` ones.
        padding: ids that are left out of every draw, as by `top_k`, int64 [ids]: the model's head has them, and its
            tokenizer has no text for them.

    Returns:
        Tokens, int64 [rows], and their log-probs, nats, float32 [rows]: under softmax(logits / temperature), at
        temperature 0 under softmax(logits).
    """
    scaled = logits.float()
    if rules.temperatures is not None:
        scaled = scaled / rules.temperatures
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    weights = scaled.exp()
    large = logits.is_cuda or logits.shape[-1] >= _LARGE
    summed = _Blocks if (large if blocks is None else blocks) else _Running
    whole = summed(weights)
    real = weights if padding is None else weights.index_fill(1, padding, 0.0)
    if rules.top_k is not None:
        real = _limited(real, rules)
    total = whole if real is weights else summed(real)
    tokens = total.draw(uniforms(rules.seeds, positions)[:, None])
    if rules.greedy is not None:
        likely = scaled if padding is None else scaled.index_fill(1, padding, -torch.inf)
        tokens = torch.where(rules.greedy, likely.argmax(dim=-1), tokens)
    return tokens, (scaled.gather(1, tokens[:, None]) - whole.total.log().float()).squeeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """The tokens that some rows of a batch may draw, because their answers are of a form; other rows draw from all."""

    rows: Tensor
    """Which rows, int64 [some]."""
    tokens: Tensor
    """Tokens that each may draw, bool [some, vocabulary], at least one."""

    @staticmethod
    def of(rows: np.ndarray, tokens: np.ndarray, device: torch.device) -> Allowed:
        """From the host: int64 [some], and bool [some, vocabulary]."""
        return Allowed(torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device))


def choose_allowed(
    logits: Tensor, rules: Rules, positions: Tensor, allowed: Allowed | None, **how: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw as `choose` does, where some rows may draw some tokens alone: after the temperature, and before `top_k`,
    `top_p` and `min_p`, their softmax is that over these tokens, and so are their log-probs.

    Args:
        logits: [rows, vocabulary]; of rows in `allowed` they are changed in place.
        rules, positions: see `choose`.
        allowed: what these rows may draw; None: all rows draw from all tokens.
        how: further arguments of `choose`.

    Returns:
        Tokens and log-probs, as `choose`, and the log of the probability that `allowed` leaves of the whole softmax,
        nats, float32 [rows], 0 for other rows: their sum is the log-prob under the whole softmax. None for None.
    """
    if allowed is None:
        return *choose(logits, rules, positions, **how), None
    whole = logits[allowed.rows]
    logits[allowed.rows] = whole.masked_fill(~allowed.tokens, -torch.inf)
    tokens, logprobs = choose(logits, rules, positions, **how)
    whole = whole.float()
    if rules.temperatures is not None:
        whole = whole / rules.temperatures[allowed.rows]
    logprob = whole.gather(1, tokens[allowed.rows, None]).squeeze(1) - whole.logsumexp(dim=-1)
    log_mass = torch.zeros_like(logprobs)
    log_mass[allowed.rows] = (logprob - logprobs[allowed.rows]).clamp(max=0.0)
    return tokens, logprobs, log_mass


class _Running:
    """Draws by a running sum over the vocabulary.

    In float64: in a float32 sum, tokens below about 6e-8 vanish, and together they can be likely.
    """

    def __init__(self, weights: Tensor):
        self._sums = weights.cumsum(dim=-1, dtype=torch.float64)
        self.total = self._sums[:, -1:]

    def draw(self, uniform: Tensor) -> Tensor:
        """The token of each row at which the running sum passes this share of the total, float64 [rows, 1]."""
        # right=True takes the first entry above the target, so never a token of weight 0. There is one: a number of at
        # most 1 - 2^-53 times the last entry rounds to less than it. (The clamp is for weights that are NaN.)
        tokens = torch.searchsorted(self._sums, uniform * self.total, right=True)
        return tokens.clamp(max=self._sums.shape[-1] - 1).squeeze(1)


class _Blocks:
    """Draws by the running sum of blocks of the vocabulary, and that within one of them."""

    def __init__(self, weights: Tensor):
        self._last = weights.shape[-1] - 1
        if missing := -weights.shape[-1] % _BLOCK:
            weights = F.pad(weights, (0, missing))
        self._weights = weights.unflatten(-1, (-1, _BLOCK))
        self._sums = self._weights.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        self.total = self._sums[:, -1:]

    def draw(self, uniform: Tensor) -> Tensor:
        target = uniform * self.total
        block = torch.searchsorted(self._sums, target, right=True).clamp(max=self._sums.shape[-1] - 1)
        before = F.pad(self._sums, (1, 0)).gather(1, block)
        inside = self._weights.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1)
        sums = inside.cumsum(dim=-1, dtype=torch.float64)
        inside = torch.searchsorted(sums, target - before, right=True)
        # Sums in another order may round to less than the target: then it is the last token that has a weight.
        token = block * _BLOCK + torch.minimum(inside, torch.searchsorted(sums, sums[:, -1:].contiguous()))
        return token.clamp(max=self._last).squeeze(1)


def to_host(tokens: Tensor, *numbers: Tensor | None) -> tuple[Any, ...]:
    """Tokens, log-probs and what else there is of each row on the host, int64 and float32 [rows], by one transfer."""
    there = [each for each in numbers if each is not None]
    if tokens.device.type == "cpu":
        host = iter([each.numpy() for each in there])
        ids: np.ndarray = tokens.numpy()
    else:
        first, *rest = torch.stack([each.double() for each in (tokens, *there)]).cpu().numpy()  # in which each is exact
        ids, host = first.astype(np.int64), iter([each.astype(np.float32) for each in rest])
    return ids, *(None if each is None else next(host) for each in numbers)


def _limited(weights: Tensor, rules: Rules) -> Tensor:
    """The weights with 0 for tokens that a row leaves out; the likeliest token always stays.

    First the `top_k` likeliest, of those the fewest that have `top_p` of their probability, and of all those at least
    `min_p` times as likely as the likeliest. Of equally likely tokens the first in the vocabulary counts as likelier.
    """
    assert rules.top_k is not None
    assert rules.top_p is not None
    assert rules.min_p is not None
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered.masked_fill((ranks >= rules.top_k) & (rules.top_k > 0), 0.0)
    before = ordered.cumsum(dim=-1, dtype=torch.float64)
    enough = (before - ordered) >= rules.top_p * before[:, -1:]
    rare = ordered < rules.min_p * ordered[:, :1]
    left_out = (enough & (rules.top_p < 1) | rare) & (ranks > 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered.masked_fill(left_out, 0.0))
