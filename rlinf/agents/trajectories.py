"""Tree of an agent's calls to the model, and the samples that it yields: every generated token is learned exactly once.

In: of each call all that the model is to read: messages as a harness sends them, again and again, or token ids. Out:
turns, of which each reads only what is new behind an earlier one; at the end, samples. Nothing here waits.

A call goes on from the longest recorded history that it begins with, compared message by message: those tokens are
taken as they were generated, never encoded again. Where a harness rewrote what was said (cut, summarised, edited), no
history fits: a branch begins at the last turn that does, or anew; answers that stand unchanged behind what was
rewritten are still read as the tokens that were generated. Branches are learned from too; what they share is learned
once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rlinf.agents import arguments
from rlinf.agents.chat import ChatFormat, Message
from rlinf.config.reading import parse_json
from rlinf.data.sample import REWARDS, Prompt, Sample, Segment, TurnTrace, read_only
from rlinf.engines.base import Completion, Finish

Key = bytes
"""Identifies a history: equal for histories in which the same was said."""
_NOTHING: Key = b""
_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=str)


@dataclass(slots=True, eq=False)
class Turn:
    """One answer of the model, behind the turn that it goes on from."""

    parent: Turn | None
    """None: nothing was said by the model before."""
    key: Key
    """Key of the history up to the answer's end; `_NOTHING` for calls by token ids."""
    before: hashlib.blake2b | None
    """Digests the messages that were answered; None for calls by token ids."""
    words: bytes
    """The answer as messages are compared; empty for calls by token ids."""
    new_ids: np.ndarray
    """Tokens that stand between the parent's answer and this one, int64 [read]."""
    answer: Segment
    """The answer."""
    finish: Finish
    """Why it ended."""
    temperature: float
    """At which it was sampled."""
    conversation: int
    """Names the line of turns for the engine, which keeps what it has read of it."""
    length: int
    """Tokens up to the answer's end."""
    reward: float | None = None
    """Reward of this answer."""
    token_rewards: np.ndarray | None = None
    """Where it falls, float64 [tokens]; None: all at the last token."""
    start: float = 0.0
    """Seconds from the episode's beginning to the call."""
    took: float = 0.0
    """Seconds that the answer took."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Tools that it called, see `TurnTrace`."""
    goes_on: bool = False
    """Another turn follows on it."""
    claimed: bool = False
    """A call that goes on from it has begun: the engine's conversation is that call's."""

    @property
    def ended_by(self) -> int | None:
        """The token that the model ended the answer with."""
        return int(self.answer.token_ids[-1]) if self.finish == "stop" else None

    def line(self) -> list[Turn]:
        """The turns that led to this one, and it."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> np.ndarray:
        """All tokens up to the answer's end, int64 [length]."""
        return np.concatenate([part for turn in self.line() for part in (turn.new_ids, turn.answer.token_ids)])


class _Rewarded(Protocol):
    """An answer that may be rewarded."""

    reward: float | None
    token_rewards: np.ndarray | None


def add_reward(turn: _Rewarded, value: Any, tokens: int, call: str) -> None:
    """Reward an answer, beside what it has got.

    Args:
        turn: it.
        value: a number, which falls at its last token, or a number for each token.
        tokens: of the answer.
        call: for errors.

    Raises:
        TypeError, ValueError: neither.
    """
    each = arguments.token_rewards(value, tokens, call)
    at_end = np.zeros(tokens)
    if each is None:
        total = arguments.number(value, call)
        at_end[-1:] = total
    else:
        total = float(each.sum())
        at_end[-1:] = 0.0 if turn.token_rewards is not None else turn.reward or 0.0
    if each is not None or turn.token_rewards is not None:
        before = 0.0 if turn.token_rewards is None else turn.token_rewards
        turn.token_rewards = before + at_end + (0.0 if each is None else each)
    turn.reward = (turn.reward or 0.0) + total


def fallen(turn: _Rewarded) -> float | np.ndarray | None:
    """The reward of an answer, or that of each of its tokens."""
    return turn.reward if turn.token_rewards is None else turn.token_rewards


