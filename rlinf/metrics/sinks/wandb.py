"""Weights & Biases. Where it sends to, and whether (`WANDB_MODE=offline`), is up to its own environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import wandb

from rlinf.metrics.tracking import Rows, Tracked


class WandbSink:
    """Scalars by their names, samples as a table per step."""

    def __init__(self, about: Tracked, project: str) -> None:
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
        self.where = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Rows) -> None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        data = [[str(row.get(name, "")) for name in names] for row in rows]
        self._run.log({"samples": wandb.Table(columns=[*names], data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sink(about: Tracked, project: str) -> WandbSink:
    """Start a run, or go on with the one that this run directory had."""
    return WandbSink(about, project)


def _remember(path: Path, run: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run, encoding="utf-8")
