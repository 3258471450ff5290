"""Trackers outside of the run's directory: TensorBoard, Weights & Biases, SwanLab.

In: a step's numbers and samples, from `trackers.Tracking`. Each is a class that is made with what is tracked and the
project, and imports its package, which is an extra, as it is made. Names and times nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.metrics.trackers import Rows, TrackedRun

_NUMBERS = ("reward", "advantage", "length")
_COLUMNS = ("step", "kind", "prompt", "response", "answer", *_NUMBERS, "outcome", "scores", "remark")
"""Columns of the table of samples, whose rows are those of samples.jsonl. `kind` is `held-out` for answers of an
evaluation."""


class TensorBoardSink:
    """TensorBoard event files in `<run>/tensorboard`: `tensorboard --logdir outputs` compares runs."""

    def __init__(self, about: TrackedRun, project: str) -> None:  # it knows no projects
        from torch.utils.tensorboard import SummaryWriter

        directory = about.directory / "tensorboard"
        purged = None if about.resumed is None else about.resumed + 1  # steps that will come again
        self._writer = SummaryWriter(str(directory), purge_step=purged)
        self.where = f"tensorboard --logdir {directory}"

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Rows) -> None:
        for number, row in enumerate(rows):
            self._writer.add_text(f"sample {number}", "\n\n".join(f"{key}: {_code(row[key])}" for key in row), step)

    def close(self) -> None:
        self._writer.close()


def _code(value: object) -> str:
    """A value as an indented block of Markdown, so that nothing in a model's answer is taken for markup."""
    return "\n\n" + "\n".join(f"    {line}" for line in str(value).splitlines())


class WandbSink:
    """Weights & Biases, with samples as one table that grows from step to step.

    Where it sends to, and whether (`WANDB_MODE=offline`), is up to its own environment variables. A resumed run goes on
    with the one that its directory had.
    """

    def __init__(self, about: TrackedRun, project: str) -> None:
        import wandb

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
        self._table = wandb.Table(columns=[*_COLUMNS], log_mode="INCREMENTAL", allow_mixed_types=True)
        self._pending = False
        self.where = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, **self._new_samples()}, step=step)

    def samples(self, step: int, rows: Rows) -> None:
        for row in rows:
            self._table.add_data(*(_cell(name, {"kind": "sampled", **row, "step": step}) for name in _COLUMNS))
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


def _check_credentials() -> None:
    """Refuse to send where no key is known: `wandb.init` would ask for one on the terminal, in the middle of a run.

    Raises:
        PermissionError: there is no key.
    """
    import wandb

    if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
        raise PermissionError("no API key is known: run `wandb login` once, or set WANDB_API_KEY or WANDB_MODE=offline")


def _cell(name: str, row: Mapping[str, Any]) -> Any:
    """A row's value as a tracker shows it: numbers to sort by, parts of the reward in one text."""
    value = row.get(name)
    if name in ("step", *_NUMBERS):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {number:g}" for part, number in value.items())
    return "" if value is None else str(value)


def _remember(path: Path, run: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run, encoding="utf-8")


class SwanLabSink:
    """SwanLab. Its own `SWANLAB_MODE` chooses between the cloud, a local copy and nothing; unset, it stays offline."""

    def __init__(self, about: TrackedRun, project: str) -> None:
        import swanlab

        self._swanlab = swanlab
        directory = about.directory / "swanlab"
        mode = os.environ.get("SWANLAB_MODE", "offline")
        swanlab.init(
            project=project,
            experiment_name=about.name,
            config=dict(about.config),
            logdir=str(directory),
            mode=mode,
        )
        self.where = f"{directory} ({mode})"

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Rows) -> None:
        texts = ["\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows]
        self._swanlab.log({"samples": [self._swanlab.Text(text) for text in texts]}, step=step)

    def close(self) -> None:
        self._swanlab.finish()
