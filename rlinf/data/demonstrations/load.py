"""Opens demonstrations of whatever format, and writes them in any, whole or not at all.

In: a path, and what its features are to be called. Out: `Episodes`, of which nothing but the index is in memory.
A data set is written beside its place under another name, and moved there when it is complete.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rlinf.config.importing import shipped_file
from rlinf.data.demonstrations.episode import Demonstration, Episodes, write_demonstrations
from rlinf.data.demonstrations.lerobot import write_lerobot
from rlinf.data.demonstrations.maniskill_h5 import write_maniskill
from rlinf.data.demonstrations.rlds_npz import write_rlds
from rlinf.data.demonstrations.stream import Part, bounded
from rlinf.data.rng import permutation

WRITTEN = ("rlinf", "lerobot", "lerobot-v2.1", "maniskill", "rlds")
"""Formats that are written; `lerobot` is version 3.0."""


def save_demonstrations(
    directory: Path,
    demonstrations: Iterable[Demonstration],
    form: str = "rlinf",
    *,
    fps: float = 10.0,
    videos: bool = True,
    task: str = "unknown",
) -> int:
    """Write a data set that is complete as soon as it can be seen.

    Args:
        directory: that is not there, or empty.
        demonstrations: at least one; asked for one after the other.
        form: one of `WRITTEN`.
        fps, videos: see `write_lerobot`.
        task: see `write_maniskill`.

    Returns:
        How many episodes were written.

    Raises:
        FileExistsError: something is there.
        ValueError: an episode cannot be kept in this format; nothing is left.
    """
    if form not in WRITTEN:
        raise ValueError(f"{form!r} is no format that is written: there are {', '.join(WRITTEN)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} is there and not empty: name another directory, or remove it")
    writers: dict[str, Callable[[Path], int]] = {
        "rlinf": lambda path: write_demonstrations(path, demonstrations),
        "lerobot": lambda path: write_lerobot(path, demonstrations, fps=fps, videos=videos),
        "lerobot-v2.1": lambda path: write_lerobot(path, demonstrations, fps=fps, videos=videos, version=2),
        "maniskill": lambda path: write_maniskill(path, demonstrations, task=task),
        "rlds": lambda path: write_rlds(path, demonstrations),
    }
    unfinished = directory.absolute().with_name(f".{directory.absolute().name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was killed
    try:
        written = writers[form](unfinished)
        if not written:
            raise ValueError("there is no episode to write")
        if directory.exists():
            directory.rmdir()
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return written


def chosen_of(episodes: Episodes, places: Iterable[int]) -> Iterator[Demonstration]:
    """Episodes of a data set, one in memory at a time.

    Args:
        episodes: the data set.
        places: which; the next one is asked for when one is done.
    """
    for place in places:
        yield episodes.read(place)


logger = logging.getLogger(__name__)

FORMATS = {
    "rlinf": "rlinf.data.demonstrations.episode.Records",
    "lerobot": "rlinf.data.demonstrations.lerobot.LeRobot",
    "maniskill": "rlinf.data.demonstrations.maniskill_h5.ManiSkillH5",
    "robomimic": "rlinf.data.demonstrations.robomimic.Robomimic",
    "rlds": "rlinf.data.demonstrations.rlds_npz.RldsNpz",
}
"""The class that reads each format; imported when asked for, since their packages are large."""


def format_of(path: Path) -> str:
    """The format of what lies at a path, by its files.

    Raises:
        FileNotFoundError: nothing is there, or nothing that is known.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or directory")
    if path.is_dir() and (path / "meta" / "info.json").is_file():
        return "lerobot"
    if path.is_dir() and any(path.glob("episode_*.json")):
        return "rlinf"
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix == ".npz":
            return "rlds"
        if file.suffix in (".h5", ".hdf5"):
            return "maniskill" if file.with_suffix(".json").is_file() else "robomimic"
    raise FileNotFoundError(
        f"{path} holds no demonstrations: neither episode_*.json (`rlinf record` writes them) nor meta/info.json "
        "(LeRobot), *.h5 or *.hdf5 (robomimic, LIBERO; ManiSkill, with a JSON file beside it) or *.npz (RLDS-like)"
    )


def open_episodes(path: Path, form: str | None = None, names: Mapping[str, str] | None = None) -> Episodes:
    """The episodes at a path.

    Args:
        path: directory or file; one below `configs/` comes with rlinf, where there is none here.
        form: one of `FORMATS`; None goes by the files that are there.
        names: our name for each feature, see `Episodes`.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file is broken, or there is no such format; the text names the file and the field.
    """
    path = Path(shipped_file(str(path))).expanduser()
    form = format_of(path) if form is None else form
    if form not in FORMATS:
        raise ValueError(f"{form!r} is no format of demonstrations: there are {', '.join(FORMATS)}")
    module, _, name = FORMATS[form].rpartition(".")
    kind: type[Episodes] = getattr(import_module(module), name)
    return kind(path, names)


