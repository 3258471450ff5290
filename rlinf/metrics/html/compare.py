"""compare.html: several runs on one page, with their curves, speed and what their configurations have unlike.

In: run directories. Out: a page in the frame of `document`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlinf.metrics.html.document import COLOURS, curves_section, document
from rlinf.metrics.html.page import EDGE
from rlinf.metrics.html.run_data import RunData, curves, read_run
from rlinf.metrics.run_directory import flat
from rlinf.metrics.verdict import typical

_UNLIKE_ANYWAY = ("name", "output_dir")
_NOTHING = "–"


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
    target.write_text(comparison([read_run(each) for each in directories], _names(directories)), encoding="utf-8")
    return target


def comparison(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """The page.

    Args:
        runs: at least two.
        names: by which they are told apart.
    """
    numbers = [
        {"name": name, **curves([*run.before, *run.rows])} for run, name in zip(runs, names, strict=True) if run.rows
    ]
    body = "".join(
        (
            f"<header><h1>{escape(' and '.join(names))}</h1></header>",
            _table(names, [(what, [tell(run) for run in runs]) for what, tell in _FACTS], legend=True),
            curves_section(numbers) if numbers else "<p>No step is over yet.</p>",
            _unlike("Configuration", "Keys whose values are not the same.", names, [run.config for run in runs]),
            _unlike("Machine", "What is not the same of where they ran.", names, [run.environment for run in runs]),
        )
    )
    return document(" and ".join(names), body, numbers)


def _names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [each.resolve().parts for each in directories]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-count:]) for each in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{number}: {each.name}" for number, each in enumerate(directories, start=1)]


def _reward(run: RunData) -> str:
    values = run.values("reward/mean")[-EDGE:]
    return f"{sum(values) / len(values):.3f}" if values else _NOTHING


def _accuracy(run: RunData) -> str:
    return f"{run.accuracies[-1][1]:.{'3f' if run.graded else '1%'}}" if run.accuracies else _NOTHING


def _median(name: str, style: str) -> Callable[[RunData], str]:
    def tell(run: RunData) -> str:
        value = run.median(name)
        return _NOTHING if value is None else f"{value:{style}}"

    return tell


def _efficiency(run: RunData) -> str:
    told = typical(run.rows)
    return f"{told['bound/efficiency']:.0%}" if told else _NOTHING


_FACTS: Sequence[tuple[str, Callable[[RunData], str]]] = (
    ("held-out problems, at the end", _accuracy),
    (f"mean reward of the last {EDGE} steps", _reward),
    ("steps", lambda run: f"{run.steps} of {run.planned}"),
    ("seconds of a step (median)", _median("timing/step", ".3g")),
    ("tokens per second (median)", _median("tokens_per_s", ",.0f")),
    ("environment steps per second (median)", _median("env_steps_per_s", ",.0f")),
    ("of what is possible", _efficiency),
    ("seconds in all", lambda run: f"{run.seconds:.0f}"),
)


def _unlike(heading: str, about: str, names: Sequence[str], sides: Sequence[Mapping[str, Any]]) -> str:
    values = [dict(flat(side)) for side in sides]
    keys = [
        key
        for key in dict.fromkeys(key for side in values for key in side)
        if key not in _UNLIKE_ANYWAY and len({repr(side.get(key)) for side in values}) > 1
    ]
    if not keys:
        return f"<section><h2>{heading}</h2><p>Nothing is unlike.</p></section>"
    rows = [(key, [_NOTHING if key not in side else str(side[key]) for side in values]) for key in keys]
    return f"<section><h2>{heading}</h2><p>{about}</p>{_table(names, rows)}</section>"


def _table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], *, legend: bool = False) -> str:
    heads = "".join(
        f'<th class="legend run{number % COLOURS}">{"<i></i>" if legend else ""}{escape(name)}</th>'
        for number, name in enumerate(names)
    )
    told = [(what, values) for what, values in rows if any(value != _NOTHING for value in values)]
    body = "".join(
        f"<tr><td>{escape(what)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for what, values in told
    )
    table = f'<table class="compared"><tr><th></th>{heads}</tr>{body}</table>'
    return f'<div class="card scroll">{table}</div>'
