"""What a person reads while a run goes: where it runs, how it learns, and at the end what came of it and where it is.

In: the events of a run, from `learning.py`. Out: on a terminal a view that is redrawn in place, with the lasting lines
above it; elsewhere plain lines, a few per minute.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rlinf.config import RunConfig, roles_to_hosts
from rlinf.flows.evaluate import Evaluation
from rlinf.metrics.live import LiveView
from rlinf.metrics.table import ProgressTable
from rlinf.metrics.timing import sentence
from rlinf.run_directory import RunDirectory
from rlinf.runtime.errors import ActorDied
from rlinf.runtime.observer import Watch

SHOWN_ANSWERS = 5
"""Held-out problems whose answers are printed at the end."""
CELL = 32
"""Characters of a problem or an answer that are printed; the rest is in samples.jsonl."""
HELD_OUT = 24
"""Held-out problems whose answers are kept of every evaluation."""
LOOK_SECONDS = 0.5
"""Between two looks at what the roles do: as fast as one reads, and a message to each host."""


class Report:
    """Tells the events of one run.

    Args:
        config: of the run.
        directory: where its results are.
        hosts: number of processes.
        watch: shows what the roles do, in the live view; None leaves that out.
        out: where to print; default: standard output.

    Use it as `async with Report(...) as report:` around the steps, and call `ends` after that: the live view is there
    in between, and its last state stays on the screen, whatever ends the run.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        hosts: int,
        watch: Watch | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._config, self._directory, self._hosts, self._watch = config, directory, hosts, watch
        self._out = out if out is not None else sys.stdout
        self._since = self._start = time.perf_counter()
        announced = ("evaluation/accuracy",) if config.evaluation.every else ()
        self._table = ProgressTable(config.steps, config.log_every, self._out, announced)
        self._timings: dict[str, list[float]] = defaultdict(list)
        self._view: LiveView | None = None
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Report:
        live = self._config.metrics.live
        if live == "always" or (live == "auto" and self._out.isatty() and os.environ.get("TERM") != "dumb"):
            self._view = LiveView(self._config.name, self._config.steps, self._out)
            if self._watch is not None:
                self._following = asyncio.create_task(_follow(self._watch, self._view), name="live view")
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        if self._view is not None:
            view, self._view = self._view, None
            await view.close()
        if self._following is not None and not self._following.cancelled():
            self._following.result()  # a bug in what it shows must not be lost

    def begins(self) -> None:
        """The roles are up."""
        roles = roles_to_hosts(self._config.placement, self._hosts)
        if self._hosts == 1:
            where = f"{', '.join(roles)} in one process"
        else:
            where = ", ".join(f"{role} on host {_listed(hosts)}" for role, hosts in roles.items())
        self.line(f"{self._config.name}: {where}")
        if self._directory.moved is not None:
            self.line(f"an earlier run of this name is now {_shown(self._directory.moved)}")
        self._since = time.perf_counter()

    def resumed(self, step: int, checkpoint: Path) -> None:
        """The run goes on from a checkpoint, written after `step`."""
        self.line(f"going on after step {step}, from {_shown(checkpoint)}")
        self.line("")

    def warmed_up(self, metrics: Mapping[str, float]) -> None:
        """The supervised warm-up is over."""
        loss = f", loss {metrics['sft/loss_first']:.2f} to {metrics['sft/loss']:.2f}"
        self.line(f"warm-up on worked problems: {self._config.sft.steps} steps in {self._lap():.1f} s{loss}")

    def evaluated(self, before: Evaluation) -> None:
        """The accuracy before the first step is known."""
        self.line(f"before: {before.accuracy:.1%} of {len(before.groups)} held-out problems answered right{self._how}")
        if self._config.steps:
            self.line("")

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        for name, value in metrics.items():
            if name.startswith("timing/"):
                self._timings[name].append(value)
        if self._view is not None:
            self._view.stepped(step, metrics)
        else:
            self._table.add(step, metrics)

    def ends(self, before: Evaluation | None, after: Evaluation | None) -> None:
        """Everything is written.

        Args:
            before, after: evaluations before the first step and after the last one; None where there is nothing to
                evaluate on.
        """
        self.line("")
        if before is not None and after is not None:
            count, change = len(after.groups), f"{before.accuracy:.1%} -> {after.accuracy:.1%}"
            self.line(f"accuracy on {count} held-out problems{self._how}: {change}")
            for line in _answers(before, after):
                self.line(line)
            self.line("")
        if told := sentence({name: statistics.median(values) for name, values in self._timings.items()}):
            self.line(f"a step took {told} (medians)")
        self.line(f"done in {time.perf_counter() - self._start:.0f} s; results in {_shown(self._directory.path)}:")
        for path, what in self._results():
            self.line(f"  {path.relative_to(self._directory.path)!s:<24} {what}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self._view is not None:
            self._view.line(text)
        else:
            self._out.write(f"{text}\n")
            self._out.flush()

    @property
    def _how(self) -> str:
        temperature = self._config.evaluation.temperature
        return ", greedily" if temperature == 0 else f", at temperature {temperature:g}"

    def _results(self) -> Iterator[tuple[Path, str]]:
        directory = self._directory
        results = (
            (directory.report, "curves, lanes and answers, for a browser"),
            (directory.latest / "hf", "the trained model, for transformers' from_pretrained"),
            (directory.metrics, "every step's numbers"),
            (directory.samples, "some answers of every step"),
            (directory.trace, "what each role did when; open it at https://ui.perfetto.dev"),
            (directory.resolved, "the configuration in full, to run again"),
        )
        yield from ((path, what) for path, what in results if path.exists())

    def _lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        lap, self._since = now - self._since, now
        return lap


async def _follow(watch: Watch, view: LiveView) -> None:
    """Show what everybody does, twice a second. A view of time needs a clock: there is no event to wait for."""
    try:
        while True:
            view.moment(await watch.look())
            await asyncio.sleep(LOOK_SECONDS)
    except ActorDied:
        pass  # a host is lost: the run itself fails by that, with its cause


def held_out_rows(evaluation: Evaluation, count: int = HELD_OUT) -> list[dict[str, Any]]:
    """The first answers of an evaluation as rows of samples.jsonl; of every evaluation the same problems.

    Args:
        evaluation: judged.
        count: at most so many problems.
    """
    firsts = [group.samples[0] for group in evaluation.groups[:count]]
    return [
        {
            "kind": "held-out",
            "prompt": sample.prompt.text,
            "response": sample.text,
            "answer": sample.prompt.answer,
            "reward": sample.reward,
            "outcome": sample.outcome,
            "length": len(sample.response_ids),
        }
        for sample in firsts
    ]


def _answers(before: Evaluation, after: Evaluation) -> Iterator[str]:
    """A few held-out problems with their answers then and now: those that changed first, since they say most."""
    pairs = [(old.samples[0], new.samples[0]) for old, new in zip(before.groups, after.groups, strict=True)]
    pairs.sort(key=lambda pair: pair[0].text == pair[1].text)  # stable: otherwise in the order of the problems
    rows = [("problem", "before", "after", "right answer")]
    shown = [(new.prompt.text, old.text, new.text, new.prompt.answer) for old, new in pairs[:SHOWN_ANSWERS]]
    rows += [(_cell(problem), _cell(old), _cell(new), _cell(right)) for problem, old, new, right in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cell(text: str) -> str:
    """A text on one line, in characters that do nothing to a terminal; its beginning if it is long."""
    plain = "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
    return plain if len(plain) <= CELL else plain[: CELL - 1] + "…"


def _listed(hosts: list[int]) -> str:
    return ", ".join(map(str, hosts))


def _shown(path: Path) -> str:
    """A path as a person would type it from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
