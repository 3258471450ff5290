"""An endless supply of prompts from rows of any order: every row once per pass, in an order drawn from (seed, pass).

In: rows. Out: prompts, as many as are asked for. Rows become prompts when they are drawn, so a large data set costs
nothing at the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Generic

import numpy as np

from rlinf.data.datasets.prompt_maker import Drawn, Item, Maker
from rlinf.data.datasets.rows import DataError, Rows, fingerprint
from rlinf.data.rng import permutation

_KEPT = 16_384
"""Prompts that are kept for later passes: some 50 MB. Small data sets, which come round often, are encoded once."""
_KEPT_BYTES = 256 << 20
"""Bytes of pictures that are kept with them."""


class PromptStream(Generic[Item]):
    """Prompts without end.

    `position` says where the stream is: set it, or load a saved state, and it goes on from there, to the token.

    Args:
        rows: what to draw from.
        maker: makes prompts of them.
        seed: of the orders.
        shuffle: False keeps the rows' own order.

    Raises:
        DataError: there is no row.
    """

    def __init__(self, rows: Rows, maker: Maker[Item], *, seed: int = 0, shuffle: bool = True):
        if not len(rows):
            raise DataError(f"{rows.name}: there is no row to draw from")
        self.maker = maker
        self.position = 0
        """Rows drawn so far; a prompt's id is the position of its row."""
        self.dropped = 0
        """Rows that were left out since their prompts were too long."""
        self.truncated = 0
        """Prompts that were cut."""
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)
        self._fingerprint: str | None = None
        self._made: dict[int, tuple[Item | None, bool]] = {}
        self._held = 0  # bytes of their pictures

    def take(self, count: int) -> list[Item]:
        """The next `count` prompts.

        Raises:
            DataError: a row cannot be used, or not one prompt is short enough.
        """
        prompts: list[Item] = []
        fruitless = 0
        while len(prompts) < count:
            drawn = [self._next() for _ in range(count - len(prompts))]
            self._make(drawn)
            for each in drawn:
                prompt, cut = self._made[each.index]
                self.truncated += cut
                if prompt is None:
                    self.dropped += 1
                    fruitless += 1
                else:
                    fruitless = 0
                    prompts.append(self.maker.numbered(prompt, each.id))
            if fruitless >= 2 * len(self._rows):  # first in one pass and last in the next is the widest gap there is
                raise all_too_long(self._rows.name, self.maker)
        return prompts

    async def draw(self, count: int) -> list[Item]:
        """The next `count` prompts, made in a thread; see `take`."""
        return await asyncio.to_thread(self.take, count)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as JSON: position, counts, and what the position refers to."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._rows)
        return {
            "position": self.position,
            "dropped": self.dropped,
            "truncated": self.truncated,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._rows),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved stream was.

        Raises:
            DataError: the data set, the seed or the order is another than when it was saved, so that the position
                would mean other prompts.
        """
        now = self.state_dict()
        changed = [
            f"{name} was {state[name]!r} and is {now[name]!r}"
            for name in ("rows", "fingerprint", "seed", "shuffle")
            if state[name] != now[name]
        ]
        if changed:
            raise DataError(
                f"{self._rows.name} is not the data set of the checkpoint ({'; '.join(changed)}): bring that back, or "
                "start a new run from the checkpoint's model"
            )
        self.position, self.dropped, self.truncated = state["position"], state["dropped"], state["truncated"]

    def _make(self, drawn: list[Drawn]) -> None:
        """Make prompts of the rows that are not at hand, and keep them for when they come round again."""
        if len(self._made) > _KEPT or self._held > _KEPT_BYTES:
            self._made.clear()
            self._held = 0
        new = [each for each in drawn if each.index not in self._made]
        batch = self.maker.make(new)
        by_id = {prompt.id: prompt for prompt in batch.prompts}
        shown: list[Any] = [getattr(each, "prompt", each) for each in batch.prompts]  # given texts are groups of one's
        self._held += sum(len(image.content) for prompt in shown for image in getattr(prompt, "images", ()))
        self._made.update((each.index, (by_id.get(each.id), each.id in batch.truncated)) for each in new)

    def _next(self) -> Drawn:
        which, at = divmod(self.position, len(self._rows))
        if which != self._pass:
            self._pass = which
            if self._shuffle:
                self._order = permutation(len(self._rows), self._seed, which)
        index = int(self._order[at]) if self._shuffle else at
        drawn = Drawn(self.position, index, self._rows[index], self._rows.where(index))
        self.position += 1
        return drawn


def all_too_long(name: str, maker: Maker[Any]) -> DataError:
    """The error for a data set that has no prompt within the limit."""
    return DataError(
        f"{name}: every {maker.unit} is longer than {maker.limit}={maker.max_tokens}; raise that, or set overlong to "
        "truncate"
    )
