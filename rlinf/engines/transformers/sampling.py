"""Choosing tokens, and the answers in flight on the host: their tokens so far, and when they end.

Random choices come from a counter-based generator: the number for token t of a request is a function of (seed, t)
alone. So a request gives the same answer whatever shares its batch, and one number per row is enough. The answers are
arrays by slot, so that a step costs a few numpy operations however many rows there are. Nobody waits here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.data.rng import uniforms
from rlinf.data.routes import fitted
from rlinf.engines.base import Completion, Finish, PartialAnswer, Request, StopTexts

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
        blocks: look for the token among blocks of the vocabulary first, then in its block, which spares a GPU a running
            sum over everything, and gives the same token up to rounding in float64. Default: on GPUs.
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
    summed = _Blocks if (logits.is_cuda if blocks is None else blocks) else _Running
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


def to_host(tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs on the host, int64 and float32 [rows], by one transfer."""
    if tokens.device.type == "cpu":
        return tokens.numpy(), logprobs.numpy()
    both = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()  # in which either is exact
    return both[0].astype(np.int64), both[1].astype(np.float32)


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


class Sampled(NamedTuple):
    """One token more of some answers, on the host."""

    slots: np.ndarray
    """Slot of each row, -1 for rows that have ended, int64 [rows]."""
    tokens: np.ndarray
    """int64 [rows]"""
    logprobs: np.ndarray
    """float32 [rows]"""
    version: int
    """Version of the weights that made them."""


