"""What one kind of run says of itself to the training loop: its roles, steps, evaluations, and what a checkpoint keeps.

In: a run under way. Out: answers to what the loop asks. Each method has a default where there is one that fits.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.text import RunConfig
from rlinf.data.datasets.prompt_stream import Counted, left_out
from rlinf.data.step import AnyStep
from rlinf.job.roles.running import Roles, save_roles
from rlinf.metrics.alarm import Alarm
from rlinf.metrics.console.report import Report
from rlinf.metrics.recorder import Recorder
from rlinf.metrics.run_directory import Checkpoint
from rlinf.placement.seats import Placed

E = TypeVar("E")
"""The outcome of an evaluation."""


class RunKind(ABC, Generic[E]):
    """The particular part of a run; `TrainingLoop` has the rest."""

    config: RunConfig | EmbodiedConfig
    """What the run is."""
    report: Report
    """Tells people of it."""
    recorder: Recorder
    """Writes it down."""
    done: int
    """Steps taken."""
    roles: Roles
    """The running ones, by name."""
    before: E | None
    """The evaluation before the first step; None where there is nothing to evaluate on."""
    after: E | None
    """The newest one."""
    generates: ClassVar[str]
    """The role that acts by the weights that the trainer publishes."""
    headline: ClassVar[str]
    """The metric of evaluations that has a column in the printed table."""
    failures: ClassVar[tuple[type[Exception], ...]] = (FloatingPointError,)
    """Errors that end a run without being a mistake in the code: told with their step, without a traceback."""
    notes: Sequence[str] = ()
    """What was found in the data, in lines."""
    moving_reference: bool = False
    """The reference policy changes from step to step, so that checkpoints keep it."""

    kinds: Sequence[type[Any]] = ()
    """Dataclasses of half made work, as checkpoints keep it."""
    ahead: bool = False
    """The flow takes what is in flight: what was drawn is kept there, until it is learned from."""
    own_roles: Collection[str] = ()
    """Names of the user's own roles."""
    _left_out_kinds: frozenset[str] = frozenset()
    """Metrics of rows that were left out of which a line was printed."""

    def alarm(self, warning: Alarm, step: int | None = None) -> None:
        """Tell people what they should know, now and on the live page.

        Args:
            warning: what.
            step: of which step; default: of the one that is over.
        """
        self.report.line(warning)
        self.recorder.alarm(self.done if step is None else step, warning.text, warning.do)

    def left_out(self, stream: Counted) -> dict[str, float]:
        """How many rows of each kind a stream has left out, cut or found unknown to its tokenizer so far, as metrics of
        the step that ends. The first of a kind is an alarm."""
        kinds = ("dropped", "truncated", "unusable", "unknown")
        counts = {f"data/{kind}": getattr(stream, kind) for kind in kinds}
        lines = left_out(stream)
        for kind in lines.keys() - self._left_out_kinds:
            self.alarm(Alarm(f"step {self.done + 1}", f"so far, {lines[kind]}"), self.done + 1)
        self._left_out_kinds |= lines.keys()
        return {name: float(count) for name, count in counts.items() if count}

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0 evaluates only before and after."""
        raise NotImplementedError

    @property
    def patience(self) -> int:
        """Evaluations that are no better than the best one after which the run ends; 0 for never."""
        return 0

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        """Start roles.

        Args:
            placed: where.
            names: which, of those that can move; None for all.
        """
        raise NotImplementedError

    async def warm_up(self) -> bool:
        """Supervised training before the first step; False if there is none."""
        return False

    async def draw(self, index: int) -> AnyStep:
        """What the flow is given for a step; called once for each, in order."""
        raise NotImplementedError

    async def evaluate(self) -> E | None:
        """How good the model is now; None where there is nothing to evaluate on."""
        raise NotImplementedError

    def numbers(self, evaluation: E) -> dict[str, float]:
        """An evaluation as metrics."""
        raise NotImplementedError

    def in_words(self, evaluation: E) -> str:
        """An evaluation as half a sentence."""
        raise NotImplementedError

    def compared(self, before: E, after: E) -> Iterable[str]:
        """Lines on what came of the run."""
        raise NotImplementedError

    def answers(self, evaluation: E) -> list[dict[str, Any]]:
        """Rows of samples.jsonl that show an evaluation."""
        return []

    async def samples(self) -> Sequence[Mapping[str, Any]]:
        """Rows of samples.jsonl that show the step that has just ended."""
        return []

    async def failed(self) -> Sequence[Mapping[str, Any]]:
        """Rows of samples.jsonl that show the step that one of `failures` ended."""
        return []

    def remarks(self) -> Iterable[str]:
        """Lines for the end of the run on what was not as it should be."""
        return ()

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """A step is over and told."""

    async def saving(self) -> Callable[[Path], Awaitable[Any]]:
        """What writes a checkpoint of this moment into a directory: its snapshot is complete once it was called."""
        return lambda directory: save_roles(self.roles, directory, self.moving_reference, self.own_roles)

    async def ends(self) -> None:
        """The steps are over, all of them well; what came of them is about to be written."""

    @property
    def restartable(self) -> bool:
        """A step that was given up before the first optimizer step can be taken again from `position`: none of the
        roles has moved on."""
        return False

    def position(self) -> dict[str, Any]:
        """The part of `queue` that drawing moves on."""
        return {}

    def queue(self) -> dict[str, Any]:
        """What a checkpoint keeps that is neither model nor optimizer, as JSON."""
        return {"before": self.before, "after": self.after}

    async def restore(self, begun: Checkpoint) -> None:
        """Take over what a checkpoint has besides the roles' own state: what `saving` and `queue` added.

        Raises:
            ValueError, FileNotFoundError, DataError: it does not fit.
        """
        queue: Any = begun.queue
        self.before, self.after = queue["before"] or None, queue["after"] or None
