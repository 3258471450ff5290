"""An episode that somebody acted well in, and the decisions in it, to learn from.

In: whole episodes, of any format. Out: a `Window` of them, of which any decisions are cut out as a batch, with chunks
of actions as long as the policy's. Nobody waits here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """One episode of T chunks of C actions."""

    observation: dict[str, Tensor]
    """Before each chunk, and after the last: T + 1 rows in each array."""
    actions: Tensor
    """Float32 [T, C, A]: in [-1, 1] where a policy did them, otherwise as the data set has them."""
    rewards: Tensor
    """Of each action, float32 [T, C]."""
    valid: Tensor
    """Which actions were done, bool [T, C]; at least one in each chunk."""
    terminated: bool
    """The task ended with it; otherwise it was cut off."""
    success: bool | None
    """The task was solved at some time; None if nobody says."""
    instruction: str | tuple[str, ...] | None
    """What was to be done, in words; of each chunk where that changes within the episode, T texts."""

    def __post_init__(self) -> None:
        count = len(self.actions)
        if isinstance(self.instruction, tuple) and len(self.instruction) != count:
            raise ValueError(f"a demonstration of {count} chunks has {len(self.instruction)} instructions")
        if self.actions.ndim != 3 or not count or self.rewards.shape != self.actions.shape[:2]:
            raise ValueError(
                f"a demonstration needs actions [T, C, A] and rewards [T, C] with T at least 1, not "
                f"{list(self.actions.shape)} and {list(self.rewards.shape)}"
            )
        odd = [name for name, rows in self.observation.items() if len(rows) != count + 1]
        if odd or not self.observation:
            raise ValueError(f"a demonstration of {count} chunks needs {count + 1} observations, not as in {odd}")

    @property
    def instructions(self) -> tuple[str, ...] | None:
        """What was to be done, in each chunk, T texts; None if nobody says."""
        one = self.instruction
        return (one,) * len(self.actions) if isinstance(one, str) else one


def instruction_from(kept: Any) -> str | tuple[str, ...] | None:
    """The instruction of an episode from what JSON keeps: a text, a list of one for each row, or null.

    Raises:
        ValueError: it is none of these.
    """
    if kept is None or isinstance(kept, str):
        return kept
    if isinstance(kept, list | tuple) and all(isinstance(each, str) for each in kept):
        return tuple(kept)
    raise ValueError(f"instruction={kept!r:.60} is neither a text nor a list of texts")


def instruction_of(texts: Sequence[str]) -> str | tuple[str, ...] | None:
    """The instruction of an episode whose rows have these: one text where they are equal, None where they are empty."""
    if len(set(texts)) > 1:
        return tuple(texts)
    return texts[0] or None if texts else None


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """D decisions of demonstrations, each of a chunk of C actions."""

    observation: dict[str, Tensor]
    """Before the chunk, D rows in each array."""
    following: dict[str, Tensor]
    """After its last action, D rows in each array."""
    actions: Tensor
    """In [-1, 1], float32 [D, C, A]; 0 where not valid."""
    rewards: Tensor
    """Of each action, float32 [D, C]; 0 where not valid."""
    valid: Tensor
    """Which actions were done, bool [D, C]: the first ones of each chunk."""
    terminated: Tensor
    """The task ended in it, bool [D]."""
    instructions: tuple[str, ...] | None
    """What was to be done, D texts."""

    def __len__(self) -> int:
        return len(self.actions)

    def rows(self, chosen: Tensor) -> Decisions:
        """Some of the decisions, `chosen` int64 [d]."""
        words = self.instructions
        return Decisions(
            {name: array[chosen] for name, array in self.observation.items()},
            {name: array[chosen] for name, array in self.following.items()},
            self.actions[chosen],
            self.rewards[chosen],
            self.valid[chosen],
            self.terminated[chosen],
            None if words is None else tuple(words[row] for row in chosen.tolist()),
        )


class Window:
    """Episodes in memory as one, cut into decisions: one from every recorded row on.

    Episodes recorded action by action give a chunk from every step on, in which actions beyond the episode's end are
    not valid; those recorded in chunks fit a policy with chunks of that length alone, since nobody saw between them.

    Args:
        demonstrations: at least one, all with the same arrays.
        chunk: actions in a decision, C.

    Raises:
        ValueError: there is none, they were recorded in chunks of another length, or their arrays differ.
    """

    def __init__(self, demonstrations: Sequence[Demonstration], chunk: int):
        if not demonstrations:
            raise ValueError("demonstrations: there is not one, so nothing can be learned from them")
        self.chunk = chunk
        first = demonstrations[0]
        for number, shown in enumerate(demonstrations):
            _check(shown, first, number, chunk)
        self._reach = 1 if first.actions.shape[1] == chunk else chunk  # recorded rows that a decision covers
        counts = torch.tensor([len(shown.actions) for shown in demonstrations])
        self._last = counts.cumsum(0).repeat_interleave(counts)  # row after the last one of each row's episode
        self._episode = torch.arange(len(counts)).repeat_interleave(counts)
        self._observation = {
            name: torch.cat([shown.observation[name] for shown in demonstrations]) for name in first.observation
        }
        self._actions = torch.cat([shown.actions for shown in demonstrations])
        self._rewards = torch.cat([shown.rewards for shown in demonstrations])
        self._valid = torch.cat([shown.valid for shown in demonstrations])
        self._terminated = torch.tensor([shown.terminated for shown in demonstrations])
        words = [shown.instructions for shown in demonstrations]
        self._words = None if any(each is None for each in words) else [text for each in words for text in each or ()]

    def __len__(self) -> int:
        """Decisions, D."""
        return len(self._last)

    def between(self, first: int, end: int) -> Decisions:
        """Neighbouring decisions, as far as there are some."""
        return self.rows(torch.arange(first, min(end, len(self))))

    def rows(self, chosen: Tensor) -> Decisions:
        """Some of the decisions, `chosen` int64 [d]."""
        episode, last = self._episode[chosen], self._last[chosen]
        behind = torch.minimum(chosen + self._reach, last)
        places = chosen[:, None] + torch.arange(self._reach)
        there = places < last[:, None]
        places = torch.minimum(places, last[:, None] - 1)
        valid = (self._valid[places] & there[..., None]).reshape(len(chosen), self.chunk)
        words = self._words
        return Decisions(
            {name: rows[chosen + episode] for name, rows in self._observation.items()},  # one more row per episode
            {name: rows[behind + episode] for name, rows in self._observation.items()},
            torch.where(valid[..., None], self._actions[places].reshape(len(chosen), self.chunk, -1), 0.0),
            torch.where(valid, self._rewards[places].reshape(len(chosen), self.chunk), 0.0),
            valid,
            self._terminated[episode] & (behind == last),
            None if words is None else tuple(words[row] for row in chosen.tolist()),
        )


def decisions(demonstrations: Sequence[Demonstration], chunk: int) -> Decisions:
    """All decisions of all episodes; arguments and errors are those of `Window`."""
    window = Window(demonstrations, chunk)
    return window.rows(torch.arange(len(window)))


def joined(parts: Sequence[Decisions]) -> Decisions:
    """Decisions of several windows, one below the other; instructions only if all of them have some."""
    if len(parts) == 1:
        return parts[0]
    told = None
    if all(part.instructions is not None for part in parts):
        told = tuple(text for part in parts for text in part.instructions or ())
    return Decisions(
        {name: torch.cat([part.observation[name] for part in parts]) for name in parts[0].observation},
        {name: torch.cat([part.following[name] for part in parts]) for name in parts[0].following},
        torch.cat([part.actions for part in parts]),
        torch.cat([part.rewards for part in parts]),
        torch.cat([part.valid for part in parts]),
        torch.cat([part.terminated for part in parts]),
        told,
    )


def mistake_between(shown: Demonstration, first: Demonstration) -> str | None:
    """How an episode differs from another in what its rows are like; None if it does not."""
    mine = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in shown.observation.items()}
    theirs = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in first.observation.items()}
    if mine != theirs:
        return f"it shows {_in_words(mine)}, and the first one {_in_words(theirs)}"
    if shown.actions.shape[1:] != first.actions.shape[1:]:
        mine_size, first_size = (list(each.actions.shape[1:]) for each in (shown, first))
        return f"its actions are {mine_size}, and those of the first one {first_size}"
    return None


def _in_words(arrays: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(
        f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in arrays.items()
    )


def _check(shown: Demonstration, first: Demonstration, number: int, chunk: int) -> None:
    recorded = shown.actions.shape[1]
    if recorded not in (1, chunk):
        raise ValueError(
            f"demonstrations were recorded in chunks of {recorded} actions, and the policy decides {chunk} at a time: "
            f"record them action by action, or set the policy's chunk to {recorded}"
        )
    if (mistake := mistake_between(shown, first)) is not None:
        raise ValueError(f"demonstrations: episode {number} does not go with the others: {mistake}")
