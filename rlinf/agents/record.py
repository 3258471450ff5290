"""Record of an episode's calls to the model, from which an interrupted episode is replayed.

In: every call of the model, before and after its answer; the calls of an earlier process, of which the last may be half
answered. Out: the answer of that process, as long as the episode asks exactly what it asked then; what a checkpoint
keeps. The record is pure logic and waits for nothing. The model that is wrapped with it answers from the record where
that has the answer; otherwise the model's answer wakes the episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf.agents.llm import LLM
from rlinf.engines.base import Completion, Hear, PartialAnswer


@dataclass(frozen=True, slots=True)
class Asked:
    """Identity of a call: prompt, seed and sampling. Equal ones may be given the same answer."""

    prompt: str
    """Digest of the token ids that the model reads."""
    length: int
    """How many they are."""
    seed: int
    """Seed of the random choices; a function of (run's seed, task, episode, agent, what is read, how often)."""
    sampling: str
    """The settings, as JSON with sorted keys."""

    @staticmethod
    def of(ids: np.ndarray, seed: int, sampling: Mapping[str, Any]) -> Asked:
        """Make the identity of a call.

        Args:
            ids: all that the model reads, int64 [tokens].
            seed: of the random choices.
            sampling: `temperature`, `max_new_tokens` and the like.
        """
        digest = hashlib.blake2b(ids.astype(np.int64, copy=False).tobytes(), digest_size=16).hexdigest()
        settings = json.dumps(dict(sampling), sort_keys=True, default=_plain_number)
        return Asked(digest, len(ids), seed, settings)

    def differs_from(self, other: Asked) -> str:
        """Return the difference from another call in a word or two; "" if there is none."""
        if (self.prompt, self.length) != (other.prompt, other.length):
            return "another prompt"
        if self.sampling != other.sampling:
            return "other sampling"
        return "" if self.seed == other.seed else "another seed"


@dataclass(slots=True, eq=False)
class Call:
    """One call of the model."""

    asked: Asked
    """Identity of the call: prompt, seed and sampling."""
    after: int
    """How many answers the episode had got when it asked: of one that asks one thing at a time, the call's number."""
    answer: Completion | None = None
    """Answer of the model; None: it has not ended yet."""
    begun: PartialAnswer | None = None
    """Part of the answer that there was when the checkpoint was written; None: nothing, or all."""
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """By which the rollout tells how far the answer is."""

    @property
    def tokens(self) -> int:
        """How many tokens the record has of its answer."""
        part = self.answer or self.begun
        return 0 if part is None else len(part.response_ids)


class Record:
    """The calls of one episode.

    An episode that called one after the other is answered from the calls of an earlier process in this order, until it
    asks for something else than then: from there it is on new ground, and what the record has beyond is dropped. Where
    calls overlapped, since several agents called at the same time, they are found in any order by what they asked,
    and what is left is dropped when the episode ends.

    Args:
        earlier: the calls of an earlier process, in the order in which they were asked.
    """

    def __init__(self, earlier: Iterable[Call] = ()) -> None:
        self.calls: list[Call] = []
        """Calls of this process, in the order in which they were made; those that were cancelled are left out."""
        self._earlier = [replace(call, name=secrets.token_hex(8)) for call in earlier]
        self._one_by_one = all(call.after == number for number, call in enumerate(self._earlier))
        self._answers = 0
        self.resumed = bool(self._earlier)
        """An earlier process had begun the episode."""
        self.reused = 0
        """Tokens that were taken from its calls."""
        self.dropped = 0
        """Tokens of its calls that were not asked for again."""
        self.anew = ""
        """Why the episode left what it had done then; "": it has not."""

    def ask(self, ids: np.ndarray, seed: int, sampling: Mapping[str, Any]) -> Call:
        """The episode calls the model.

        Args:
            ids, seed, sampling: as of `Asked.of`.

        Returns:
            The call: with its `answer` if the record has it, with what was `begun` if it has half of it.
        """
        identity = Asked.of(ids, seed, sampling)
        due = self._earlier[:1] if self._one_by_one else self._earlier
        call = next((call for call in due if call.asked == identity), None)
        if call is not None:
            self._earlier.remove(call)
            self.reused += call.tokens
            self._answers += call.answer is not None
        else:
            if self._earlier:
                self.anew = self.anew or identity.differs_from(self._earlier[0].asked)
                if self._one_by_one:
                    self._drop()
            call = Call(identity, self._answers)
        self.calls.append(call)
        return call

    def answered(self, call: Call, answer: Completion) -> None:
        """The model has answered."""
        call.answer, call.begun = answer, None
        self._answers += 1

    def given_up(self, call: Call) -> None:
        """Nobody waits for the answer any more."""
        self.calls.remove(call)

    def end(self) -> None:
        """The episode is over."""
        if self._earlier:
            self.anew = self.anew or "fewer calls"
            self._drop()
        elif not self._one_by_one:
            self.anew = ""  # what was new ground came before other agents had caught up

    def state(self, partial: Mapping[str, PartialAnswer]) -> tuple[Call, ...]:
        """Return the calls that a checkpoint keeps: those so far, and those of an earlier process that may be asked for
        yet.

        Args:
            partial: how far the answers under way are, by the names of their calls.
        """
        calls = [*self.calls, *self._earlier]
        return tuple(
            call if call.answer is not None else replace(call, begun=partial.get(call.name, call.begun))
            for call in calls
        )

    @property
    def tokens(self) -> int:
        """How many tokens the record has, of ended answers and those that an earlier process began."""
        return sum(call.tokens for call in (*self.calls, *self._earlier))

    def _drop(self) -> None:
        self.dropped += sum(call.tokens for call in self._earlier)
        self._earlier.clear()


def _plain_number(value: Any) -> Any:
    """A number of numpy's as Python's own."""
    return value.item()


class RecordedModel:
    """An `LLM` for one episode.

    Args:
        llm: answers what the record does not.
        record: of the episode.
    """

    def __init__(self, llm: LLM, record: Record) -> None:
        self._llm, self._record = llm, record

    async def answer(
        self, ids: np.ndarray, *, seed: int, conversation: int | None, hear: Hear | None = None, **sampling: Any
    ) -> Completion:
        """See `LLM`."""
        call = self._record.ask(ids, seed, sampling)
        if call.answer is not None:  # whose listener hears all of it at its end
            await asyncio.sleep(0)  # agents that call at the same time do so again
            return call.answer
        recorded = {"name": call.name, "begun": call.begun, **({} if hear is None else {"hear": hear})}
        try:
            answer: Completion = await self._llm.answer(
                ids, seed=seed, conversation=conversation, **recorded, **sampling
            )
        except BaseException:
            self._record.given_up(call)
            raise
        self._record.answered(call, answer)
        return answer

    def ended(self, conversation: int) -> None:
        """See `LLM`."""
        self._llm.ended(conversation)

    def scores(self, texts: Sequence[np.ndarray], top: int) -> Any:
        """See `LLM`; nothing is recorded."""
        return self._llm.scores(texts, top)
