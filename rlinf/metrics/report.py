"""Terminal and log report of a run: where it runs, how it learns, and at the end its results and where they are.

In: the events of a run, from `text.py`. Out: on a terminal a view that is redrawn in place, with the lasting lines
above it; elsewhere plain lines, a few per minute. Held-out evaluations are formatted as a sentence, as a before/after
table, and as rows of samples.jsonl.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.text import RunConfig
from rlinf.data.sample import Evaluation, Group
from rlinf.data.tokenizer import shown_prompt
from rlinf.metrics.live import LiveView
from rlinf.metrics.machine import machine
from rlinf.metrics.tables import ProgressTable
from rlinf.metrics.timing import sentence
from rlinf.metrics.trackers import TrackedRun, Tracking, wanted_trackers
from rlinf.metrics.verdict import FAMILIES, over, tells, typical, verdict
from rlinf.placement.plan import GB
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.devices.memory import DeviceMemory
from rlinf.runtime.system.observer import Watch
from rlinf.storage.directory import Checkpoint, RunDirectory, previous_runs, size_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCURACY_COLUMN = "accuracy"
SHOWN = 5
"""Problems whose answers are printed at the end of a run."""
CELL = 32
"""Characters of a problem or an answer that are printed, the last ones; the rest is in samples.jsonl."""
KEPT = 24
"""Problems whose answers are kept of every evaluation."""


def rows(
    evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase | None = None, count: int = KEPT
) -> list[dict[str, Any]]:
    """The first answers of an evaluation as rows of samples.jsonl; of every evaluation the same problems.

    Args:
        evaluation: judged.
        tokenizer: the model's; with it `prompt` is what the model read, see `shown_prompt`.
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
            "length": sample.learned_tokens,
            **({"remark": sample.remark} if sample.remark else {}),
            **({} if tokenizer is None else shown_prompt(sample.prompt, tokenizer)),
        }
        for sample in firsts
    ]


def compare(before: Evaluation, after: Evaluation, temperature: float) -> Iterator[str]:
    """Compare the evaluations before and after a run: accuracy or mean reward, and a few problems with their answers
    then and now; those that changed first, since they say most.

    Args:
        before, after: of the same problems; of others, after a change of the configuration, only `after` is told.
        temperature: at which they were answered.
    """
    then, now = problems_of(before), problems_of(after)
    if [group.prompt.text for group in then] != [group.prompt.text for group in now]:
        yield f"{in_words(after, temperature)}; before the first step it answered other ones"
        return
    name, style = measure_of(before, after)
    change = f"{before.accuracy:{style}} -> {after.accuracy:{style}}"
    yield f"{name} on {len(now)} held-out problems{_how(temperature)}: {change}"
    pairs = [(old.samples[0], new.samples[0]) for old, new in zip(then, now, strict=True)]
    pairs.sort(key=lambda pair: pair[0].text == pair[1].text)  # stable: otherwise in the order of the problems
    table: list[tuple[str, ...]] = [("problem", "before", "after", "right answer")]
    problem = own_parts([group.prompt.text for group in now])
    answers = [(problem[new.prompt.text], old.text, new.text, new.prompt.answer) for old, new in pairs[:SHOWN]]
    table += [tuple(map(_cell, texts)) for texts in answers]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def in_words(evaluation: Evaluation, temperature: float) -> str:
    """One evaluation by itself."""
    name, style = measure_of(evaluation)
    value, problems = f"{evaluation.accuracy:{style}}", f"{len(problems_of(evaluation))} held-out problems"
    if name == ACCURACY_COLUMN:
        return f"{value} of {problems} answered right{_how(temperature)}"
    return f"{name} {value} on {problems}{_how(temperature)}"


def measure_of(*evaluations: Evaluation) -> tuple[str, str]:
    """Return the name and format of the evaluations' `accuracy`: a share of right answers only where each reward is 0
    or 1.

    Args:
        evaluations: that are told together.
    """
    rewards = (reward for evaluation in evaluations for group in evaluation.groups for reward in group.rewards)
    return (ACCURACY_COLUMN, ".1%") if all(reward in (0, 1) for reward in rewards) else ("mean reward", ".3f")


def problems_of(evaluation: Evaluation) -> list[Group]:
    """A group for each problem: where several agents work on one, that of the first."""
    firsts: dict[int, Group] = {}
    for group in evaluation.groups:
        firsts.setdefault(group.prompt.id, group)
    return [*firsts.values()]


def _how(temperature: float) -> str:
    return ", greedily" if temperature == 0 else f", at temperature {temperature:g}"


