"""Keys that every kind of run has, `placement` among them, and rules on them.

One process of `torchrun` is one device: a GPU, or on a CPU the share of the cores that the process computes with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from rlinf.config.gguf import directory_of
from rlinf.config.importing import mistake_in
from rlinf.config.schema import CLOSED, leaves

Place = Annotated[str, AfterValidator(directory_of)]
"""A file or directory, or something on a hub: `~` at its beginning becomes the home directory when the configuration is
read, and a GGUF file the directory with what it holds, so that whatever opens it need not know of it."""


def join_mistake(join: str | None, role: str) -> Iterator[tuple[str, str]]:
    """(key, advice) if that is no place where others can join a role."""
    host, _, port = (join or ":0").rpartition(":")
    if join is not None and not (host and port.isdigit() and int(port) < 1 << 16):
        yield "join", f"write HOST:PORT, an address of the machine of {role} rank 0 and a port, or 0 for any"


@dataclass(config=CLOSED)
class CheckpointConfig:
    """When a checkpoint is written: the model for `from_pretrained`, and all that is needed to go on."""

    every: int = Field(default=0, ge=0)
    """Write one after every this many steps; 0 leaves it to `minutes`, and writes the last one."""
    minutes: float = Field(default=30.0, ge=0)
    """Write one, too, at the end of a step when so many minutes have gone since the last one, or since the first step
    began: what a crash can cost then. 0 goes by steps alone."""
    keep: int = Field(default=3, ge=0)
    """How many stay; older ones are removed. 0 keeps all."""
    best: str | None = None
    """Metric of evaluations, such as evaluation/accuracy, by which the best checkpoint is kept besides: one is written
    after every evaluation that is the best so far, and `checkpoints/best` leads to it. null keeps the newest alone."""
    best_mode: Literal["max", "min"] = "max"
    """Best is the largest value of that metric, or the smallest."""
    grace: float = Field(default=30.0, ge=0)
    """Seconds in which a run that gets SIGTERM, SIGUSR1 or SIGHUP writes a checkpoint and ends with exit code 75, to go
    on by `--resume auto`: as of the end of the step under way if that comes in time, else of its beginning. 0 ends it
    at once."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.best is not None and not self.best.startswith("evaluation/"):
            yield "best", "name a metric of evaluations, such as evaluation/accuracy"


@dataclass(config=CLOSED)
class ModelCheckpointConfig(CheckpointConfig):
    """When a checkpoint is written: the model for `from_pretrained`, and all that is needed to go on."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights in hf/; auto: that in which the model was saved, float32 for a new one. What a run goes
    on from is in float32 in any case."""


@dataclass(config=CLOSED)
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


@dataclass(config=CLOSED)
class MetricsConfig(TrackingConfig):
    """Where a run's numbers go, besides metrics.jsonl, and when to warn about them."""

    samples: int = Field(default=8, ge=0)
    """Answers of each step that are written to samples.jsonl."""
    token_rows: int = Field(default=2, ge=0)
    """The first so many of these are written token by token, too: text, log-prob, whether it is learned, version of the
    weights; at most 1,024 tokens of each, which take some 30 kB."""
    mismatch_mean: Annotated[float, Gt(0)] | Literal["auto"] | None = "auto"
    """Warn when log-probs of engine and trainer differ by more than this on average, nats; null never warns. `auto` is
    0.05, and where answers are those of rounded weights (rollout.weights) 0.15 for int8 and 0.3 for float8."""
    mismatch_max: float | None = Field(default=5.0, gt=0)
    """Warn when those of any one token differ by more than this, nats; null never warns."""
    route_drift: float | None = Field(default=0.25, gt=0, le=1)
    """Warn when the trainer's gates would choose other experts than the engine did for a larger share of tokens and
    layers than this; null never warns."""


