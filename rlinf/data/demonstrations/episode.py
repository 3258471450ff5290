"""Recorded episodes to learn from: in memory, as batches of decisions, in any format, and in rlinf's own files.

Every format of demonstrations is read as `Episodes`: from a directory or file, facts (`About`) about every episode
without its tensors, and any episode whole. A `Window` holds whole episodes, of which any decisions are cut out as a
batch, with chunks of actions as long as the policy's. Nobody waits here.

The format of `rlinf.flows.record` is a directory with two files for each episode. `episode_000000.safetensors` holds
its tensors (`observation.NAME`, `actions`, `rewards`, `valid`), and `episode_000000.json` how it ended and what was to
be done. The second is written last, so an episode without it is incomplete and is not read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.config.reading import parse_json


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """One episode of T chunks of C actions."""

    observation: dict[str, Tensor]
    """Before each chunk, and after the last: T + 1 rows in each array."""
    actions: Tensor
    """Float32 [T, C, A]: in [-1, 1] where a policy did them, otherwise as the data set has them."""
    rewards: Tensor
    """Reward of each action, float32 [T, C]."""
    valid: Tensor
    """Which actions were done, bool [T, C]; at least one in each chunk."""
    terminated: bool
    """The task ended with it; otherwise it was cut off."""
    success: bool | None
    """The task was solved at some time; None if nobody says."""
    instruction: str | tuple[str, ...] | None
    """The task, in words; one text for each chunk where that changes within the episode, T texts."""
    intervened: Tensor | None = None
    """Actions of somebody who took over from whoever was acting, bool [T, C]; None if nobody says."""

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
        """The task of each chunk in words, T texts; None if nobody says."""
        one = self.instruction
        return (one,) * len(self.actions) if isinstance(one, str) else one


def instruction_from(value: Any) -> str | tuple[str, ...] | None:
    """The instruction of an episode from what JSON keeps: a text, a list of one for each row, or null.

    Raises:
        ValueError: it is none of these.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError(f"instruction={value!r:.60} is neither a text nor a list of texts")


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
    """Reward of each action, float32 [D, C]; 0 where not valid."""
    valid: Tensor
    """Which actions were done, bool [D, C]: the first ones of each chunk; neighbours where some are before it."""
    terminated: Tensor
    """The task ended in it, bool [D]."""
    instructions: tuple[str, ...] | None
    """The task of each decision in words, D texts."""

    def __len__(self) -> int:
        return len(self.actions)

    def rows(self, indices: Tensor) -> Decisions:
        """Some of the decisions, `indices` int64 [d]."""
        words = self.instructions
        return Decisions(
            {name: array[indices] for name, array in self.observation.items()},
            {name: array[indices] for name, array in self.following.items()},
            self.actions[indices],
            self.rewards[indices],
            self.valid[indices],
            self.terminated[indices],
            None if words is None else tuple(words[row] for row in indices.tolist()),
        )


class Window:
    """Episodes in memory as one, cut into decisions: one from every recorded row on.

    Episodes recorded action by action give a chunk from every step on, in which actions beyond the episode's end are
    not valid; those recorded in chunks fit a policy with chunks of that length alone, since nobody saw between them.

    Args:
        demonstrations: at least one, all with the same arrays.
        chunk: actions in a decision, C.
        before: so many of them are before what is seen; those before an episode's beginning are not valid.

    Raises:
        ValueError: there is none, they were recorded in chunks of another length, or their arrays differ.
    """

    def __init__(self, demonstrations: Sequence[Demonstration], chunk: int, before: int = 0):
        if not demonstrations:
            raise ValueError("demonstrations: there is not one, so nothing can be learned from them")
        self.chunk = chunk
        first = demonstrations[0]
        for number, demo in enumerate(demonstrations):
            _check(demo, first, number, chunk)
        self._reach = 1 if first.actions.shape[1] == chunk else chunk  # recorded rows that a decision covers
        self._before = before if self._reach > 1 else 0
        counts = torch.tensor([len(demo.actions) for demo in demonstrations])
        self._last = counts.cumsum(0).repeat_interleave(counts)  # row after the last one of each row's episode
        self._first = self._last - counts.repeat_interleave(counts)
        self._episode = torch.arange(len(counts)).repeat_interleave(counts)
        self._observation = {
            name: torch.cat([demo.observation[name] for demo in demonstrations]) for name in first.observation
        }
        self._actions = torch.cat([demo.actions for demo in demonstrations])
        self._rewards = torch.cat([demo.rewards for demo in demonstrations])
        self._valid = torch.cat([demo.valid for demo in demonstrations])
        self._terminated = torch.tensor([demo.terminated for demo in demonstrations])
        words = [demo.instructions for demo in demonstrations]
        self._words = None if any(each is None for each in words) else [text for each in words for text in each or ()]

    def __len__(self) -> int:
        """Decisions, D."""
        return len(self._last)

    def between(self, first: int, end: int) -> Decisions:
        """Neighbouring decisions, as far as there are some."""
        return self.rows(torch.arange(first, min(end, len(self))))

    def rows(self, indices: Tensor) -> Decisions:
        """Some of the decisions, `indices` int64 [d]."""
        episode, first, last = self._episode[indices], self._first[indices], self._last[indices]
        behind = torch.minimum(indices + self._reach - self._before, last)
        places = indices[:, None] + torch.arange(self._reach) - self._before
        there = (places >= first[:, None]) & (places < last[:, None])
        places = torch.maximum(torch.minimum(places, last[:, None] - 1), first[:, None])
        valid = (self._valid[places] & there[..., None]).reshape(len(indices), self.chunk)
        words = self._words
        return Decisions(
            {name: rows[indices + episode] for name, rows in self._observation.items()},  # one more row per episode
            {name: rows[behind + episode] for name, rows in self._observation.items()},
            torch.where(valid[..., None], self._actions[places].reshape(len(indices), self.chunk, -1), 0.0),
            torch.where(valid, self._rewards[places].reshape(len(indices), self.chunk), 0.0),
            valid,
            self._terminated[episode] & (behind == last),
            None if words is None else tuple(words[row] for row in indices.tolist()),
        )