def read_demonstrations(directory: Path, *, solved: bool = True) -> list[Demonstration]:
    """Read all episodes of a data set, in its order.

    Args:
        directory: in any of the formats.
        solved: leave out those of which somebody says that they did not solve their task.

    Raises:
        FileNotFoundError: there is none.
        ValueError: none of them solved its task, or a file is broken.
    """
    episodes = open_episodes(directory)
    return [episodes.read(place) for place in episodes.chosen(solved)]


def first_demonstration(directory: Path, *, solved: bool = True) -> Demonstration:
    """The first episode that `read_demonstrations` would give; raises what that does, if there is none."""
    episodes = open_episodes(directory)
    return episodes.read(episodes.chosen(solved)[0])


SET_KEYS = ("path", "weight", "format", "names", "bounds")
"""Keys that each of several data sets may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """The demonstrations that a policy is to learn from: data sets, which of their episodes, and memory for them."""

    sets: Mapping[str, Mapping[str, Any]]
    """By name: `path`, and `weight`, `format`, `names`, `bounds` where they differ from the defaults."""
    solved: bool = True
    """Leave out episodes of which somebody says that they did not solve their task."""
    broken: Literal["refuse", "drop"] = "refuse"
    """Episodes that cannot be read, or have numbers that are not finite, end the run or are left out with a line."""
    held_out: float = 0.0
    """Share of the episodes of each data set that is not learned from, but watched."""
    frames: int = 1
    """So many last observations are seen at once, of data sets that show one at a time."""
    memory: int = 4 << 30
    """Bytes of episodes that are held at a time."""

    @classmethod
    def at(cls, path: str | Path) -> DemonstrationSet:
        """One data set, all of it."""
        return cls(sets={"data": {"path": str(path)}})


def _whole(episodes: Episodes, places: Sequence[int]) -> list[int]:
    """Those of some episodes whose numbers can be read and are finite; the others are told of.

    Raises:
        ValueError: none is left.
    """
    reasons = {place: reason for place in places if (reason := _defect(episodes, place)) is not None}
    if len(reasons) == len(places):
        raise ValueError(f"{episodes.path}: not one of {len(places)} episodes is whole: {next(iter(reasons.values()))}")
    if reasons:
        logger.warning(
            "%s: %d of %d episodes are left out (imitation.broken: drop), the first since %s",
            episodes.path,
            len(reasons),
            len(places),
            next(iter(reasons.values())),
        )
    return [place for place in places if place not in reasons]


def _defect(episodes: Episodes, place: int) -> str | None:
    """Why an episode cannot be learned from; its pictures are not looked at."""
    try:
        demo = episodes.read(place, pictures=False)
    except ValueError as error:
        return str(error)
    arrays = {"actions": demo.actions, "rewards": demo.rewards, **demo.observation}
    wrong = [name for name, rows in arrays.items() if rows.is_floating_point() and not bool(rows.isfinite().all())]
    return f"{wrong[0]} of episode {place} has a value that is not finite" if wrong else None


def open_parts(sets: DemonstrationSet, seed: int = 0) -> tuple[list[Part], list[Part]]:
    """The data sets, each cut into what is learned from and what is held out.

    Args:
        sets: which.
        seed: of which episodes are held out.

    Raises:
        FileNotFoundError: a data set is not there.
        ValueError: one is broken, has too few episodes to hold any out, or a setting of it cannot be used.
    """
    learned, watched = [], []
    for number, (name, about) in enumerate(sets.sets.items()):
        if unknown := sorted({*about} - {*SET_KEYS}):
            raise ValueError(f"{name} has no {unknown[0]!r}; of a data set there are {', '.join(SET_KEYS)}")
        weight = float(about.get("weight", 1.0))
        if not 0 < weight < float("inf"):
            raise ValueError(f"{name}: weight={weight} must be above 0")
        episodes = open_episodes(Path(about["path"]), about.get("format"), about.get("names") or None)
        places = episodes.chosen(sets.solved)
        if sets.broken == "drop":
            places = _whole(episodes, places)
        order = [places[each] for each in permutation(len(places), seed, number).tolist()]
        count = round(sets.held_out * len(places))
        if sets.held_out and not 0 < count < len(places):
            raise ValueError(f"{episodes.path}: {sets.held_out:g} of its {len(places)} episodes cannot be held out")
        part = bounded(Part(episodes, tuple(sorted(order[count:])), weight, frames=sets.frames), about.get("bounds"))
        learned.append(part)
        if count:
            watched.append(replace(part, places=tuple(sorted(order[:count]))))
    return learned, watched
