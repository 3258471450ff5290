"""A rollout role as the model of conversations: single answers, each conversation on one rank.

In: token ids of conversations. Out: their answers. A conversation stays on the rank that answered its first turn, the
one with the fewest conversations then. Who wakes whom: the rollout's reply wakes the conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf.engines.base import Completion, PartialAnswer


class RolloutModel:
    """An `LLM` for conversations.

    Args:
        rollout: the role that answers now; it may move to other hosts from one step to the next.
    """

    def __init__(self, rollout: Callable[[], Any]) -> None:
        self._rollout = rollout
        self._ranks: dict[int, int] = {}  # by conversation that has begun
        self._held: Counter[int] = Counter()  # conversations by rank
        self._over: dict[int, list[int]] = {}  # conversations that have ended and their rank need not keep, by rank

    async def answer(
        self,
        ids: np.ndarray,
        *,
        seed: int,
        conversation: int | None = None,
        name: str | None = None,
        begun: PartialAnswer | None = None,
        **sampling: Any,
    ) -> Completion:
        """See `LLM`.

        Args:
            ids, seed, conversation, sampling: as there.
            name: by which `answering` tells how far the answer is; None: it does not.
            begun: the beginning of the answer, which is not made again.
        """
        rollout = self._rollout()
        rank = len(rollout) if conversation is None else self._ranks.get(conversation, len(rollout))
        if rank >= len(rollout):
            rank = min(range(len(rollout)), key=self._held.__getitem__)
            self._held[rank] += 1
            if conversation is not None:
                self._ranks[conversation] = rank
        recorded = {} if name is None else {"name": name, "begun": begun}
        over = self._over.pop(rank, None)
        forgetting = None if over is None else rollout[rank].forget(over)
        try:
            answer: Completion = await rollout[rank].answer(
                ids, seed=seed, conversation=conversation, **recorded, **sampling
            )
        finally:
            if conversation is None:
                self._held[rank] -= 1
        if forgetting is not None:
            await forgetting
        return answer

    async def answering(self) -> dict[str, PartialAnswer]:
        """How far the answers under way are, by the names that their calls gave them, on all ranks; those that have no
        token yet are left out."""
        told = await self._rollout().answering()
        return {name: partial for of_rank in told for name, partial in of_rank.items()}

    def ended(self, conversation: int) -> None:
        """See `LLM`; its rank is told with the next answer that it is asked for."""
        if (rank := self._ranks.pop(conversation, None)) is not None:
            self._held[rank] -= 1
            self._over.setdefault(rank, []).append(conversation)
