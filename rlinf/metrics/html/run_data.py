"""Read a run directory for the report page. Every file but metrics.jsonl may be missing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf.metrics.console.table import ACCURACY, GRADED
from rlinf.metrics.files import ENVIRONMENT, METRICS, SAMPLES, read_lines
from rlinf.metrics.html.state.samples import Row, Samples

MOST_POINTS = 800
"""Points per curve: more than a chart has pixels; a longer run is shown by means of so many parts."""
SHOWN_SAMPLES = 6
"""Answers that are shown of each chosen step."""
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
    before: Sequence[Row]
    """Step 0 of metrics.jsonl, what was known before the first one; empty if there is none."""
    rows: Sequence[Row]
    """Of metrics.jsonl: one per step, in order, from step 1."""
    accuracies: Sequence[tuple[int, float]]
    """(step, mean reward on held-out problems), step 0 included."""
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
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def planned(self) -> int:
        """Steps that there were to be; as many as there are, where whoever drove the run decided."""
        planned = self.environment.get("steps", self.config.get("steps"))
        return self.steps if planned is None else int(planned)

    def values(self, name: str) -> list[float]:
        """All values of a metric, in order."""
        return [row[name] for row in self.rows if isinstance(row.get(name), int | float)]

    def median(self, name: str) -> float | None:
        """Of a metric over all steps; None if it has no value."""
        values = self.values(name)
        return statistics.median(values) if values else None

    @property
    def best(self) -> tuple[str, int, float] | None:
        """(metric, step, value) of the best evaluation after a step, where the configuration asks for one."""
        asked = self.config.get("checkpoint")
        metric = asked.get("best") if isinstance(asked, Mapping) else None
        known = [(float(row[metric]), int(row["step"])) for row in self.rows if metric and _known(row, metric)]
        if not metric or not known:
            return None
        sign = -1 if isinstance(asked, Mapping) and asked.get("best_mode") == "min" else 1
        value, step = max(known, key=lambda pair: sign * pair[0])  # the first of equal ones, as the run takes it
        return str(metric), step, value

    @property
    def graded(self) -> bool:
        """Some reward of an evaluation was neither 0 nor 1, so that its mean is no share of right answers."""
        return any(row.get(GRADED) for row in (*self.before, *self.rows))

    @property
    def seconds(self) -> float:
        """How long the run took, or its steps alone where that was not noted."""
        elapsed = self.values("timing/elapsed")
        return elapsed[-1] if elapsed else sum(self.values("timing/step"))


def read_run(directory: Path) -> RunData:
    """Read a run directory.

    Raises:
        FileNotFoundError: it has no metrics.jsonl, so it is no run's directory.
    """
    if not (directory / METRICS).is_file():
        raise FileNotFoundError(f"{directory} is no run's directory: it has no {METRICS}")
    by_step: dict[int, Row] = {}
    for row in read_lines(directory / METRICS):
        if isinstance(step := row.get("step"), int):
            by_step.setdefault(step, {}).update(row)  # an evaluation that somebody asked for is a line of its own
    rows = [by_step[step] for step in sorted(by_step)]
    samples = Samples(directory / SAMPLES)
    samples.refresh()
    text = _text(directory / "resolved.yaml")
    config = _mapping(text)
    return RunData(
        name=str(config.get("name", directory.name)),
        config=config,
        config_text=text,
        environment=_environment(directory / ENVIRONMENT),
        before=[row for row in rows if row["step"] <= 0],
        rows=[row for row in rows if row["step"] > 0],
        accuracies=[(row["step"], row[name]) for name in (ACCURACY,) for row in rows if _known(row, name)],
        answers=shown_answers(samples),
        held_out=samples.held_out(SHOWN_PROBLEMS),
        sampled=samples.steps,
        remark=samples.remark[:MOST_REMARK],
    )


def curves(rows: Sequence[Row]) -> dict[str, Any]:
    """`steps`, `elapsed`, `env_steps` and `metrics` by name, all of one length; null where a metric has no value, and
    for all environment steps if they were not counted."""
    groups = list(_parts(rows, MOST_POINTS))
    names = sorted({name for row in rows for name, value in row.items() if isinstance(value, int | float)} - {"step"})
    elapsed, total = [], 0.0
    acted = [group[-1].get("env_steps/total", None if group[-1]["step"] > 0 else 0) for group in groups]
    for group in groups:
        total += sum(row.get("timing/step") or 0.0 for row in group)
        elapsed.append(_short(group[-1].get("timing/elapsed") or total))
    metrics = {name: [_mean([row[name] for row in group if _known(row, name)]) for group in groups] for name in names}
    steps = [group[-1]["step"] for group in groups]
    return {
        "steps": steps,
        "elapsed": elapsed,
        "env_steps": acted if all(isinstance(count, int | float) for count in acted) else None,
        "metrics": metrics,
    }


def _parts(rows: Sequence[Row], most: int) -> Iterator[Sequence[Row]]:
    count = min(len(rows), most)
    for part in range(count):
        yield rows[len(rows) * part // count : len(rows) * (part + 1) // count]


def _known(row: Row, name: str) -> bool:
    return isinstance(row.get(name), int | float)


def _mean(values: Sequence[float]) -> float | None:
    return _short(sum(values) / len(values)) if values else None


def _short(value: float) -> float:
    return float(f"{value:.5g}")


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
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:  # the page shows the text as it is
        return {}
    return config if isinstance(config, dict) else {}


def _environment(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
