"""Writes demonstrations in any format, whole or not at all.

In: a data set of any format. Out: a directory. It is written beside its place under another name, and moved there when
it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rlinf.data.demonstrations.episode import Demonstration
from rlinf.data.demonstrations.lerobot.writing import write_lerobot
from rlinf.data.demonstrations.maniskill_h5 import write_maniskill
from rlinf.data.demonstrations.records import write_demonstrations
from rlinf.data.demonstrations.rlds_npz import write_rlds
from rlinf.data.demonstrations.source import Episodes

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