@dataclass(slots=True)
class Counts:
    """Counts of the recorded answers and of the branches that they began."""

    calls: int = 0
    """Answers of the model."""
    joined: int = 0
    """Number of answers that went on from an earlier turn's tokens."""
    given_up: int = 0
    """Calls whose answer nobody waited for to its end, such as those of clients that left."""
    branches: int = 0
    """How many began a branch although the model had said something before: the history was rewritten, or forked."""


@dataclass(slots=True, eq=False)
class Trajectories:
    """The record of one agent's calls."""

    chat: ChatFormat
    """How messages become tokens."""
    counts: Counts = field(default_factory=Counts)
    """Counts of its answers and branches."""
    ignored: list[str] = field(default_factory=list)
    """Fields of a foreign client's requests that were not honoured; see docs/agents.md."""
    _turns: list[Turn] = field(default_factory=list)
    _by_key: dict[Key, Turn] = field(default_factory=dict)
    _other_words: dict[bytes, Turn] = field(default_factory=dict)

    @property
    def turns(self) -> Sequence[Turn]:
        """All answers, in the order in which they ended."""
        return tuple(self._turns)

    # What is read -----------------------------------------------------------------------------------------------

    def of_messages(
        self, messages: Sequence[Message], chat: ChatFormat | None = None, *, answer: bool = True
    ) -> tuple[Turn | None, np.ndarray]:
        """Find the turn that a call by messages goes on from, and encode the tokens that it adds.

        Args:
            messages: all that was said, at least one.
            chat: with other arguments of the chat template, such as `tools`; its messages are compared with those of
                calls with the same arguments alone.
            answer: the model answers next.

        Returns:
            The turn, None for none; int64 [added].

        Raises:
            UserError: the chat template refuses the messages.
        """
        chat = self.chat if chat is None else chat
        turn_before, count = None, 0
        for number, key in self.histories(messages, chat):
            if (turn := self._by_key.get(key)) is not None:
                turn_before, count = turn, number
        return turn_before, self._encoded(
            messages, count, None if turn_before is None else turn_before.ended_by, chat, answer
        )

    def _encoded(
        self, messages: Sequence[Message], count: int, ended_by: int | None, chat: ChatFormat, answer: bool
    ) -> np.ndarray:
        """Tokens of all messages but the first `count`, which end with an answer that `ended_by` ended. Answers among
        them that were recorded are read as they were generated."""
        recorded: dict[bytes, Turn] = {}
        if any(message.get("role") == "assistant" for message in messages[count:]):
            recorded |= self._other_words
            recorded |= {turn.words: turn for turn in self._turns if turn.words}
        parts: list[np.ndarray] = []
        for number in range(count, len(messages) + 1):
            turn = None
            if number < len(messages):
                message = messages[number]
                turn = recorded.get(_canonical(message)) if message.get("role") == "assistant" and number else None
            if number > count and (turn is not None or number == len(messages)):
                for_model = answer or turn is not None
                before, new = messages[:count], messages[count:number]
                parts.append(
                    chat.following(before, new, ended_by=ended_by, answer=for_model)
                    if count
                    else chat.opening(new, answer=for_model)
                )
            if turn is not None:
                parts.append(turn.answer.token_ids)
                count, ended_by = number + 1, turn.ended_by
        return np.concatenate(parts or [np.empty(0, np.int64)])

    def of_ids(self, ids: np.ndarray) -> tuple[Turn | None, np.ndarray]:
        """Find the turn that a call by token ids goes on from, and the tokens that it adds to it; see `of_messages`."""
        turn_before = None
        for turn in self._turns:
            if turn.length <= len(ids) and (turn_before is None or turn.length > turn_before.length):
                whole = turn.ids()
                if np.array_equal(whole, ids[: len(whole)]):
                    turn_before = turn
        return turn_before, ids if turn_before is None else ids[turn_before.length :]

    def goes_on_from(self, key: Key) -> bool:
        """A call goes on, or has gone on, from the history of this key."""
        return self._by_key[key].claimed if key in self._by_key else False

    def histories(self, messages: Sequence[Message], chat: ChatFormat) -> Iterator[tuple[int, Key]]:
        """(how many messages, key) of every history that the messages begin with and that ends with an answer."""
        state = _start(chat)
        for number, message in enumerate(messages, 1):
            state.update(_canonical(message))
            if message.get("role") == "assistant":
                yield number, state.digest()

    # What is said -----------------------------------------------------------------------------------------------

    def add(
        self,
        parent: Turn | None,
        new_ids: np.ndarray,
        done: Completion,
        temperature: float,
        conversation: int,
        messages: Sequence[Message] = (),
        chat: ChatFormat | None = None,
    ) -> Turn:
        """Record an answer.

        Args:
            parent: what it goes on from.
            new_ids: tokens that were added to that, int64 [read].
            done: the answer.
            temperature: at which it was sampled.
            conversation: names the line of turns for the engine.
            messages: all of them, the answer last; none for calls by token ids.
            chat: as in `of_messages`.
        """
        state, words, key = None, b"", _NOTHING
        if messages:
            state, words = _start(self.chat if chat is None else chat), _canonical(messages[-1])
            for message in messages[:-1]:
                state.update(_canonical(message))
            key = _ended(state, words)
        length = (0 if parent is None else parent.length) + len(new_ids) + len(done.response_ids)
        segment = Segment(done.response_ids, done.logprobs, done.versions, done.routes, done.log_mass)
        history = (parent, key, state, words, read_only(new_ids))
        turn = Turn(*history, segment, done.finish, temperature, conversation, length)
        self.counts.calls += 1
        self.counts.joined += parent is not None
        self.counts.branches += bool(self._turns) if parent is None else parent.goes_on
        if parent is not None:
            parent.goes_on = True
        self._turns.append(turn)
        if key:
            self._by_key[key] = turn
        return turn

    def also(self, turn: Turn, message: Message, *, in_place_of: Turn | None = None) -> Key:
        """The harness knows an answer by other words than ours, such as without the text that stopped it.

        Args:
            turn: the answer to messages.
            message: it, as the harness will send it back.
            in_place_of: an answer to the messages that the harness has, which it was not shown; this one, to what was
                said behind that, it takes for the answer to them. None: there is none.

        Returns:
            The key of the history that ends with it.
        """
        words, target = _canonical(message), turn if in_place_of is None else in_place_of
        if target.before is None or (target is turn and words == turn.words):
            return turn.key
        self._other_words[words] = turn
        key = _ended(target.before, words)
        self._by_key[key] = turn
        return key

    # What came of it --------------------------------------------------------------------------------------------

    def samples(self, prompt: Prompt | None, index: int, reward: float | None, **more: Any) -> list[Sample]:
        """Everything as samples: one per line of turns (and temperature), each generated token learned in one of them.

        Args:
            prompt: the task; None for none.
            index: of the samples in their group.
            reward: of the whole; None takes for each sample the rewards of its own answers, and of those that stand
                behind them on their line. A sample without any is left to a judge.
            more: further fields of the samples, such as `scores`.
        """
        in_turns = any(turn.reward is not None for turn in self._turns)
        used: set[int] = set()
        samples: list[Sample] = []
        for leaf in sorted(self._turns, key=lambda turn: turn.conversation):  # as they began, whichever ended first
            if leaf.goes_on:
                continue
            line = leaf.line()
            for temperature in dict.fromkeys(turn.temperature for turn in line):
                own = [turn for turn in line if id(turn) not in used and turn.temperature == temperature]
                if any(len(turn.answer.token_ids) for turn in own):
                    used |= {id(turn) for turn in own}
                    earned = [turn.reward for turn in line[line.index(own[0]) :] if turn.reward is not None]
                    total = sum(earned) if reward is None and earned else reward
                    samples.append(self._sample(line, own, prompt, index, total, in_turns, more))
        return samples

    def _sample(
        self,
        line: Sequence[Turn],
        own: Sequence[Turn],
        task: Prompt | None,
        index: int,
        reward: float | None,
        in_turns: bool,
        more: Mapping[str, Any],
    ) -> Sample:
        """A line of turns, of which some are learned; what stands behind the last of those is left out."""
        mine = {id(turn) for turn in own}
        first = next(number for number, turn in enumerate(line) if id(turn) in mine)
        last = max(number for number, turn in enumerate(line) if id(turn) in mine)
        before = [part for turn in line[:first] for part in (turn.new_ids, turn.answer.token_ids)]
        prompt_ids = np.concatenate([*before, line[first].new_ids])
        segments = [line[first].answer]
        rewards = [fallen(line[first])]
        trace, end = list[TurnTrace](), 0
        for turn in line[first : last + 1]:
            begin = end + (len(turn.new_ids) if end else 0)
            end = begin + len(turn.answer.token_ids)
            if id(turn) in mine:
                trace.append(TurnTrace(begin, end, turn.start, turn.took, turn.finish, turn.calls))
        for turn in line[first + 1 : last + 1]:
            answer = turn.answer if id(turn) in mine else Segment(turn.answer.token_ids, routes=turn.answer.routes)
            segments += [Segment(turn.new_ids), answer]
            rewards += [None, fallen(turn) if id(turn) in mine else None]
        return sample_of(
            self.chat.tokenizer.decode,
            Prompt(0, np.empty(0, np.int64)) if task is None else task,
            prompt_ids,
            segments,
            rewards if in_turns else (),
            finish=line[last].finish,
            index=index,
            temperature=own[0].temperature,
            reward=reward,
            trace=tuple(trace),
            **more,
        )


