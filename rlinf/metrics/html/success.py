"""The section of a report on how often a policy solved its tasks, by suite and by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlinf.metrics.console.success import SuccessRow, success_rows

_EVALUATION = "evaluation/"


def success_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the first and the last evaluation; empty where none tells of success.

    Args:
        rows: of metrics.jsonl, in order, the one before the first step included.
    """
    told = [found for row in rows if (found := _told(row))]
    if not told:
        return ""
    first, last = told[0], told[-1]
    body = "".join(_line(row, first.get(place)) for place, row in last.items())
    return (
        "<section><h2>Success</h2><p>In the last trials, with the interval in which each share lies in 95 % of cases."
        "</p><table><thead><tr><th>suite or task</th><th>episodes</th><th>before</th><th>success</th><th>interval</th>"
        f"<th>mean return</th></tr></thead><tbody>{body}</tbody></table></section>"
    )


def _told(metrics: Mapping[str, Any]) -> dict[tuple[str, str], SuccessRow]:
    numbers = {
        name.removeprefix(_EVALUATION): value
        for name, value in metrics.items()
        if name.startswith(_EVALUATION) and isinstance(value, int | float)
    }
    return {(row.suite, row.task): row for row in success_rows(numbers) if row.success is not None}


def _line(row: SuccessRow, before: SuccessRow | None) -> str:
    was = None if before is None else before.success
    name = f"&nbsp;&nbsp;{escape(row.task)}" if row.task else escape(row.name)
    between = f"{_share(row.low)} to {_share(row.high)}"
    cells = (name, f"{row.episodes}", _share(was), _share(row.success), between, f"{row.total:.2f}")
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
