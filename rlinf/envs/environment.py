"""Action chunks, time limits, resets, seeds and episode statistics around any simulator.

An `Environment` takes chunks of actions from -1 to 1, [N, C, A], and returns `Chunk`s, which functions here join to
those of several environments. It does the actions of a chunk
one after the other, stops each row at the end of its episode, cuts episodes off at their time limit, keeps final
observations, begins the next episodes, and keeps the accounts of each.

Where randomness comes from: the start of an episode is a function of (seed, epoch, group, number), where the group is
the environment's own, or shared by `group_size` neighbours, and the number counts the episodes that this environment
began in the epoch. So a run repeats, whatever workers and slices it is divided into.

An episode with an action, observation or reward that is not finite is dropped: the chunk says that it is lost, and why,
and another one is begun in its place, or in the place of all of its group. Where a simulator resets all environments
together, what has ended or was dropped waits, without valid steps, until no episode is under way.

Accounts are numpy's, on the host, wherever the simulator computes: there an operation on a few numbers takes a third of
torch's time, and what ended must be known on the host after every step.

`FrameStack` is a simulator whose observations are the last few of another one, so that a policy without memory sees
motion; `Environment` makes it where `env.frame_stack` is more than 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.data.rng import mix
from rlinf.envs.base import (
    ActionSpec,
    ArraySpec,
    Interventions,
    Observation,
    Simulator,
    State,
    Timing,
    Transition,
    rows_of,
    rows_where,
    with_rows,
)
from rlinf.envs.video import Recorder
from rlinf.envs.wrappers import Wrapper


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
    intervened: int = 0
    """Steps in which somebody else acted in the policy's place."""
    times: Mapping[str, float] | None = field(default=None, compare=False)
    """When its steps were decided and done, see `times_of`; None where time stands still between steps."""


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
    interventions: Interventions | None = None
    """Actions of somebody else in place of those asked for; None where nobody can."""

    @property
    def cut(self) -> Tensor:
        """Rows of `ended` and `final` whose episode was truncated, int64: their final values are needed."""
        return torch.tensor([row for row, each in enumerate(self.episodes) if each.truncated], dtype=torch.int64)

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


def times_of(steps: Sequence[tuple[Timing, bool]]) -> dict[str, float] | None:
    """Times of an episode, seconds: `age` of observations when the actions came, its mean and `age_max`; of it, the
    mean of `decision` here and of the `link` there and back; `limited`, the share of actions that were cut; `holds`
    that came before.

    Args:
        steps: when each was done, and whether its action was cut; none where nobody says.
    """
    if not steps:
        return None
    ages, decisions = [each.age for each, _ in steps], [each.decision for each, _ in steps]
    age, decision = sum(ages) / len(ages), sum(decisions) / len(decisions)
    limited, holds = sum(cut for _, cut in steps) / len(steps), float(sum(each.holds for each, _ in steps))
    means = {"age": age, "decision": decision, "link": age - decision, "limited": limited}
    return {**means, "age_max": max(ages), "holds": holds}


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
    never, always, lost, running, ended = _without_events(*rewards.shape, rewards.device)
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
        running=running,
        lost=lost,
        episodes=(),
        instructions=instructions,
        final_instructions=None if instructions is None else (),
        uneventful=True,
    )


