"""Bars of each measure, and whether its figures do. Imports no torch, so that the table is quick to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """One target of one measure."""

    words: str
    """The comparison in words, for the table."""
    figure: str
    """The measure's figure that is compared; its name ends in its unit."""
    least: float | None = None
    """The figure is to be at least this; or,"""
    most: float | None = None
    """at most this."""
    limit: str | None = None
    """The measure's figure that says what the card could do at most, in the same unit, where there is one."""

    @property
    def target(self) -> str:
        """For the table."""
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def verdict(self, figures: Mapping[str, Any]) -> str:
        """`met` or `LOST`; `not measured` where there is no such number."""
        found = figures.get(self.figure)
        if not isinstance(found, int | float):
            return "not measured"
        held = found >= self.least if self.least is not None else found <= (self.most or 0.0)
        return "met" if held else "LOST"


BARS: dict[str, tuple[Bar, ...]] = {
    "step": (
        Bar("GRPO step, GSM8K shape: share of the step in which the device works", "busy_share", least=0.85),
        Bar("GRPO step: share of publishing and switching", "publish_and_switch_share", most=0.03),
    ),
    "decode": tuple(
        Bar(
            f"decode 1.5B, {rows} rows x {context} tokens, graphed: step over the bandwidth limit",
            f"graphed_r{rows}_c{context}_over_limit_ratio",
            most=2.0,
        )
        for context in (512, 4096)
        for rows in (8, 64, 256, 512)
    ),
    "training": (Bar("trainer 1.5B, 16k tokens: MFU, the best way that fits", "best_mfu_share", least=0.40),),
    "publishing": (
        Bar("publish 1.5B, one process: seconds", "direct_bfloat16_s", most=0.2, limit="direct_bfloat16_limit_s"),
        Bar("publish 1.5B, one process: bytes through the host", "direct_bfloat16_host_bytes", most=0),
        Bar(
            "publish 1.5B, two processes on one card: seconds", "ipc_bfloat16_s", most=0.2, limit="ipc_bfloat16_limit_s"
        ),
        Bar("publish 1.5B, two processes on one card: bytes through the host", "ipc_bfloat16_host_bytes", most=0),
    ),
    "parking": (
        Bar("park 18.5 GB, later: GB/s", "park_later_gb_per_s", least=45.0, limit="to_host_limit_gb_per_s"),
        Bar("unpark 18.5 GB, later: GB/s", "unpark_later_gb_per_s", least=45.0, limit="to_device_limit_gb_per_s"),
        Bar("park 18.5 GB, first: seconds", "park_first_s", most=2.0),
    ),
    "head": (Bar("head, forward and backward: share of all but matrix products", "rest_share", most=0.30),),
    "prefill": (
        Bar(
            "prefill of 8k ragged tokens: TFLOP/s", "packed_tflop_per_s", least=400.0, limit="packed_limit_tflop_per_s"
        ),
    ),
    "large": (
        Bar(
            "decode 7B, 256 rows x 600 tokens, graphed: step over the bandwidth limit",
            "graphed_r256_c600_over_limit_ratio",
            most=1.5,
        ),
    ),
    "micro_batch": (
        Bar("micro-batch of 16k tokens: share of its time in which the device works", "large_busy_share", least=0.95),
        Bar("micro-batch of 16k tokens: waits of the host", "large_syncs", most=0),
    ),
    "launches": (
        Bar(
            "graphed decode: launches of the host a step (1, pages that fill up aside)",
            "graphed_launches_per_step",
            most=1.1,
        ),
        Bar("graphed decode: waits of the host a step (the same)", "graphed_syncs_per_step", most=1.1),
    ),
}
"""By measure. The figures behind them are those of the full shapes; a rehearsal has others, and is not judged."""


def judged(measure: str, figures: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Tell whether a measure reaches its bars, and which it does.

    Args:
        measure: a key of `BARS`.
        figures: what was measured.

    Returns:
        True when all are met, False when one is lost, None when none is lost but some were not measured; and the
        verdicts on one line.
    """
    verdicts = {bar: bar.verdict(figures) for bar in BARS[measure]}
    passed = False if "LOST" in verdicts.values() else None if "not measured" in verdicts.values() else True
    told = (f"{bar.figure} {_number(figures.get(bar.figure))} {bar.target}: {said}" for bar, said in verdicts.items())
    return passed, "; ".join(told)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"


def table(outcomes: Mapping[str, Any], *, rehearsal: bool) -> str:
    """Measure, target, found, what the card could do, and met or lost: a line for each bar.

    Args:
        outcomes: of the result file, by measure.
        rehearsal: the figures are those of tiny shapes on a CPU, which meet and lose nothing.
    """
    rows = [("measure", "target", "found", "limit", "")]
    for measure, bars in BARS.items():
        found = outcomes.get(measure, {"state": "not reached"})
        figures = found.get("figures", {})
        for bar in bars:
            known = found["state"] in ("passed", "failed", "measured") or bar.figure in figures
            said = bar.verdict(figures) if known else found["state"]
            if rehearsal and known:
                said = "rehearsed" if bar.figure in figures else "other sizes"
            rows.append(
                (
                    bar.words,
                    bar.target,
                    _number(figures.get(bar.figure)),
                    "" if bar.limit is None else _number(figures.get(bar.limit)),
                    said,
                )
            )
    return _aligned(rows)


def compared(outcomes: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Every number that two result files have in common, and the ratio of the newer to the older.

    Args:
        outcomes: of the newer file, by measure.
        before: of the older one.
    """
    rows = [("figure", "before", "now", "now / before")]
    for measure, found in outcomes.items():
        then = before.get(measure, {}).get("figures", {})
        for name, value in found.get("figures", {}).items():
            other = then.get(name)
            if isinstance(value, int | float) and isinstance(other, int | float):
                ratio = f"{value / other:.3f}" if other else "-"
                rows.append((f"{measure}: {name}", _number(other), _number(value), ratio))
    return _aligned(rows) if len(rows) > 1 else "the two files have no figure in common"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < place < len(row) - 1 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