def sample_of(
    decode: Callable[..., Any],
    task: Prompt,
    prompt_ids: np.ndarray,
    segments: Sequence[Segment],
    rewards: Sequence[float | np.ndarray | None],
    *,
    finish: Finish,
    **more: Any,
) -> Sample:
    """One sample of what was read and generated behind a prompt.

    Args:
        decode: the tokenizer's.
        task: the prompt, whose tokens `prompt_ids` take the place of.
        prompt_ids: all that was read before the first answer, int64 [prompt].
        segments: from the first answer to the last.
        rewards: of single segments, which stand at their last tokens, or of each of their tokens; none if answers were
            not rewarded one by one.
        finish: why the last answer ended.
        more: further fields of the sample.
    """
    if not np.array_equal(task.token_ids, prompt_ids):
        task = replace(task, token_ids=prompt_ids, text=task.text or str(decode(prompt_ids)))
    ids = np.concatenate([part.token_ids for part in segments])
    per_token = {}
    if rewards:
        ends = np.cumsum([len(part.token_ids) for part in segments])
        per_token[REWARDS] = np.zeros(len(ids), np.float32)
        for end, segment_reward in zip(ends, rewards, strict=True):
            if isinstance(segment_reward, np.ndarray):
                per_token[REWARDS][end - len(segment_reward) : end] += segment_reward
            elif segment_reward is not None:
                per_token[REWARDS][end - 1] += segment_reward
    return Sample.of_segments(
        task,
        segments=segments,
        text=str(decode(ids[:-1] if finish == "stop" else ids, skip_special_tokens=False)),
        truncated=finish in ("length", "abort"),
        per_token=per_token,
        **more,
    )


