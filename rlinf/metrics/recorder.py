"""Records the steps of a run: metrics and samples to files and trackers, with timing and efficiency.

In: what a flow returned, and some samples. Out: lines in metrics.jsonl and samples.jsonl, messages to the trackers'
threads, and the ledger's file at the end. Who wakes whom: nobody; only `step_ends` awaits, the hosts' answers to where
the time went.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf.metrics.explain import Explainer, Explanation
from rlinf.metrics.limits import MEASURED_AFTER, OwnDevice, Use, Work, worth_a_word
from rlinf.metrics.machine import environment
from rlinf.metrics.timing import parts, timing
from rlinf.metrics.tracing import RunSpans, spans_here
from rlinf.metrics.trackers import Tracking
from rlinf.placement.costs import Ledger
from rlinf.runtime.observe.spans import Lap
from rlinf.runtime.system.observer import Watch
from rlinf.storage import files


class Recorder:
    """Writes down the steps of one run.

    Args:
        directory: of the run.
        watch: of its system.
        tracking: its trackers, closed with this.
        hosts: processes of the job.
        ledger: says of every step how far it was from the possible, and is saved at the end; None says nothing.
        about: what environment.json says besides the machine.
        explainer: says what each step waited for; it needs the ledger.
        spans: of the run, for a collector; None: nobody wants any.

    Use it as `async with Recorder(...) as recorder:`.
    """

    def __init__(
        self,
        directory: Path,
        watch: Watch,
        tracking: Tracking,
        hosts: int,
        ledger: Ledger | None = None,
        about: Mapping[str, Any] | None = None,
        explainer: Explainer | None = None,
        spans: RunSpans | None = None,
    ) -> None:
        self._spans = spans
        self._explainer, self._explanations = explainer, files.JsonLines(directory / files.EXPLAINED)
        self._alarms = files.JsonLines(directory / files.ALARMS)
        self.explained: list[Explanation] = []
        """Explanation of each step of this process."""
        self._directory, self._watch, self._tracking, self._ledger = directory, watch, tracking, ledger
        self._device = OwnDevice()
        self._began = watch.now() - _elapsed(directory / files.METRICS)
        self._metrics, self._samples = (
            files.MetricsFile(directory / files.METRICS),
            files.SamplesFile(directory / files.SAMPLES),
        )
        self.files = (self._metrics, self._samples, self._explanations, self._alarms)
        """To which lines are added."""
        facts = {**environment(hosts), **(about or {})}
        (directory / files.ENVIRONMENT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def step_begins(self) -> None:
        """The flow starts its next step."""
        self._watch.begins()
        if self._spans is not None:
            self._spans.step_begins()

    def rested(self, seconds: float) -> None:
        """So long the run stood still between two steps because somebody wanted it to: no time of the run."""
        self._began += seconds

    async def step_ends(self, step: int, returned: Mapping[str, float]) -> dict[str, float]:
        """The flow has returned: its metrics with how long the step took, and where that went.

        Args:
            step: which, from 1.
            returned: what the flow returned.

        Returns:
            The same with `timing/...`, seconds; with `bound/...` and `lost/...` if there is a ledger, and `mfu/...`,
            `mbu/...` and `idle/...` where the limits of its devices are known; with
            `tokens_per_s` if it tells `response_tokens`, `env_steps_per_s` if it tells `env_steps`; and with `kl`, from
            the policy that sampled, if no reference model gave one.
        """
        lap = await self._watch.ends(f"step {step}")
        if self._spans is not None:
            self._spans.step_ends(step, lap, self._watch.now())
        metrics = {**returned, "timing/step": lap.end - lap.start, "timing/elapsed": self._watch.now() - self._began}
        if lap.busy:
            metrics |= timing(lap) | parts(lap)
            if self._ledger is not None:
                metrics |= self._ledger.step(lap)
                uses = await self._used(lap, metrics)
                await self._explain(step, lap, metrics, uses)
        for counted, speed in (("response_tokens", "tokens_per_s"), ("env_steps", "env_steps_per_s")):
            if counted in metrics:
                metrics[speed] = metrics[counted] / max(metrics["timing/step"], 1e-9)
        if "approx_kl" in metrics and "kl" not in metrics:
            metrics["kl"] = metrics.pop("approx_kl")
        return metrics

    async def _used(self, lap: Lap, metrics: dict[str, float]) -> list[Use]:
        """How much of the devices' limits the step used; those worth a word. Adds its metrics."""
        assert self._ledger is not None
        done, measured = Work(lap), self._ledger.measured_step
        if not done.dtypes or measured is None or not measured.lanes or len({*self._ledger.kinds}) > 1:
            return []
        limits = self._device.limits(done.dtypes)
        if limits is None:
            if metrics["timing/elapsed"] > MEASURED_AFTER:  # for the steps to come, while nothing computes
                await asyncio.to_thread(self._device.measure, done.dtypes)
            return []
        uses = done.uses(measured, limits)
        self._ledger.add_limits({use.role: use.least for use in uses})
        metrics |= done.metrics(uses, limits, len(measured.lanes))
        return uses if worth_a_word(metrics, self._device.kind) else []

    async def _explain(self, step: int, lap: Lap, metrics: Mapping[str, float], uses: list[Use]) -> None:
        if self._explainer is None or self._ledger is None or self._ledger.measured_step is None:
            return
        arguments = (lap, self._ledger.devices, self._ledger.measured_step, dict(metrics), uses)
        explained = await asyncio.to_thread(self._explainer.step, *arguments)  # it may ask the planner, which computes
        if explained is not None:
            self.explained.append(explained)
            self._explanations.add([{"step": step, **asdict(explained)}])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down a step; step 0 is what was known before the first one."""
        self._metrics.write(step, metrics)
        self._tracking.write(step, metrics)

    def alarm(self, step: int, text: str, do: str = "") -> None:
        """Write down what a person should know of a step.

        Args:
            step: which.
            text: what is wrong.
            do: what to do about it.
        """
        self._alarms.add([{"step": step, "text": text, "do": do}])

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write down some answers of a step."""
        rows = list(rows)
        if rows:
            self._samples.write(step, rows)
            self._tracking.samples(
                step, [{key: row[key] for key in row if key not in ("tokens", "turns", "times")} for row in rows]
            )

    async def __aenter__(self) -> Recorder:
        spans_here.set(self._spans)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        spans_here.set(None)
        if self._spans is not None:
            self._spans.end(error)
        if self._ledger is not None and self._directory.is_dir():  # else the run has ended for that
            self._ledger.save(self._directory)
        for file in self.files:
            file.close()
        await self._tracking.__aexit__(kind, error, trace)


def _elapsed(metrics: Path) -> float:
    """Seconds that earlier processes of this run took, if it goes on."""
    return max((float(row.get("timing/elapsed") or 0.0) for row in files.read_lines(metrics)), default=0.0)
