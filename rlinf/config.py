"""Every key of a configuration, with its type, default and meaning, in one place.

`load_config(path, overrides)` gives a `RunConfig`, or one `ConfigError` with every mistake in it. The text under a
field is what `--help` and docs/config.md print. A key stands here only if something reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlinf.config_loading import ConfigError, InputError, Problem, dump, load
from rlinf.dotted import mistake_in
from rlinf.schema import number

__all__ = ["ConfigError", "InputError", "Problem", "RunConfig", "dump", "load_config"]


@dataclass
class ModelConfig:
    """The policy: a saved Hugging Face model, or a small one made from nothing."""

    path: str | None = None
    """Hugging Face directory (or hub name) to start from; null makes a new model from `model.config`."""
    config: dict[str, Any] = field(default_factory=lambda: {"model_type": "qwen2"})
    """Hugging Face configuration of a new model: `model_type` and that type's own keys. The vocabulary comes from the
    task."""


@dataclass
class TaskConfig:
    """What is learned: problems with known answers."""

    name: Literal["sort", "copy"] = "sort"
    """Kind of problem: `sort` (3142 -> 1234) or `copy` (3142 -> 3142)."""
    digits: int = number(4, low=1, high=9)
    """Digits per problem."""


@dataclass
class SftConfig:
    """Supervised warm-up on worked problems, before reinforcement learning."""

    steps: int = number(0, low=0)
    """Optimizer steps; 0 skips the warm-up."""
    batch_size: int = number(128, low=1)
    """Worked problems per step."""
    lr: float = number(2e-3, above=0)
    """Learning rate (AdamW, constant)."""


@dataclass
class AlgorithmConfig:
    """How samples become a gradient: GRPO with a clipped ratio and no KL penalty."""

    prompts_per_step: int = number(64, low=1)
    """Prompts drawn for each step."""
    group_size: int = number(8, low=2)
    """Answers sampled for each prompt; their mean reward is the baseline."""
    advantage_scale: Literal["std", "none"] = "std"
    """`std` divides a group's advantages by the spread of its rewards (GRPO); `none` does not (Dr. GRPO)."""
    epochs: int = number(1, low=1)
    """Optimizer steps taken on each batch of samples."""
    clip_low: float = number(0.2, low=0, high=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = number(0.2, low=0)
    """The probability ratio is clipped above at 1 + clip_high; more than clip_low lets rare tokens grow."""


@dataclass
class OptimizerConfig:
    """AdamW for reinforcement learning."""

    lr: float = number(1e-6, above=0)
    """Learning rate after warm-up."""
    warmup_steps: int = number(0, low=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    betas: tuple[float, float] = number((0.9, 0.99), low=0, below=1)
    """Decay of the running means of the gradient and of its square."""
    weight_decay: float = number(0.0, low=0)
    """Decoupled weight decay."""
    grad_clip: float = number(1.0, above=0)
    """Gradients with a larger global norm are scaled down to it."""


@dataclass
class RolloutConfig:
    """How answers are sampled while training."""

    temperature: float = number(1.0, above=0)
    """Logits are divided by it; 1 samples from the model itself."""
    max_new_tokens: int = number(16, low=1)
    """An answer without an end token is cut after this many tokens."""
    max_rows: int = number(128, low=1)
    """Answers decoded together; fewer finish sooner, so that scoring and training start sooner."""


@dataclass
class TrainerConfig:
    """How gradients are computed; nothing here changes what is learned."""

    micro_batch_tokens: int = number(2048, low=1)
    """Tokens (prompts included) that are computed at once; a longer sample stands alone."""


@dataclass
class EvaluationConfig:
    """Greedy accuracy on held-out problems."""

    problems: int = number(500, low=1)
    """Held-out problems; the same ones every time."""
    every: int = number(0, low=0)
    """Evaluate after every this many steps; 0 evaluates only before and after."""


@dataclass
class PlacementConfig:
    """Which hosts (processes of `torchrun`, numbered from 0) each role runs on; in one process all share it."""

    rollout: list[int] = number([0], low=0)
    """Hosts that generate answers."""
    trainer: list[int] = number([0], low=0)
    """Hosts that train."""
    judge: list[int] = number([0], low=0)
    """Hosts that score answers."""


@dataclass
class CheckpointConfig:
    """When the model is saved, as a directory that `from_pretrained` reads."""

    every: int = number(0, low=0)
    """Save after every this many steps; 0 saves only the last one."""


@dataclass
class RunConfig:
    """One training run."""

    name: str = "run"
    """Names the run directory, `<output_dir>/<name>`."""
    output_dir: str = "outputs"
    """Where run directories are made."""
    seed: int = number(0, low=0)
    """Seed of the model, the problems and the sampling."""
    steps: int = number(100, low=0)
    """Steps of the flow; 0 only warms up and evaluates."""
    flow: str = "rlinf.flows.grpo"
    """Dotted path of the async function that is one step: `package.module.function`, or a module with a function of
    its own name. Your own file works the same."""
    reward: str = "rlinf.rewards.exact.exact"
    """Dotted path of the function that scores an answer: `reward(response, answer, **row) -> float`, plain or async."""
    log_every: int = number(10, low=1)
    """A progress line is printed every this many steps; metrics.jsonl has every step."""
    trace: bool = True
    """Write trace.json: what every role did when, for ui.perfetto.dev."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)


def load_config(path: str | Path | None, overrides: Sequence[str] = (), hosts: int | None = None) -> RunConfig:
    """Read a configuration.

    Args:
        path: YAML file; None takes the defaults alone.
        overrides: `a.b=value`; they win over the file, later ones over earlier ones.
        hosts: number of processes of this job; given, the placement is checked against it too.

    Raises:
        ConfigError: with every mistake, before anything is started.
        InputError: if the file cannot be read as YAML at all.
    """
    return load(RunConfig, path, overrides, lambda config: _mistakes(config, hosts))


def roles_to_hosts(placement: PlacementConfig, hosts: int) -> dict[str, list[int]]:
    """Where each role runs in a job of `hosts` processes: as written, or all on host 0 where there is only that one."""
    return {role: wanted if hosts > 1 else [0] for role, wanted in asdict(placement).items()}


def _mistakes(config: RunConfig, hosts: int | None) -> Iterator[tuple[str, str]]:
    """(key, advice) for what the type and the limits of a single key cannot say."""
    if not config.name or config.name.startswith(".") or set(config.name) & set("/\\\0"):
        yield "name", "this names a directory: give it at least one character, no slash and no leading dot"
    if (flow := mistake_in(config.flow, must_be_async=True)) is not None:
        yield "flow", flow
    if (reward := mistake_in(config.reward)) is not None:
        yield "reward", reward
    path = config.model.path
    if path is not None and path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        yield (
            "model.path",
            "there is no such directory; name one that save_pretrained wrote, or owner/name on the hub",
        )
    if path is None and "model_type" not in config.model.config:
        yield "model.config", "a new model needs its model_type, such as qwen2; or set model.path to a saved model"
    if len(config.placement.trainer) > 1:
        yield "placement.trainer", "it trains on one host so far; name a single one, such as [1]"
    for role, wanted in asdict(config.placement).items():
        yield from ((f"placement.{role}", advice) for advice in _misplaced(wanted, hosts))


def _misplaced(wanted: list[int], hosts: int | None) -> Iterator[str]:
    if not wanted:
        yield "name at least one host, such as [0]"
    if len(set(wanted)) < len(wanted):
        yield "a host is named twice; name each once"
    unknown = [host for host in wanted if hosts is not None and 1 < hosts <= host]
    if unknown:
        count = max(wanted) + 1
        yield (
            f"this job has {hosts} hosts, 0 to {(hosts or 1) - 1}, so there is no host {unknown[0]}; "
            f"start {count} processes (torchrun --nproc-per-node {count}) or name one that exists"
        )
