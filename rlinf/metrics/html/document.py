"""The frame of a page: style, script, what it may do, and the curves of one run or several.

In: parts of a body, and numbers. Out: one file that needs nothing from outside. Everything that a model, a data set or
a configuration wrote is escaped, and the page's own policy forbids every script but its own: answers are hostile until
proven otherwise.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlinf.metrics.html.lanes_svg import STYLE

_CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
COLOURS = 6
"""Runs that are told apart by colour; page.js has as many."""

SECTIONS = (
    (
        "Learning",
        (
            "reward/mean",
            "evaluation/accuracy",
            "success_once",
            "evaluation/success_once",
            "episodes/length",
            "response_length/mean",
            "truncated",
            "groups/uniform",
            "loss",
            "reward/failed",
            "outcomes/timeout",
            "outcomes/error",
        ),
    ),
    ("Optimisation", ("entropy", "kl", "clip_frac", "grad_norm", "ratio/max", "lr")),
    ("Sampler against trainer", ("mismatch/mean", "mismatch/max", "staleness/mean", "staleness/max", "staleness/ess")),
    ("Experts", ("moe/load_max", "moe/dead_experts", "moe/aux_loss", "moe/route_drift")),
    (
        "Speed",
        (
            "tokens_per_s",
            "env_steps_per_s",
            "timing/step",
            "bound/efficiency",
            "timing/generation",
            "timing/simulation",
            "timing/training",
            "timing/sync",
            "timing/other",
        ),
    ),
)
"""Charts that are shown at once, by heading; those of all other metrics unfold."""


def document(title: str, body: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """A page.

    Args:
        title: of the page.
        body: as HTML, all of it escaped.
        runs: the numbers of each run, see `run_data.curves`, with its `name`.
    """
    # What is data for a script must not be able to end the element that it stands in.
    carried = json.dumps({"runs": runs}).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}{STYLE}</style></head>"
        f'<body><main>{body}</main><script type="application/json" id="numbers">{carried}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def curves_section(runs: Sequence[Mapping[str, Any]]) -> str:
    """Curves of all metrics, those of several runs in one chart; arguments as for `document`."""
    acted = '<option value="env">environment steps</option>' if all(run["env_steps"] for run in runs) else ""
    values: dict[str, list[float | None]] = {}
    for run in runs:
        for name, each in run["metrics"].items():
            values.setdefault(name, []).extend(each)
    there = sorted(name for name, each in values.items() if any(value is not None for value in each))
    shown: set[str] = set()
    parts = [
        "<h2>Curves</h2><p>Point at one to read its value; all of them follow.</p>"
        '<div class="controls"><label>smoothing <input id="smoothing" type="range" min="0" max="0.97" step="0.01" '
        'value="0.6"></label><label>over <select id="axis"><option value="step">steps</option>'
        f'{acted}<option value="time">time</option></select></label><noscript>Curves need JavaScript.</noscript></div>'
    ]
    for heading, names in SECTIONS:
        found = [name for name in names if any(values.get(name, ()))]  # a curve of nothing but 0 can wait
        shown.update(found)
        if found:
            parts.append(f'<h3>{heading}</h3><div class="charts">{_places(found)}</div>')
    if rest := [name for name in there if name not in shown]:
        parts.append(
            f'<details class="card"><summary>All other metrics ({len(rest)})</summary>'
            f'<div class="charts">{_places(rest)}</div></details>'
        )
    return f"<section>{''.join(parts)}</section>"


def _places(names: Iterable[str]) -> str:
    return "".join(
        f'<div class="card chart" data-metric="{escape(name)}"><div class="head"><span>{escape(name)}</span>'
        "<output></output></div></div>"
        for name in names
    )
