"""Writes `report.html`, a page that shows a whole run and needs no other file.

In: only the files of a run directory, so a page can be made while a run goes, after a crash, or years later.
"""

from __future__ import annotations

from pathlib import Path

from rlinf.metrics.html.lanes import actor_lanes
from rlinf.metrics.html.page import page
from rlinf.metrics.html.run_data import read_run
from rlinf.metrics.html.trace import Trace


def write_report(directory: Path) -> Path:
    """Make, or make again, the report.html of a run. It blocks, for seconds if the trace is long.

    Args:
        directory: of the run. It needs metrics.jsonl; samples.jsonl, trace.json, resolved.yaml and environment.json are
            shown if they are there.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: this is no run's directory.
        ValueError: its trace.json is none.
    """
    run, traced = read_run(directory), directory / "trace.json"
    trace = Trace(traced) if traced.is_file() else None
    text = page(run, actor_lanes(trace, trace.first_middle_last()) if trace is not None else [])
    path = directory / "report.html"
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)  # a browser that reloads it never meets half of it
    return path