@dataclass(config=CLOSED)
class SystemConfig:
    """Processes that die, fall silent or wait for each other."""

    host_timeout: float | None = Field(default=60.0, gt=0)
    """Seconds of silence after which a process counts as lost, which ends the job: its machine has lost power, the
    network is cut, or it was stopped. One that computes is not silent, however long it does. A network's failure that
    lasts half as long is survived. null waits for ever."""
    stall_after: float | None = Field(default=1800.0, gt=0)
    """Seconds after which a job ends, with a report of who waits on whom, if nothing that the flow waits for has moved
    meanwhile: no call began or ended, no item came or went, no computing thread used the processor. So a single
    computation may last longer; waiting for something outside, such as a server, may not. null waits for ever."""


Delta = Literal["auto", "always", "off"]


@dataclass(config=CLOSED)
class WeightsConfig:
    """Weights on their way from the trainer to those who generate or act."""

    delta: Delta = "auto"
    """Part of new weights that another machine, or an engine that joined, is sent. auto: what has changed since the
    version that it has, in the dtype in which they are published, exactly, where that is smaller than the whole; both
    ends then keep one version in host memory. Weights that a GPU has room to publish go whole to other machines, by
    NCCL. always: those go through host memory, too. off: always the whole. See docs/async.md."""


@dataclass(config=CLOSED)
class CommonConfig:
    """One run of any kind."""

    name: str = "run"
    """Names the run directory, `<output_dir>/<name>`."""
    output_dir: str = "outputs"
    """Where run directories are made."""
    keep_previous: int = Field(default=10, ge=0)
    """How many earlier runs of this name stay, as `<name>.previous-<n>`; the oldest are removed, and so is one that
    failed before its first step was over. 0 keeps all."""
    seed: int = Field(default=0, ge=0)
    """Seed of new weights, of what is drawn to learn from, and of the sampling."""
    steps: int = Field(default=100, ge=0)
    """Steps of the flow; 0 only does what comes before and after them."""
    log_every: int = Field(default=10, ge=1)
    """A progress line is printed every this many steps; metrics.jsonl has every step."""
    trace: bool = True
    """Write trace.json: what every role did when, for ui.perfetto.dev and the lanes in report.html."""
    tracing: str | None = Field(default=None, pattern=r"^https?://")
    """OpenTelemetry collector, such as http://localhost:4318, to which spans of the run, its steps, their stages and
    episodes are sent; null: that of OTEL_EXPORTER_OTLP_ENDPOINT, or none."""
    flow: str | None = None
    """Dotted path of the async function that is one step."""
    callbacks: list[str] = field(default_factory=list)
    """Dotted paths of functions, which are called after each step, or of classes with methods such as on_evaluate; see
    docs/train.md."""
    system: SystemConfig = field(default_factory=SystemConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in these keys, and for numbers that no run can mean, in any."""
        for leaf in leaves(type(self)):
            value = attrgetter(leaf.key)(self)
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(each, int) and abs(each) >= 2**63 for each in numbers):  # which 64 bits do not hold
                yield leaf.key, f"this is too large a number; expected {leaf.expectation}"
            if isinstance(value, float) and (advice := _out_of_reason(leaf.key.rpartition(".")[2], value)) is not None:
                yield leaf.key, advice
        if not self.name or self.name.startswith(".") or set(self.name) & set("/\\\0"):
            yield "name", "this names a directory: give it at least one character, no slash and no leading dot"
        if self.flow is not None and (flow := mistake_in(self.flow, must_be_async=True)) is not None:
            yield "flow", flow
        for path in self.callbacks:
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


def best_mistakes(best: str | None, patience: int, every: int, section: str) -> Iterator[tuple[str, str]]:
    """(key, advice) for what asks for the best evaluation where there is none between the steps.

    Args:
        best: as of `checkpoint`.
        patience, every: as of the section that says when to evaluate.
        section: its name.
    """
    advice = f"evaluations are compared, and there is none between the steps; set {section}.every"
    if best is not None and best.startswith("evaluation/") and not every:
        yield "checkpoint.best", advice
    if patience and not every:
        yield f"{section}.patience", advice


@dataclass(config=CLOSED)
class Placing:
    """Keys of placement that every kind of run has."""

    __together__: ClassVar[bool] = True
    """`"rollout,judge": 0` is short for the same value under both names."""

    mode: Literal["collocated", "disaggregated", "hybrid", "auto"] | None = None
    """How roles share devices. `collocated`: all on all devices, taking turns. `disaggregated`: each on devices of its
    own, all at work at once. `hybrid`: generation on some, the others take turns on the rest. `auto`: begins
    collocated, measures, plans, and moves. null: as written below, or host 0; roles that meet there compute side by
    side, or take turns once device_memory_gb is given. Any mode wins over what is written below."""
    plan: str | None = None
    """A plan.yaml, as `python -m rlinf plan` or a run writes it; edited as you like. It wins over all else."""
    profile: str | None = None
    """A profile.json, as every run leaves one: the planner then finds the best sizes for the mode, or the best mode for
    auto or null. Without one a mode takes even shares, and `auto` measures first."""
    extrapolate: bool = False
    """Let the planner use numbers of devices and items that were not profiled: a guess. `auto` always does."""
    idle_processes: bool = False
    """Processes that were started may have no role, and idle; otherwise they are refused."""
    profile_steps: int = Field(default=3, ge=1)
    """auto: measure so many steps of each placement before planning; the first is left out as warm-up if there are
    several."""
    replan_above: float = Field(default=0.15, gt=0)
    """auto: plan anew once the last few steps took longer or shorter than predicted by more than this share."""
    device_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of each device in GB (10^9 bytes); null takes a GPU's own, and no limit on a CPU. What cannot fit is
    refused before anything starts; roles that do not fit side by side are parked while they are not at work."""
    node_groups: dict[str, Any] = field(default_factory=dict)
    """Names for parts of a cluster, `{big: {nodes: 0-3, hardware: h100}}`, for placements such as
    `trainer: {node_group: big, placement: all}`. Plans count every kind of hardware by itself."""
    devices: dict[str, Any] = field(default_factory=dict)
    """Memory and speed of a device of each kind of `hardware`: {l40s: {memory_gb: 43, tflops: 362, bandwidth:
    864, link: 32}}, bandwidth and link in GB a second; relative speeds will do for plans from a profile. Cards such as
    h100, a100 and l40s are known by their names: {gpu: h100}, where `gpu` is the kind of nodes that no group names."""


@dataclass(config=CLOSED)
class PlacementConfig(Placing):
    """Which devices each role runs on. A placement is `0`, `0-3`, `all`, `0-3:0-7` (eight processes on four devices),
    or `{node_group: NAME, placement: 0-3}`; several roles may be given together, as in `"rollout,judge": 0-3`. In one
    process all share it."""

    device_kind: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` leaves GPUs alone. `cuda` takes them; `--dry-run` takes the devices to be GPUs where there are none, for
    defaults and memory that depend on it: with device_memory_gb, it tells on a laptop what a cluster would run. `auto`
    is what this machine has."""
    rollout: Any = None
    """Devices that generate answers."""
    trainer: Any = None
    """Devices that train, one process each."""
    judge: Any = None
    """Hosts that score answers, beside their devices."""
    critic: Any = None
    """Devices that train the critic; null: those of the trainer. The same holds for the next three."""
    reward_model: Any = None
    """Devices of the reward model, each with a whole copy."""
    reference: Any = None
    """Devices of the reference policy, each with a whole copy."""
    teacher: Any = None
    """Devices of the teacher, each with a whole copy."""


@dataclass(config=CLOSED)
class EmbodiedPlacementConfig(Placing):
    """Which devices each role runs on. A placement is `0`, `0-3`, `all`, `0-3:0-7` (eight processes on four devices),
    or `{node_group: NAME, placement: 0-3}`; several roles may be given together, as in `"env,policy": 0-3`. In one
    process all share it."""

    env: Any = None
    """Hosts that simulate, each process env.num_envs environments, beside their devices."""
    policy: Any = None
    """Devices that act."""
    trainer: Any = None
    """Devices that train, one process each, with a whole policy."""
    world: Any = None
    """Devices with environments inside the world model, each process world.num_envs; null: where policy is."""
    world_trainer: Any = None
    """Devices that train the world model; null: where trainer is."""
