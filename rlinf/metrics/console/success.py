"""How often a policy solved its tasks, as a table: a row per suite and per task, each with how sure its rate is.

In: metrics of an evaluation. Out: rows, and plain lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SUITES, TASKS = "suites/", "tasks/"
"""What metrics of one suite, and of one task, begin with."""
COUNT = "/episodes"
_WIDEST = 60
"""Characters of a name that are shown: an instruction may be longer."""


@dataclass(frozen=True, slots=True)
class SuccessRow:
    """A suite of environments, or one task of it."""

    suite: str
    """Name of the suite; empty for the environments of training."""
    task: str
    """Name of the task; empty for all of the suite."""
    episodes: int
    """That were played."""
    success: float | None
    """Share that was solved at some time; None where the simulator does not say."""
    low: float | None
    """Lower end of that share's interval, which holds in 95 % of cases."""
    high: float | None
    """Upper end."""
    total: float
    """Mean return."""

    @property
    def name(self) -> str:
        """Of the task, or of the suite."""
        return self.task or self.suite or "all"


def success_rows(metrics: Mapping[str, float]) -> list[SuccessRow]:
    """The rows that an evaluation's metrics tell, suites first and each followed by its tasks.

    Args:
        metrics: such as `success_once`, `suites/ood/success_once` and `tasks/push/success_once`, each with `/low` and
            `/high` and beside it `episodes` and `reward/mean`.
    """
    found = []
    for name in (name for name in metrics if f"/{name}".endswith(COUNT)):
        prefix = name[: -len(COUNT) + 1]
        suite, task = _named(prefix)
        share, low, high = (metrics.get(f"{prefix}success_once{end}") for end in ("", "/low", "/high"))
        total = metrics.get(f"{prefix}reward/mean", 0.0)
        found.append(SuccessRow(suite, task, int(metrics[name]), share, low, high, total))
    return sorted(found, key=lambda row: row.suite != "")  # stable: the environments of training first


def success_table(before: Mapping[str, float] | None, after: Mapping[str, float]) -> Iterator[str]:
    """A table as lines; none where no simulator tells of success.

    Args:
        before: metrics of an evaluation that `after` is compared with; None for none.
        after: metrics of an evaluation.
    """
    rows = [row for row in success_rows(after) if row.success is not None]
    if not rows:
        return
    earlier = {(row.suite, row.task): row.success for row in success_rows(before or {})}
    wide = max(len(_shown(row)) for row in rows)
    yield f"  {'':<{wide}}  episodes{'' if before is None else '   before'}  success{'95% interval':>16}{'return':>10}"
    for row in rows:
        was = "" if before is None else f"{_share(earlier.get((row.suite, row.task))):>9}"
        between = f"{_share(row.low)} to {_share(row.high)}"
        yield f"  {_shown(row):<{wide}}{row.episodes:>10}{was}{_share(row.success):>9}{between:>16}{row.total:>10.2f}"


def _named(prefix: str) -> tuple[str, str]:
    suite = task = ""
    if prefix.startswith(SUITES):
        suite, _, prefix = prefix.removeprefix(SUITES).partition("/")
    if prefix.startswith(TASKS):
        task = prefix.removeprefix(TASKS).rstrip("/")
    return suite, task


def _shown(row: SuccessRow) -> str:
    text = f"  {row.task}" if row.task else row.name
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
