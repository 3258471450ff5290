"""Section of the report page with sampled responses. Model output is untrusted, so all of it is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rlinf.metrics.html.run_data import RunData
from rlinf.metrics.html.state.samples import Row

LONG = 160
"""Characters; with longer answers the steps stand below each other instead of side by side."""


def answers_section(run: RunData) -> str:
    """Held-out problems before and after, and sampled answers of an early, a middle and a late step."""
    parts = [*_held_out(run), *_sampled(run)]
    return f"<section><h2>What the model wrote</h2>{''.join(parts)}</section>" if parts else ""


def _held_out(run: RunData) -> Sequence[str]:
    if not run.held_out:
        return []
    steps = f"after step {run.held_out[0][1].get('step')}"
    rows = "".join(
        f"<tr>{_cell(after.get('prompt'))}{_cell(before.get('response'), before)}{_cell(after.get('response'), after)}"
        f"{_cell(after.get('answer'))}</tr>"
        for before, after in run.held_out
    )
    head = f"<tr><th>problem</th><th>before</th><th>{escape(steps)}</th><th>right answer</th></tr>"
    return [
        "<p>The same held-out problems before and after training; those whose answer changed come first.</p>",
        f'<div class="card scroll"><table>{head}{rows}</table></div>',
    ]


def _cell(text: Any, judged: Row | None = None) -> str:
    badge = "" if judged is None else f"{_badge(judged)} "
    return f'<td class="text"><div>{badge}{_text(text)}</div></td>'


def _sampled(run: RunData) -> Sequence[str]:
    if not run.answers:
        return []
    rows = [row for answers in run.answers.values() for row in answers]
    long = any(len(str(row.get("prompt"))) + len(str(row.get("response"))) > LONG for row in rows)
    columns = "".join(
        f'<div class="card"><h3>Step {step}</h3>{"".join(_by_prompt(answers))}</div>'
        for step, answers in run.answers.items()
    )
    return ["<h3>Answers that were learned from</h3>", f'<div class="answers{" long" if long else ""}">{columns}</div>']


def _by_prompt(rows: Sequence[Row]) -> Iterator[str]:
    """Answers, those to one prompt below it."""
    for prompt, answers in groupby(rows, key=lambda row: row.get("prompt")):
        yield f'<pre class="prompt">{_text(prompt)}</pre>'
        yield from map(_answer, answers)


def _answer(row: Row) -> str:
    facts = []
    if row.get("answer") not in (None, ""):
        facts.append(f"right answer {row['answer']}")
    if isinstance(row.get("advantage"), int | float):
        facts.append(f"advantage {row['advantage']:+.2f}")
    if row.get("length") is not None:
        facts.append(f"{row['length']} tokens")
    if row.get("outcome") not in (None, "ok"):
        facts.append(str(row["outcome"]))
    if isinstance(versions := row.get("versions"), list) and versions:
        facts.append(f"weights {'–'.join(str(version) for version in dict.fromkeys((versions[0], versions[-1])))}")
    if row.get("remark"):
        facts.append(str(row["remark"]))
    told = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return (
        f'<div class="answer"><pre>{_text(row.get("response"))}</pre><div class="facts">{_badge(row)}{told}</div></div>'
    )


def _badge(row: Row) -> str:
    reward = row.get("reward")
    if not isinstance(reward, int | float):
        return '<span class="badge">no reward</span>'
    return f'<span class="badge{" good" if reward > 0.5 else ""}">{reward:g}</span>'


def _text(value: Any) -> str:
    """Escaped; what would not be seen is told."""
    text = "" if value is None else str(value)
    return escape(text) if text.strip() else f'<span class="soft">(empty{", blanks" if text else ""})</span>'
