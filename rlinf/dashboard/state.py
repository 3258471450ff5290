"""Run state for pages: reads a run directory and returns all that a page shows of a run, as JSON knows it.

In: the files of a run directory, of which every one but metrics.jsonl may be missing. Out: one mapping, with the
headline, where the time of a step went, how far from the possible it was, answers, episodes and videos. The page of a
finished run carries it; that of a live one is given it, and then what changes.

samples.jsonl may grow while it is read: in memory is where each step's rows lie, not the rows. Episodes of a policy are
rows of two tables, made of metrics.jsonl and the directory of videos: how often it solved its tasks, and the videos
that were kept.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.config.reading import open_regular, parse_json, parse_yaml, read_bytes
from rlinf.dashboard.lanes import Lanes, Stretch, Trace, actor_lanes
from rlinf.metrics.tables import ACCURACY, GRADED, SuccessRow, success_rows
from rlinf.metrics.timing import ACTIVITIES
from rlinf.metrics.verdict import BINDING, FAMILIES, MEANINGS, PARTS, binding, idles_most, of_the_device, over, typical
from rlinf.storage.directory import flat
from rlinf.storage.files import ALARMS, ENVIRONMENT, EXPLAINED, METRICS, SAMPLES
from rlinf.storage.reading import Appended, MetricFile, MetricRows, objects

Row = dict[str, Any]
"""One line of metrics.jsonl or samples.jsonl."""
HELD_OUT = "held-out"
"""`kind` of rows that are answers to held-out problems."""
MOST_TURNS = 64
"""Turns of one answer that a page shows."""
MOST_TEXT = 6_000
"""Characters of one text that a page shows; the whole is in samples.jsonl."""
MOST_TOKENS = 2_000
"""Tokens of one answer that a page colours."""
_BEGINS, _HELD_OUT = re.compile(rb'\{"step": (-?\d+)[,}]'), b'"kind": "held-out"'
"""Marks of a row as the run writes it, which save the reading of rows that nobody asks for. Within a text, a quotation
mark has a backslash before it, so none looks like this."""
_TOKENS = ("texts", "logprobs", "mask", "versions")


class Samples:
    """The rows of a samples.jsonl.

    Args:
        path: of the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, Appended(path, self._forget)
        self._answers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._held_out: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.remark = ""
        """Why the first answer could not be scored; empty if all could."""

    @property
    def steps(self) -> list[int]:
        """Steps of which there are answers that were learned from."""
        return sorted(self._answers)

    @property
    def left_out(self) -> int:
        """Lines that no run writes: too long."""
        return self._file.left_out

    def refresh(self) -> list[int]:
        """Look at what was added since the last time, or at all of a file that is another one now.

        Returns:
            The steps of which it has new answers.
        """
        new: set[int] = set()
        for place, block in self._file.blocks():
            for line in block.splitlines(keepends=True):
                if (head := _head(line)) is not None:
                    step, held_out = head
                    (self._held_out if held_out else self._answers)[step].append((place, len(line)))
                    if not held_out:
                        new.add(step)
                        if not self.remark and b'"remark": ' in line:
                            self.remark = str((_row(line) or {}).get("remark") or "")
                place += len(line)
        return sorted(new)

    def _forget(self) -> None:
        """The file is another one now: of a run begun anew, or gone on with from earlier."""
        self._answers.clear()
        self._held_out.clear()
        self.remark = ""

    def rows(self, step: int, most: int | None = None) -> list[Row]:
        """Answers of a step that were learned from, long texts cut; at most so many."""
        return [cut(row) for row in self._rows(self._answers.get(step, [])[:most])]

    def held_out(self, most: int) -> list[tuple[Row, Row]]:
        """Pair the answers to each held-out problem before and after; those first that changed, and at most so many."""
        if not self._held_out:
            return []
        first, last = ({str(row.get("prompt")): row for row in self._rows(self._held_out[step])} for step in self._ends)
        pairs = [(first.get(prompt, row), row) for prompt, row in last.items()]
        pairs.sort(key=lambda pair: pair[0].get("response") == pair[1].get("response"))  # stable
        return [(cut(before), cut(after)) for before, after in pairs[:most]]

    @property
    def _ends(self) -> tuple[int, int]:
        return min(self._held_out), max(self._held_out)

    def _rows(self, places: list[tuple[int, int]]) -> Iterator[Row]:
        if not places:
            return
        with open_regular(self._path, links=False) as file:
            for start, length in places:
                file.seek(start)
                if (row := _row(file.read(length))) is not None:
                    yield row


