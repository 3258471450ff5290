"""Drafts: tokens that answers probably have next, by what texts of the same prompt had, and how many of them to read.

Flows in: answers as they grow, and those that ended. Flows out: for a step, a few tokens behind the newest of some
rows, which the model reads in the same pass. Each token is then drawn as ever, with its own random number, and a draft
only tells behind which tokens that could be done at once: those up to the first that was drawn otherwise. So drafts
change no token, up to the rounding of a pass of another height.

A prompt's texts are its own, the answers under way, and answers to it that have ended, of this epoch and of earlier
ones. What followed in them behind the same few tokens is the draft. How often such drafts were right is counted, also
where they were only guessed and not read, so that one is read where its chance is worth what it costs. All of it is a
function of requests and steps, never of time.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlinf.engines.base import Request

_ORDERS = (8, 3)
"""Tokens behind which something follows, the longer first: 8 are seldom the same by accident, 3 soon are again after a
token that differs."""
_VOTES = 8
"""Votes for what followed are counted below it."""
_MOST = 16
"""Tokens drafted of an answer at a time: where they are right nine times in ten, six of them are drawn."""
_ANSWERS, _KEPT, _INDEXED = 16, 1 << 22, 4096
"""Answers that are remembered of a prompt, tokens of all, 4 bytes each, and tokens of a prompt's texts that are looked
up while it is answered, some 400 bytes each, in which a cache of keys and values has room for few tokens."""
_LATELY = 256
"""Guesses of a kind that count in full; then older ones count for half."""
_WORTH = 1.05
"""Least gain of a pass with drafts by their chances, which are estimates."""
_PATIENCE, _PAUSE, _SHARE = 16, 4, 8
"""Steps without a draft after which one answer in `_SHARE` is looked at in one step of `_PAUSE`, to see if any would
pay: to look at an answer takes three millionths of a second."""
_CHEAPEST = 0.75
"""Least that a token more costs in a pass, see the prices."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of passes, in what a token more costs in a large one."""

    passes: Sequence[tuple[float, float]]
    """Tokens of a pass, and its price; linear between them, and behind them by one for each."""
    laying: float
    """To choose drafts and to lay a pass out for them, whose rows do not stand at the same column."""


SMALL = Prices(((1, 24), (2, 25)), 24)
"""Of a model that lies in a processor's caches: models of 0.1 and 1 M weights cost as much for themselves as 23 to 40
tokens do, on one thread (2026-11-29), and half a millisecond of Python as much as 16 to 60."""
LARGE = Prices(((1, 22), (3, 26), (4, 39), (8, 53), (16, 59), (32, 71), (64, 107)), 1)
"""Of one that is read from memory for every pass, SmolLM2-135M in float32 on one thread (2026-11-29). MKL multiplies 4
to 15 rows no faster than 16."""
IN_CACHE = 10_000_000
"""Weights up to which a model is small: 40 MB in float32."""


class Continuations:
    """The tokens that followed in the texts of one prompt.

    Args:
        prompt: int64 [prompt].
        answers: to it, the oldest first, int32 [answer] each.
    """

    def __init__(self, prompt: np.ndarray, answers: Iterable[np.ndarray]):
        self.rows = 0
        """Answers under way that use it."""
        self.repeats = False
        """An answer to the prompt has ended."""
        self._tables: list[dict[tuple[int, ...], int]] = [{} for _ in _ORDERS]
        self.tail: list[int] = prompt[-_ORDERS[0] :].tolist()
        """The last tokens of the prompt, behind which answers begin."""
        text = prompt[-_INDEXED:].tolist()
        self.learn(text, min(len(text), _ORDERS[-1]))
        for answer in answers:
            self.repeats = True
            self.learn(self.tail + answer.tolist(), len(self.tail))

    def learn(self, text: Sequence[int], first: int) -> None:
        """Take in a text from its token `first` on: of tokens that differ behind the same ones, the one stays that came
        more often."""
        for order, table in zip(_ORDERS, self._tables, strict=True):
            for place in range(first, len(text)):
                behind, token = tuple(text[max(0, place - order) : place]), text[place]
                before = table.get(behind)
                if before is None:
                    table[behind] = token * _VOTES + 1
                elif before // _VOTES == token:
                    table[behind] = min(before + 1, token * _VOTES + _VOTES - 1)
                else:
                    table[behind] = before - 1 if before % _VOTES > 1 else token * _VOTES + 1

    def guess(self, text: Sequence[int]) -> tuple[int, int] | None:
        """The token that probably follows a text, and the kind of this guess; None: nothing like it was seen."""
        for number, (order, table) in enumerate(zip(_ORDERS, self._tables, strict=True)):
            if (entry := table.get(tuple(text[-order:]))) is not None:
                token, votes = divmod(entry, _VOTES)
                return token, (3 * number + min(votes, 3) - 1) * 2 + self.repeats
        return None


