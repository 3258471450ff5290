"""Results of environments: how episodes begin, what a chunk of actions did, and how finished episodes went.

Single steps become `Start`, `Chunk`, `Episode` and `EnvOutput`; functions join chunks of several environments to one,
and choose, replace and check rows of observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from rlinf.envs.base import ArraySpec, Observation


class NothingHappened(ValueError):
    """A step in which no action was done in an episode that was kept; another step may go well."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    env: int
    """Environment that it ran in, counted over all workers and slices."""
    epoch: int
    """The one that `reset` was called with."""
    number: int
    """How many this environment began before it in the epoch. Members of a group share starts of equal numbers."""
    seed: int
    """Seed of its reset."""
    length: int
    """Steps done."""
    total: float
    """The return: the sum of its rewards, undiscounted."""
    success_once: bool | None
    """The task was solved after some step; None if the simulator does not say."""
    success_at_end: bool | None
    """The task was solved after the last step."""
    truncated: bool
    """It was cut off; otherwise the task ended it."""
    task: str | None = None
    """Name of what it was to do, as the simulator says when it begins; None where there is one task alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The beginning of episodes in all environments."""

    observation: Observation
    """First of each episode, N rows."""
    episode: Tensor
    """Number of each episode, int64 [N]; see `Episode.number`."""
    instructions: tuple[str, ...] | None
    """Instruction of each environment, in words, N texts."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Results of C actions in a row in each of N environments.

    A row stops at the end of its episode: what remains of the chunk is not done, and not valid.
    """

    rewards: Tensor
    """Reward of each step, float32 [N, C]; 0 where not valid."""
    terminated: Tensor
    """This step ended the task, bool [N, C]: nothing can be earned after it, so its value is its reward."""
    truncated: Tensor
    """This step was the last because the episode was cut off, bool [N, C]; never together with `terminated`. More could
    have been earned: bootstrap with the value of the final observation."""
    valid: Tensor
    """This step was done, bool [N, C]; the one that ended the episode included."""
    observation: Observation
    """Observation to act on next, N rows. Where an episode ended and the next was begun, the first one of the next;
    where it ended and none was begun, the last one of the old."""
    ended: Tensor
    """Environments whose episode ended in this chunk, ascending, int64 [m]."""
    final: Observation
    """Last observation of those episodes, m rows in the order of `ended`."""
    episode: Tensor
    """Number of the episode that the row's steps belong to, int64 [N]."""
    next_episode: Tensor
    """Number of the episode that `observation` belongs to, int64 [N]."""
    running: Tensor
    """An episode is under way after the chunk, bool [N]; always, unless `auto_reset` is off."""
    lost: Tensor
    """The row's episode died with its simulator, or was dropped for a number that is not finite, bool [N]: no step of
    it is valid, its earlier chunks have no end and are not to be learned from (see `chunk_advantages.without_lost`),
    and another one was begun in its place."""
    episodes: tuple[Episode, ...]
    """Those that ended in this chunk, in the order of `ended`."""
    instructions: tuple[str, ...] | None
    """Instruction of each environment from here on, in words, N texts."""
    final_instructions: tuple[str, ...] | None = None
    """Instructions of the episodes that ended, m texts in the order of `ended`."""
    remarks: tuple[str, ...] = ()
    """Why episodes were dropped: which environment, its seed, and which number was not finite."""
    uneventful: bool = False
    """Every step was done, and no episode ended or was lost, as in most chunks: see `of_steps`."""

    @property
    def cut(self) -> Tensor:
        """Rows of `ended` and `final` whose episode was truncated, int64: their final values are needed."""
        return self.truncated[self.ended].any(1).nonzero().squeeze(1)

    @property
    def following(self) -> tuple[Observation, tuple[str, ...] | None]:
        """Observations after the actions, N rows, and the instruction of each environment: of the episodes that the
        actions were done in, also where those ended."""
        words = self.instructions
        if words is not None and self.final_instructions is not None:
            ended = dict(zip(self.ended.tolist(), self.final_instructions, strict=True))
            words = tuple(ended.get(env, text) for env, text in enumerate(words))
        return with_rows(self.observation, self.ended, self.final), words


@dataclass(frozen=True, slots=True, eq=False)
class EnvOutput:
    """Input of the policy's next decision for a slice of N environments."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its arrays

    observation: Observation
    """To act on next, N rows."""
    instructions: tuple[str, ...] | None
    """Instruction of each environment, in words."""
    chunk: Chunk | None
    """Results of the last actions; None at the beginning of a step."""
    seeds: Tensor
    """For the next draw of actions, one per environment, int64 [N]: a function of seed, epoch, environment and time, so
    that what a policy draws does not depend on slices or on who asks when."""
    first: int
    """Number of the first environment among those of its actor."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Decision of a policy with a memory for a slice of N environments."""

    __plain__: ClassVar[bool] = True

    actions: Tensor
    """Chunks in [-1, 1], float32 [N, C, A]."""
    memory: Tensor
    """The policy's memory, float32 [N, M]; shown to it again as "memory" with the results of the actions, 0 where an
    episode ended or was lost."""


def remembered(chunk: Chunk, memory: Tensor) -> Chunk:
    """A chunk whose observations have what the policy remembers; nothing is remembered of an episode that is over."""
    carried = memory.clone()
    carried[chunk.ended] = 0.0
    carried[chunk.lost.cpu()] = 0.0
    observation = {**chunk.observation, "memory": carried}
    return replace(chunk, observation=observation, final={**chunk.final, "memory": memory[chunk.ended]})


