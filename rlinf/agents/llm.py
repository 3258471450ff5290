"""The `LLM` protocol, which answers token ids with a `Reply`, and its implementation over a rollout role.

A model behind an actor, a server or a script in a test is an `LLM` alike. The one over a rollout role asks for single
answers: each conversation stays on the rank that answered its first turn, the one with the fewest conversations then.
Who wakes whom: the rollout's reply wakes the conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np

from rlinf.agents.arguments import WrongType, WrongValue
from rlinf.config.text import PastConfig
from rlinf.data.rng import mix
from rlinf.data.sample import read_only
from rlinf.engines.base import Completion, Finish, Hear, PartialAnswer, Sampling, TextScores
from rlinf.runtime.base.errors import RemoteError, UserError
from rlinf.runtime.streams.stream import Stream

SETTINGS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop", "form")
"""Names of the sampling settings that an answer may be asked for with."""

_ELSEWHERE = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_new_tokens")
"""Names that OpenAI's and Anthropic's protocols have for our settings."""


class ContextFull(UserError):
    """Not one more token fits into the model's context."""


class LLM(Protocol):
    """A model that answers token ids; an actor, a server or a script in a test."""

    def answer(self, ids: np.ndarray, *, seed: int, conversation: int | None, **sampling: Any) -> Any:
        """Answer once; awaited, a `Completion`.

        Args:
            ids: all that the model reads, int64 [tokens].
            seed: of the random choices.
            conversation: whose turn it is: what was read for the turn before need not be read again. None: there will
                be one turn only.
            sampling: `temperature`, `max_new_tokens` and the like; what is not given is the model's own.
                Of an earlier version of the model also `adapter`, its name.
                Of a call in an episode also `name`, its own, and `begun`, the answer's beginning, which is not made
                again, or None. Of a call that somebody listens to also `hear`, which may be called with the answer's
                new tokens as they come.
        """

    def ended(self, conversation: int) -> None:
        """No further turn of this conversation will come."""

    def scores(self, texts: Sequence[np.ndarray], top: int) -> Any:
        """Say how likely the tokens of texts are; awaited, a `TextScores` of each. See `Engine.score`."""


