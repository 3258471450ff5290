"""The runs of these tests, small and long enough to be disturbed; and what they left."""

from __future__ import annotations

from pathlib import Path

from tests.launching import QUICKSTART, TINY, metrics_of

STEPS = 40
LEARNING = (
    "task.digits=2", "sft.steps=80", "sft.batch_size=64", "model.config.hidden_size=64",
    "model.config.intermediate_size=128", "algorithm.epochs=2",
)  # fmt: skip
"""Some answers are right and some wrong from the first step on, so that every step changes the model."""
SHARDED = ("--config", QUICKSTART, *TINY, *LEARNING, f"steps={STEPS}", "evaluation.every=0", "checkpoint.every=10")
GRPO = (*SHARDED, "placement.trainer=0-1")
"""Both answer and train; process 0 scores."""


def steps_noted(output: Path) -> int:
    """How many steps a run has behind it."""
    noted = output / "quickstart" / "metrics.jsonl"
    return len(noted.read_text().splitlines()) if noted.exists() else 0


def all_steps_once(run: Path, steps: int = STEPS) -> None:
    """No step was lost or taken twice."""
    assert [line["step"] for line in metrics_of(run)] == list(range(1, steps + 1))