def cut(row: Row) -> Row:
    """A row whose texts and tokens are no more than a page shows."""
    short: dict[str, Any] = {}
    for name, value in row.items():
        long = isinstance(value, str) and len(value) > MOST_TEXT
        short[name] = f"{value[:MOST_TEXT]}… ({len(value):,} characters)" if long else value
    if isinstance(spans := row.get("read"), list):
        short["read"] = [[begin, min(end, MOST_TEXT)] for begin, end in spans if begin < MOST_TEXT]
    if isinstance(turns := row.get("turns"), list):
        short["turns"] = [
            cut(turn) | {"tokens": turn.get("tokens")} for turn in turns[:MOST_TURNS] if isinstance(turn, dict)
        ]
    if isinstance(tokens := row.get("tokens"), dict):
        lists = {name: tokens[name] for name in _TOKENS if isinstance(tokens.get(name), list)}
        short["tokens"] = {name: each[:MOST_TOKENS] for name, each in lists.items()}
        left_out = max(map(len, lists.values()), default=0) - MOST_TOKENS
        if (excess := max(left_out, 0) + int(tokens.get("cut") or 0)) > 0:
            short["tokens"]["cut"] = excess
    return short


def _head(line: bytes) -> tuple[int, bool] | None:
    """(step, whether it is held-out) of a line; None if it is none."""
    if (match := _BEGINS.match(line)) is not None:
        return int(match[1]), _HELD_OUT in line
    row = _row(line)
    step = None if row is None else row.get("step")
    return None if row is None or not isinstance(step, int) else (step, row.get("kind") == HELD_OUT)


def _row(line: bytes) -> Row | None:
    try:
        row = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


VIDEOS = "videos"
"""Directory of a run's videos."""
_EVALUATION = "evaluation/"
_STEP = re.compile(r"step_(\d+)")
_PLAYED = (".mp4", ".webm", ".webp", ".gif")
"""Browsers play these; the last two are pictures to them."""
MOST_EPISODES = 200
"""The newest that a page offers."""


def success(metrics: MetricRows) -> list[dict[str, Any]]:
    """How often the tasks of each suite were solved in the first and the last trials; empty where nothing tells it.

    Args:
        metrics: of all steps, 0 included.
    """
    counts = [name for name in metrics.names if name.startswith(_EVALUATION) and name.endswith("/episodes")]
    tried = np.flatnonzero(np.any([~np.isnan(metrics.column(name)) for name in counts], axis=0)) if counts else ()
    evaluations = [by_task for place in tried if (by_task := _success_by_task(metrics[int(place)]))]
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    return [
        {name: getattr(row, name) for name in ("suite", "task", "name", "episodes", "success", "low", "high")}
        | {"before": first[place].success if place in first else None, "return": row.total}
        for place, row in last.items()
    ]


def episodes(directory: Path) -> list[dict[str, Any]]:
    """The videos of a run, the newest step first and of a step failures first.

    Args:
        directory: of the run.
    """
    videos = sorted(_videos(directory / VIDEOS), key=lambda row: (-row["step"], row["success"] is True, row["video"]))
    return videos[:MOST_EPISODES]


def _videos(directory: Path) -> Iterator[dict[str, Any]]:
    for path in directory.rglob("*"):
        relative = path.relative_to(directory)
        numbered = _STEP.fullmatch(relative.parts[0])
        if path.suffix not in _PLAYED or numbered is None or path.name.startswith("."):
            continue
        ends = {"-success": True, "-failure": False}
        solved = next((value for end, value in ends.items() if path.stem.endswith(end)), None)
        where = {"video": relative.as_posix(), "task": "/".join(relative.parts[1:-1])}
        yield {"step": int(numbered[1]), "success": solved, **where}