class Answers:
    """Answers that have ended, by prompt, the one whose prompt came longest ago first; bounded."""

    def __init__(self, most: int = _KEPT):
        self._most, self._tokens = most, 0
        self._of: OrderedDict[Any, deque[np.ndarray]] = OrderedDict()

    def add(self, key: Any, tokens: np.ndarray) -> None:
        """Keep an answer, int64 [answer]."""
        answers = self._of.setdefault(key, deque())
        self._of.move_to_end(key)
        if len(answers) == _ANSWERS:
            self._tokens -= len(answers.popleft())
        answers.append(tokens.astype(np.int32))
        self._tokens += len(tokens)
        while self._tokens > self._most and self._of:
            _, dropped = self._of.popitem(last=False)
            self._tokens -= sum(map(len, dropped))

    def of(self, key: Any) -> list[np.ndarray]:
        """Newest answers to a prompt, the oldest of them first, with as many tokens as are looked up."""
        some, room = list[np.ndarray](), _INDEXED
        for answer in reversed(self._of.get(key, ())):
            room -= len(answer)
            if room < 0:
                break
            some.append(answer)
        return some[::-1]


@dataclass(slots=True, eq=False)
class _Row:
    """An answer under way."""

    key: Any
    texts: Continuations
    text: list[int]
    """End of the prompt, and the answer so far as it was seen."""
    count: int = 0
    """Tokens of the answer in it."""
    guess: tuple[int, int] | None = None
    """For the next token, of a kind, if it was not drafted."""


