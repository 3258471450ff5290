"""Plain-text tables: a run's progress for files and pipes, and a policy's success per suite and task.

Progress has one line per few steps, with the means over them, and of evaluations meanwhile the newest. Success comes
from the metrics of an evaluation: a row per suite and per task, each with how sure its rate is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

FAILED = "reward/failed"
"""The share of answers without a reward: a column from the first failure on."""
ACCURACY, GRADED = "evaluation/accuracy", "evaluation/graded"
"""Mean reward of an evaluation; and the share of its rewards other than 0 and 1. From the first of them on, the mean is
no share of right answers."""
HELD_OUT = ("held-out", ACCURACY, "{:.3f}")
"""The column of a mean reward that is no share."""


class ProgressTable:
    """A line per `every` steps with the means over those steps, and their newest evaluation; the header comes with the
    first line.

    Args:
        steps: how many there will be; None: nobody knows.
        every: steps per line.
        out: where to print.
        announced: metrics that have a column though they come later.
    """

    COLUMNS = (
        ("reward", "reward/mean", "{:.3f}"),
        ("not scored", FAILED, "{:.1%}"),
        ("accuracy", ACCURACY, "{:.1%}"),
        ("success", "success_once", "{:.1%}"),
        ("in trials", "evaluation/success_once", "{:.1%}"),
        ("perplexity", "perplexity", "{:.3f}"),
        ("margin", "rewards/margins", "{:.3f}"),
        ("chosen won", "rewards/accuracies", "{:.1%}"),
        ("held out", "evaluation/loss", "{:.4f}"),
        ("length", "response_length/mean", "{:.1f}"),
        ("cut", "truncated", "{:.1%}"),
        ("clip frac", "clip_frac", "{:.1%}"),
        ("grad norm", "grad_norm", "{:.2f}"),
        ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ("steps/s", "env_steps_per_s", "{:,.0f}"),
        ("s/step", "timing/step", "{:.2f}"),
    )
    """(heading, metric, format); a column is there if the metric was announced, or the first line has it. The header
    comes again when the column of failures joins, or `HELD_OUT` replaces the accuracy."""

    def __init__(self, steps: int | None, every: int, out: TextIO, announced: Collection[str] = ()) -> None:
        self._steps, self._every, self._out, self._announced = steps, every, out, announced
        self._pending: list[Mapping[str, float]] = []
        self._columns: list[tuple[str, str, str]] = []
        self._joined: set[str] = set()

    def announce(self, metrics: Mapping[str, float]) -> None:
        """Take the evaluation before the first step, so that the first header fits those that follow."""
        self._joined |= metrics.keys() & {GRADED}

    def add(self, step: int, metrics: Mapping[str, float], last: bool = False) -> None:
        """Take one step's metrics; prints when `every` steps have gathered, and after the last one."""
        self._pending.append(metrics)
        if step % self._every and step != self._steps and not last:
            return
        joining = {name for name in (FAILED, GRADED) if self._mean(name)} - self._joined
        if not self._columns or joining:
            self._joined |= joining
            there = {name for _, name, _ in self._columns}.union(self._announced, *self._pending)
            there -= {FAILED} - self._joined
            self._columns = [
                HELD_OUT if column[1] == ACCURACY and GRADED in self._joined else column
                for column in self.COLUMNS
                if column[1] in there
            ]
            self._print("step", [heading for heading, _, _ in self._columns], "" if self._steps is None else "left")
        cells = [self._cell(name, style) for _, name, style in self._columns]
        seconds = self._mean("timing/step") or 0.0
        remaining = "" if self._steps is None else f"{0.0 if last else (self._steps - step) * seconds:.0f} s"
        self._print(str(step), cells, remaining)
        self._pending.clear()

    def _cell(self, name: str, style: str) -> str:
        value = self._newest(name) if name.startswith("evaluation/") else self._mean(name)
        return "" if value is None else style.format(value)

    def _newest(self, name: str) -> float | None:
        return next((metrics[name] for metrics in reversed(self._pending) if name in metrics), None)

    def _mean(self, name: str) -> float | None:
        values = [metrics[name] for metrics in self._pending if name in metrics]
        return sum(values) / len(values) if values else None

    def _print(self, first: str, cells: list[str], last: str) -> None:
        self._out.write(f"{first:>6}" + "".join(f"{cell:>11}" for cell in cells) + f"{last:>8}\n")
        self._out.flush()


SUITES, TASKS = "suites/", "tasks/"
"""Prefixes of metrics of one suite, and of one task."""
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
        """Name of the task, or else of the suite."""
        return self.task or self.suite or "all"


def success_rows(metrics: Mapping[str, float]) -> list[SuccessRow]:
    """The rows that an evaluation's metrics tell, suites first and each followed by its tasks.

    Args:
        metrics: such as `success_once`, `suites/ood/success_once` and `tasks/push/success_once`, each with `/low` and
            `/high` and beside it `episodes` and `reward/mean`.
    """
    rows = []
    for name in (name for name in metrics if f"/{name}".endswith(COUNT)):
        prefix = name[: -len(COUNT) + 1]
        suite, task = _named(prefix)
        share, low, high = (metrics.get(f"{prefix}success_once{end}") for end in ("", "/low", "/high"))
        total = metrics.get(f"{prefix}reward/mean", 0.0)
        rows.append(SuccessRow(suite, task, int(metrics[name]), share, low, high, total))
    return sorted(rows, key=lambda row: row.suite != "")  # stable: the environments of training first


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
    wide = max(len(_label(row)) for row in rows)
    yield f"  {'':<{wide}}  episodes{'' if before is None else '   before'}  success{'95% interval':>16}{'return':>10}"
    for row in rows:
        was = "" if before is None else f"{_share(earlier.get((row.suite, row.task))):>9}"
        between = f"{_share(row.low)} to {_share(row.high)}"
        yield f"  {_label(row):<{wide}}{row.episodes:>10}{was}{_share(row.success):>9}{between:>16}{row.total:>10.2f}"


def _named(prefix: str) -> tuple[str, str]:
    suite = task = ""
    if prefix.startswith(SUITES):
        suite, _, prefix = prefix.removeprefix(SUITES).partition("/")
    if prefix.startswith(TASKS):
        task = prefix.removeprefix(TASKS).rstrip("/")
    return suite, task


def _label(row: SuccessRow) -> str:
    text = f"  {row.task}" if row.task else row.name
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