class Slots:
    """Answers in flight, each in a slot.

    Args:
        slots: how many there may be.
        stop_texts: finds them; None if there will be none.
    """

    def __init__(self, slots: int, stop_texts: StopTexts | None):
        self.requests: dict[int, Request] = {}
        """By slot, in the order in which they came."""
        self.lengths = np.zeros(slots + 1, dtype=np.int64)
        """Tokens answered, int64 [slots + 1]. The last slot, also known as -1, is of rows that have ended."""
        self.last = np.zeros(slots + 1, dtype=np.int64)
        """Newest token, int64 [slots + 1]."""
        self.prompts = np.zeros(slots + 1, dtype=np.int64)
        """Tokens of the prompt, int64 [slots + 1]."""
        self.shifts = np.zeros(slots + 1, dtype=np.int64)
        """How much further on than its number a token of the answer stands, int64 [slots + 1], see `Layers.shifts`."""
        self.draws = np.zeros(slots + 1, dtype=DRAWS)
        """How each answer's tokens are chosen, [slots + 1]."""
        self.draws["temperature"] = self.draws["top_p"] = 1
        self._stop_texts = stop_texts
        self._free = list(range(slots - 1, -1, -1))
        self._texts: set[int] = set()  # slots with stop texts
        self._limits = np.ones(slots + 1, dtype=np.int64)
        self._least = np.zeros(slots + 1, dtype=np.int64)
        self._stops = np.full((slots + 1, 1), -1, dtype=np.int64)
        self._tokens = np.empty((slots + 1, 1), dtype=np.int64)
        self._logprobs = np.empty((slots + 1, 1), dtype=np.float32)
        self._versions = np.empty((slots + 1, 1), dtype=np.int32)
        self._routes: dict[int, list[np.ndarray]] = {}  # of each text from its beginning, piece by piece

    @property
    def free(self) -> int:
        """Slots without an answer."""
        return len(self._free)

    def open(self, requests: Sequence[Request]) -> np.ndarray:
        """Begin answers, or continue those that were begun elsewhere; returns their slots, int64 [requests]."""
        samplings = [request.sampling for request in requests]
        self._widen(max(s.max_new_tokens for s in samplings), max(len(s.stop_ids) for s in samplings))
        slots = np.array([self._free.pop() for _ in requests], dtype=np.int64)
        self.requests.update(zip(slots.tolist(), requests, strict=True))
        self.lengths[slots] = 0
        self.prompts[slots] = [len(request.prompt_ids) for request in requests]
        self.draws[slots] = [
            (request.seed, s.temperature, s.top_k, s.top_p, s.min_p)
            for request, s in zip(requests, samplings, strict=True)
        ]
        self._limits[slots] = [s.max_new_tokens for s in samplings]
        self._least[slots] = [s.min_new_tokens for s in samplings]
        width = self._stops.shape[1]
        self._stops[slots] = [s.stop_ids + (-1,) * (width - len(s.stop_ids)) for s in samplings]
        self._texts.update(slot for slot, s in zip(slots.tolist(), samplings, strict=True) if s.stop_texts)
        for slot, request in zip(slots.tolist(), requests, strict=True):
            if (partial := request.partial) is not None:
                if partial.routes is not None:
                    self._routes[slot] = [partial.routes]
                count = self.lengths[slot] = len(partial.response_ids)
                self._tokens[slot, :count], self.last[slot] = partial.response_ids, partial.response_ids[-1]
                self._logprobs[slot, :count], self._versions[slot, :count] = partial.logprobs, partial.versions
        return slots

    def partial(self, slot: int) -> Request:
        """The request with its tokens so far."""
        count = int(self.lengths[slot])
        tokens, logprobs, versions = (
            array[slot, :count].copy() for array in (self._tokens, self._logprobs, self._versions)
        )
        partial = PartialAnswer(tokens, logprobs, versions, self._routes_of(slot, count)) if count else None
        return replace(self.requests[slot], partial=partial)

    def routed(self, slots: Sequence[int], end: int, routes: np.ndarray) -> None:
        """A text was read up to `end`, or its last part was: what is known of it already stays as it is, since its
        tokens were drawn from what those experts gave.

        Args:
            slots: of the answers to it.
            end: tokens of the text so far.
            routes: of its last tokens, [read, layers, experts per token].
        """
        for slot in slots:
            pieces = self._routes.setdefault(slot, [])
            tokens, start = sum(map(len, pieces)), end - len(routes)
            if start > tokens:  # of what was read for an earlier turn, that turn's answer tells
                pieces.append(fitted(routes[:0], start - tokens))
            if (new := routes[max(0, tokens - start) :]).size:
                pieces.append(new)

    def routed_step(self, slots: np.ndarray, routes: np.ndarray) -> None:
        """The newest token of each answer was read; int64 [rows], and [rows, layers, experts per token]."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                self._routes[slot].append(routes[row : row + 1])

    def _routes_of(self, slot: int, answered: int) -> np.ndarray | None:
        """Routes of all that was read for so many tokens, [prompt + answered - 1, layers, experts per token]."""
        pieces = self._routes.get(slot)
        if not pieces:
            return None
        self._routes[slot] = [whole] = [np.concatenate(pieces)]
        return whole[: int(self.prompts[slot]) + answered - 1]

    def add(self, sampled: Sampled) -> list[tuple[int, Finish]]:
        """Take in a step's tokens.

        Returns:
            Positions in `drawn.slots` of the answers that ended, in order, and why.
        """
        slots, tokens, logprobs, version = sampled
        places = self.lengths[slots]
        self._tokens[slots, places] = tokens
        self._logprobs[slots, places] = logprobs
        self._versions[slots, places] = version
        self.last[slots] = tokens
        lengths = places + 1
        self.lengths[slots] = lengths
        self.lengths[-1] = 0
        stopped = (self._stops[slots] == tokens[:, None]).any(axis=1) & (lengths >= self._least[slots])
        ended = (stopped | (lengths >= self._limits[slots])) & (slots >= 0)
        finishes: dict[int, Finish] = {}
        if self._texts:
            finishes = {row: "text" for row in np.flatnonzero(slots >= 0).tolist() if self._text_ends(int(slots[row]))}
        if not finishes and not ended.any():
            return []
        for row in np.flatnonzero(ended).tolist():
            if stopped[row] or row not in finishes:
                finishes[row] = "stop" if stopped[row] else "length"
        return sorted(finishes.items())

    def close(self, slots: np.ndarray, finishes: Sequence[Finish]) -> list[tuple[Request, Completion]]:
        """End answers and free their slots, int64 [ended]."""
        lengths = self.lengths[slots].tolist()
        span = slice(0, max(lengths, default=0))
        tokens, logprobs, versions = (array[slots, span] for array in (self._tokens, self._logprobs, self._versions))
        closed = []
        for row, (slot, length, finish) in enumerate(zip(slots.tolist(), lengths, finishes, strict=True)):
            request = self.requests.pop(slot)
            answer = tokens[row, :length], logprobs[row, :length], versions[row, :length]
            closed.append((request, Completion(request.id, *answer, finish, self._routes_of(slot, length))))
            self._routes.pop(slot, None)
            self._texts.discard(slot)
            self._free.append(slot)
        return closed

    def room(self, slots: np.ndarray) -> int:
        """Tokens that the one of these answers may still get that may get most."""
        return int((self._limits[slots] - self.lengths[slots]).max())

    def text_ids(self, slot: int) -> np.ndarray:
        """All that has been read of a text: its prompt and the answer without its newest token, int64 [tokens]."""
        prompt, answered = self.requests[slot].prompt_ids, int(self.lengths[slot]) - 1
        return prompt if answered < 1 else np.concatenate([prompt, self._tokens[slot, :answered]])

    def _text_ends(self, slot: int) -> bool:
        """True if the newest token completed a stop text of this answer."""
        length = int(self.lengths[slot])
        if slot not in self._texts or length < self._least[slot]:
            return False
        assert self._stop_texts is not None
        stops = self.requests[slot].sampling.stop_texts
        # A text of n characters has at most 4n bytes, and a token that shows has at least one. The rest is for tokens
        # that show nothing and for a character that the cut tears.
        tail = self._tokens[slot, max(0, length - 4 * max(map(len, stops)) - 8) : length].tolist()
        return self._stop_texts.complete(tail, stops)

    def _widen(self, room: int, stops: int) -> None:
        self._tokens, self._logprobs, self._versions = (
            _wider(array, room) for array in (self._tokens, self._logprobs, self._versions)
        )
        if stops > self._stops.shape[1]:
            narrow = self._stops
            self._stops = np.full((len(narrow), stops), -1, dtype=np.int64)
            self._stops[:, : narrow.shape[1]] = narrow


def _wider(array: np.ndarray, columns: int) -> np.ndarray:
    if columns <= array.shape[1]:
        return array
    wide = np.empty((len(array), columns), dtype=array.dtype)  # pages that are never written are never taken
    wide[:, : array.shape[1]] = array
    return wide
