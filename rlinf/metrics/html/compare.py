"""compare.html: several runs on one page, with their curves, speed and what their configurations have unlike.

In: run directories. Out: the page of a run, with more than one on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rlinf.metrics.html.document import static_page
from rlinf.metrics.html.state.episodes import VIDEOS
from rlinf.metrics.html.state.run_state import run_state


def write_comparison(directories: Sequence[Path], target: Path) -> Path:
    """Write the page of several runs.

    Args:
        directories: of the runs, at least two; each is read as the report reads it.
        target: the file.

    Returns:
        The same.

    Raises:
        FileNotFoundError: one is no run's directory.
    """
    names = _names(directories)
    states = [
        run_state(each) | {"name": name, "videos": f"{_from(target, each)}/{VIDEOS}"}
        for each, name in zip(directories, names, strict=True)
    ]
    target.write_text(static_page(" and ".join(names), states), encoding="utf-8")
    return target


def _from(page: Path, directory: Path) -> str:
    """A directory as a page names it in addresses."""
    return quote(Path(os.path.relpath(directory.resolve(), page.resolve().parent)).as_posix())


def _names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [each.resolve().parts for each in directories]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-count:]) for each in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{number}: {each.name}" for number, each in enumerate(directories, start=1)]
