"""Weights & Biases. Where it sends to, and whether (`WANDB_MODE=offline`), is up to its own environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from rlinf.metrics.trackers import Rows, Tracked

NUMBERS = ("reward", "advantage", "length")
COLUMNS = ("step", "kind", "prompt", "response", "answer", *NUMBERS, "outcome", "scores", "remark")
"""Of the table of samples; its rows are those of samples.jsonl. `kind` is `held-out` for answers of an evaluation."""


class WandbSink:
    """Scalars by their names, samples as one table that grows from step to step."""

    def __init__(self, about: Tracked, project: str) -> None:
        _check_credentials()
        named = about.directory / "wandb" / "run_id"
        self._run = wandb.init(
            project=project,
            name=about.name,
            dir=str(about.directory),
            config=dict(about.config),
            id=named.read_text(encoding="utf-8") if about.resumed is not None and named.exists() else None,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is ours
        )
        _remember(named, self._run.id)
        # mixed types: a reward that is missing, and one that is a number
        self._table = wandb.Table(columns=[*COLUMNS], log_mode="INCREMENTAL", allow_mixed_types=True)
        self._pending = False
        self.where = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, **self._new_samples()}, step=step)

    def samples(self, step: int, rows: Rows) -> None:
        for row in rows:
            self._table.add_data(*(_cell(name, {"kind": "sampled", **row, "step": step}) for name in COLUMNS))
        self._pending = self._pending or bool(
            rows
        )  # logged with the step's numbers: a second log would replace the first

    def _new_samples(self) -> dict[str, Any]:
        pending, self._pending = self._pending, False
        return {"samples": self._table} if pending else {}

    def close(self) -> None:
        if rest := self._new_samples():
            self._run.log(rest)
        self._run.finish()


def open_sink(about: Tracked, project: str) -> WandbSink:
    """Start a run, or go on with the one that this run directory had."""
    return WandbSink(about, project)


def _check_credentials() -> None:
    """Refuse to send where no key is known: `wandb.init` would ask for one on the terminal, in the middle of a run.

    Raises:
        PermissionError: there is no key.
    """
    if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
        raise PermissionError("no API key is known: run `wandb login` once, or set WANDB_API_KEY or WANDB_MODE=offline")


def _cell(name: str, row: Mapping[str, Any]) -> Any:
    """A row's value as a tracker shows it: numbers to sort by, parts of the reward in one text."""
    value = row.get(name)
    if name in ("step", *NUMBERS):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {number:g}" for part, number in value.items())
    return "" if value is None else str(value)


def _remember(path: Path, run: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run, encoding="utf-8")