def _success_by_task(metrics: Mapping[str, Any]) -> dict[tuple[str, str], SuccessRow]:
    numbers = {
        name.removeprefix(_EVALUATION): value
        for name, value in metrics.items()
        if name.startswith(_EVALUATION) and isinstance(value, int | float)
    }
    return {(row.suite, row.task): row for row in success_rows(numbers) if row.success is not None}


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
    """Contents of a run directory for a page, lanes apart."""

    name: str
    """Name of the run."""
    config: Mapping[str, Any]
    """The resolved configuration; empty if it cannot be read."""
    config_text: str
    """The configuration as it was written."""
    environment: Mapping[str, Any]
    """On what it ran."""
    metrics: MetricRows
    """Metrics of all steps; step 0 is what was known before the first one."""
    answers: Mapping[int, Sequence[Row]]
    """Sampled answers of a few steps, the first and the last among them."""
    held_out: Sequence[tuple[Row, Row]]
    """Answers to each held-out problem before and after; those first that changed."""
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
        """Return the median of a metric over all steps; None if it has no value."""
        values = self.values(name)
        return statistics.median(values) if values else None

    def points(self, name: str, first: int = 0) -> list[tuple[int, float]]:
        """(step, value) of a metric from a step on, where it has one."""
        values = self.metrics.column(name).tolist()
        pairs = zip(self.metrics.steps, values, strict=True)
        return [(step, value) for step, value in pairs if value == value and step >= first]

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(step, mean reward on held-out problems), step 0 included."""
        return self.points(ACCURACY)

    @property
    def best(self) -> tuple[str, int, float] | None:
        """(metric, step, value) of the best evaluation after a step, where the configuration asks for one."""
        settings = self.config.get("checkpoint")
        metric = settings.get("best") if isinstance(settings, Mapping) else None
        values = self.points(str(metric), first=1) if metric else []
        if not values:
            return None
        sign = -1 if isinstance(settings, Mapping) and settings.get("best_mode") == "min" else 1
        step, value = max(values, key=lambda pair: sign * pair[1])  # the first of equal ones, as the run takes it
        return str(metric), step, value

    @property
    def graded(self) -> bool:
        """Some reward of an evaluation was neither 0 nor 1, so that its mean is no share of right answers."""
        return any(value for _, value in self.points(GRADED))

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
    config = _mapping(text, parse_yaml)
    return RunData(
        name=str(config.get("name", directory.resolve().name)),
        config=config,
        config_text=text,
        environment=_mapping(_text(directory / ENVIRONMENT), parse_json),
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
    rows_by_step: dict[int, list[Row]] = {}
    characters = 0
    for share in _SHOWN_STEPS:
        step = steps[round(share * (len(steps) - 1))]
        if step in rows_by_step or (len(rows_by_step) >= _SHOWN_ANYWAY and characters > MOST_ANSWERS):
            continue
        rows_by_step[step] = samples.rows(step, SHOWN_SAMPLES)
        characters += len(json.dumps(rows_by_step[step]))
    return dict(sorted(rows_by_step.items()))


def _text(path: Path) -> str:
    try:
        return read_bytes(path, links=False).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(text: str, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    """The mapping that a text holds; an empty one where it is none, of which a page shows the text as it is."""
    try:
        value = parse(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


EDGE = 5
"""Steps at both ends whose mean reward is compared: one step alone is noise."""
Fact = dict[str, str]
"""`label`, `value` and `note`; `before` where a value is set beside that of the run's beginning."""


def about(run: RunData) -> list[str]:
    """Describe the set-up of a run: algorithm, model, number of processes, start."""
    parts = [
        str(run.config.get("flow") or _named(run.config.get("algorithm"))),
        _model(run.config.get("model")),
        f"{run.environment['hosts']} processes" if run.environment.get("hosts", 1) != 1 else "",
        str(run.environment.get("started", "")).replace("T", " "),
    ]
    return [each for each in parts if each]


def headline(run: RunData) -> list[Fact]:
    """Return the most important figures of a run, in the order in which a page shows them."""
    return [*_learned(run), *_spoilt(run), *_spent(run)]


def time(run: RunData) -> dict[str, Any]:
    """Where the time of a typical step went; empty where that is not known.

    Returns:
        `step`, seconds; `over`, the steps that it is a mean of, in words; and `parts`: pairs of an activity and its
        seconds. Roles work at the same time, so the parts may add up to more than the step.
    """
    names = [name for name in (*ACTIVITIES, "switching", "overlap", "other") if run.values(f"timing/{name}")]
    steps = _steps(run, [f"timing/{name}" for name in names])
    means = typical(steps) if names and steps else {}
    if not means.get("timing/step"):
        return {}
    parts = [(name, means.get(f"timing/{name}", 0.0)) for name in names]
    return {"step": means["timing/step"], "over": over(steps), "parts": parts}


