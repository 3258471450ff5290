"""Outcomes as a table, a row per recipe: for the terminal, and as Markdown inside a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.learning_recipes import CHANGES
from benchmarks.learning_runs import Outcome

HEADINGS = ("recipe", "before, %", "after, %", "error left, %", "minutes", "of processor", "learned")
BEGIN, END = "<!-- benchmarks.learning: table -->", "<!-- benchmarks.learning: end -->"
"""Between these lines of a page stands the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """One recipe."""

    recipe: str
    """Its name."""
    before: str
    """Accuracy of each seed at the start."""
    after: str
    """... and at the end."""
    error_left: str
    """Share of each seed's errors that is left."""
    minutes: str
    """Median over the seeds."""
    processor: str
    """Median of processor time."""
    verdict: str
    """`yes` if every seed at least halved its error, else what did not."""

    @property
    def cells(self) -> tuple[str, ...]:
        """All but the verdict."""
        return (self.recipe, self.before, self.after, self.error_left, self.minutes, self.processor)


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row per recipe, in the order in which recipes first appear."""
    found = []
    for recipe in dict.fromkeys(outcome.recipe for outcome in outcomes):
        seeds = [outcome for outcome in outcomes if outcome.recipe == recipe]
        ended = [outcome for outcome in seeds if not outcome.failure]
        found.append(
            Row(
                recipe,
                _each(outcome.before for outcome in ended),
                _each(outcome.after for outcome in ended),
                _each(outcome.error_left for outcome in ended),
                _median(outcome.minutes for outcome in ended),
                _median(outcome.processor_minutes for outcome in ended),
                _verdict(seeds),
            )
        )
    return found


def in_page(page: str, lines: Sequence[Row]) -> str:
    """The page with this table in place of the one between the two marks.

    Raises:
        ValueError: the page lacks the marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table: it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{markdown(lines)}\n{END}{after}"


def markdown(lines: Sequence[Row]) -> str:
    """The table, and below it what was changed for a recipe and why."""
    table = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for line in lines:
        verdict = line.verdict if line.verdict == "yes" else f"**{line.verdict}**"
        table.append(f"| {' | '.join((f'`{line.recipe}`', *line.cells[1:], verdict))} |")
    changes = [
        f"* `{line.recipe}`: "
        + "; ".join(f"`{' '.join(change.keys)}`, {change.why}" for change in CHANGES[line.recipe])
        for line in lines
        if line.recipe in CHANGES
    ]
    return "\n".join([*table, "", *changes]).rstrip()


def _each(shares: Iterable[float]) -> str:
    return ", ".join(f"{100 * share:.1f}" for share in shares)


def _median(minutes: Iterable[float]) -> str:
    known = list(minutes)
    return f"{statistics.median(known):.1f}" if known else ""


def _verdict(seeds: Sequence[Outcome]) -> str:
    if all(outcome.learned for outcome in seeds):
        return "yes"
    parts = []
    if missed := [str(outcome.seed) for outcome in seeds if not outcome.failure and not outcome.learned]:
        parts.append(f"no: seed {', '.join(missed)}")
    parts += dict.fromkeys(f"failed: {outcome.failure}" for outcome in seeds if outcome.failure)
    return "; ".join(parts)
