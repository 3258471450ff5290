"""The keys that every kind of run has, and what may not stand in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from rlinf.config.importing import mistake_in
from rlinf.config.schema import leaves, number


@dataclass
class CheckpointConfig:
    """When a checkpoint is written: the model for `from_pretrained`, and all that is needed to go on."""

    every: int = number(0, low=0)
    """Write one after every this many steps; 0 leaves it to `minutes`, and writes the last one."""
    minutes: float = number(30.0, low=0)
    """Write one, too, at the end of a step when so many minutes have gone since the last one, or since the first step
    began: what a crash can cost then. 0 goes by steps alone."""
    keep: int = number(3, low=0)
    """How many stay; older ones are removed. 0 keeps all."""
    best: str | None = None
    """Metric of evaluations, such as evaluation/accuracy, by which the best checkpoint is kept besides: one is written
    after every evaluation that is the best so far, and `checkpoints/best` leads to it. null keeps the newest alone."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the largest value of that metric is the best, or the smallest."""
    grace: float = number(30.0, low=0)
    """Seconds in which a run that gets SIGTERM, SIGUSR1 or SIGHUP writes a checkpoint and ends with exit code 75, to go
    on by `--resume auto`: as of the end of the step under way if that comes in time, else of its beginning. 0 ends it
    at once."""


@dataclass
class TrackingConfig:
    """Where a run's numbers go, besides metrics.jsonl."""

    tensorboard: bool = False
    """Write event files into the run directory (needs `pip install rlinf[tracking]`)."""
    wandb: str | None = None
    """Project on Weights & Biases; offline with WANDB_MODE=offline (needs `pip install rlinf[tracking]`)."""
    swanlab: str | None = None
    """Project on SwanLab (needs `pip install rlinf[swanlab]`)."""
    live: Literal["auto", "always", "never"] = "auto"
    """A view that refreshes itself; `auto` has it on terminals. Otherwise a line per few steps."""
    web: bool = False
    """Serve the run's live page, on this machine alone, at an address that is printed; `rlinf watch RUN_DIRECTORY` does
    the same from outside of the run, at any time. See docs/watch.md."""


@dataclass
class SystemConfig:
    """Processes that die, fall silent or wait for each other."""

    host_timeout: float | None = number(60.0, above=0)
    """Seconds of silence after which a process counts as lost, which ends the job: its machine has lost power, the
    network is cut, or it was stopped. One that computes is not silent, however long it does. A network's failure that
    lasts half as long is survived. null waits for ever."""
    stall_after: float | None = number(1800.0, above=0)
    """Seconds after which a job ends, with a report of who waits on whom, if nothing that the flow waits for has moved
    meanwhile: no call began or ended, no item came or went, no computing thread used the processor. So a single
    computation may last longer; waiting for something outside, such as a server, may not. null waits for ever."""


@dataclass
class CommonConfig:
    """One run of any kind."""

    name: str = "run"
    """Names the run directory, `<output_dir>/<name>`."""
    output_dir: str = "outputs"
    """Where run directories are made."""
    keep_previous: int = number(10, low=0)
    """How many earlier runs of this name stay, as `<name>.previous-<n>`; the oldest are removed, and so is one that
    failed before its first step was over. 0 keeps all."""
    seed: int = number(0, low=0)
    """Seed of new weights, of what is drawn to learn from, and of the sampling."""
    steps: int = number(100, low=0)
    """Steps of the flow; 0 only does what comes before and after them."""
    log_every: int = number(10, low=1)
    """A progress line is printed every this many steps; metrics.jsonl has every step."""
    trace: bool = True
    """Write trace.json: what every role did when, for ui.perfetto.dev and the lanes in report.html."""
    flow: str | None = None
    """Dotted path of the async function that is one step."""
    callbacks: list[str] = field(default_factory=list)
    """Dotted paths of functions, which are called after each step, or of classes with methods such as on_evaluate; see
    docs/train.md."""
    system: SystemConfig = field(default_factory=SystemConfig)


def common_mistakes(config: CommonConfig) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake in these keys, and for whole numbers that 64 bits do not hold, in any."""
    for leaf in leaves(type(config)):
        value = attrgetter(leaf.key)(config)
        if any(
            isinstance(each, int) and abs(each) >= 2**63 for each in (value if isinstance(value, list) else [value])
        ):
            yield leaf.key, f"this is too large a number; expected {leaf.expectation}"
        if isinstance(value, float) and (advice := _out_of_reason(leaf.key.rpartition(".")[2], value)) is not None:
            yield leaf.key, advice
    if not config.name or config.name.startswith(".") or set(config.name) & set("/\\\0"):
        yield "name", "this names a directory: give it at least one character, no slash and no leading dot"
    if config.flow is not None and (flow := mistake_in(config.flow, must_be_async=True)) is not None:
        yield "flow", flow
    for path in config.callbacks:
        if (advice := mistake_in(path)) is not None:
            yield "callbacks", f"{path}: {advice}"


_LARGEST_RATE, _LEAST_TEMPERATURE, _YEAR = 10.0, 1e-3, 366 * 86400.0
_WAITS = ("grace", "timeout", "host_timeout", "stall_after")


def _out_of_reason(name: str, value: float) -> str | None:
    """Advice on a number that no run can mean, such as one with a sign lost in its exponent; None for all others."""
    if (name == "lr" or name.endswith("_lr")) and value > _LARGEST_RATE:
        return "one step of this size destroys any weights: learning rates lie between 1e-8 and 0.1"
    if name == "temperature" and 0 < value < _LEAST_TEMPERATURE:
        return "logits divided by this overflow: at least 0.001, or 0 for the likeliest token where that is taken"
    if name in _WAITS and value > _YEAR:
        return "these are seconds, and more than a year of them"
    return None


def best_mistakes(checkpoint: CheckpointConfig, patience: int, every: int, section: str) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake in what asks for the best evaluation.

    Args:
        checkpoint: of the run.
        patience: evaluations that may be no better.
        every: steps between evaluations; 0 for none.
        section: that has these two keys.
    """
    if checkpoint.best is not None and not checkpoint.best.startswith("evaluation/"):
        yield "checkpoint.best", "name a metric of evaluations, such as evaluation/accuracy"
    advice = f"evaluations are compared, and there is none between the steps; set {section}.every"
    if checkpoint.best is not None and checkpoint.best.startswith("evaluation/") and not every:
        yield "checkpoint.best", advice
    if patience and not every:
        yield f"{section}.patience", advice