def decisions(demonstrations: Sequence[Demonstration], chunk: int) -> Decisions:
    """All decisions of all episodes; arguments and errors are those of `Window`."""
    window = Window(demonstrations, chunk)
    return window.rows(torch.arange(len(window)))


def joined(parts: Sequence[Decisions]) -> Decisions:
    """Decisions of several windows, one below the other; instructions only if all of them have some."""
    if len(parts) == 1:
        return parts[0]
    texts = None
    if all(part.instructions is not None for part in parts):
        texts = tuple(text for part in parts for text in part.instructions or ())
    return Decisions(
        {name: torch.cat([part.observation[name] for part in parts]) for name in parts[0].observation},
        {name: torch.cat([part.following[name] for part in parts]) for name in parts[0].following},
        torch.cat([part.actions for part in parts]),
        torch.cat([part.rewards for part in parts]),
        torch.cat([part.valid for part in parts]),
        torch.cat([part.terminated for part in parts]),
        texts,
    )


def mistake_between(demo: Demonstration, first: Demonstration) -> str | None:
    """How an episode differs from another in what its rows are like; None if it does not."""
    mine = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in demo.observation.items()}
    theirs = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in first.observation.items()}
    if mine != theirs:
        return f"it shows {_in_words(mine)}, and the first one {_in_words(theirs)}"
    if demo.actions.shape[1:] != first.actions.shape[1:]:
        mine_size, first_size = (list(each.actions.shape[1:]) for each in (demo, first))
        return f"its actions are {mine_size}, and those of the first one {first_size}"
    return None