class Listener(Protocol):
    """Hears an answer as it comes; called on the event loop of the run."""

    def reads(self, new_ids: np.ndarray, cached: int, name: str) -> None:
        """The model is asked.

        Args:
            new_ids: what it reads behind the earlier answer that it goes on from, int64 [tokens].
            cached: tokens up to the end of that.
            name: of the answer, of which ids of its calls are made; no other answer of the task's agents has it.
        """

    def tells(self, ids: Sequence[int]) -> None:
        """Further tokens of the answer have come, and it goes on behind them. Those that nothing told come with the
        answer: its last one, and all of a model that tells none."""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One answer of the model."""

    text: str
    """Without its end token."""
    ids: np.ndarray
    """Its tokens, the end token included if one was reached, int64 [tokens]; it cannot be written into."""
    logprobs: np.ndarray
    """Log-prob of each token under softmax(logits / temperature), nats, float32 [tokens]."""
    versions: np.ndarray
    """Version of the weights that made each token, int32 [tokens]."""
    finish: Finish
    """Why it ended: `stop` (an end token), `text` (a stop text), `length` (a limit cut it), `abort`."""

    @staticmethod
    def of(answer: Completion, decode: Callable[..., Any]) -> Reply:
        """Make the reply that a program receives: copies, so that nothing it does to them reaches the record.

        Args:
            answer: the engine's.
            decode: the tokenizer's.
        """
        text_ids = answer.response_ids[:-1] if answer.finish == "stop" else answer.response_ids
        text = str(decode(text_ids, skip_special_tokens=False))
        ids, logprobs, versions = map(read_only, (answer.response_ids, answer.logprobs, answer.versions))
        return Reply(text, ids, logprobs, versions, answer.finish)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all conversations of a session share: the model, and the defaults and limits of its answers."""

    llm: LLM
    """Answers."""
    temperature: float
    """Sampling temperature of answers, where a conversation does not say."""
    max_new_tokens: int
    """Longest answer in tokens, where a conversation does not say."""
    longest: int | None = None
    """Tokens of a whole conversation that the model has positions and memory for; None: nobody knows."""
    vocabulary: int | None = None
    """Token ids are below it; None: nobody knows."""
    no_forms: str | None = "the model is not asked by an engine that keeps answers to schemas"
    """Why no schema is enforced while answers are decoded; None: they are."""

    def sampling_of(self, call: str, length: int, *settings: Mapping[str, Any]) -> dict[str, Any]:
        """How to sample an answer.

        Args:
            call: for errors, such as `conversation.generate`.
            length: tokens that are read before it.
            given: settings; later ones replace earlier ones.

        Returns:
            Any of `SETTINGS`; `max_new_tokens` fits into the context.

        Raises:
            TypeError: there is no such setting.
            ValueError: a setting out of range.
            ContextFull: no token fits.
        """
        merged: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        for each in settings:
            merged |= each
        if unknown := sorted(merged.keys() - {*SETTINGS}):
            first = unknown[0]
            near = [_ELSEWHERE[first]] if first in _ELSEWHERE else get_close_matches(first, SETTINGS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise WrongType(
                f"{call}: there is no setting {', '.join(unknown)}{hint}; those of an answer are "
                f"{', '.join(SETTINGS)}, and seed is one of session.conversation(seed=…)"
            )
        if isinstance(merged.get("stop"), str):
            merged["stop"] = [merged["stop"]]
        merged["max_new_tokens"] = self._room(call, length, merged["max_new_tokens"])
        try:
            own = {name: value for name, value in merged.items() if name != "stop" and value is not None}
            merged["temperature"] = float(Sampling(**own, stop_texts=tuple(merged.get("stop") or ())).temperature)
        except (TypeError, ValueError) as error:
            raise WrongValue(f"{call}: {error}") from None
        return merged

    def _room(self, call: str, length: int, wanted: Any) -> int:
        """How many tokens an answer may have."""
        if not isinstance(wanted, (int, np.integer)) or isinstance(wanted, bool) or wanted < 1:
            raise WrongValue(f"{call}: max_new_tokens={wanted!r} must be a whole number, at least 1")
        if self.longest is None:
            return int(wanted)
        if self.longest <= length:
            raise ContextFull(
                f"{call}: {length} tokens were said and the model takes {self.longest}, so no answer fits any more: "
                "end the conversation earlier (finish is 'length' where a limit cut an answer), say less, or take a "
                "model with a longer context"
            )
        return min(int(wanted), self.longest - length)


@dataclass(frozen=True, slots=True)
class PastSelves:
    """Places of earlier versions of the policy: which of them plays in a task, and which the policy takes when."""

    config: PastConfig
    """How many there are, and how often one is renewed."""

    def drawn(self, *task: int) -> int | None:
        """Place of the version that plays in a task; None: none does.

        Args:
            task: what its randomness depends on, for all attempts at it alike.
        """
        size, share = self.config.size, self.config.share
        return mix(*task, 1) % size if size and mix(*task, 0) < share * 2.0**63 else None

    def renewed(self, step: int) -> int | None:
        """Place that the policy as it is after a step takes; None: none."""
        turn, rest = divmod(step, self.config.every)
        return None if rest or not self.config.size else (turn - 1) % self.config.size

    def learned(self, place: int, step: int) -> int:
        """Steps that the version had learned from which plays in a step from this place."""
        newest = (step - 1) // self.config.every
        return max(0, newest - (newest - 1 - place) % self.config.size) * self.config.every


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
        hear: Hear | None = None,
        **sampling: Any,
    ) -> Completion:
        """See `LLM`.

        Args:
            ids, seed, conversation, sampling: as there.
            name: by which `answering` tells how far the answer is; None: it does not.
            begun: the beginning of the answer, which is not made again.
            hear: as there.
        """
        rollout = self._rollout()
        rank = len(rollout) if conversation is None else self._ranks.get(conversation, len(rollout))
        if rank >= len(rollout):
            rank = self._idlest(rollout)
            self._held[rank] += 1
            if conversation is not None:
                self._ranks[conversation] = rank
        recorded = {} if name is None else {"name": name, "begun": begun}
        over = self._over.pop(rank, None)
        forgetting = None if over is None else rollout[rank].forget(over)
        try:
            how = {"seed": seed, "conversation": conversation, **recorded, **sampling}
            if hear is None:
                answer: Completion = await rollout[rank].answer(ids, **how)
            else:
                answer = await _heard(rollout[rank].stream(ids, **how), hear)
        finally:
            if conversation is None:
                self._held[rank] -= 1
        if forgetting is not None:
            await forgetting
        return answer

    def _idlest(self, rollout: Any) -> int:
        return min(range(len(rollout)), key=self._held.__getitem__)

    async def scores(self, texts: Sequence[np.ndarray], top: int = 0) -> list[TextScores]:
        """See `LLM`."""
        rollout = self._rollout()
        rank = self._idlest(rollout)
        self._held[rank] += 1
        try:
            scores: list[TextScores] = await rollout[rank].scores(texts, top)
            return scores
        finally:
            self._held[rank] -= 1

    async def answering(self) -> dict[str, PartialAnswer]:
        """How far the answers under way are, by the names that their calls gave them, on all ranks; those that have no
        token yet are left out."""
        partials = await self._rollout().answering()
        return {name: partial for of_rank in partials for name, partial in of_rank.items()}

    def ended(self, conversation: int) -> None:
        """See `LLM`; its rank is told with the next answer that it is asked for."""
        if (rank := self._ranks.pop(conversation, None)) is not None:
            self._held[rank] -= 1
            self._over.setdefault(rank, []).append(conversation)


async def _heard(stream: Stream[Any], hear: Hear) -> Completion:
    """Tell the tokens of an answer as they come, and return it. Cancelled, it ends the answer."""
    try:
        async for item in stream:
            if isinstance(item, Completion):
                return item
            hear(item)
    finally:
        await stream.close()
    raise RemoteError("the rollout ended an answer without giving it")
