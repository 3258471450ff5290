"""What a page says of a run in numbers: its headline, where the time of a step went, how far from the possible it was.

In: a `RunData`. Out: lists and mappings as JSON knows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlinf.metrics.html.run_data import RunData
from rlinf.metrics.timing import ACTIVITIES
from rlinf.metrics.verdict import BINDING, MEANINGS, PARTS, binding, over, typical

EDGE = 5
"""Steps at both ends whose mean reward is compared: one step alone is noise."""
Fact = dict[str, str]
"""`label`, `value` and `note`; `before` where a value is set beside that of the run's beginning."""


def about(run: RunData) -> list[str]:
    """What was trained, by what, on how many processes, since when."""
    told = [
        str(run.config.get("flow") or _named(run.config.get("algorithm"))),
        _model(run.config.get("model")),
        f"{run.environment['hosts']} processes" if run.environment.get("hosts", 1) != 1 else "",
        str(run.environment.get("started", "")).replace("T", " "),
    ]
    return [each for each in told if each]


def headline(run: RunData) -> list[Fact]:
    """What one wants to know of a run first."""
    return [*_learned(run), *_spoilt(run), *_spent(run)]


def time(run: RunData) -> dict[str, Any]:
    """Where the time of a typical step went; empty where that is not known.

    Returns:
        `step`, seconds; `over`, the steps that it is a mean of, in words; and `parts`: pairs of an activity and its
        seconds. Roles work at the same time, so the parts may add up to more than the step.
    """
    names = [name for name in (*ACTIVITIES, "switching", "overlap", "other") if run.values(f"timing/{name}")]
    steps = _steps(run, [f"timing/{name}" for name in names])
    told = typical(steps) if names and steps else {}
    if not told.get("timing/step"):
        return {}
    parts = [(name, told.get(f"timing/{name}", 0.0)) for name in names]
    return {"step": told["timing/step"], "over": over(steps), "parts": parts}


def possible(run: RunData) -> dict[str, Any]:
    """How far a step was from what is possible; empty where the run does not tell.

    Returns:
        `step`, seconds, and `over`, as in `time`; `efficiency`, a share; `devices`; and `parts`: (name, seconds,
        meaning), the least possible first, which add up to the step.
    """
    told = _typical(run)
    if not told:
        return {}
    which = binding(told)
    least = ("the least possible", told["bound/seconds"], f"{which}: {BINDING[which]}")
    return {
        "step": told["timing/step"],
        "over": over(_steps(run)),
        "efficiency": told["bound/efficiency"],
        "devices": round(told["bound/devices"]),
        "parts": [least, *((part, told.get(f"lost/{part}", 0.0), MEANINGS[part]) for part in PARTS)],
    }


def side_by_side(run: RunData) -> list[tuple[str, str]]:
    """What runs are compared by, each with its value; what a run does not tell is left out."""
    rewards, told = run.values("reward/mean")[-EDGE:], _typical(run)
    step = _step_seconds(run)
    found = [
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
        ("of what is possible", f"{told['bound/efficiency']:.0%}" if told else ""),
        ("seconds in all", f"{run.seconds:.0f}"),
    ]
    return [(what, value) for what, value in found if value]


def _typical(run: RunData) -> dict[str, float]:
    """See `verdict.typical`, which needs these metrics alone: rows of all of them take long to make."""
    names = [name for name in run.metrics.names if name.startswith(("bound/", "lost/"))]
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
    made = model.get("config")
    return str(model.get("path") or (f"a new {made.get('model_type')}" if isinstance(made, Mapping) else ""))


def _tried(run: RunData) -> Iterator[Fact]:
    """How well a policy acts in its trials, before and after: solved ones, or else the return, which any simulator
    tells."""
    for metric, label, style in (
        ("evaluation/success_once", "Solved in trials", ".1%"),
        ("evaluation/reward/mean", "Return in trials", ".2f"),
    ):
        if told := run.told(metric):
            (_, before), (step, after) = told[0], told[-1]
            episodes = run.told("evaluation/episodes")
            note = f"of {episodes[-1][1]:,.0f} episodes, after step {step}" if episodes else f"after step {step}"
            yield _fact(label, f"{after:{style}}", note) | ({"before": f"{before:{style}}"} if len(told) > 1 else {})
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