def _start(chat: ChatFormat) -> hashlib.blake2b:
    """A digest of histories with the arguments of this chat template."""
    return hashlib.blake2b(chat.fingerprint, digest_size=16)


def _ended(state: hashlib.blake2b, words: bytes) -> Key:
    """The key of a history that a digest begins and these words end."""
    whole = state.copy()
    whole.update(words)
    return whole.digest()


_COMPARED = frozenset({"role", "content", "tool_calls"})
"""Fields by which answers are compared: libraries add others, and white space around words and ids of calls are not the
model's."""


def _canonical(message: Message) -> bytes:
    """Encode what two messages must share to count as equal. Answers share words and calls, in whatever clothes a
    library sends them back; all other messages share every field that says something."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    answer = message.get("role") == "assistant"
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    words = content.strip() if answer and isinstance(content, str) else content or ""
    more = (
        {} if answer else {name: each for name, each in message.items() if name not in _COMPARED and each is not None}
    )
    if isinstance(words, str) and not calls and not more:  # nearly all messages, at a fifth of the cost
        return f"{len(words)} {message.get('role')} {words}".encode("utf-8", "surrogatepass")
    return _JSON.encode([message.get("role"), words, calls, more]).encode("utf-8", "surrogatepass")


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            pass
    return [function.get("name"), arguments]
