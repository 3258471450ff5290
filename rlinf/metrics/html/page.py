"""report.html: one file that shows a run, without anything from outside.

In: what `run_data` read, and lanes. Out: a page, in the frame of `document`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rlinf.metrics.html.answers import answers_section
from rlinf.metrics.html.document import curves_section, document
from rlinf.metrics.html.lanes import Lanes
from rlinf.metrics.html.lanes_svg import actor_lanes_svg
from rlinf.metrics.html.run_data import RunData, curves
from rlinf.metrics.html.success import success_section
from rlinf.metrics.timing import ACTIVITIES
from rlinf.metrics.verdict import BINDING, MEANINGS, PARTS, binding, typical

EDGE = 5
"""Steps at both ends whose mean reward is compared: one step alone is noise."""


def page(run: RunData, lanes: Sequence[Lanes]) -> str:
    """The page of a run.

    Args:
        run: its files.
        lanes: of a few steps; empty if there is no trace.
    """
    numbers = {"name": run.name, **curves([*run.before, *run.rows])}
    body = "".join(
        (
            _header(run),
            f'<section class="headline">{"".join(_headline(run))}</section>',
            success_section([*run.before, *run.rows]),
            curves_section([numbers]) if run.rows else "<p>No step is over yet.</p>",
            _where_time_went(run),
            _beside_the_possible(run),
            _lanes(lanes),
            answers_section(run),
            _setup(run),
        )
    )
    return document(f"{run.name}: training report", body, [numbers])


def _header(run: RunData) -> str:
    over = run.steps >= run.planned
    state = f"{run.steps} steps" if over else f"{run.steps} of {run.planned} steps"
    about = [
        str(run.config.get("flow") or _named(run.config.get("algorithm"))),
        _model(run.config.get("model")),
        f"{run.environment['hosts']} processes" if run.environment.get("hosts", 1) != 1 else "",
        str(run.environment.get("started", "")).replace("T", " "),
    ]
    return (
        f'<header><h1>{escape(run.name)}<span class="state{"" if over else " open"}">{state}</span></h1>'
        f"<p>{escape(' · '.join(filter(None, about)))}</p></header>"
    )


def _named(algorithm: Any) -> str:
    return str(algorithm.get("name", "")) if isinstance(algorithm, Mapping) else ""


def _model(model: Any) -> str:
    if not isinstance(model, Mapping):
        return ""
    made = model.get("config")
    return str(model.get("path") or (f"a new {made.get('model_type')}" if isinstance(made, Mapping) else ""))


def _headline(run: RunData) -> Iterator[str]:
    if run.accuracies:
        (_, before), (step, after) = run.accuracies[0], run.accuracies[-1]
        label, style = ("Held-out reward", ".3f") if run.graded else ("Accuracy", ".1%")
        shown, note = f"{after:{style}}", f"on held-out problems, after step {step}"
        if len(run.accuracies) > 1:
            shown = f"<small>{before:{style}} →</small> {shown}"
            note = (f"{after - before:+.3f} " if run.graded else f"{(after - before) * 100:+.1f} points ") + note
        yield _fact(label, shown, note)
    if run.best is not None:
        metric, step, value = run.best
        yield _fact("Best", f"{value:.4g}", f"{metric}, after step {step}; in checkpoints/best")
    if rewards := run.values("reward/mean"):
        edge = min(EDGE, len(rewards))
        first, last = sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge
        yield _fact("Mean reward", f"<small>{first:.3f} →</small> {last:.3f}", f"of the first and last {edge} steps")
    if (failed := run.values("reward/failed")) and any(failed):
        why = f"; the first: {run.remark}" if run.remark else ""
        yield _fact("Not scored", f"{sum(failed) / len(failed):.1%}", f"of answers, over all steps{why}")
    left_out, cut = (max(run.values(f"data/{name}"), default=0.0) for name in ("dropped", "truncated"))
    if left_out or cut:
        yield _fact("Prompts too long", f"{left_out:,.0f}", f"left out, and {cut:,.0f} cut at their beginning")
    if run.rows:
        step_time = run.median("timing/step")
        note = f"{step_time:.3g} s per step (median)" if step_time is not None else ""
        yield _fact("Time", _duration(run.seconds), note)
    if (speed := run.median("tokens_per_s")) is not None:
        answers = sum(run.values("samples"))
        yield _fact(
            "Tokens per second", f"{speed:,.0f}", f"median; {answers:,.0f} answers in all" if answers else "median"
        )


def _fact(label: str, value: str, note: str) -> str:
    return (
        f'<div class="card"><div class="label">{label}</div><div class="value">{value}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _where_time_went(run: RunData) -> str:
    step = run.median("timing/step")
    told = [(name, run.median(f"timing/{name}")) for name in (*ACTIVITIES, "switching", "overlap", "other")]
    found = [(name, seconds) for name, seconds in told if seconds is not None]
    if not step or not found:
        return ""
    labels = {"overlap": "side by side", "other": "none of these"}
    bars = "".join(
        f'<span>{labels.get(name, name)}</span><span class="bar"><i class="{name}" style="width:'
        f'{min(1.0, seconds / step):.1%}"></i></span>'
        f'<span class="number">{seconds:.3g} s, {seconds / step:.0%}</span>'
        for name, seconds in found
    )
    return (
        "<section><h2>Where the time of a step went</h2><p>Medians over all steps, beside the "
        f"{step:.3g} s of a step. Roles work at the same time, so the parts may add up to more than the whole.</p>"
        f'<div class="card bars">{bars}</div></section>'
    )


def _beside_the_possible(run: RunData) -> str:
    told = typical(run.rows)
    if not told:
        return ""
    step, which, devices = told["timing/step"], binding(told), round(told["bound/devices"])
    parts = [("the least possible", told["bound/seconds"], f"{which}: {BINDING[which]}", "least")]
    parts += [(part, told.get(f"lost/{part}", 0.0), MEANINGS[part], part) for part in PARTS]
    before, bars = 0.0, []
    for name, seconds, meaning, style in parts:
        start, share = before / step, max(0.0, seconds / step)
        before += seconds
        bars.append(
            f"<span>{name}<small>{meaning}</small></span>"
            f'<span class="bar"><i class="{style}" style="margin-left:{start:.1%};width:{share:.1%}"></i></span>'
            f'<span class="number">{seconds:.3f} s, {seconds / step:.0%}</span>'
        )
    return (
        f"<section><h2>How far from the possible</h2><p>{told['bound/efficiency']:.0%} of what is possible on "
        f"{devices} device{'s' if devices != 1 else ''}, at what the roles cost in this run. The parts add up to the "
        f"{step:.3g} s of a step (means over the middle half of the steps).</p>"
        f'<div class="card bars possible">{"".join(bars)}</div></section>'
    )


def _lanes(steps: Sequence[Lanes]) -> str:
    if not steps:
        return ""
    return (
        "<section><h2>Who did what when</h2><p>Steps early, in the middle and at the end of the run, on one time "
        "scale. trace.json has all of it, for ui.perfetto.dev.</p>"
        f'<div class="card picture">{actor_lanes_svg(steps, card=False)}</div></section>'
    )


def _setup(run: RunData) -> str:
    told = {
        name: ", ".join(value) if isinstance(value, list) else value
        for name, value in run.environment.items()
        if name != "steps"
    }
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
        for name, value in told.items()
        if value not in ("", None)
    )
    parts = ["<section><h2>Set-up</h2><p>What it takes to run it again.</p>"]
    if run.config_text:
        parts.append(
            f'<details class="card"><summary>Configuration</summary><pre>{escape(run.config_text)}</pre></details>'
        )
    if rows:
        parts.append(f'<details class="card"><summary>Environment</summary><table>{rows}</table></details>')
    return "".join(parts) + "</section>" if len(parts) > 1 else ""


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, hours = whole // 60, whole / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:.1f} h"
