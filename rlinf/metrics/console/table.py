"""A run's progress as plain lines, for files and pipes: one line per few steps, with the means over them, and of what
was evaluated meanwhile the newest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
        left = "" if self._steps is None else f"{0.0 if last else (self._steps - step) * seconds:.0f} s"
        self._print(str(step), cells, left)
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
