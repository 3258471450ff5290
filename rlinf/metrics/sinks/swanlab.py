"""SwanLab. Its own `SWANLAB_MODE` chooses between the cloud, a local copy and nothing; unset, it stays offline."""

from __future__ import annotations

import os
from collections.abc import Mapping

import swanlab

from rlinf.metrics.trackers import Rows, Tracked


class SwanLabSink:
    """Scalars by their names, samples as text."""

    def __init__(self, about: Tracked, project: str) -> None:
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
        swanlab.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Rows) -> None:
        texts = ["\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows]
        swanlab.log({"samples": [swanlab.Text(text) for text in texts]}, step=step)

    def close(self) -> None:
        swanlab.finish()


def open_sink(about: Tracked, project: str) -> SwanLabSink:
    """Start an experiment."""
    return SwanLabSink(about, project)