def _in_words(arrays: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(
        f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in arrays.items()
    )


def _check(demo: Demonstration, first: Demonstration, number: int, chunk: int) -> None:
    recorded = demo.actions.shape[1]
    if recorded not in (1, chunk):
        raise ValueError(
            f"demonstrations were recorded in chunks of {recorded} actions, and the policy decides {chunk} at a time: "
            f"record them action by action, or set the policy's chunk to {recorded}"
        )
    if (mistake := mistake_between(demo, first)) is not None:
        raise ValueError(f"demonstrations: episode {number} does not go with the others: {mistake}")


STATE, RGB, ACTIONS, REWARDS = "state", "rgb", "actions", "rewards"
"""Our names for what formats call differently; every other name is an array of the observation as it stands."""
IGNORED = ""
"""Name of a feature that is left out."""
NOTHING = "nothing"
"""Stands in the place of an observation of which only pictures are known, where they are left out."""


@dataclass(frozen=True, slots=True)
class About:
    """Facts about an episode that are known before it is read."""

    rows: int
    """Recorded rows, T: actions, or chunks of actions."""
    success: bool | None
    """The task was solved at some time; None if nobody says."""
    instruction: str | tuple[str, ...] | None
    """The task, in words."""


class Episodes(ABC):
    """The episodes of a data set.

    Args:
        path: of the data set.
        names: our name for each of its features (`state`, `rgb`, `actions`, `rewards`, or any other array of the
            observation); features of one name are joined along their last axis, in this order, as cameras are. None
            takes the format's own choice.
    """

    format: ClassVar[str]
    """Name of the format, as `--format` takes it."""
    abouts: Sequence[About]
    """Facts about every episode, in the order of the data set."""

    def __init__(self, path: Path, names: Mapping[str, str] | None = None):
        self.path, self.names = path, names

    def __len__(self) -> int:
        return len(self.abouts)

    @abstractmethod
    def read(self, index: int, *, pictures: bool = True) -> Demonstration:
        """An episode, by its place in `abouts`.

        Args:
            index: its place.
            pictures: with them; without, where numbers alone are wanted, it is quicker.

        Raises:
            ValueError: a file of it is broken; the text names the file and the field.
        """

    def chosen(self, solved: bool = True) -> list[int]:
        """Places of the episodes that are learned from.

        Args:
            solved: leave out those of which somebody says that they did not solve their task.

        Raises:
            ValueError: none is left.
        """
        places = [place for place, about in enumerate(self.abouts) if not (solved and about.success is False)]
        if not places:
            raise ValueError(
                f"{self.path}: none of its {len(self)} episodes solved its task, so there is nothing to imitate"
            )
        return places


@contextmanager
def broken(path: Path, field: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a ValueError that names the file and the field.

    Args:
        path: of the file that is read.
        field: what is read of it.
    """
    try:
        yield
    except MissingPackage:
        raise
    except Exception as error:  # of files that may hold anything
        problem = f"{path}: {field}"
        if isinstance(error, FileNotFoundError):
            raise ValueError(f"{problem}: the file is missing") from error
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(reason if reason.startswith(f"{path}: ") else f"{problem}: {reason}") from error


class MissingPackage(ImportError):
    """A format needs a package that is not installed; the text says which command brings it."""


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Imports inside bring a package of the extra `demonstrations`.

    Args:
        what: cannot be done without, for the error.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackage(f"{what} needs {error.name}: pip install 'rlinf[demonstrations]'") from error


def assembled(
    arrays: Mapping[str, Tensor],
    names: Mapping[str, str],
    rows: int,
    about: About,
    terminated: bool,
    *,
    pictures: bool = True,
) -> Demonstration:
    """An episode of single actions from features under the names of their data set.

    Args:
        arrays: T or T + 1 rows each; where the observation after the last action is not recorded, the last one that
            is stands in its place.
        names: our name for each.
        rows: T.
        about: of the episode.
        terminated: the task ended with it.
        pictures: they must be there; without, features that are missing are passed over.

    Raises:
        ValueError: a feature is missing, or there are no actions or observations among them.
    """
    grouped: dict[str, list[Tensor]] = {}
    for feature, name in names.items():
        if name != IGNORED:
            if feature not in arrays and not pictures:
                continue
            if feature not in arrays:
                raise ValueError(
                    f"there is no feature {feature!r}, of which {name!r} is made; there are {sorted(arrays)}"
                )
            grouped.setdefault(name, []).append(_with_axis(arrays[feature], feature, rows, name))
    actions = _one(grouped, ACTIONS)
    rewards = grouped.pop(REWARDS, [torch.zeros(rows, 1)])[0]
    observation = {name: _joined(name, parts) for name, parts in grouped.items()}
    if not observation and not pictures:
        observation = {NOTHING: torch.zeros(rows + 1, 0)}
    if not observation:
        raise ValueError(f"no feature is an observation: name one of {sorted(arrays)}")
    whole = {name: torch.cat([part, part[-1:]]) if len(part) == rows else part for name, part in observation.items()}
    return Demonstration(
        whole,
        actions[:rows, None].float(),
        rewards[:rows].float(),
        torch.ones(rows, 1, dtype=torch.bool),
        terminated,
        about.success,
        about.instruction,
    )


def _with_axis(array: Tensor, feature: str, rows: int, name: str) -> Tensor:
    """Rows of numbers: a feature of single numbers has one in each; observations as the policies take them."""
    if len(array) not in (rows, rows + 1):
        raise ValueError(f"feature {feature!r} has {len(array)} rows, and the episode {rows} actions")
    array = array[:, None] if array.ndim == 1 else array
    if name == STATE:
        return array.flatten(1).float()
    return array.float() if array.dtype == torch.float64 else array


def _one(grouped: dict[str, list[Tensor]], name: str) -> Tensor:
    if name not in grouped:
        raise ValueError(f"no feature is {name!r}: say which one by `names`")
    return _joined(name, grouped.pop(name))


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[:-1]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"the features of {name!r} cannot be joined: they are {[list(part.shape[1:]) for part in parts]}"
        )
    return torch.cat(list(parts), -1)


def alike(demonstrations: Iterable[Demonstration], form: str, *, mixed: bool = False) -> Iterator[Demonstration]:
    """Episodes of single actions, as foreign formats keep them.

    Args:
        demonstrations: one after the other.
        form: name of the format, for errors.
        mixed: their arrays may differ.

    Raises:
        ValueError: there is none, one was recorded in chunks, or they differ.
    """
    first: Demonstration | None = None
    for number, demo in enumerate(demonstrations):
        first = demo if first is None else first
        if demo.actions.shape[1] != 1:
            raise ValueError(
                f"{form} keeps single actions, and this episode was recorded in chunks of {demo.actions.shape[1]}, "
                "between which nothing was seen: record it action by action, or keep it in rlinf's format"
            )
        if not mixed and (mistake := mistake_between(demo, first)) is not None:
            raise ValueError(f"episode {number} does not go with the others: {mistake}")
        yield demo
    if first is None:
        raise ValueError("there is no episode to write")


def text_of(value: Any) -> str:
    """A text from what files keep as one: str, bytes, or an array of one of them."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


_NAME = "episode_{:06d}"
_PREFIX = "observation."
PATTERN = "episode_*.json"
"""Files that a directory of this format holds."""


class Records(Episodes):
    """Episodes that `write_demonstrations` wrote. `names` renames arrays of the observation."""

    format = "rlinf"

    def __init__(self, path: Path, names: Mapping[str, str] | None = None):
        super().__init__(path, names)
        self._files = sorted(path.glob(PATTERN))
        if not self._files:
            raise FileNotFoundError(
                f"{path} holds no {PATTERN}: record demonstrations there first, with `rlinf record`"
            )
        self._read = [_about(file) for file in self._files]
        self.abouts = [about for about, _ in self._read]

    def read(self, index: int, *, pictures: bool = True) -> Demonstration:
        file, (about, terminated) = self._files[index].with_suffix(".safetensors"), self._read[index]
        with broken(file, "tensors"):
            tensors = load_file(file)  # mapped into memory: what is left out is not read
        observations = {name.removeprefix(_PREFIX): rows for name, rows in tensors.items() if name.startswith(_PREFIX)}
        names = {name: name for name in observations} if self.names is None else self.names
        with broken(file, "observation"):
            observations = {ours: observations[theirs] for theirs, ours in names.items() if ours != IGNORED}
        if not pictures:
            observations = {name: rows for name, rows in observations.items() if rows.dtype != torch.uint8}
            observations = observations or {NOTHING: torch.zeros(about.rows + 1, 0)}
        with broken(file, "actions, rewards, valid"):
            parts = (tensors["actions"], tensors["rewards"], tensors["valid"])
            by = tensors.get("intervened")
            return Demonstration(observations, *parts, terminated, about.success, about.instruction, by)


def _about(file: Path) -> tuple[About, bool]:
    with broken(file, "the text"):
        about = parse_json(file.read_text(encoding="utf-8"))
    checked = {}
    for name, kinds in (
        ("chunks", int),
        ("terminated", bool),
        ("success", bool | None),
        ("instruction", str | list | None),
    ):
        with broken(file, name):
            if not isinstance(about, dict) or not isinstance(about[name], kinds):  # type: ignore[arg-type]
                raise ValueError(f"{about[name]!r:.60} is not of the kind {kinds}")
            checked[name] = about[name]
    with broken(file, "instruction"):
        words = instruction_from(checked["instruction"])
    return About(checked["chunks"], checked["success"], words), checked["terminated"]


def write_demonstrations(directory: Path, demonstrations: Iterable[Demonstration]) -> int:
    """Add episodes to a directory, which is made if it is not there.

    Args:
        directory: episodes that are there stay, and new ones are numbered after them.
        demonstrations: what is added.

    Returns:
        How many were added.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first = max((int(path.stem.rpartition("_")[2]) + 1 for path in directory.glob("episode_*")), default=0)
    number = first
    for demo in demonstrations:
        name = _NAME.format(number)
        tensors = {"actions": demo.actions, "rewards": demo.rewards, "valid": demo.valid}
        tensors |= {f"observation.{each}": rows for each, rows in demo.observation.items()}
        tensors |= {} if demo.intervened is None else {"intervened": demo.intervened}
        save_file({each: rows.contiguous() for each, rows in tensors.items()}, directory / f"{name}.safetensors")
        about = {
            "chunks": len(demo.actions),
            "return": float(demo.rewards[demo.valid].double().sum()),
            "terminated": demo.terminated,
            "success": demo.success,
            "instruction": demo.instruction,
        }
        unfinished = directory / f".{name}.json"
        unfinished.write_text(json.dumps(about) + "\n", encoding="utf-8")
        unfinished.replace(directory / f"{name}.json")  # so that it is there whole, or not at all
        number += 1
    return number - first