def own_parts(texts: Sequence[str]) -> dict[str, str]:
    """The part of each text that the others do not have, where they are too long for a cell: of chats what the user
    says, without the system prompt before it and the marks of the template behind it."""
    if len({*texts}) < 2 or max(map(len, texts)) <= CELL:
        return {text: text for text in texts}
    first = re.sub(r"[^\n>\]]*$", "", _beginning(texts))  # back to a mark or a new line, which begins a message
    rest = [text[len(first) :] for text in texts]
    last = re.sub(r"^[^\n<\[]*", "", _beginning([text[::-1] for text in rest])[::-1])
    return {text: part.removesuffix(last) for text, part in zip(texts, rest, strict=True)}


def _beginning(texts: Sequence[str]) -> str:
    """The characters that all texts begin with."""
    return "".join(column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False)))


def _cell(text: str) -> str:
    """A text on one line, in characters that do nothing to a terminal; its end if it is long, where answers come to
    their point and chats to the last message."""
    plain = "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
    return plain if len(plain) <= CELL else f"…{plain[1 - CELL :]}"


LOOK_SECONDS = 0.5
"""Between two looks at what the roles do: as fast as one reads, and a message to each host."""


class Report:
    """Tells the events of one run.

    Args:
        config: of the run: its name, `log_every` and `metrics.live`.
        steps: how many there will be; None: nobody knows.
        directory: where its results are.
        hosts: number of processes.
        watch: shows what the roles do, in the live view; None leaves that out.
        announced: metrics that come later than the first printed line, and have a column all the same.
        out: where to print; default: standard output.

    Use it as `async with Report(...) as report:` around the steps, and call `ends` after that: the live view is there
    in between, and its last state stays on the screen, whatever ends the run.
    """

    def __init__(
        self,
        config: RunConfig | EmbodiedConfig,
        directory: RunDirectory,
        hosts: int,
        *,
        steps: int | None,
        announced: Collection[str] = (),
        watch: Watch | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._name, self._directory, self._hosts, self._watch = config.name, directory, hosts, watch
        self._steps, self._live = steps, config.metrics.live
        self._out = out if out is not None else sys.stdout
        self._since = self._start = time.perf_counter()
        self._table = ProgressTable(steps, config.log_every, self._out, announced)
        self._steps_taken: list[dict[str, float]] = []
        self._view: LiveView | None = None
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Report:
        live = self._live
        if live == "always" or (live == "auto" and self._out.isatty() and os.environ.get("TERM") != "dumb"):
            self._view = LiveView(self._name, self._steps, self._out)
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

    def begins(self, roles: Mapping[str, Sequence[int]], notes: Iterable[str] = ()) -> None:
        """The roles are up, each on these hosts; `notes` are about the data."""
        if self._hosts == 1:
            where = f"{', '.join(roles)} in one process"
        else:
            where = ", ".join(f"{role} on host {_listed(hosts)}" for role, hosts in roles.items())
        for line in (where, *notes):
            self.line(f"{self._name}: {line}")
        if self._directory.lock is not None and (dead := self._directory.lock.taken_from) is not None:
            self.line(f"the lock of the run directory is taken over from {dead}, which ended without giving it back")
        if self._directory.moved is not None:
            moved = self._directory.moved
            all_of_them = [moved, *(run for run in previous_runs(self._directory.path) if run != moved)]
            sizes = [size_of(run) for run in all_of_them]
            others = f"; with {len(sizes) - 1} more, {in_bytes(sum(sizes))}" if len(sizes) > 1 else ""
            sizes_text = f"({in_bytes(sizes[0])}{others}; keep_previous says how many stay)"
            self.line(f"an earlier run of this name is now {_short_path(moved)} {sizes_text}")
        for removal in self._directory.removed:
            if removal == self._directory.path:
                self.line(f"an earlier run in {_short_path(removal)}, which had not done a step, is removed")
            else:
                self.line(f"the oldest run of this name, {_short_path(removal)}, is removed; see keep_previous")
        self._since = time.perf_counter()

    def resumed(self, step: int, checkpoint: Path, metrics: Mapping[str, float] | None = None) -> None:
        """The run goes on from a checkpoint, written after `step`; its newest evaluation is known, as metrics."""
        self._table.announce(metrics or {})
        self.line(f"going on after step {step}, from {_short_path(checkpoint)}")
        self.line("")

    def warmed_up(self, metrics: Mapping[str, float], source: str) -> None:
        """The supervised warm-up on `source` is over."""
        loss = f", loss {metrics['sft/loss_first']:.2f} to {metrics['sft/loss']:.2f}"
        self.line(f"warm-up on {source}: {metrics['sft/steps']:.0f} steps in {self._lap():.1f} s{loss}")

    def evaluated(self, before: str, metrics: Mapping[str, float] | None = None) -> None:
        """How good the model is before the first step is known, in words and as metrics."""
        self._table.announce(metrics or {})
        self.line(f"before: {before}")
        if self._steps != 0:
            self.line("")

    def stepped(self, step: int, metrics: Mapping[str, float], last: bool = False) -> None:
        """A step is over; the last one before its time, perhaps."""
        self._steps_taken.append({name: metrics[name] for name in metrics if name.startswith(FAMILIES)})
        if self._view is not None:
            self._view.stepped(step, metrics)
        else:
            self._table.add(step, metrics, last)

    def ends(
        self,
        change: Iterable[str] = (),
        memory: Mapping[int, DeviceMemory] | None = None,
        why: Iterable[str] = (),
    ) -> None:
        """Everything is written.

        Args:
            change: lines about what came of it, from before the first step to after the last one.
            memory: what each device held at most.
            why: lines about what steps waited for.
        """
        self.line("")
        came_of_it = list(change)
        for line in [*came_of_it, ""] if came_of_it else []:
            self.line(line)
        usual = typical(self._steps_taken)
        if timing_text := sentence(usual):
            which = over(self._steps_taken)
            self.line(f"a step took {timing_text}{f' ({which})' if which else ''}")
        for line in [*(verdict(usual, machine()) if tells(self._steps_taken) else ()), *why, *fullest(memory or {})]:
            self.line(line)
        self.line(f"done in {time.perf_counter() - self._start:.0f} s; results in {_short_path(self._directory.path)}:")
        results = {str(path.relative_to(self._directory.path)): what for path, what in self._results()}
        width = max([24, *map(len, results)])
        for name, what in results.items():
            self.line(f"  {name:<{width}} {what}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self._view is not None:
            self._view.line(text)
        else:
            self._out.write(f"{text}\n")
            self._out.flush()

    def _results(self) -> Iterator[tuple[Path, str]]:
        directory = self._directory
        results = (
            (directory.report, "curves, lanes and answers, for a browser"),
            (directory.latest / "hf", "the trained model, for transformers' from_pretrained"),
            (directory.latest / "adapter", "its adapters alone, for peft's PeftModel.from_pretrained"),
            (directory.latest / "policy", "the trained policy"),
            (directory.best / "hf", "the model of the best evaluation"),
            (directory.best / "policy", "the policy of the best trials"),
            (directory.path / "videos", "episodes before and after, to look at"),
            (directory.metrics, "every step's numbers"),
            (directory.explained, "what every step waited for, and what would help"),
            (directory.samples, "some answers of every step"),
            (directory.trace, "what each role did when; open it at https://ui.perfetto.dev"),
            (directory.path / "profile.json", "what each role costs, to plan other runs with"),
            (directory.resolved, "the configuration in full, to run again"),
        )
        yield from ((path, what) for path, what in results if path.exists() and path.stat().st_size)

    def _lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        lap, self._since = now - self._since, now
        return lap


def tracking_of(
    config: RunConfig | EmbodiedConfig, directory: RunDirectory, checkpoint: Checkpoint | None, report: Report
) -> Tracking:
    """The trackers that a configuration wants, from the step on where its run goes on; their trouble is reported."""
    metrics = config.metrics
    wanted = wanted_trackers(tensorboard=metrics.tensorboard, wandb=metrics.wandb, swanlab=metrics.swanlab)
    about = TrackedRun(config.name, directory.path, asdict(config), None if checkpoint is None else checkpoint.step)
    return Tracking(wanted, about, report.line)


def fullest(memory: Mapping[int, DeviceMemory]) -> Iterator[str]:
    """A line on the device that was filled the most; none where none is limited, or nobody shares one.

    Args:
        memory: of each device, by the book of the leases: bytes of roles that share one, as their shapes say.
    """
    shared = [device for device in memory.values() if device.capacity and device.peak]
    if shared:
        device = max(shared, key=lambda device: device.peak / (device.capacity or 1))
        yield (
            f"devices that roles share held at most {device.peak / GB:.4g} of {(device.capacity or 0) / GB:.4g} GB, "
            "by the roles' shapes"
        )


async def _follow(watch: Watch, view: LiveView) -> None:
    """Show what everybody does, twice a second. A view of time needs a clock: there is no event to wait for."""
    try:
        while True:
            view.moment(await watch.look())
            await asyncio.sleep(LOOK_SECONDS)
    except ActorDied:
        pass  # a host is lost: the run itself fails by that, with its cause


def in_bytes(count: int) -> str:
    """Bytes for people: `2.1 GB`, `340 MB`, `0 MB`."""
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 1e6:.0f} MB"


def _listed(hosts: Sequence[int]) -> str:
    return ", ".join(map(str, hosts))


def _short_path(path: Path) -> str:
    """A path as a person would type it from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
