"""What came of a run that `rlinf.train` made: its numbers, and where its files are.

In: the training loop when it is over, and the files of its run directory. Out: a `Result`, which shows itself well in a
notebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.data.sample import Evaluation
from rlinf.metrics.console.answers import ACCURACY, measure_of, problems_of
from rlinf.metrics.console.live_picture import curve
from rlinf.metrics.console.progress_lines import clock
from rlinf.metrics.files import read_lines

_CURVE = 24
"""Columns of the curve of rewards."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """What came of a run."""

    run_dir: Path
    """Where its files are."""
    steps: int
    """Steps done."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Of each step, in order: `step` and its numbers by name."""
    before: Evaluation | Mapping[str, float] | None = None
    """How good the model was before the first step: `.accuracy`, `.metrics`, `.groups`; of a run on given texts its
    numbers by name, such as `loss`; None without an evaluation."""
    after: Evaluation | Mapping[str, float] | None = None
    """The same after the last step."""
    best_step: int | None = None
    """After which the best evaluation was, where `checkpoint.best` or a patience asked for it."""
    stopped: str | None = None
    """Why the run ended before its last step, if it did."""

    @property
    def model_dir(self) -> Path:
        """The trained model with its tokenizer, for transformers' `from_pretrained`."""
        return self.run_dir / "checkpoints" / "latest" / "hf"

    @property
    def best_model_dir(self) -> Path | None:
        """The model of the best evaluation; None unless `checkpoint.best` asked for it."""
        path = self.run_dir / "checkpoints" / "best" / "hf"
        return path if path.exists() else None

    @property
    def report(self) -> Path:
        """A page with curves, answers and lanes."""
        return self.run_dir / "report.html"

    def history(self, name: str) -> list[float]:
        """The values of one metric, of the steps that have it.

        Raises:
            KeyError: no step has it; the text has those that there are.
        """
        values = [row[name] for row in self.metrics if row.get(name) is not None]
        if not values and self.metrics:
            raise KeyError(
                f"no step has {name}; there are {', '.join(sorted({key for row in self.metrics for key in row}))}"
            )
        return values

    def frame(self) -> Any:
        """`metrics` as a table of pandas, a row per step; needs `pip install pandas`."""
        import pandas

        return pandas.DataFrame(self.metrics).set_index("step")

    def model(self, **how: Any) -> Any:
        """Load the trained model: a language model, or where that was trained, a reward model, a sequence classifier.

        Args:
            how: arguments of transformers' `from_pretrained`, such as dtype.
        """
        from transformers import AutoConfig, AutoModelForSequenceClassification

        from rlinf.data.pictures.processor import auto_class
        from rlinf.data.tokenizer import pretrained

        found = pretrained(AutoConfig, self.model_dir)
        scores = (found.architectures or [""])[0].endswith("ForSequenceClassification")
        kind = AutoModelForSequenceClassification if scores else auto_class(found)
        return pretrained(kind, self.model_dir, **how)

    def tokenizer(self) -> Any:
        """Load its tokenizer."""
        from transformers import AutoTokenizer

        from rlinf.data.tokenizer import pretrained

        return pretrained(AutoTokenizer, self.model_dir)

    def __repr__(self) -> str:
        took = [row["timing/elapsed"] for row in self.metrics if row.get("timing/elapsed") is not None]
        head = f"{self.steps} steps" + (f" in {clock(took[-1])}" if took else "")
        return "\n".join([f"rlinf.Result: {head}", *(f"  {name:<9} {text}" for name, text in self._lines())])

    def _lines(self) -> Iterator[tuple[str, str]]:
        for name, key in (("reward", "reward/mean"), ("loss", "loss")):
            if numbers := [row[key] for row in self.metrics if row.get(key) is not None]:
                yield name, f"{numbers[0]:.3f} -> {numbers[-1]:.3f}   {curve(numbers, _CURVE)}"
                break
        if isinstance(self.before, Mapping) and isinstance(self.after, Mapping):
            yield "held out", f"loss {self.before['loss']:.4f} -> {self.after['loss']:.4f}"
        elif isinstance(self.before, Evaluation) and isinstance(self.after, Evaluation):
            best = f"; the best after step {self.best_step}" if self.best_step is not None else ""
            count = f"on {len(problems_of(self.after))} held-out problems{best}"
            name, style = measure_of(self.before, self.after)
            change = f"{self.before.accuracy:{style}} -> {self.after.accuracy:{style}}"
            yield (name if name == ACCURACY else "held-out"), f"{change}   {count}"
        if self.stopped is not None:
            yield "stopped", self.stopped
        for name, path in (("model", self.model_dir), ("best", self.best_model_dir), ("report", self.report)):
            if path is not None and path.exists():
                yield name, str(path)


def result_of(loop: Any) -> Result:
    """The result of a run that is over.

    Args:
        loop: its `TrainingLoop`.
    """
    rows: list[Mapping[str, Any]] = list(read_lines(loop.directory.metrics))
    return Result(
        loop.directory.path,
        loop.done,
        [dict(row) for row in rows if row.get("step", 0) > 0],
        loop.before,
        loop.after,
        None if loop.best is None else loop.best.step,
        loop.stopped,
    )
