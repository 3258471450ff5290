"""From figures to an outcome: the bounds of a check, what breaks them, and what a rehearsal leaves out."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.scale import NotRun, Outcome, Scale

Figures = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound of one figure."""

    figure: str
    """Its name."""
    least: float | None = None
    """It is at least this."""
    most: float | None = None
    """It is at most this."""
    equals: str | int | None = None
    """It is this."""
    needs: str = ""
    """A need that a CPU does not meet; without it the bound is left out of a rehearsal, which says so."""

    def broken_by(self, figures: Figures) -> str | None:
        """Say what is wrong, in words; None: nothing. A figure that is missing or no number breaks every bound."""
        found = figures.get(self.figure)
        if found is None:
            return f"{self.figure} was not measured"
        if self.equals is not None:
            return None if found == self.equals else f"{self.figure} is {found} and should be {self.equals}"
        if isinstance(found, str) or math.isnan(found):
            return f"{self.figure} is {found}, which is no number"
        if self.least is not None and found < self.least:
            return f"{self.figure} {found:.4g} < {self.least:g}"
        if self.most is not None and found > self.most:
            return f"{self.figure} {found:.4g} > {self.most:g}"
        return None

    def __str__(self) -> str:
        if self.equals is not None:
            return f"{self.figure} = {self.equals}"
        ends = [*([f">= {self.least:g}"] if self.least is not None else [])]
        ends += [f"<= {self.most:g}"] if self.most is not None else []
        return f"{self.figure} {' and '.join(ends)}"


def judge(scale: Scale, figures: Figures, bounds: Sequence[Bound]) -> Outcome:
    """Passed if no bound is broken; says which are, or what a rehearsal did without."""
    held = [bound for bound in bounds if not (scale.rehearse and bound.needs)]
    wrong = [text for bound in held if (text := bound.broken_by(figures)) is not None]
    without = dict.fromkeys(bound.needs for bound in bounds if scale.rehearse and bound.needs)
    said = "; ".join(wrong) if wrong else "; ".join(map(str, held))
    return Outcome(not wrong, figures, said + (f" (rehearsed without: {', '.join(without)})" if without else ""))


def required(package: str, why: str) -> None:
    """Go on only if a package is there that the check takes.

    Raises:
        NotRun: it is not.
    """
    try:
        importlib.import_module(package)
    except ImportError as missing:
        raise NotRun(f"{missing.name or package} is not installed, {why}") from missing
