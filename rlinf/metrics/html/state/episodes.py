"""Episodes of a policy for a page: how often it solved its tasks, and the videos that were kept.

In: rows of metrics.jsonl, and the directory of videos. Out: rows of two tables, as JSON knows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.metrics.console.success import SuccessRow, success_rows
from rlinf.metrics.reading.metric_rows import MetricRows

VIDEOS = "videos"
"""Directory of a run's videos."""
_EVALUATION = "evaluation/"
_STEP = re.compile(r"step_(\d+)")
_PLAYED = (".mp4", ".webm", ".webp", ".gif")
"""Browsers play these; the last two are pictures to them."""
MOST_EPISODES = 200
"""The newest that a page offers."""


def success(metrics: MetricRows) -> list[dict[str, Any]]:
    """How often the tasks of each suite were solved in the first and the last trials; empty where nothing tells it.

    Args:
        metrics: of all steps, 0 included.
    """
    counts = [name for name in metrics.names if name.startswith(_EVALUATION) and name.endswith("/episodes")]
    tried = np.flatnonzero(np.any([~np.isnan(metrics.column(name)) for name in counts], axis=0)) if counts else ()
    told = [found for place in tried if (found := _told(metrics[int(place)]))]
    if not told:
        return []
    first, last = told[0], told[-1]
    return [
        {
            "suite": row.suite, "task": row.task, "name": row.name, "episodes": row.episodes,
            "before": first[place].success if place in first else None, "success": row.success, "low": row.low,
            "high": row.high, "return": row.total,
        }
        for place, row in last.items()
    ]  # fmt: skip


def episodes(directory: Path) -> list[dict[str, Any]]:
    """The videos of a run, the newest step first and of a step failures first.

    Args:
        directory: of the run.
    """
    found = sorted(_videos(directory / VIDEOS), key=lambda row: (-row["step"], row["success"] is True, row["video"]))
    return found[:MOST_EPISODES]


def _videos(directory: Path) -> Iterator[dict[str, Any]]:
    for path in directory.rglob("*"):
        kept = path.relative_to(directory)
        numbered = _STEP.fullmatch(kept.parts[0])
        if path.suffix not in _PLAYED or numbered is None or path.name.startswith("."):
            continue
        ends = {"-success": True, "-failure": False}
        yield {
            "step": int(numbered[1]), "video": kept.as_posix(), "task": "/".join(kept.parts[1:-1]),
            "success": next((value for end, value in ends.items() if path.stem.endswith(end)), None),
        }  # fmt: skip


def _told(metrics: Mapping[str, Any]) -> dict[tuple[str, str], SuccessRow]:
    numbers = {
        name.removeprefix(_EVALUATION): value
        for name, value in metrics.items()
        if name.startswith(_EVALUATION) and isinstance(value, int | float)
    }
    return {(row.suite, row.task): row for row in success_rows(numbers) if row.success is not None}
