"""What a person reads while a run goes: where it runs, how it learns, and at the end what came of it and where it is.

In: the events of a run, from `learning.py`. Out: plain lines, a few per minute, the same on a terminal and in a file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from rlinf.config import RunConfig, roles_to_hosts
from rlinf.flows.evaluate import Evaluation
from rlinf.metrics import ProgressTable
from rlinf.run_directory import RunDirectory

SHOWN_ANSWERS = 5
"""Held-out problems whose answers are printed at the end."""


class Report:
    """Prints the events of one run.

    Args:
        config: of the run.
        directory: where its results are.
        hosts: number of processes.
        out: where to print; default: standard output.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, hosts: int, out: TextIO | None = None) -> None:
        self._config, self._directory, self._hosts = config, directory, hosts
        self._out = out if out is not None else sys.stdout
        self._since = self._start = time.perf_counter()
        announced = ("evaluation/accuracy",) if config.evaluation.every else ()
        self._table = ProgressTable(config.steps, config.log_every, self._out, announced)

    def begins(self) -> None:
        """The roles are up."""
        roles = roles_to_hosts(self._config.placement, self._hosts)
        if self._hosts == 1:
            where = f"{', '.join(roles)} in one process"
        else:
            where = ", ".join(f"{role} on host {_listed(hosts)}" for role, hosts in roles.items())
        self._line(f"{self._config.name}: {where}")
        if self._directory.moved is not None:
            self._line(f"an earlier run of this name is now {_shown(self._directory.moved)}")
        self._since = time.perf_counter()

    def warmed_up(self, metrics: Mapping[str, float]) -> None:
        """The supervised warm-up is over."""
        loss = f", loss {metrics['sft/loss_first']:.2f} to {metrics['sft/loss']:.2f}"
        self._line(f"warm-up on worked problems: {self._config.sft.steps} steps in {self._lap():.1f} s{loss}")

    def evaluated(self, before: Evaluation) -> None:
        """The accuracy before the first step is known."""
        self._line(f"before: {before.accuracy:.1%} of {len(before.groups)} held-out problems answered right, greedily")
        if self._config.steps:
            self._line("")

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        self._table.add(step, metrics)

    def ends(self, before: Evaluation, after: Evaluation) -> None:
        """Everything is written."""
        count = len(after.groups)
        self._line("")
        self._line(f"accuracy on {count} held-out problems, greedy: {before.accuracy:.1%} -> {after.accuracy:.1%}")
        for line in _answers(before, after):
            self._line(line)
        self._line("")
        self._line(f"done in {time.perf_counter() - self._start:.0f} s; results in {_shown(self._directory.path)}:")
        for path, what in self._results():
            self._line(f"  {path.relative_to(self._directory.path)!s:<24} {what}")

    def _results(self) -> Iterator[tuple[Path, str]]:
        if self._config.steps:
            yield self._directory.latest / "hf", "the trained model, for transformers' from_pretrained"
            yield self._directory.metrics, "every step's numbers"
        if self._config.trace:
            yield self._directory.trace, "what each role did when; open it at https://ui.perfetto.dev"
        yield self._directory.resolved, "the configuration in full, to run again"

    def _lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        lap, self._since = now - self._since, now
        return lap

    def _line(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


def _answers(before: Evaluation, after: Evaluation) -> Iterator[str]:
    """A few held-out problems with their answers then and now: those that changed first, since they say most."""
    pairs = [(old.samples[0], new.samples[0]) for old, new in zip(before.groups, after.groups, strict=True)]
    pairs.sort(key=lambda pair: pair[0].text == pair[1].text)  # stable: otherwise in the order of the problems
    rows = [("problem", "before", "after", "right answer")]
    rows += [(new.prompt.text, old.text, new.text, new.prompt.answer) for old, new in pairs[:SHOWN_ANSWERS]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _listed(hosts: list[int]) -> str:
    return ", ".join(map(str, hosts))


def _shown(path: Path) -> str:
    """A path as a person would type it from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