def possible(run: RunData) -> dict[str, Any]:
    """How far a step was from what is possible; empty where the run does not tell.

    Returns:
        `step`, seconds, and `over`, as in `time`; `efficiency`, a share; `devices`; `device`, how much of them was
        used, in words, "" where that is not known; `idles`, that this is the larger loss; and `parts`: (name, seconds,
        meaning), the least possible first, which add up to the step.
    """
    means = _typical(run)
    if not means:
        return {}
    which, device = binding(means), _device(run)
    least = ("the least possible", means["bound/seconds"], f"{which}: {BINDING[which]}")
    return {
        "step": means["timing/step"],
        "over": over(_steps(run)),
        "efficiency": means["bound/efficiency"],
        "devices": round(means["bound/devices"]),
        "device": of_the_device(means, device).replace("%", " %"),
        "idles": idles_most(means, device),
        "parts": [least, *((part, means.get(f"lost/{part}", 0.0), MEANINGS[part]) for part in PARTS)],
    }


def _device(run: RunData) -> str:
    """Return the name of a run's devices: its first GPU, or the CPU."""
    devices = run.environment.get("devices")
    return (
        str(devices[0]) if isinstance(devices, list) and devices else f"CPU, {run.environment.get('cpus', '?')} cores"
    )


def side_by_side(run: RunData) -> list[tuple[str, str]]:
    """Return the figures by which runs are compared, each with its value; empty where a run does not tell it."""
    rewards, means = run.values("reward/mean")[-EDGE:], _typical(run)
    step = _step_seconds(run)
    facts = [
        ("held-out problems", _newest(run)),
        (f"mean reward of the last {EDGE} steps", f"{sum(rewards) / len(rewards):.3f}" if rewards else ""),
        ("steps", f"{run.steps} of {run.planned}"),
        ("seconds of a step", f"{step:.3g}" if step is not None else ""),
        *(
            (what, "" if (value := run.median(name)) is None else f"{value:{style}}")
            for what, name, style in (
                ("tokens per second (median)", "tokens_per_s", ",.0f"),
                ("environment steps per second (median)", "env_steps_per_s", ",.0f"),
            )
        ),
        ("of what is possible", f"{means['bound/efficiency']:.0%}" if means else ""),
        (
            "of what the devices could do",
            f"{means['bound/device'] / step:.1%}" if "bound/device" in means and step else "",
        ),
        ("seconds in all", f"{run.seconds:.0f}"),
    ]
    return [(what, value) for what, value in facts if value]


def _typical(run: RunData) -> dict[str, float]:
    """See `verdict.typical`, which needs these metrics alone: rows of all of them take long to make."""
    names = [name for name in run.metrics.names if name.startswith(FAMILIES)]
    return typical(_steps(run, names)) if {"timing/step", "bound/seconds"} <= set(run.metrics.names) else {}


def _step_seconds(run: RunData) -> float | None:
    """A typical step's, as the run itself prints it; None where no step was timed."""
    return typical(_steps(run)).get("timing/step")


def _steps(run: RunData, names: Iterable[str] = ()) -> list[dict[str, float]]:
    """Some metrics of every step after step 0, and those by which `typical` chooses steps."""
    there = [name for name in dict.fromkeys(("timing/step", "bound/seconds", *names)) if name in run.metrics.names]
    table = zip(*(run.metrics.column(name).tolist() for name in there), strict=True)
    return [
        {name: value for name, value in zip(there, row, strict=True) if value == value}
        for step, row in zip(run.metrics.steps, table, strict=bool(there))
        if step > 0
    ]


def _newest(run: RunData) -> str:
    """The newest evaluation, and after which step it was made; empty without one."""
    if not run.accuracies:
        return ""
    step, value = run.accuracies[-1]
    return f"{value:.{'3f' if run.graded else '1%'}} {f'after step {step}' if step else 'before step 1'}"


def _named(algorithm: Any) -> str:
    return str(algorithm.get("name", "")) if isinstance(algorithm, Mapping) else ""


def _model(model: Any) -> str:
    if not isinstance(model, Mapping):
        return ""
    architecture = model.get("config")
    return str(
        model.get("path") or (f"a new {architecture.get('model_type')}" if isinstance(architecture, Mapping) else "")
    )


def _tried(run: RunData) -> Iterator[Fact]:
    """How well a policy acts in its trials, before and after: solved ones, or else the return, which any simulator
    tells."""
    for metric, label, style in (
        ("evaluation/success_once", "Solved in trials", ".1%"),
        ("evaluation/reward/mean", "Return in trials", ".2f"),
    ):
        if values := run.points(metric):
            (_, before), (step, after) = values[0], values[-1]
            episodes = run.points("evaluation/episodes")
            note = f"of {episodes[-1][1]:,.0f} episodes, after step {step}" if episodes else f"after step {step}"
            yield _fact(label, f"{after:{style}}", note) | ({"before": f"{before:{style}}"} if len(values) > 1 else {})
            return


