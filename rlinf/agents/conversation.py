"""A conversation with a language model as exact tokens: those read, those generated, and their log-probs.

In: messages, and answers of a model (`LLM`). Out: `Reply`s, and at the end a `Sample` whose `loss_mask` tells the
generated tokens from those that were only read. What was generated is never encoded again. Who wakes whom: the model's
answer wakes whoever awaits `generate`; nothing else waits here.

    async with session.conversation(system="Guess a number from 0 to 9.") as c:
        c.user("Go on.")
        while not game.over:
            reply = await c.generate(max_new_tokens=4)      # .text .ids .finish
            c.user(game.feedback(reply.text))               # read, not learned
        return c.trajectory(reward=game.score)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.agents.arguments import Awaited, WrongType, number, shown, token_ids
from rlinf.agents.chat import ChatFormat, Message, copied
from rlinf.agents.llm import Reply, Setting
from rlinf.agents.trajectories import add_reward, fallen, sample_of
from rlinf.data.rng import mix
from rlinf.data.sample import Prompt, Sample, Segment
from rlinf.engines.base import Completion, Finish
from rlinf.runtime.base.errors import UserError


@dataclass(slots=True)
class _Turn:
    """One answer of the model, or several parts of it."""

    segment: int
    """Which of the segments it is."""
    finish: Finish
    """Why it ended."""
    reward: float | None = None
    """Reward of this turn."""
    token_rewards: np.ndarray | None = None
    """Where it falls, float64 [tokens]; None: all at the last token."""


@dataclass(slots=True, eq=False)
class Conversation:
    """Turns of a user, tools and the model; `session.conversation(…)` makes one.

    Public names besides the methods: `messages` (what was said, for people and rewards), `ids` (all tokens so far).
    """

    setting: Setting
    """The model and its limits."""
    chat: ChatFormat
    """How messages become tokens."""
    key: tuple[int, ...]
    """Its randomness: the seed of turn t is a function of (key, t)."""
    number: int | None
    """Names it among all conversations with the model; None: it has one turn only."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """For `generate` where it does not say otherwise."""
    prompt: Prompt | None = None
    """Task that its trajectory answers: id, text, right answer and columns; None for a conversation without a task."""
    index: int = 0
    """Index of its trajectory in the group."""
    fresh: Callable[[], int] | None = None
    """Gives numbers to forks."""
    messages: list[Message] = field(default_factory=list)
    _tokenized: list[Message] = field(default_factory=list)  # the messages that are tokens
    _segments: list[Segment] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)
    _last: Reply | None = None  # the model had the last word, and this is it
    _temperature: float | None = None
    _answers: int = 0  # answers asked for
    _forks: int = 0
    _busy: bool = False
    _closed: str = ""  # by which call

    # What is said -----------------------------------------------------------------------------------------------

    def system(self, content: Any) -> Conversation:
        """Say something as the system."""
        return self.append(content, role="system", call="system")

    def user(self, content: Any) -> Conversation:
        """Say something as the user; content is text, or what the chat template reads in its place."""
        return self.append(content, role="user", call="user")

    def tool(self, content: Any, **more: Any) -> Conversation:
        """Say what a tool returned; `more` is what else the chat template reads of it, such as `tool_call_id`."""
        return self.append(content, role="tool", call="tool", **more)

    def append(self, content: Any, *, role: str = "user", call: str = "append", **more: Any) -> Conversation:
        """Add a message, or tokens as they are. They are read and not learned.

        Args:
            content: a text or what the chat template reads in its place; an array of whole numbers is token ids, which
                get no chat template around them.
            role: whose.
            call: for errors.
            more: further keys of the message.

        Returns:
            The conversation itself.

        Raises:
            UserError: the conversation is over, or answers just now; ids that the model does not have.
            TypeError: neither a text nor ids.
        """
        self._check(call)
        if isinstance(content, np.ndarray) or (
            isinstance(content, (list, tuple)) and content and not isinstance(content[0], Mapping)
        ):
            self._raw(token_ids(content, self.setting.vocabulary, f"conversation.{call}"), role)
            return self
        if not isinstance(content, str) and not (isinstance(content, list) and content):
            raise WrongType(
                f"conversation.{call}: {shown(content)} is neither a text nor an array of token ids; give one of them"
            )
        if role == "assistant":
            raise UserError(
                f"conversation.{call}: a text of the assistant is not what the model generated; take `generate`, or "
                "begin a conversation with earlier messages: conversation(prompt=[{'role': …, 'content': …}, …])"
            )
        self.messages.append(copied({"role": role, "content": content, **more}))
        return self

    def begin(self, messages: Iterable[Message]) -> None:
        """Add earlier messages of any roles, before the first answer."""
        self.messages += [copied(message) for message in messages]

    def _raw(self, ids: np.ndarray, role: str) -> None:
        self._encode(answer=role == "assistant")
        self.messages.append({"role": role, "content": str(self.chat.tokenizer.decode(ids))})
        self._became_tokens(None)
        self._segments.append(Segment(ids))

    # What the model says ----------------------------------------------------------------------------------------

    def generate(self, **sampling: Any) -> Awaited[Reply]:
        """Let the model answer; await it.

        Args:
            sampling: any of `max_new_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `min_new_tokens`, `stop`.

        Raises:
            UserError: nothing was said, the model had the last word, the conversation is over or answers already, or
                not one more token fits.
            ValueError, TypeError: a setting out of range, or that there is not.
        """
        return Awaited(self._generate(sampling), "c.generate(…)")

    async def _generate(self, sampling: Mapping[str, Any]) -> Reply:
        self._check("generate")
        if not self.messages:
            raise UserError("conversation.generate: nothing was said yet; say something by c.user(…) before it")
        if len(self._tokenized) == len(self.messages) and self._last is not None and self._last.finish != "length":
            raise UserError("conversation.generate: the model had the last word; say something by c.user(…) before it")
        prefix = self.messages[-1] if self.messages[-1]["role"] == "assistant" else None
        self._encode(answer=True)
        ids = self.ids
        settings = self.setting.sampling_of("conversation.generate", len(ids), self.sampling, sampling)
        temperature = settings["temperature"]
        seed, self._answers = mix(*self.key, self._answers), self._answers + 1
        self._busy = True
        try:
            done: Completion = await self.setting.llm.answer(ids, seed=seed, conversation=self.number, **settings)
        finally:
            self._busy = False
        if self._temperature not in (None, temperature):
            self._temperature = math.nan
        else:
            self._temperature = temperature
        reply = Reply.of(done, self.chat.tokenizer.decode)
        self._turns.append(_Turn(len(self._segments), reply.finish))
        self._segments.append(Segment(done.response_ids, done.logprobs, done.versions, done.routes, done.log_mass))
        if prefix is not None:  # it went on with an answer that a limit had cut, or that it was made to begin with
            self.messages[-1] = {**prefix, "content": f"{prefix['content']}{reply.text}"}
        else:
            self.messages.append({"role": "assistant", "content": reply.text})
        self._became_tokens(reply)
        return reply

    def _encode(self, *, answer: bool) -> None:
        """Make tokens of the messages that are none yet.

        Raises:
            UserError: a message that is tokens already was changed.
        """
        for place, message in enumerate(self._tokenized):
            if place >= len(self.messages) or self.messages[place] != message:
                raise UserError(
                    f"conversation.messages[{place}] was changed after the model had read it, and it would not read it "
                    "again: begin another conversation with the messages as they shall be, "
                    "session.conversation(prompt=[…])"
                )
        new = self.messages[len(self._tokenized) :]
        if not new:
            return
        if not self._tokenized:
            ids = self.chat.opening(new, answer=answer)
        else:
            ended = self._last is not None and self._last.finish == "stop"
            ended_by = int(self._last.ids[-1]) if ended and self._last is not None else None
            ids = self.chat.following(self._tokenized, new, ended_by=ended_by, answer=answer)
        if not self._segments and not len(ids):
            raise UserError("conversation.generate: what was said has not one token; say something by c.user(…)")
        self._segments.append(Segment(ids))
        self._became_tokens(None)

    def _became_tokens(self, last: Reply | None) -> None:
        """All messages are tokens now, the last of them those of a reply or of nobody's."""
        self._tokenized = copied(self.messages)
        self._last = last

    # What came of it --------------------------------------------------------------------------------------------

    @property
    def ids(self) -> np.ndarray:
        """All tokens so far, int64 [tokens]; messages become tokens when the model answers them."""
        return np.concatenate([part.token_ids for part in self._segments] or [np.empty(0, np.int64)])

    def reward(self, value: float | Sequence[float]) -> None:
        """Reward the last answer of the model; several rewards of one answer add.

        Args:
            value: the reward, which falls at the answer's last token; or one for each of its tokens.

        Raises:
            UserError: the model has not answered yet.
            TypeError, ValueError: no number, and no numbers as many as tokens.
        """
        self._check("reward")
        if not self._turns:
            raise UserError("conversation.reward: the model has not answered yet; call it after `await c.generate(…)`")
        turn = self._turns[-1]
        add_reward(turn, value, len(self._segments[turn.segment].token_ids), "conversation.reward")

    def fork(self) -> Conversation:
        """Another conversation that goes on from here, with randomness of its own.

        Its trajectory has all that was said before too, and learns it with its own reward: a policy gradient over the
        trajectories, in which an answer before the fork counts once for each. Where every answer shall be learned once,
        take `session.llm()`, whose branches share what came before.
        """
        self._check("fork")
        self._forks += 1
        other = copy.copy(self)
        other.messages, other._segments = copied(self.messages), [*self._segments]
        other._turns = [copy.copy(turn) for turn in self._turns]
        other.key, other._answers, other._forks = (*self.key, self._answers, -self._forks), 0, 0
        other.number = self.number if self.fresh is None else self.fresh()
        return other

    def trajectory(self, reward: float | None = None) -> Sample:
        """End the conversation; all of it as one sample. What was said after the last answer is left out.

        Args:
            reward: of the whole; what it is more than the rewards of the turns counts at the last token. None takes
                their sum, or leaves the sample to the session's reward function.

        Returns:
            The sample. `loss_mask` is true for what the model generated; `per_token["rewards"]` has the turns' rewards,
            if there are any, each at the last token of its answer.

        Raises:
            UserError: the model has not answered, the answers were sampled at different temperatures, or the
                conversation was ended before.
            ValueError: the reward is no number.
        """
        if self._closed == "trajectory" or self._busy:
            self._check("trajectory")
        if not self._turns:
            raise UserError("conversation.trajectory: the model has not answered; `await c.generate(…)` before it")
        if self._temperature is None or math.isnan(self._temperature):
            raise UserError(
                "conversation.trajectory: its answers were sampled at different temperatures, and a sample has one; "
                "give every generate the same"
            )
        rewards = [turn.reward for turn in self._turns if turn.reward is not None]
        total = sum(rewards) if reward is None and rewards else reward
        total = None if total is None else number(total, "conversation.trajectory")
        sample = self._sample(total, bool(rewards))
        self._close("trajectory")
        return sample

    def _sample(self, reward: float | None, in_turns: bool) -> Sample:
        first, last = self._turns[0].segment, self._turns[-1].segment
        segments, rewards = self._segments[first : last + 1], dict[int, float | np.ndarray | None]()
        for turn in self._turns:
            if len(self._segments[turn.segment].token_ids):
                rewards[turn.segment] = fallen(turn)
        return sample_of(
            self.chat.tokenizer.decode,
            self.prompt or Prompt(self.number or 0, np.empty(0, np.int64)),
            np.concatenate([part.token_ids for part in self._segments[:first]]),
            segments,
            [rewards.get(place) for place in range(first, last + 1)] if in_turns else (),
            finish=self._turns[-1].finish,
            index=self.index,
            temperature=float(self._temperature or 0.0),
            reward=reward,
        )

    async def __aenter__(self) -> Conversation:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.end()

    def __enter__(self) -> Conversation:
        raise UserError("with session.conversation(…): write `async with session.conversation(…) as c:`")

    def __exit__(self, *exception: object) -> None:
        """Never comes to be called."""

    def end(self) -> None:
        """End it without a trajectory, as the end of its `async with` does."""
        self._close("async with")

    def _close(self, by: str) -> None:
        if self._closed != "trajectory":
            if not self._closed and self.number is not None:
                self.setting.llm.ended(self.number)
            self._closed = by

    def _check(self, call: str) -> None:
        if self._closed == "trajectory":
            raise UserError(
                f"conversation.{call}: the conversation ended with trajectory(); begin another one, or fork() before it"
            )
        if self._closed:
            raise UserError(f"conversation.{call}: the conversation ended with its `async with`; call it inside")
        if self._busy:
            raise UserError(
                f"conversation.{call}: the model is answering; await that generate first, or fork() for another branch"
            )
