"""What every format of demonstrations is read as: episodes that are told of at once and read one at a time.

In: a directory or file. Out: an `About` of every episode, without its tensors, and any episode whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.data.demonstrations.episode import Demonstration

STATE, RGB, ACTIONS, REWARDS = "state", "rgb", "actions", "rewards"
"""Our names for what formats call differently; every other name is an array of the observation as it stands."""
IGNORED = ""
"""Name of a feature that is left out."""
NOTHING = "nothing"
"""Stands in the place of an observation of which only pictures are known, where they are left out."""


@dataclass(frozen=True, slots=True)
class About:
    """What is known of an episode before it is read."""

    rows: int
    """Recorded rows, T: actions, or chunks of actions."""
    success: bool | None
    """The task was solved at some time; None if nobody says."""
    instruction: str | tuple[str, ...] | None
    """What was to be done, in words."""


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
    """Of every episode, in the order of the data set."""

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
        found = [place for place, about in enumerate(self.abouts) if not (solved and about.success is False)]
        if not found:
            raise ValueError(
                f"{self.path}: none of its {len(self)} episodes solved its task, so there is nothing to imitate"
            )
        return found


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
        told = f"{path}: {field}"
        if isinstance(error, FileNotFoundError):
            raise ValueError(f"{told}: the file is missing") from error
        said = f"there is no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(said if said.startswith(f"{path}: ") else f"{told}: {said}") from error


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


def plain(shown: Demonstration, form: str) -> Demonstration:
    """An episode of single actions, as foreign formats keep them.

    Raises:
        ValueError: it was recorded in chunks.
    """
    if shown.actions.shape[1] != 1:
        raise ValueError(
            f"{form} keeps single actions, and this episode was recorded in chunks of {shown.actions.shape[1]}, "
            "between which nothing was seen: record it action by action, or keep it in rlinf's format"
        )
    return shown


def text_of(value: Any) -> str:
    """A text from what files keep as one: str, bytes, or an array of one of them."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
