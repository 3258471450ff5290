"""Base class of policies for action chunks: observations in; actions, their log-probs and values out.

A rollout calls `act`, sends `Act.actions` to the environment and keeps `Act.stored`; a trainer calls `evaluate` on the
stored rows, with gradient. Nothing else needs to travel: `stored` is all that log-probs depend on besides the weights.

A policy derives from `Policy` and fills in `inputs`, `encode`, `draw`, `score` and `value`; levels, storing and
imitation are written here, once.

Random numbers for a batch of decisions come from one generator or from a seed per row. With a seed per row, what a row
draws is a function of its seed alone: the same in a large batch, in slices that take turns, or alone. That is how a
pipelined rollout equals an unpipelined one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn

from rlinf.algos.advantages import Reduce
from rlinf.algos.loss_sum import LossSum, one_of
from rlinf.algos.losses import supervised
from rlinf.data import rng
from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.data.safetensors_io import write_tensors
from rlinf.models.policy.published import EXTRA, matches, read_tensors, tensor_files, write_sharded

if TYPE_CHECKING:
    from rlinf.models.policy.robots import RobotActions, Scaling

Generator: TypeAlias = torch.Generator | Tensor | None
"""A generator; a seed per row, int64 [N], best of `data.rng.mix`; or None for torch's global generator."""


def uniforms(generator: Generator, rows: int, count: int, device: torch.device) -> Tensor:
    """Random numbers in [0, 1).

    Args:
        generator: where they come from. Number j of a row with a seed is output j of SplitMix64 (Steele, Lea and Flood,
            OOPSLA 2014, figure 19) from that seed, whose state only counts.
        rows: N.
        count: numbers for each row.
        device: where they are needed; a generator of another device draws on its own.

    Returns:
        float64 [rows, count], multiples of 2^-53.

    Raises:
        ValueError: seeds are not int64 [rows].
    """
    if isinstance(generator, Tensor):
        if generator.shape != (rows,) or generator.dtype != torch.int64:
            raise ValueError(
                f"seeds must be int64 [{rows}], one per row, not {generator.dtype} {list(generator.shape)}"
            )
        if device.type == "cpu":
            return rng.uniforms_by_numpy(generator.cpu(), count)
        return rng.uniforms(generator.to(device)[:, None], torch.arange(count, device=device))
    source = device if generator is None else generator.device
    return torch.rand(rows, count, generator=generator, dtype=torch.float64, device=source).to(device)


def normals(noise: Tensor) -> Tensor:
    """Standard normal numbers from uniform ones, by the inverse of their distribution function.

    Args:
        noise: in [0, 1), multiples of 2^-53, float64 of any shape.

    Returns:
        float32 in that shape, between -8.3 and 8.3: 0 counts as 2^-54.
    """
    inside = (noise + 2.0**-54).clamp(max=1.0 - 2.0**-53)  # the largest would be rounded to 1, which is at infinity
    values: Tensor = torch.special.ndtri(inside)
    return values.float()


Greedy: TypeAlias = bool | Literal["from_noise"]
"""Choice of the likeliest actions; `from_noise`: beginning at random noise, all else likeliest (flows alone)."""

Observation: TypeAlias = Mapping[str, Tensor]
"""Observations by name, one row per environment: "state" float32 [N, S]; "rgb" uint8 [N, H, W, 3 k] for k cameras."""

Stored: TypeAlias = dict[str, Tensor]
"""Inputs of `evaluate`, N rows in every tensor, so that rows of many steps concatenate and are picked one by one.
"actions" is always there: the drawn actions, in the policy's own terms."""

BROKEN = "broken"
"""Name of what some policies store of decisions, bool [N]: what was drawn says no chunk of actions as it should."""

