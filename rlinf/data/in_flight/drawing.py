"""Where what is begun comes from: whoever draws prompts, the steps that bring their own, or the count of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf.data.in_flight.rules import Draw
from rlinf.runtime.streams.stream import each


class Drawing:
    """What is drawn, with its ids.

    Args:
        draw: draws prompts. None: a step brings its own; what has no prompts is drawn by counting steps on.
    """

    def __init__(self, draw: Draw | None) -> None:
        self.exhausted = False
        """There is no more to draw."""
        self._draw = draw
        self._own: list[Any] = []
        self._next = 0

    def drawn_before(self, number: int) -> None:
        """This one was drawn already."""
        self._next = max(self._next, number + 1)

    async def own(self, step: Any) -> int | None:
        """How many prompts a step brings; None where they are drawn."""
        if self._draw is not None or not hasattr(step, "prompts"):
            return None
        own = [prompt async for prompt in each(step.prompts)]
        self._own += own
        self.exhausted = False
        return len(own)

    async def take(self, count: int, step: Any) -> list[tuple[int, Any]]:
        """So many more; fewer where there are no more.

        Args:
            count: how many.
            step: the one in hand.
        """
        if self._draw is not None:
            drawn = [(item.id, item) for item in await self._draw(count)]
        elif hasattr(step, "prompts"):
            own, self._own = self._own[:count], self._own[count:]
            drawn = [(prompt.id, prompt) for prompt in own]
        else:
            first = max(self._next, step.index)
            self._next = first + count
            drawn = [(index, replace(step, index=index)) for index in range(first, self._next)]
        self.exhausted = not drawn
        return drawn