def _learned(run: RunData) -> Iterator[Fact]:
    if not run.accuracies:
        yield from _tried(run)
    if run.accuracies:
        (_, before), (step, after) = run.accuracies[0], run.accuracies[-1]
        label, style = ("Held-out reward", ".3f") if run.graded else ("Accuracy", ".1%")
        fact = {"label": label, "value": f"{after:{style}}", "note": f"on held-out problems, after step {step}"}
        if len(run.accuracies) > 1:
            gained = f"{after - before:+.3f}" if run.graded else f"{(after - before) * 100:+.1f} points"
            fact |= {"before": f"{before:{style}}", "note": f"{gained} {fact['note']}"}
        yield fact
    if run.best is not None:
        metric, step, value = run.best
        yield _fact("Best", f"{value:.4g}", f"{metric}, after step {step}; in checkpoints/best")
    if rewards := run.values("reward/mean"):
        edge = max(1, min(EDGE, len(rewards) // 2))  # both ends have steps of their own
        first, last = sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge
        note = f"of the first and last {edge} steps" if edge > 1 else "of the first and the last step"
        yield {**_fact("Mean reward", f"{last:.3f}", note), "before": f"{first:.3f}"}


def _spoilt(run: RunData) -> Iterator[Fact]:
    if (failed := run.values("reward/failed")) and any(failed):
        why = f"; the first: {run.remark}" if run.remark else ""
        yield _fact("Not scored", f"{sum(failed) / len(failed):.1%}", f"of answers, over all steps{why}")
    left_out, cut = (max(run.values(f"data/{name}"), default=0.0) for name in ("dropped", "truncated"))
    if left_out or cut:
        yield _fact("Prompts too long", f"{left_out:,.0f}", f"left out, and {cut:,.0f} cut at their beginning")
    if unusable := max(run.values("data/unusable"), default=0.0):
        yield _fact("Rows left out", f"{unusable:,.0f}", "that cannot be used; the first is among the alarms")


def _spent(run: RunData) -> Iterator[Fact]:
    if run.steps:
        step_time = _step_seconds(run)
        note = f"{step_time:.3g} s per step" if step_time is not None else ""
        yield _fact("Time", _duration(run.seconds), note)
    for metric, label, counted in (
        ("tokens_per_s", "Tokens per second", ("samples", "answers")),
        ("env_steps_per_s", "Environment steps per second", ("env_steps", "steps of environments")),
    ):
        if (speed := run.median(metric)) is not None:
            total = sum(run.values(counted[0]))
            yield _fact(label, f"{speed:,.0f}", f"median; {total:,.0f} {counted[1]} in all" if total else "median")


def _fact(label: str, value: str, note: str) -> Fact:
    return {"label": label, "value": value, "note": note}


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, hours = whole // 60, whole / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:.1f} h"


SECTIONS = {
    "Learning": "reward/mean evaluation/accuracy success_once evaluation/success_once episodes/length "
    "response_length/mean truncated groups/uniform loss reward/failed outcomes/timeout outcomes/error",
    "Optimisation": "entropy kl clip_frac grad_norm ratio/max lr",
    "Sampler against trainer": "mismatch/mean mismatch/max",
    "Staleness": "staleness/mean staleness/max staleness/ess",
    "Experts": "moe/load_max moe/dead_experts moe/aux_loss moe/route_drift",
    "Speed": "tokens_per_s env_steps_per_s timing/step bound/efficiency mfu/trainer mbu/rollout timing/generation "
    "timing/simulation timing/training timing/sync timing/other",
}
"""Curves that are shown at once, by heading; those of all other metrics unfold."""
_OWN_KEYS = ("name", "output_dir")
"""Keys of a configuration in which runs are never alike."""
MOST_SENTENCES = 200
"""The newest that a page shows."""
MOST_OVERLAPS = 1000
FINEST = 1 / 1500
"""Share of a step; narrower holes between stretches of one kind are closed: no picture shows them."""


def run_state(
    directory: Path, *, traced: bool = True, metrics: MetricRows | None = None, samples: Samples | None = None
) -> dict[str, Any]:
    """The state of a run, from its files. It blocks, for seconds if the trace is long.

    Args:
        directory: of the run. It needs metrics.jsonl; what else is there is told.
        traced: read trace.json too, for `lanes`.
        metrics, samples: what was read of it before and is up to date; None reads them.

    Raises:
        FileNotFoundError: this is no run's directory.
        ValueError: its trace.json is none.
    """
    return {
        **state_of(read_run(directory, metrics, samples)),
        **events_in(directory),
        "directory": str(directory),
        "lanes": run_lanes(directory) if traced else [],
    }


def state_of(run: RunData) -> dict[str, Any]:
    """Make the part of a run's state that follows from metrics, samples and set-up.

    Args:
        run: its files, as `read_run` reads them.
    """
    return {
        "name": run.name,
        "status": "finished" if run.steps >= run.planned else "unfinished",
        "step": run.steps,
        "steps": run.planned,
        "began": run.environment.get("started"),
        "about": about(run),
        "config_text": run.config_text,
        "config": {key: value for key, value in flat(run.config) if key not in _OWN_KEYS},
        "environment": {name: value for name, value in run.environment.items() if name != "steps"},
        "curves": run.metrics.curves(MOST_POINTS),
        "sections": [[heading, names.split()] for heading, names in SECTIONS.items()],
        "facts": headline(run),
        "compared": side_by_side(run),
        "time": time(run),
        "possible": possible(run),
        "success": success(run.metrics),
        "answers": {"steps": list(run.sampled), "shown": {str(step): rows for step, rows in run.answers.items()}},
        "held_out": [list(pair) for pair in run.held_out],
    }


def events_in(directory: Path) -> dict[str, Any]:
    """Make the part of a run's state that follows from smaller files: sentences, causes, alarms, and the videos of
    episodes."""
    explained = _lines(directory / EXPLAINED)
    return {
        "sentences": explained[-MOST_SENTENCES:],
        "causes": causes(explained),
        "alarms": _lines(directory / ALARMS),
        "episodes": episodes(directory),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [row for _, block in Appended(path).blocks() for row in objects(block.splitlines())]


def causes(explained: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add up the causes for which steps waited, the costliest first.

    Args:
        explained: lines of explained.jsonl, in order.

    Returns:
        Of each cause `cause`, `steps`, `seconds`, and of the last step that tells one its `text`, `change` and `saves`.
    """
    by_cause: dict[str, dict[str, Any]] = {}
    for line in explained:
        name = line.get("cause")
        if not isinstance(name, str) or name == "none":
            continue
        one = by_cause.setdefault(name, {"cause": name, "steps": 0, "seconds": 0.0, "change": None, "saves": 0.0})
        one["steps"] += 1
        one["seconds"] += line.get("seconds") or 0.0
        one["text"] = line.get("text")
        if line.get("change"):
            one["change"], one["saves"] = line["change"], line.get("saves") or 0.0
    return sorted(by_cause.values(), key=lambda one: -one["seconds"])


def run_lanes(directory: Path) -> list[dict[str, Any]]:
    """Return the lanes of every actor in an early, a middle and a late step; empty without a trace.

    Raises:
        ValueError: trace.json is none.
    """
    path = directory / "trace.json"
    if not path.is_file():
        return []
    trace = Trace(path)
    return [lanes_json(each) for each in actor_lanes(trace, trace.first_middle_last())]


def lanes_json(lanes: Lanes) -> dict[str, Any]:
    """Lanes as JSON knows them: `title`, `step`, `seconds`, `timing`, `overlap` (when two activities went on), and
    `lanes`, each with `host`, `actor` and `stretches` of (activity, start, end), seconds since the step began."""
    return {
        "title": lanes.title,
        "step": lanes.step,
        "seconds": lanes.seconds,
        "timing": dict(lanes.timing),
        "overlap": [(round(start, 5), round(end, 5)) for start, end in lanes.overlap()][:MOST_OVERLAPS],
        "lanes": [
            {
                "host": lane.host,
                "actor": lane.name,
                "stretches": list(_joined(lane.stretches, lanes.seconds * FINEST)),
            }
            for lane in lanes.lanes
        ],
    }


def _joined(stretches: Sequence[Stretch], finest: float) -> Iterator[tuple[str, float, float]]:
    """Stretches of one lane, those of one activity as one where less than `finest` seconds lie between them."""
    by_activity: dict[str, list[list[float]]] = {}
    for each in stretches:
        times = by_activity.setdefault(each.activity, [])
        if times and each.start - times[-1][1] < finest:
            times[-1][1] = max(times[-1][1], each.end)
        else:
            times.append([each.start, each.end])
    every = (
        (activity, round(start, 5), round(end, 5)) for activity, times in by_activity.items() for start, end in times
    )
    yield from sorted(every, key=lambda each: each[1])