Level = Literal["token", "action", "chunk"]
LEVELS = ("token", "action", "chunk")
ValueLevel = Literal["action", "chunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Configuration that all policies share. A policy's own config derives from it."""

    action_size: int
    """Numbers in one action, A."""
    chunk: int = 1
    """Actions that are decided at a time, C."""
    level: Level = "action"
    """The unit that has a log-prob of its own, so a ratio to clip: each number of an action ("token"), each action, or
    the chunk."""
    value_level: ValueLevel | None = "chunk"
    """A value before each action, or one before the chunk; null for a policy without a critic (GRPO)."""
    seed: int = 0
    """Seed of the first weights."""

    def __post_init__(self) -> None:
        if self.action_size < 1 or self.chunk < 1:
            raise ValueError(f"policy: action_size={self.action_size} and chunk={self.chunk} must be at least 1")
        one_of("policy", "level", self.level, LEVELS)
        if self.value_level is not None:
            one_of("policy", "value_level", self.value_level, ("action", "chunk"))
        if self.level == "chunk" and self.value_level == "action" and self.chunk > 1:
            raise ValueError(
                "policy: value_level=action gives every action an advantage of its own, which level=chunk cannot use: "
                "it has one log-prob for all of them. Take level=action, or value_level=chunk"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Chunks of actions that a policy chose, token by token."""

    actions: Tensor
    """For the environment, in [-1, 1], float32 [N, C, A]."""
    made: Tensor
    """The actions in the policy's own terms, which become `stored["actions"]`; [N, ...]."""
    logprobs: Tensor
    """Log-prob of each number, nats, float32 [N, C, A]."""
    values: Tensor | None
    """Return expected before each action, [N, C], or before the chunk, [N]; None without a critic."""
    also: Stored = field(default_factory=dict)
    """Other results of drawing that `score` needs, N rows each, which are stored beside `made`."""
    memory: Tensor | None = None
    """The policy's memory after the decision, [N, ...], which comes back as "memory" with the next observation of the
    episode; None for policies without one."""


@dataclass(frozen=True, slots=True, eq=False)
class Act:
    """A decision of `Policy.act`, without gradient."""

    actions: Tensor
    """For the environment, in [-1, 1], float32 [N, C, A]."""
    logprobs: Tensor
    """Log-probs of the drawn actions, nats, at the policy's level: [N, C, A], [N, C] or [N]."""
    values: Tensor | None
    """Return expected before each action, [N, C], or before the chunk, [N]; None without a critic."""
    stored: Stored
    """All that `evaluate` needs."""
    memory: Tensor | None = None
    """See `Drawn.memory`."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """Log-probs, entropy and values of stored actions, with gradient."""

    logprobs: Tensor
    """Nats, at the level asked for: token [N, C, A], action [N, C], chunk [N]."""
    entropy: Tensor
    """Entropy of the distributions that they were drawn from, nats, at the same level."""
    values: Tensor | None
    """Return expected before each action, [N, C], or before the chunk, [N]; None without a critic."""


class Policy(nn.Module, ABC):
    """A network that decides chunks of actions. Made as `Class(config)` with an instance of its `Config`.

    What only values need is kept under the attribute `critic`, so that it can have a learning rate of its own.

    A policy whose log-probs come from a chain of denoising steps derives from `vla.flow.FlowPolicy`: its stored
    "actions" are the chain.

    A policy that sets `published` can be read from a directory that its authors publish, and every checkpoint has it in
    that form, besides `policy.json` (its whole configuration) and `extra.safetensors` (what is `own`). Where names are
    the authors', that is all; where they are others, `published_name` says how they correspond; where tensors are, too,
    a policy writes `read_published` and `write_published` itself.
    """

    Config: ClassVar[type[PolicyConfig]]
    """Class of this policy's configuration."""
    float32: ClassVar[tuple[str, ...]] = ("critic.*",)
    """Patterns of parameters that stay in float32 where the others are in bfloat16, such as "*norm.weight"."""
    trains: ClassVar[tuple[str, ...]] = ("*",)
    """Patterns of the parameters that learn where a run does not say, as for `policy.train`."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """Linear layers that get low-rank adapters where a run says `auto`, as for `lora.lora_targets`; none: not known."""
    published: ClassVar[tuple[str, ...]] = ()
    """Patterns of files that such a directory must have, as "config.json" and "*.safetensors"; none: there is no form
    but our own."""
    small_files: ClassVar[tuple[str, ...]] = ()
    """Patterns of small files there that are kept and written back as they were, such as "tokenizer*"."""
    own: ClassVar[tuple[str, ...]] = ("critic.*",)
    """Patterns of names of the state that the authors' form has no place for; they have first values of our own."""
    needs_path: ClassVar[bool] = False
    """True if it acts only where it was read from a directory, which has something beside weights, such as a tokenizer.
    A run without `policy.path` is refused then."""
    files: dict[str, bytes]
    """Contents of the files that `small_files` names, of the directory that the policy was read from."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.config: Any = config
        self.files = {}

    # What a policy fills in ------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Select from an observation all that decisions depend on, N rows each, as raw and small as can be: it is
        stored.

        Raises:
            ValueError: something that this policy looks at is missing or has another shape.
        """

    @abstractmethod
    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """Actions in [-1, 1], [N, C, A], in the policy's own terms: the inverse of what `draw` does, such as bins.

        Args:
            actions: somebody else's.
            inputs: of `inputs`, N rows: what was seen before these actions.
        """

    @abstractmethod
    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """Choose actions.

        Args:
            inputs: of `inputs`.
            noise: random numbers in [0, 1), float64 [N, `randomness`]; None for the likeliest actions; [N, `starts`]
                for the likeliest from random starts.
        """

    @abstractmethod
    def score(self, stored: Stored) -> Evaluated:
        """Log-probs and entropy of stored actions at token level, [N, C, A], and values at the policy's level."""

    @abstractmethod
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """Return expected from an observation on, before anything is decided, [N]: what bootstraps a cut episode."""

    @property
    def randomness(self) -> int:
        """Random numbers that `draw` needs for each row."""
        return int(self.config.chunk * self.config.action_size)

    @property
    def starts(self) -> int:
        """The first of them, where decisions begin at noise, as flows do: how many make a start; 0 otherwise."""
        return 0

    @property
    def lesson(self) -> tuple[int, int]:
        """Actions of a demonstration that `demonstrated` takes: so many before the decision, and how many in all."""
        return 0, int(self.config.chunk)

    @property
    def tokens_of_a_decision(self) -> tuple[int, int] | None:
        """Tokens that a decision reads together through nearly all parameters, and those that it draws one after the
        other behind them; None where a policy is no such model."""
        return None

    def adapt(self, stored: Stored, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Learn from what was seen by other means than gradients, such as the scale of observations.

        Called once per training step, after its last update and before weights are published: log-probs of stored
        actions must not move within an update by anything but the gradient.

        Args:
            stored: rows of this step.
            mask: which rows count, bool [N]; None for all.
            reduce: adds a tensor of sums up over ranks; None if this is all.
        """

    @property
    def sequence(self) -> int:
        """Decisions in a row that `score` takes as one row, [B, L, ...], where it has a memory; 1 for single ones. What
        it returns are B x L rows then."""
        return 1

    def adapt_values(self, returns: Tensor) -> None:
        """Learn the scale of returns, without changing one prediction. Called before the first update of a step.

        Args:
            returns: what values are to predict, of all ranks, [n].
        """

    @property
    def value_scale(self) -> Tensor | float:
        """Divisor of value errors in the critic's loss: the scale of returns, where it is known."""
        return 1.0

    def blocks(self) -> Sequence[nn.Module]:
        """The repeated layers, which are checkpointed, and spread over ranks, one by one; none for a small policy.

        They compute by being called, and draw nothing at random.
        """
        return ()

    # What follows from it --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        instructions: Sequence[str] | None = None,
        generator: Generator = None,
        greedy: Greedy = False,
    ) -> Act:
        """Decide what to do, without gradient.

        Args:
            observation: N rows, on the policy's device.
            instructions: what each environment is to do, in words, N texts, for policies that read.
            generator: source of randomness; or a seed per row, int64 [N], which makes what a row draws independent of
                the other rows. None: torch's global one.
            greedy: take the likeliest actions instead of drawing.

        Raises:
            ValueError: greedy=from_noise, and the policy begins at none.
        """
        if greedy == "from_noise" and not self.starts:
            raise ValueError("trials.greedy=from_noise is for policies that denoise actions: take true, or false")
        inputs = self.inputs(observation, instructions)
        rows = next(iter(inputs.values()))
        count = self.starts if greedy == "from_noise" else self.randomness
        noise = None if greedy is True else uniforms(generator, len(rows), count, rows.device)
        sampled = self.draw(inputs, noise)
        logprobs = at_level(sampled.logprobs, self.config.level)
        stored = {**inputs, **sampled.also, "actions": sampled.made}
        return Act(sampled.actions, logprobs, sampled.values, stored, sampled.memory)

    def evaluate(self, stored: Stored, *, level: Level | None = None) -> Evaluated:
        """Log-probs, entropy and values of stored actions under the weights as they are now, with gradient.

        Args:
            stored: rows of `Act.stored`, or of `demonstrated`.
            level: None for the policy's own.
        """
        level = self.config.level if level is None else level
        scores = self.score(stored)
        return Evaluated(at_level(scores.logprobs, level), at_level(scores.entropy, level), scores.values)

    def forward(self, stored: Stored) -> Evaluated:
        """`evaluate`, for FSDP2, which hooks into calls."""
        return self.evaluate(stored)

    def demonstrated(
        self, observation: Observation, actions: Tensor, instructions: Sequence[str] | None = None
    ) -> Stored:
        """Stored rows of demonstrated actions, as if this policy had sampled them.

        Args:
            observation, instructions: as for `act`.
            actions: in [-1, 1], float32 [N, L, A], L of them from the first of `lesson` on.

        Raises:
            ValueError: actions are not [N, L, A].
        """
        _, length = self.lesson
        if actions.shape[1:] != (length, self.config.action_size):
            raise ValueError(
                f"policy: demonstrated actions {list(actions.shape)} must be [N, {length}, {self.config.action_size}]: "
                "rows, actions that a decision is learned from, numbers of an action"
            )
        inputs = self.inputs(observation, instructions)
        return {**inputs, "actions": self.encode(actions, inputs)}

    def imitate(self, stored: Stored, mask: Tensor | None = None, generator: Generator = None) -> LossSum:
        """The supervised loss of demonstrations: the negative log-likelihood of their actions, nats per number.

        Args:
            stored: of `demonstrated`.
            mask: which actions count, bool [N, L]; None for all.
            generator: source of randomness, as for `act`, for policies whose loss is drawn (flow matching).

        Returns:
            Un-normalised sums over numbers, differentiable.
        """
        logprobs = self.evaluate(stored, level="token").logprobs
        weights = (
            torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask[..., None].expand(logprobs.shape)
        )
        return supervised(logprobs.flatten(1), weights.flatten(1))

    def kept_in(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a parameter where those that may be are in `dtype`."""
        return torch.float32 if any(fnmatchcase(name, pattern) for pattern in self.float32) else dtype

    @torch.no_grad()
    def keep(self, dtype: torch.dtype | DtypeOf) -> Self:
        """Have parameters in a dtype, but for those that stay in float32; or in what is said of each. Buffers stay."""
        for name, parameter in self.named_parameters():
            parameter_dtype = self.kept_in(name, dtype) if isinstance(dtype, torch.dtype) else dtype(self, name)
            parameter.data = parameter.data.to(parameter_dtype)
        return self

    def weights(self) -> dict[str, Tensor]:
        """Tensors that are published and saved, by name: parameters, tied ones once, and the buffers that belong to
        them."""
        names = self.state_dict().keys()
        return {**dict(self.named_parameters()), **{name: each for name, each in self.named_buffers() if name in names}}

    def without_critic(self) -> list[nn.Parameter]:
        """Parameters that decide."""
        return [each for name, each in self.named_parameters() if not name.startswith("critic.")]

    def of_critic(self) -> list[nn.Parameter]:
        """Parameters that only values need; none without a critic."""
        return [each for name, each in self.named_parameters() if name.startswith("critic.")]

    # The form that its authors publish -------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """Settings of the policy in an authors' directory, as keys of `Config`; a run's own settings go before them.

        Args:
            directory: of the authors, or of a checkpoint.

        Raises:
            ValueError: a file there says something else than this policy can be.
        """
        return {}

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """Keys of `Config` by which it acts, and saves, on the scale of some data.

        Args:
            name: of the data, under which a checkpoint has these statistics.
            statistics: of "actions" as `actions_of` has them in the robot's units, and of the "state" if there is one.
            episodes: in the data.

        Raises:
            ValueError: it has no statistics of data.
        """
        raise ValueError(f"{cls.__name__} keeps no statistics of data: it acts in [-1, 1]")

    @classmethod
    def actions_of(cls, config: Any, scaling: Scaling | None) -> RobotActions:
        """Between the numbers that it predicts and a simulator's actions, for policies that keep statistics.

        Args:
            config: of the policy, its `Config`.
            scaling: of what it predicts.
        """
        raise NotImplementedError

    def open_published(self, directory: Path) -> None:
        """Take from an authors' directory what is no tensor, such as a tokenizer; `files` has been read. To be
        overridden."""

    def read_published(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """The tensors of an authors' directory, under this policy's own names, one at a time."""
        mine = {self.published_name(name): name for name in self._of_authors()}
        files = {name: path for name, path in tensor_files(directory).items() if name in mine}
        return ((mine[name], tensor) for name, tensor in read_tensors(files))

    def published_name(self, name: str) -> str:
        """How the authors call what has this name in the policy's state; by default the same."""
        return name

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """Write tensors and configuration as the authors do; `files` have been written, and may be changed.

        Args:
            directory: there already.
            state: the policy's state but for what is `own`, in host memory, in the dtypes to be written.
        """
        write_sharded(directory, {self.published_name(name): tensor for name, tensor in state.items()})

    def write_own(self, directory: Path, own: Mapping[str, Tensor]) -> None:
        """Write what is `own` beside it.

        Args:
            directory: of the published form.
            own: by name, in host memory.
        """
        write_tensors(directory / EXTRA, own)

    def _of_authors(self) -> list[str]:
        return [name for name in self.weights() if not matches(name, self.own)]


DtypeOf: TypeAlias = Callable[[Policy, str], torch.dtype]
"""Says in which dtype the parameter of a name is in a policy."""


def at_level(x: Tensor, level: Level) -> Tensor:
    """Sum what each number of an action has, log-prob or entropy, over what is decided as one.

        token [N, C, A]        action [N, C]: sum over A        chunk [N]: sum over C and A

    Args:
        x: [N, C, A].
        level: of the result.

    Raises:
        ValueError: there is no such level.
    """
    one_of("at_level", "level", level, LEVELS)
    if level == "token":
        return x
    if level == "action":
        return x.squeeze(-1) if x.shape[-1] == 1 else x.sum(-1)
    return x.sum((-2, -1))


def looked_at(observation: Observation, name: str, shape: tuple[int, ...], policy: str) -> Tensor:
    """One array of an observation, checked.

    Args:
        observation: N rows.
        name: such as "state".
        shape: of one row.
        policy: to name in errors.

    Raises:
        ValueError: it is missing, or its rows have another shape.
    """
    if name not in observation:
        raise ValueError(f"{policy} looks at {name!r}, which the observation has not: it has {sorted(observation)}")
    pictures = observation[name]
    if tuple(pictures.shape[1:]) != shape:
        raise ValueError(
            f"{policy}: observation {name!r} is {list(pictures.shape)}, but the policy was made for [N, "
            f"{', '.join(map(str, shape))}]: another environment, or another config?"
        )
    return pictures