class Records(Protocol):
    """The answers in flight, as far as drafts look at them."""

    requests: dict[int, Request]
    constraints: Any

    def since(self, slot: int, count: int) -> list[int]:
        """Tokens of an answer behind so many."""
        ...

    def room(self, slots: np.ndarray) -> int:
        """Tokens that the one of these answers may still get that may get most."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """The drafts of one pass."""

    counts: np.ndarray
    """Tokens that each row reads, its newest included, int64 [rows]."""
    drafts: dict[int, list[tuple[int, int]]]
    """By row: the tokens behind its newest, and of which kind each guess is."""
    rows: np.ndarray = field(init=False)
    """Row of each token that is read, int64 [tokens]."""
    depths: np.ndarray = field(init=False)
    """How many tokens of its row are before it, int64 [tokens]."""

    def __post_init__(self) -> None:
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        object.__setattr__(self, "rows", rows)
        firsts = np.cumsum(self.counts) - self.counts
        object.__setattr__(self, "depths", np.arange(len(rows)) - firsts[rows])

    @property
    def tokens(self) -> np.ndarray:
        """The drafts, row after row, int64 [drafts]."""
        return np.array([token for row in sorted(self.drafts) for token, _ in self.drafts[row]], np.int64)

    def right(self, outcome: np.ndarray) -> np.ndarray:
        """How many tokens of each row count, int64 [rows]: those drawn behind what was drawn.

        Args:
            outcome: drawn behind each token, int64 [tokens].
        """
        counting, firsts = np.ones(len(self.counts), np.int64), np.cumsum(self.counts) - self.counts
        for row, drafts in self.drafts.items():
            first = int(firsts[row])
            for (token, _), other in zip(drafts, outcome[first : first + len(drafts)].tolist(), strict=True):
                if token != other:
                    break
                counting[row] += 1
        return counting


class Drafts:
    """Drafts for the rows of a decode batch.

    Args:
        prices: of passes.
    """

    def __init__(self, prices: Prices):
        self.reads = self.right = 0
        """Drafts that were read, and those that were drawn."""
        self._prices = prices
        tokens, passes = zip(*prices.passes, strict=True)
        self._costs: list[float] = np.interp(range(int(tokens[-1])), tokens, passes).tolist()
        self._answers = Answers()
        self._texts: dict[Any, Continuations] = {}
        self._rows: dict[int, _Row] = {}
        kinds = 6 * len(_ORDERS)
        self._hits, self._tries = [2.0] * kinds, [4.0] * kinds  # before any was tried, one in two is taken to be right
        self._steps = self._empty = 0

    def propose(self, records: Records, slots: np.ndarray) -> Proposal | None:
        """Choose drafts for a step; None: none is worth what it costs.

        Args:
            records: of the answers.
            slots: of the rows, -1 for those that have ended, int64 [rows].
        """
        self._steps += 1
        quiet = self._empty >= _PATIENCE
        if quiet and self._steps % _PAUSE:
            return None
        most = self.cost(_MOST * len(slots)) + self._prices.laying
        if self.cost(len(slots)) * _MOST <= _WORTH * most:  # not even if all were right
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot >= 0 and slot not in records.constraints]
        chains: dict[int, list[tuple[int, int]]] = {}
        for row in rows[::_SHARE] if quiet else rows:
            guess = self._look(records, int(slots[row])).guess
            if guess is not None and records.room(slots[row : row + 1]) > 1:
                chains[row] = [guess]
        counts = self._worth(records, slots, chains)
        self._empty = 0 if counts else self._empty + 1
        if not counts:
            return None
        for row in counts:
            self._rows[int(slots[row])].guess = None
        tokens = np.ones(len(slots), np.int64)
        tokens[list(counts)] += list(counts.values())
        return Proposal(tokens, {row: chains[row][:count] for row, count in counts.items()})

    def _worth(self, records: Records, slots: np.ndarray, chains: dict[int, list[tuple[int, int]]]) -> dict[int, int]:
        """How many drafts of each row to read, so that a pass draws most for its price; the likeliest come first.

        Args:
            records, slots: see `propose`.
            chains: of each row that has a guess, to which more are added.
        """
        tokens, gain, laying = len(slots), float((slots >= 0).sum()), self._prices.laying
        rate, order, worth = _WORTH * gain / self.cost(tokens), list[int](), 0
        heap = [(-self._chance(chain[0]), row) for row, chain in chains.items()]
        heapq.heapify(heap)
        texts = {row: self._rows[int(slots[row])].text[-_ORDERS[0] :] for row in chains}
        while heap:
            chance, row = heapq.heappop(heap)
            if -chance * (self.cost(tokens) + laying) <= _CHEAPEST * gain:
                break
            gain, tokens = gain - chance, tokens + 1
            order.append(row)
            if (now := gain / (self.cost(tokens) + laying)) > rate:
                rate, worth = now, len(order)
            slot, chain = int(slots[row]), chains[row]
            texts[row].append(chain[-1][0])
            if len(chain) < min(_MOST, records.room(slots[row : row + 1]) - 1):
                guess = self._rows[slot].texts.guess(texts[row])
                if guess is not None:
                    chain.append(guess)
                    heapq.heappush(heap, (chance * self._chance(guess), row))
        return Counter(order[:worth])

    def took(self, proposal: Proposal, counting: np.ndarray) -> None:
        """Count how good the drafts of a pass were, of which so many tokens of each row count, int64 [rows]."""
        for row, drafts in proposal.drafts.items():
            right = int(counting[row]) - 1
            for number, (_, kind) in enumerate(drafts[: right + 1]):
                self._count(kind, number < right)
            self.reads += len(drafts)
            self.right += right

    def ended(self, slot: int, request: Request, answer: np.ndarray | None) -> None:
        """An answer has left its slot; with its tokens, int64 [answer], it is remembered."""
        row = self._rows.pop(slot, None)
        if row is not None:
            if answer is not None:
                first = len(row.text)
                row.texts.learn(row.text + answer[row.count :].tolist(), first)
                row.texts.repeats = True
            row.texts.rows -= 1
            if not row.texts.rows:
                del self._texts[row.key]
        if answer is not None:
            self._answers.add(_key(request), answer)

    def clear(self) -> None:
        """No answer is under way any more."""
        self._rows.clear()
        self._texts.clear()

    def cost(self, tokens: int) -> float:
        """Price of a pass."""
        last, price = self._prices.passes[-1]
        cost: float = self._costs[tokens] if tokens < last else price + tokens - last
        return cost

    def _look(self, records: Records, slot: int) -> _Row:
        """An answer as it is by now, with a guess for its next token."""
        row = self._rows.get(slot)
        if row is None:
            request = records.requests[slot]
            key = _key(request)
            if (texts := self._texts.get(key)) is None:
                texts = self._texts[key] = Continuations(request.prompt_ids, self._answers.of(key))
            texts.rows += 1
            row = self._rows[slot] = _Row(key, texts, [*texts.tail])
        new = records.since(slot, row.count)
        if row.guess is not None:
            self._count(row.guess[1], row.guess[0] == new[0])
        first = len(row.text)
        row.text += new
        row.count += len(new)
        row.texts.learn(row.text, first)
        row.guess = row.texts.guess(row.text)
        return row

    def _chance(self, guess: tuple[int, int]) -> float:
        return self._hits[guess[1]] / self._tries[guess[1]]

    def _count(self, kind: int, right: bool) -> None:
        self._hits[kind] += right
        self._tries[kind] += 1
        if self._tries[kind] >= _LATELY:
            self._hits[kind], self._tries[kind] = self._hits[kind] / 2, self._tries[kind] / 2


def _key(request: Request) -> Any:
    return request.prefix_key(), request.adapter
