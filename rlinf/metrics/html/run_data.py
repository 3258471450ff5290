"""Read a run directory for a page. Every file but metrics.jsonl may be missing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json, parse_yaml, read_bytes
from rlinf.metrics.console.table import ACCURACY, GRADED
from rlinf.metrics.files import ENVIRONMENT, METRICS, SAMPLES
from rlinf.metrics.html.state.samples import Row, Samples
from rlinf.metrics.reading.metric_file import MetricFile
from rlinf.metrics.reading.metric_rows import MetricRows

MOST_POINTS = 800
"""Points per curve: more than a chart has pixels; a longer run is shown by means of so many parts."""
SHOWN_SAMPLES = 8
"""Answers that are shown of each chosen step: as many as a run writes unless `metrics.samples` says otherwise."""
SHOWN_PROBLEMS = 12
"""Held-out problems whose answers are shown, before and after."""
MOST_ANSWERS = 120_000
"""Characters of answers that a page carries, about; with longer ones it has those of fewer steps."""
MOST_REMARK = 300
"""Characters of the first remark on an answer that could not be scored."""

_SHOWN_STEPS = (0, 1, *(part / 16 for part in (8, 4, 12, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15)))
"""Shares of the way from the first step to the last, in the order in which they are looked at."""
_SHOWN_ANYWAY = 3


@dataclass(frozen=True, slots=True)
class RunData:
    """What a page shows of a run, lanes apart."""

    name: str
    """Of the run."""
    config: Mapping[str, Any]
    """The resolved configuration; empty if it cannot be read."""
    config_text: str
    """The same as it was written."""
    environment: Mapping[str, Any]
    """On what it ran."""
    metrics: MetricRows
    """Of all steps; step 0 is what was known before the first one."""
    answers: Mapping[int, Sequence[Row]]
    """Sampled answers of a few steps, the first and the last among them."""
    held_out: Sequence[tuple[Row, Row]]
    """The same held-out problems before and after; those first whose answer changed."""
    sampled: Sequence[int] = ()
    """Steps of which samples.jsonl has answers."""
    remark: str = ""
    """Why the first answer could not be scored; empty if all could."""

    @property
    def steps(self) -> int:
        """Steps that are over."""
        return max(self.metrics.steps, default=0)

    @property
    def planned(self) -> int:
        """Steps that there were to be; as many as there are, where whoever drove the run decided."""
        planned = self.environment.get("steps", self.config.get("steps"))
        return self.steps if planned is None else int(planned)

    def values(self, name: str) -> list[float]:
        """All values of a metric after step 0, in order."""
        return self.metrics.values(name)

    def median(self, name: str) -> float | None:
        """Of a metric over all steps; None if it has no value."""
        values = self.values(name)
        return statistics.median(values) if values else None

    def told(self, name: str, first: int = 0) -> list[tuple[int, float]]:
        """(step, value) of a metric from a step on, where it has one."""
        values = self.metrics.column(name).tolist()
        pairs = zip(self.metrics.steps, values, strict=True)
        return [(step, value) for step, value in pairs if value == value and step >= first]

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(step, mean reward on held-out problems), step 0 included."""
        return self.told(ACCURACY)

    @property
    def best(self) -> tuple[str, int, float] | None:
        """(metric, step, value) of the best evaluation after a step, where the configuration asks for one."""
        asked = self.config.get("checkpoint")
        metric = asked.get("best") if isinstance(asked, Mapping) else None
        known = self.told(str(metric), first=1) if metric else []
        if not known:
            return None
        sign = -1 if isinstance(asked, Mapping) and asked.get("best_mode") == "min" else 1
        step, value = max(known, key=lambda pair: sign * pair[1])  # the first of equal ones, as the run takes it
        return str(metric), step, value

    @property
    def graded(self) -> bool:
        """Some reward of an evaluation was neither 0 nor 1, so that its mean is no share of right answers."""
        return any(value for _, value in self.told(GRADED))

    @property
    def seconds(self) -> float:
        """How long the run took, or its steps alone where that was not noted."""
        elapsed = self.values("timing/elapsed")
        return elapsed[-1] if elapsed else sum(self.values("timing/step"))


def read_run(directory: Path, metrics: MetricRows | None = None, samples: Samples | None = None) -> RunData:
    """Read a run directory.

    Args:
        directory: of the run.
        metrics, samples: what was read of it before and is up to date; None reads them.

    Raises:
        FileNotFoundError: it has no metrics.jsonl, so it is no run's directory.
    """
    if metrics is None:
        if not (directory / METRICS).is_file() or (directory / METRICS).is_symlink():
            raise FileNotFoundError(f"{directory} is no run's directory: it has no {METRICS}")
        file = MetricFile(directory / METRICS)
        file.update()
        metrics = file.rows
    if samples is None:
        samples = Samples(directory / SAMPLES)
        samples.refresh()
    text = _text(directory / "resolved.yaml")
    config = _mapping(text)
    return RunData(
        name=str(config.get("name", directory.resolve().name)),
        config=config,
        config_text=text,
        environment=_environment(directory / ENVIRONMENT),
        metrics=metrics,
        answers=shown_answers(samples),
        held_out=samples.held_out(SHOWN_PROBLEMS),
        sampled=samples.steps,
        remark=samples.remark[:MOST_REMARK],
    )


def shown_answers(samples: Samples) -> dict[int, list[Row]]:
    """Answers of the first, the middle and the last step; and where these are short, of more steps between."""
    steps = samples.steps
    if not steps:
        return {}
    chosen: dict[int, list[Row]] = {}
    characters = 0
    for share in _SHOWN_STEPS:
        step = steps[round(share * (len(steps) - 1))]
        if step in chosen or (len(chosen) >= _SHOWN_ANYWAY and characters > MOST_ANSWERS):
            continue
        chosen[step] = samples.rows(step, SHOWN_SAMPLES)
        characters += len(json.dumps(chosen[step]))
    return dict(sorted(chosen.items()))


def _text(path: Path) -> str:
    try:
        return read_bytes(path, links=False).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        config = parse_yaml(text)
    except ValueError:  # the page shows the text as it is
        return {}
    return config if isinstance(config, dict) else {}


def _environment(path: Path) -> Mapping[str, Any]:
    try:
        found = parse_json(_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
