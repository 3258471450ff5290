"""Writes `report.html`, a page that shows a whole run and needs no other file but videos.

In: only the files of a run directory, so a page can be made while a run goes, after a crash, or years later.
"""

from __future__ import annotations

from pathlib import Path

from rlinf.metrics.files import replace_text
from rlinf.metrics.html.document import static_page
from rlinf.metrics.html.state.run_state import run_state


def write_report(directory: Path) -> Path:
    """Make, or make again, the report.html of a run. It blocks, for seconds if the trace is long.

    Args:
        directory: of the run. It needs metrics.jsonl; samples.jsonl, trace.json, resolved.yaml and whatever else there
            is of it is shown.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: this is no run's directory.
        ValueError: its trace.json is none.
    """
    state = run_state(directory)
    path = directory / "report.html"
    replace_text(path, static_page(f"{state['name']}: training report", [state]))
    return path
