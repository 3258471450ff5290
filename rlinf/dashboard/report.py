"""Writes `report.html` and `compare.html`: pages of one or several whole runs that need no other file but videos.

In: only the files of run directories, so a page can be made while a run goes, after a crash, or years later. A
comparison has the runs' curves, speed and what their configurations have unlike.

A page is one file: style, scripts, what it may do, and the state of runs (`run_state`) where it carries them. What a
model, a data set or a configuration wrote reaches it as JSON alone; the scripts put it there as text, the page's own
policy forbids every script but these, and even these may make no element out of text: answers are hostile until proven
otherwise.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlinf.dashboard.state import VIDEOS, read_run, run_state, side_by_side
from rlinf.storage.directory import flat
from rlinf.storage.files import replace_text

_PAGE = Path(__file__).with_name("page")
STYLES = ("page", "sections")
SCRIPTS = ("dom", "runs", "curves", "told", "lanes", "now", "answers", "live", "page")
"""In this order: each uses what stands before it."""


def static_page(title: str, states: Sequence[Mapping[str, Any]]) -> str:
    """A page that carries the states of one run or several, for a browser without a server.

    Args:
        title: of the page.
        states: of each run, see `run_state`.
    """
    return _page(title, {"live": False, "runs": states})[0]


def live_page() -> tuple[str, str]:
    """The page that asks its server for everything, and what it may do, as the value of Content-Security-Policy."""
    html, policy = _page("rlinf", {"live": True})
    return html, f"{policy}; frame-ancestors 'none'"


def _page(title: str, carried: Mapping[str, Any]) -> tuple[str, str]:
    style = "\n".join((_PAGE / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    parts = (f"// {name}.js\n{(_PAGE / f'{name}.js').read_text(encoding='utf-8')}" for name in SCRIPTS)
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "connect-src 'self'" if carried["live"] else "connect-src 'none'",
            "img-src 'self' file: data:",
            "media-src 'self' file:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        )
    )
    # What is data for a script must not be able to end the element that it stands in.
    data = json.dumps(carried, separators=(",", ":"), default=str)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f'<body><header></header><div class="frame"><nav aria-label="sections"></nav><main>'
        "<noscript>This page needs JavaScript.</noscript></main></div>"
        f'<script type="application/json" id="state">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    ), policy


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


_WIDEST = 40
"""Characters of a value: two of them and a key stay on one line of most terminals."""
_OWN = ("name", "output_dir")
"""Keys that every run has for itself."""


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


def in_lines(directories: Sequence[Path]) -> Iterator[str]:
    """Compare runs in lines for a terminal: a table of their results, and of the keys that are not the same.

    Args:
        directories: of the runs, at least two.
    """
    runs = [read_run(each) for each in directories]
    facts = [dict(side_by_side(run)) for run in runs]
    keys = [dict(flat(run.config)) for run in runs]
    unlike = [key for key in dict.fromkeys(chain(*keys)) if key not in _OWN]
    rows = [
        ("", _names(directories)),
        *((what, [each.get(what, "-") for each in facts]) for what in dict.fromkeys(chain(*facts))),
        *((key, values) for key in unlike if len(set(values := [_cell(each.get(key, "-")) for each in keys])) > 1),
    ]
    widths = [max(len(values[place]) for _, values in rows) for place in range(len(runs))]
    first = max(len(what) for what, _ in rows)
    for what, values in rows:
        cells = (f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        yield f"{what:<{first}}  {'  '.join(cells)}"


def _cell(value: object) -> str:
    """A value of a configuration in one line, as a terminal can show it."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _from(page: Path, directory: Path) -> str:
    """A directory as a page names it in addresses."""
    return quote(Path(os.path.relpath(directory.resolve(), page.resolve().parent)).as_posix())


def _names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [each.resolve().parts for each in directories]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {each.name}" for number, each in enumerate(directories, start=1)]


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