def joined_starts(parts: Sequence[Start]) -> Start:
    """Starts of several environments as those of one, in their order."""
    return Start(
        _joined([part.observation for part in parts]),
        torch.cat([part.episode for part in parts]),
        _texts([part.instructions for part in parts]),
    )


def of_steps(rewards: Tensor, observation: Observation, episode: Tensor, instructions: tuple[str, ...] | None) -> Chunk:
    """An uneventful chunk, of which nothing else need be told. Its other tensors are shared by all such chunks.

    Args:
        rewards, observation, episode, instructions: see `Chunk`.
    """
    never, always, ended = _without_events(*rewards.shape, rewards.device)
    return Chunk(
        rewards=rewards,
        terminated=never,
        truncated=never,
        valid=always,
        observation=observation,
        ended=ended,
        final={name: array[:0] for name, array in observation.items()},
        episode=episode,
        next_episode=episode,
        running=always[:, 0],
        lost=never[:, 0],
        episodes=(),
        instructions=instructions,
        final_instructions=None if instructions is None else (),
        uneventful=True,
    )


@lru_cache
def _without_events(count: int, actions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """All-false and all-true masks, bool [N, C], and an empty list of ended environments, for chunks in which nothing
    ends; nobody writes to them."""
    always = torch.ones(count, actions, dtype=torch.bool, device=device)
    return ~always, always, torch.zeros(0, dtype=torch.int64)


def joined_chunks(parts: Sequence[Chunk]) -> Chunk:
    """Chunks of several environments as that of one, in their order."""
    if len(parts) == 1:
        return parts[0]
    if all(part.uneventful for part in parts):
        return of_steps(
            torch.cat([part.rewards for part in parts]),
            _joined([part.observation for part in parts]),
            torch.cat([part.episode for part in parts]),
            _texts([part.instructions for part in parts]),
        )
    ended, offset = [], 0
    for part in parts:
        ended.append(part.ended + offset)
        offset += len(part.running)

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return Chunk(
        rewards=rows("rewards"),
        terminated=rows("terminated"),
        truncated=rows("truncated"),
        valid=rows("valid"),
        observation=_joined([part.observation for part in parts]),
        ended=torch.cat(ended),
        final=_joined([part.final for part in parts]),
        episode=rows("episode"),
        next_episode=rows("next_episode"),
        running=rows("running"),
        lost=rows("lost"),
        episodes=tuple(episode for part in parts for episode in part.episodes),
        instructions=_texts([part.instructions for part in parts]),
        final_instructions=_texts([part.final_instructions for part in parts]),
        remarks=tuple(remark for part in parts for remark in part.remarks),
    )


def lost_chunk(start: Start, episode: Tensor, running: Tensor, actions: int) -> Chunk:
    """The chunk of environments whose simulator died while it ran, or before.

    Args:
        start: the episodes that were begun in the place of those that were under way.
        episode: numbers of those, int64 [N].
        running: where one was under way, bool [N].
        actions: C.
    """
    count = len(episode)
    nothing = torch.zeros(count, actions, dtype=torch.bool)
    return Chunk(
        rewards=torch.zeros(count, actions),
        terminated=nothing,
        truncated=nothing,
        valid=nothing,
        observation=start.observation,
        ended=torch.zeros(0, dtype=torch.int64),
        final={name: array[:0] for name, array in start.observation.items()},
        episode=episode,
        next_episode=start.episode,
        running=torch.ones(count, dtype=torch.bool),
        lost=running,
        episodes=(),
        instructions=start.instructions,
        final_instructions=None if start.instructions is None else (),
    )


def _texts(parts: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    return None if parts[0] is None else tuple(text for part in parts for text in part or ())


def rows_of(observation: Observation, rows: Tensor) -> Observation:
    """The rows named by `rows`, int64 [n], as a copy."""
    return {name: array[rows.to(array.device)] for name, array in observation.items()}


def with_rows(observation: Observation, rows: Tensor, new: Observation) -> Observation:
    """A copy of `observation` whose `rows`, int64 [n], are those of `new`."""
    result = {}
    for name, array in observation.items():
        result[name] = array.clone()
        result[name][rows.to(array.device)] = new[name]
    return result


def rows_where(mask: Tensor, new: Observation, old: Observation) -> Observation:
    """Rows of `new` where `mask`, bool [N], is true, and of `old` elsewhere."""
    return {name: torch.where(mask.view(-1, *(1,) * (new[name].ndim - 1)), new[name], old[name]) for name in old}


def _joined(parts: Sequence[Observation]) -> Observation:
    """The rows of all parts, one below the other."""
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def mistake_in(observation: Observation, spec: Mapping[str, ArraySpec], rows: int) -> str | None:
    """How an observation differs from its specification, for the adapter's author; None if it does not."""
    if observation.keys() != spec.keys():
        return f"it has {sorted(observation)}, and observation_spec {sorted(spec)}"
    for name, array in observation.items():
        wanted = (rows, *spec[name].shape)
        if tuple(array.shape) != wanted or array.dtype != spec[name].dtype:
            return f"{name!r} is {array.dtype} {list(array.shape)} instead of {spec[name].dtype} {list(wanted)}"
    return None
