"""A model whose every call is recorded, and answered from the record of an earlier process where that has the answer.

In: calls of an episode's agents and conversations. Out: answers of the model, or of the record. Who wakes whom: the
model's answer wakes the episode.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from rlinf.agents.episodes.record import Record
from rlinf.agents.llm import LLM
from rlinf.engines.base import Completion


class RecordedModel:
    """An `LLM` for one episode.

    Args:
        llm: answers what the record does not.
        record: of the episode.
    """

    def __init__(self, llm: LLM, record: Record) -> None:
        self._llm, self._record = llm, record

    async def answer(self, ids: np.ndarray, *, seed: int, conversation: int | None, **sampling: Any) -> Completion:
        """See `LLM`."""
        call = self._record.ask(ids, seed, sampling)
        if call.answer is not None:
            await asyncio.sleep(0)  # agents that call at the same time do so again
            return call.answer
        try:
            answer: Completion = await self._llm.answer(
                ids, seed=seed, conversation=conversation, name=call.name, begun=call.begun, **sampling
            )
        except BaseException:
            self._record.given_up(call)
            raise
        self._record.answered(call, answer)
        return answer

    def ended(self, conversation: int) -> None:
        """See `LLM`."""
        self._llm.ended(conversation)