@lru_cache
def _without_events(count: int, actions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All-false and all-true masks, bool [N, C] and [N], and an empty list of ended environments, for chunks in which
    nothing ends; nobody writes to them."""
    always = torch.ones(count, actions, dtype=torch.bool, device=device)
    return ~always, always, ~always[:, 0], always[:, 0], torch.zeros(0, dtype=torch.int64)


def joined_chunks(parts: Sequence[Chunk]) -> Chunk:
    """Chunks of several environments as that of one, in their order."""
    if len(parts) == 1:
        return parts[0]
    chunk = _joined_chunks(parts)
    acted = [part.interventions for part in parts]
    if (first := next((each for each in acted if each is not None), None)) is None:
        return chunk
    whole = []
    for part, each in zip(parts, acted, strict=True):  # a part that was lost with its simulator has none
        nobody = torch.zeros(part.valid.shape, dtype=torch.bool)
        whole.append(each or Interventions(nobody, torch.zeros(*nobody.shape, first.actions.shape[-1])))
    together = Interventions(torch.cat([each.steps for each in whole]), torch.cat([each.actions for each in whole]))
    return replace(chunk, interventions=together)


def _joined_chunks(parts: Sequence[Chunk]) -> Chunk:
    """Chunks as one, but for interventions."""
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

    names = ("rewards", "terminated", "truncated", "valid", "episode", "next_episode", "running", "lost")
    rows: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Chunk(
        **rows,
        observation=_joined([part.observation for part in parts]),
        ended=torch.cat(ended),
        final=_joined([part.final for part in parts]),
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


HELD_OUT = (1 << 31) - (1 << 21)
"""Seeds from here on are kept for evaluation: two million, and one in a thousand of all."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules by which episodes begin and end, and how much of them is seen."""

    seed: int = 0
    """Seed of all starts."""
    group_size: int = 1
    """So many neighbouring environments begin their episodes of equal number alike."""
    auto_reset: bool = True
    """After a chunk in which an episode ended, the next one begins; otherwise the environment waits for `reset`."""
    chunks: int | None = None
    """So many chunks follow on a `reset`, and after the last one no episode is begun that nobody would act in; None: it
    is not known."""
    ignore_terminations: bool = False
    """Episodes go on when their task ends, so that all last until their time limit."""
    max_steps: int | None = None
    """Steps after which an episode is cut off; None for the simulator's own limit."""
    frame_stack: int = 1
    """So many last observations are seen at once; see `FrameStack`."""
    held_out: bool = False
    """Begin episodes by seeds that are kept for evaluation: no other environment ever draws one of them."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size} must be at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps} must be at least 1")
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"chunks={self.chunks} must be at least 1")
        if self.frame_stack < 1:
            raise ValueError(f"frame_stack={self.frame_stack} must be at least 1")

    def seed_of(self, epoch: int, env: int, episode: int) -> int:
        """Seed of an episode's start, from 0 to 2^31 - 1, which is what every simulator takes; from `HELD_OUT` on for
        episodes that are held out, and otherwise below.

        Args:
            epoch: that environments were reset with.
            env: environment, counted over all workers and slices.
            episode: its number in the epoch.
        """
        number = mix(self.seed, epoch, env // self.group_size, episode) >> 32
        return HELD_OUT + number % ((1 << 31) - HELD_OUT) if self.held_out else number % HELD_OUT


def not_finite(arrays: Mapping[str, Tensor]) -> Tensor | None:
    """Rows in which some number is NaN or infinite, bool [N]; None if there is none.

    Args:
        arrays: N rows each.
    """
    floats = [array for array in arrays.values() if array.is_floating_point()]
    if all(math.isfinite(array.sum().item()) for array in floats):  # a sum tells of any, at a fraction of the price
        return None
    rows = torch.stack([~torch.isfinite(array).reshape(len(array), -1).all(1) for array in floats]).any(0)
    return rows if bool(rows.any()) else None


class InvalidEpisodes:
    """The episodes of one chunk that cannot be used, and the remarks on them.

    Args:
        describe: names the episode that an environment is in, and its next step.
    """

    def __init__(self, describe: Callable[[int], str]):
        self._describe = describe
        self._remarks: list[str] = []
        self.rows = np.zeros(0, np.bool_)
        """Environments whose episode was spoiled in this chunk, bool [N]."""

    def begin(self, count: int) -> None:
        """A chunk of so many environments begins."""
        self.rows = np.zeros(count, np.bool_)

    @property
    def noted(self) -> bool:
        """There is a remark that nobody has had yet."""
        return bool(self._remarks)

    def left(self, active: np.ndarray, arrays: Mapping[str, Tensor]) -> np.ndarray:
        """The active environments, bool [N], whose numbers are finite; the others are noted.

        Args:
            active: bool [N].
            arrays: N rows each, by name; rows that are not active may hold anything.
        """
        wrong = not_finite(arrays)
        if wrong is None or not (bad := wrong.cpu().numpy() & active).any():
            return active
        self.rows |= bad
        envs = np.flatnonzero(bad)
        self.note(rows_of(dict(arrays), torch.from_numpy(envs)), envs)
        return active & ~bad

    def note(self, arrays: Mapping[str, Tensor], envs: np.ndarray) -> str:
        """Remark on environments which of their rows is not finite; the last remark.

        Args:
            arrays: n rows each, by name.
            envs: of the rows, int64 [n], at least one.
        """
        for row, env in enumerate(envs.tolist()):
            names = [name for name, array in arrays.items() if not_finite({name: array[row : row + 1]}) is not None]
            self._remarks.append(f"{self._describe(env)}: its {' and '.join(names)} is not finite")
        return self._remarks[-1]

    def remarks(self) -> tuple[str, ...]:
        """The remarks since the last call."""
        remarks, self._remarks = tuple(self._remarks), []
        return remarks


class FrameStack(Wrapper):
    """The last `frames` observations, the oldest first, one behind the other along the last axis.

    At the beginning of an episode the first observation stands in the place of those that there are not.

    Args:
        simulator: what is observed; this one owns it from now on.
        frames: how many observations are seen at once, K. "state" [N, S] becomes [N, K S], "rgb" [N, H, W, 3 k] becomes
            [N, H, W, K 3 k].
    """

    def __init__(self, simulator: Simulator, frames: int):
        super().__init__(simulator)
        self.frames = frames
        specs = simulator.observation_spec
        self.observation_spec = {
            name: ArraySpec((*spec.shape[:-1], frames * spec.shape[-1]), spec.dtype) for name, spec in specs.items()
        }
        self._seen = {
            name: torch.zeros(self.num_envs, frames, *spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in specs.items()
        }

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        first, rows = self.simulator.reset(seeds, env_ids), env_ids.to(self.device)
        for name, frames in self._seen.items():
            frames[rows] = first[name][:, None].to(self.device)
        return {name: _stacked(frames[rows]) for name, frames in self._seen.items()}

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        moved = self.simulator.step(actions, active)
        for name, frames in self._seen.items():
            new = torch.cat([frames[:, 1:], moved.observation[name][:, None].to(self.device)], 1)
            self._seen[name] = torch.where(active.view(-1, *[1] * (frames.ndim - 1)), new, frames)
        return replace(moved, observation={name: _stacked(frames) for name, frames in self._seen.items()})

    def save(self) -> list[State]:
        inner = self.simulator.save()
        return [
            {"simulator": state, "frames": {name: frames[env].clone() for name, frames in self._seen.items()}}
            for env, state in enumerate(inner)
        ]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self.simulator.restore([state["simulator"] for state in states], env_ids)
        for env, state in zip(env_ids.tolist(), states, strict=True):
            for name, frames in state["frames"].items():
                self._seen[name][env] = frames.to(self.device)


def _stacked(frames: Tensor) -> Tensor:
    """[n, K, ..., C] as [n, ..., K C], a copy."""
    return frames.movedim(1, -2).flatten(-2).clone()


MOST_STARTS = 5
"""Starts in a row whose observation is not finite, after which a simulator is given up."""


class _Done(NamedTuple):
    """One step of N environments."""

    reward: np.ndarray
    """float32 [N]; 0 where not active."""
    active: np.ndarray
    """Environments that did it, bool [N]."""
    over: np.ndarray | None
    """Those of them whose episode it ended, bool [N]; None if it ended none."""
    terminated: np.ndarray | None
    """Where the task is over, bool [N], which counts where the episode is; None: nowhere."""


def _of_chunk(acted: Sequence[Interventions | None], count: int, spec: ActionSpec) -> Interventions | None:
    """Interventions of the steps of a chunk, in [-1, 1]; None if nobody can intervene.

    Args:
        acted: of each step that was done; its steps among those that were active.
        count: actions of the chunk, of which the last may not have been done.
        spec: of the actions.
    """
    by_step = [(index, each) for index, each in enumerate(acted) if each is not None]
    if not by_step:
        return None
    steps = torch.zeros(len(by_step[0][1].steps), count, dtype=torch.bool)
    actions = torch.zeros(*steps.shape, spec.size)
    for index, each in by_step:
        steps[:, index], actions[:, index] = each.steps.cpu(), spec.unscaled(each.actions).cpu()
    return Interventions(steps, actions)


class Environment:
    """N environments that are acted on in chunks. Its calls block; `workers.py` makes them awaitable.

    Args:
        simulator: what is acted on; the environment owns it from now on.
        rules: how episodes begin and end.
        first: number of the first environment among those of all workers and slices; a multiple of the group's size.
        recorder: keeps videos of episodes; None for none.

    Raises:
        ValueError: a group would be divided, or nothing would ever end an episode.
    """

    def __init__(
        self, simulator: Simulator, rules: Rules | None = None, *, first: int = 0, recorder: Recorder | None = None
    ):
        self.rules = rules if rules is not None else Rules()
        stacks = self.rules.frame_stack > 1
        self.simulator = FrameStack(simulator, self.rules.frame_stack) if stacks else simulator
        self.num_envs = simulator.num_envs
        self.first = first
        self._recorder = recorder
        self.max_steps = self.rules.max_steps or simulator.max_steps
        group = self.rules.group_size
        if first % group or self.num_envs % group:
            raise ValueError(
                f"groups of {group} do not fit {self.num_envs} environments from number {first}: "
                f"both must be multiples of group_size, so that no group is divided between workers or slices"
            )
        if self.max_steps is None and self.rules.ignore_terminations:
            raise ValueError("ignore_terminations needs max_steps: nothing else would end an episode")
        self._everyone = np.arange(self.num_envs)
        self._epoch: int | None = None
        self._done = 0  # chunks since the last reset
        self._invalid = InvalidEpisodes(self._place)
        self._tasks: list[str] | None = None  # of each environment's episode
        self.pause: Callable[[bool], None] | None = None
        """Called when episodes begin to be begun within a step, and again when they have been."""

    def reset(self, epoch: int = 0, episode: Tensor | None = None) -> Start:
        """Begin new episodes everywhere.

        Args:
            epoch: part of what the starts follow from, together with the rules' seed.
            episode: numbers of the episodes to begin, int64 [N]; 0 if None.
        """
        self._epoch, self._done = epoch, 0
        count = self.num_envs
        self._episode = np.zeros(count, np.int64) if episode is None else episode.numpy().copy()
        self._steps, self._total = np.zeros(count, np.int64), np.zeros(count, np.float64)
        self._once, self._solved, self._running = (np.full(count, each) for each in (False, False, True))
        self._intervened = np.zeros(count, np.int64)
        self._timings: list[list[tuple[Timing, bool]]] = [[] for _ in range(count)]
        self._tells_success = False
        self._observation = self._begin(self._everyone)
        wrong = mistake_in(self._observation, self.simulator.observation_spec, self.num_envs)
        if wrong is not None:
            raise ValueError(f"{type(self.simulator).__name__}.reset() returned a wrong observation: {wrong}")
        return Start(self._observation, self._numbers(), self._instructions())

    def step(self, actions: Tensor) -> Chunk:
        """Do a chunk of actions.

        Args:
            actions: from -1 to 1 (clipped), float32 [N, C, A].

        Raises:
            RuntimeError: `reset` was not called before.
            ValueError: the actions have another shape.
        """
        self._check(actions)
        self._done += 1
        actions = self.simulator.action_spec.scaled(actions.to(self.simulator.device))
        active = self._running
        everyone = bool(active.all())  # as in most steps, which then need no operation to leave anybody out
        spoiled = self._invalid
        spoiled.begin(self.num_envs)
        done: list[_Done] = []
        acted: list[Interventions | None] = []
        if defers := self.simulator.deferring is not None:
            self.simulator.deferring = actions.shape[1] > 1
        for action in actions.unbind(1):
            able = spoiled.left(active, {"action": action})
            everyone = everyone and able is active
            if not (everyone or able.any()):
                break
            moved = self.simulator.step(action, self._on_device(able))
            active = spoiled.left(able, {"reward": moved.reward, **moved.observation})
            everyone = everyone and active is able
            acted.append(self._acted(moved, active))
            if moved.timing is not None:
                self._time(moved.timing, active)
            done.append(step := self._account(moved, active, everyone))
            if step.over is not None:
                everyone, active = False, active & ~step.over
        if defers:  # those whose episode ended have not moved since
            self._observation = {**self._observation, **self.simulator.look()}
        if everyone and done and len(done) == actions.shape[1] and not spoiled.noted:
            rewards = torch.from_numpy(np.array([step.reward for step in done], np.float32).T.copy())
            chunk = of_steps(rewards, self._observation, self._numbers(), self._instructions())
        else:
            chunk = self._eventful(done, actions.shape[1])
        interventions = _of_chunk(acted, actions.shape[1], self.simulator.action_spec)
        return chunk if interventions is None else replace(chunk, interventions=interventions)

    def _acted(self, moved: Transition, active: np.ndarray) -> Interventions | None:
        """Interventions of a step in the active environments, which count for their episodes."""
        if (acted := moved.interventions) is None:
            return None
        steps = _on_host(acted.steps) & active
        self._intervened += steps
        return Interventions(torch.from_numpy(steps), acted.actions)

    def _time(self, timing: Timing, active: np.ndarray) -> None:
        """Enter when a step was done into the accounts of the active environments."""
        limited = _on_host(timing.limited)
        for env in np.flatnonzero(active).tolist():
            self._timings[env].append((timing, bool(limited[env])))

    def _on_device(self, mask: np.ndarray) -> Tensor:
        """A mask as the simulator takes it; not to be written to."""
        return torch.from_numpy(mask).to(self.simulator.device)

    def _numbers(self) -> Tensor:
        """Number of each environment's episode, int64 [N]."""
        return torch.from_numpy(self._episode)  # replaced, never written to, when others begin

    def _eventful(self, done: Sequence[_Done], count: int) -> Chunk:
        """The chunk of some of so many steps, of which not all were done by everyone, or which episodes ended in."""
        rewards = np.zeros((self.num_envs, count), np.float32)
        terminated, truncated, valid = (np.zeros(rewards.shape, np.bool_) for _ in range(3))
        for index, step in enumerate(done):
            rewards[:, index], valid[:, index] = step.reward, step.active
            if step.over is not None and step.terminated is not None:
                terminated[:, index] = step.over & step.terminated
            if step.over is not None:
                truncated[:, index] = step.over & ~terminated[:, index]
        episode = self._numbers()
        lost = self._drop(self._invalid.rows, rewards, terminated, truncated, valid)
        return self._close_chunk(rewards, terminated, truncated, valid, lost, episode)

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on; steps after `load_state_dict` equal those after this, bit for bit.

        A video that is being recorded is not part of it.
        """
        self._check_begun()
        return {
            "rules": self._fingerprint(),
            "simulator": self.simulator.save(),
            "epoch": self._epoch,
            "chunks": self._done,
            "observation": {name: array.clone() for name, array in self._observation.items()},
            "tells_success": self._tells_success,
            "tasks": self._tasks,
            **{name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Start:
        """Go on from a saved state, which may come from another process.

        Returns:
            What to act on next, as `reset` does.

        Raises:
            ValueError: it belongs to other environments, or to other rules.
        """
        if state["rules"] != self._fingerprint():
            raise ValueError(
                f"saved environments differ from these: {state['rules']} was saved, and here it is "
                f"{self._fingerprint()}; resume with the same settings, or begin anew with reset()"
            )
        device = self.simulator.device
        self.simulator.restore(state["simulator"], torch.from_numpy(self._everyone))
        self._epoch, self._done = state["epoch"], state["chunks"]
        self._observation = {name: array.to(device, copy=True) for name, array in state["observation"].items()}
        self._tells_success, self._tasks = state["tells_success"], state.get("tasks")
        saved = {"intervened": torch.zeros(self.num_envs, dtype=torch.int64), **state}  # earlier versions have none
        for name in _COUNTERS:
            setattr(self, f"_{name}", saved[name].cpu().numpy().copy())
        self._timings = [[] for _ in range(self.num_envs)]
        return Start(self._observation, self._numbers(), self._instructions())

    def watch(self, envs: Sequence[int]) -> None:
        """Keep videos of these environments alone from now on, counted over all workers and slices.

        Raises:
            RuntimeError: it has no recorder.
        """
        if self._recorder is None:
            raise RuntimeError("these environments were made without a recorder: give them a Recording")
        self._recorder.watch(envs)

    def weigh(self, weights: Sequence[float]) -> None:
        """`Simulator.weigh`."""
        self.simulator.weigh(weights)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """`Simulator.load`."""
        self.simulator.load(weights)

    def offload(self) -> None:
        """Give device memory back; `onload` before the next step."""
        self.simulator.offload()

    def onload(self) -> None:
        """Be ready again after `offload`."""
        self.simulator.onload()

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()

    def seed_of(self, env: int, episode: int) -> int:
        """Seed of an episode's start; see `Rules.seed_of`.

        Args:
            env: environment, from 0 to N - 1.
            episode: its number in the epoch.
        """
        assert self._epoch is not None
        return self.rules.seed_of(self._epoch, self.first + env, episode)

    def _begin(self, envs: np.ndarray) -> Observation:
        """Begin the episodes whose numbers `_episode` says, in some environments; their first observations. Starts that
        are not finite are passed over.

        Raises:
            ValueError: no start was finite in so many attempts.
        """
        observation = self._started(envs)
        attempts = 1
        while (wrong := not_finite(observation)) is not None:
            rows = np.flatnonzero(wrong.cpu().numpy())
            remark = self._invalid.note(rows_of(observation, torch.from_numpy(rows)), envs[rows])
            if attempts == MOST_STARTS:
                raise ValueError(f"{type(self.simulator).__name__}.reset(), {attempts} times in a row: {remark}")
            rows = np.arange(len(envs)) if self.simulator.resets_together else rows
            self._count_episodes(envs[rows])
            observation = with_rows(observation, torch.from_numpy(rows), self._started(envs[rows]))
            attempts += 1
        if (tasks := self.simulator.tasks()) is not None:
            self._tasks = list(tasks)
        if self._recorder is not None:
            names = [(self.first + env, self._epoch or 0, int(self._episode[env])) for env in envs.tolist()]
            self._recorder.begin(self.simulator, envs.tolist(), names)
        return observation

    def _started(self, envs: np.ndarray) -> Observation:
        seeds = [self.seed_of(env, int(self._episode[env])) for env in envs.tolist()]
        return self.simulator.reset(torch.tensor(seeds, dtype=torch.int64), torch.from_numpy(envs))

    def _count_episodes(self, envs: np.ndarray) -> None:
        """Environments begin the episodes that follow."""
        self._episode = self._episode.copy()
        self._episode[envs] += 1

    def _place(self, env: int) -> str:
        """Which episode an environment is in, and the step that it does, for people."""
        number = int(self._episode[env])
        which = f"epoch {self._epoch}, episode {number}, step {int(self._steps[env]) + 1}"
        return f"environment {self.first + env}, seed {self.seed_of(env, number)} ({which})"

    def _drop(self, spoiled: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
        """Begin other episodes where one was spoiled, or one of its group's was; nothing of the chunk remains of them.

        Args:
            spoiled: bool [N].
            arrays: of the chunk, [N, C]; emptied where episodes are dropped.

        Returns:
            Where an episode was dropped, bool [N].
        """
        if not spoiled.any():
            return spoiled
        group = self.rules.group_size
        lost: np.ndarray = spoiled.reshape(-1, group).any(1).repeat(group) & self._running
        for array in arrays:
            array[lost] = 0
        highest = self._episode.reshape(-1, group).max(1).repeat(group)
        self._episode = np.where(lost, highest, self._episode)
        if self.simulator.resets_together:
            self._running = self._running & ~lost
        if self.rules.auto_reset or not self.simulator.resets_together:
            self._next(np.flatnonzero(lost))
        return lost

    def _account(self, moved: Transition, active: np.ndarray, everyone: bool) -> _Done:
        """Enter one step of the active environments, which may be known to be all."""
        reward, terminated, truncated = (_on_host(each) for each in (moved.reward, moved.terminated, moved.truncated))
        if everyone:
            self._observation = dict(moved.observation)
        else:
            self._observation = rows_where(self._on_device(active), moved.observation, self._observation)
            reward = np.where(active, reward, np.float32(0.0))
        self._steps += active
        self._total += reward
        if moved.success is not None:
            self._tells_success = True
            self._solved = np.where(active, solved := _on_host(moved.success), self._solved)
            self._once |= active & solved
        over = truncated if self.max_steps is None else truncated | (self._steps >= self.max_steps)
        over = over if self.rules.ignore_terminations else over | terminated
        over = over if everyone else over & active
        if self._recorder is not None:
            self._recorder.add(self.simulator, torch.from_numpy(active))
        return _Done(
            reward, active, over if over.any() else None, None if self.rules.ignore_terminations else terminated
        )

    def _close_chunk(
        self,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
        lost: np.ndarray,
        episode: Tensor,
    ) -> Chunk:
        """Finish a chunk after its last action: end episodes and begin others."""
        over = (terminated | truncated).any(1)
        ended = np.flatnonzero(over)
        numbers = torch.from_numpy(ended)
        final, words = rows_of(self._observation, numbers), self._instructions()
        episodes: tuple[Episode, ...] = ()
        if len(ended):
            episodes = self._finished(ended, np.asarray(truncated.any(1)))
            self._running = self._running & ~over
            if self.rules.auto_reset and self._done != self.rules.chunks:
                self._next(ended)
        return Chunk(
            rewards=torch.from_numpy(rewards),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            valid=torch.from_numpy(valid),
            observation=self._observation,
            ended=numbers,
            final=final,
            episode=episode,
            next_episode=self._numbers(),
            running=torch.from_numpy(self._running),
            lost=torch.from_numpy(lost),
            episodes=episodes,
            instructions=self._instructions(),
            final_instructions=None if words is None else tuple(words[env] for env in ended.tolist()),
            remarks=self._invalid.remarks(),
        )

    def _finished(self, ended: np.ndarray, truncated: np.ndarray) -> tuple[Episode, ...]:
        """The accounts of episodes that are over; their videos are written."""
        columns = [
            array.tolist()
            for array in (
                self._steps,
                self._total,
                self._once,
                self._solved,
                truncated,
                self._episode,
                self._intervened,
            )
        ]
        episodes = []
        for env in ended.tolist():
            length, total, once, solved, cut, number, intervened = (column[env] for column in columns)
            episodes.append(
                Episode(
                    env=self.first + env,
                    epoch=self._epoch or 0,
                    number=number,
                    seed=self.seed_of(env, number),
                    length=length,
                    total=total,
                    success_once=once if self._tells_success else None,
                    success_at_end=solved if self._tells_success else None,
                    truncated=cut,
                    task=None if self._tasks is None else self._tasks[env],
                    intervened=intervened,
                    times=times_of(self._timings[env]),
                )
            )
            if self._recorder is not None:
                self._recorder.end(env, episodes[-1].success_once)
        return tuple(episodes)

    def _next(self, ended: np.ndarray) -> None:
        """Begin the next episode where one is over, or everywhere once all are, if the simulator resets together."""
        if self.simulator.resets_together:
            if self._running.any():
                return
            ended = self._everyone
        self._count_episodes(ended)
        for counter in (self._steps, self._total, self._once, self._solved, self._intervened):
            counter[ended] = 0
        for env in ended.tolist():
            self._timings[env] = []
        self._running = self._running.copy()
        self._running[ended] = True
        if self.pause is not None:
            self.pause(True)
        try:
            start = self._begin(ended)
        finally:
            if self.pause is not None:
                self.pause(False)
        self._observation = with_rows(self._observation, torch.from_numpy(ended), start)

    def _instructions(self) -> tuple[str, ...] | None:
        texts = self.simulator.instructions()
        return None if texts is None else tuple(texts)

    def _fingerprint(self) -> dict[str, Any]:
        """Facts that must be equal for a saved state to mean the same here."""
        rules, simulator = self.rules, self.simulator
        stack = {} if rules.frame_stack == 1 else {"frame_stack": rules.frame_stack}
        return {
            "simulator": type(simulator.simulator if isinstance(simulator, FrameStack) else simulator).__name__,
            **stack,
            "num_envs": self.num_envs,
            "first": self.first,
            "max_steps": self.max_steps,
            **{name: getattr(rules, name) for name in ("seed", "group_size", "auto_reset", "ignore_terminations")},
        }

    def _check(self, actions: Tensor) -> None:
        self._check_begun()
        size = self.simulator.action_spec.size
        if actions.ndim != 3 or actions.shape[0] != self.num_envs or actions.shape[2] != size:
            raise ValueError(
                f"actions must be [environments, chunk, numbers] = [{self.num_envs}, C, {size}], "
                f"not {list(actions.shape)}"
            )

    def _check_begun(self) -> None:
        if self._epoch is None:
            raise RuntimeError("the environment has no episodes yet: call reset() first")


_COUNTERS = ("episode", "steps", "total", "once", "solved", "running", "intervened")
"""Arrays that count per environment, [N], by the name of their attribute."""


def _on_host(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.cpu().numpy()
    return array
