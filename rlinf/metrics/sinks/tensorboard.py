"""TensorBoard event files in `<run>/tensorboard`: `tensorboard --logdir outputs` compares runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from rlinf.metrics.trackers import Rows, Tracked


class TensorBoardSink:
    """Scalars by their names, samples as text."""

    def __init__(self, about: Tracked) -> None:
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


def open_sink(about: Tracked, project: str) -> TensorBoardSink:
    """Start writing."""
    return TensorBoardSink(about)


def _code(value: object) -> str:
    """A value as an indented block of Markdown, so that nothing in a model's answer is taken for markup."""
    return "\n\n" + "\n".join(f"    {line}" for line in str(value).splitlines())
