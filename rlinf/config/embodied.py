"""The keys of runs in which a policy acts in environments, and how such a configuration is read.

A file with a section `env` is one of these; every other one is for text (`text.py`, `validate.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlinf.config.common import CheckpointConfig, CommonConfig, TrackingConfig
from rlinf.config.placement import EmbodiedPlacementConfig
from rlinf.config.schema import number

SAC = "sac"
"""The algorithm that learns off-policy."""


@dataclass
class EnvConfig:
    """Environments to act in."""

    simulator: str = "rlinf.envs.gymnasium.Gymnasium"
    """Dotted path of the simulator's class, such as rlinf.envs.maniskill.ManiSkill; your own works the same."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the simulator is made with, such as {id: PullCube-v1, control: pd_ee_delta_pos}
    for ManiSkill."""
    num_envs: int = number(16, low=1)
    """Environments on each host of placement.env."""
    workers: int = number(2, low=0)
    """Child processes that they are divided over, on each host; 0 simulates in a thread of the host's own process."""
    slices: int = number(1, low=1)
    """Parts that are acted on by turns: with 2, one is simulated while actions for the other are decided."""
    group_size: int = number(1, low=1)
    """So many neighbouring environments begin their episodes alike, to be compared with each other (GRPO)."""
    max_steps: int | None = number(None, low=1)
    """Steps after which an episode is cut off; null takes the simulator's own limit."""
    ignore_terminations: bool = False
    """Episodes go on when their task ends, so that all last until their limit."""
    fresh: bool = True
    """Every step of the flow begins new episodes; false goes on with those that are under way."""
    step_timeout: float = number(60.0, above=0)
    """Seconds that a worker has for one chunk; it is replaced after that, and its episodes are drawn anew."""
    start_timeout: float = number(300.0, above=0)
    """Seconds until a worker has made its simulators."""


@dataclass
class PolicyConfig:
    """The policy that acts and learns."""

    type: str | None = None
    """`mlp` (state), `cnn` (pixels), `vla` (pixels and words), `soft` (state, for sac), or the dotted path of a class
    of your own; null takes mlp, or soft for sac."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keys of that policy, such as {hidden: [128, 128], chunk: 4}; sizes come from the environment."""
    path: str | None = None
    """Directory of a saved policy to start from, instead of a new one."""
    horizon: int = number(50, low=1)
    """Decisions of each environment per step of the flow; each decides a whole chunk of actions."""


@dataclass
class ControlAlgorithmConfig:
    """How trajectories become a gradient: a recipe by its name (ppo with a critic, grpo and its like without), any part
    of which can be changed; or sac, whose settings are in `off_policy`. `algorithm: ppo` is short for its name."""

    __shorthand__: ClassVar[str] = "name"

    name: str = "ppo"
    """The recipe."""
    epochs: int = number(8, low=1)
    """How often the decisions of each step are learned from."""
    minibatch: int = number(100, low=1)
    """Decisions per optimizer step, over all ranks of the trainer."""
    staleness: int = number(1, low=0)
    """Where the flow is rlinf.flows.embodied_async, by how many versions the weights that act may be behind those that
    learn from it; with 0 it is rlinf.flows.embodied, which never is behind. More than 1 helps where steps take
    unequally long, and no longer repeats bit for bit."""
    kl_stop: float | None = number(None, above=0)
    """No more optimizer steps on a batch once the policy has moved so far from the one that acted, nats; null never
    stops."""
    value_coef: float = number(0.5, low=0)
    """Weight of the critic's loss beside the policy's."""
    advantage: Any = field(default_factory=dict)
    """Changes what actions are compared with: {gamma: 0.8, lam: 0.9} for ppo."""
    loss: Any = field(default_factory=dict)
    """Changes the loss: {clip_low: 0.2, clip_high: 0.2}, or another one by name."""
    aggregation: dict[str, Any] = field(default_factory=dict)
    """Changes how losses of actions become one: {how: seq-mean-token-mean} averages over episodes."""
    entropy_bonus: float | None = number(None, low=0)
    """Weight of the reward for staying undecided; null as in the recipe."""
    critic: Any = field(default_factory=dict)
    """Changes the critic's loss: {clip: 0.2, error: huber}."""


@dataclass
class ControlOptimizerConfig:
    """AdamW."""

    lr: float = number(3e-4, above=0)
    """Learning rate."""
    critic_lr: float | None = number(None, above=0)
    """Of the part that only values need; null takes lr."""
    betas: tuple[float, float] = number((0.9, 0.999), low=0, below=1)
    """Decay of the running means of the gradient and of its square."""
    weight_decay: float = number(0.0, low=0)
    """Decoupled weight decay."""
    grad_clip: float | None = number(None, above=0)
    """Gradients with a larger global norm are scaled down to it; null takes 0.5, and no bound for sac."""


@dataclass
class OffPolicyConfig:
    """Learning from what is remembered, where the algorithm is sac (arXiv:1812.05905), with the choices of REDQ and
    RLPD (arXiv:2302.02948)."""

    batch: int = number(256, low=1)
    """Transitions per optimizer step, over all ranks."""
    capacity: int = number(1_000_000, low=1)
    """Transitions that are remembered."""
    warmup: int = number(1_000, low=0)
    """Transitions collected before the first optimizer step."""
    utd: float = number(1.0, above=0)
    """Optimizer steps of the critics per transition that came after the warm-up."""
    actor_every: int = number(1, low=1)
    """Steps of the critics for each of the actor."""
    gamma: float = number(0.99, low=0, high=1)
    """Discount per action."""
    tau: float = number(0.005, above=0, high=1)
    """Share of the way that target critics go with each step."""
    alpha: float = number(1.0, above=0)
    """First temperature, reward per nat."""
    alpha_lr: float | None = number(None, low=0)
    """Learning rate of the temperature; null takes optimizer.lr, 0 keeps it."""
    target_entropy: float | None = None
    """Nats that the temperature aims at; null: minus the numbers in a chunk."""
    subset: int | None = number(None, low=1)
    """Target critics drawn in each step (REDQ); null takes all."""
    demonstrations: str | None = None
    """Directory of demonstrations that a part of each batch is drawn from (RLPD); null for none."""
    demo_share: float = number(0.5, low=0, high=1)
    """That part."""


@dataclass
class ImitationConfig:
    """Supervised warm-up on demonstrations, before learning by acting."""

    path: str | None = None
    """Directory of demonstrations, as `rlinf.flows.record` writes them; null skips the warm-up."""
    steps: int = number(300, low=1)
    """Optimizer steps."""
    batch: int = number(64, low=1)
    """Decisions in each, over all ranks."""
    lr: float = number(1e-3, above=0)
    """Learning rate (AdamW)."""


@dataclass
class TrialsConfig:
    """Evaluation: whole episodes by the likeliest actions, in environments of their own, the same starts each time."""

    episodes: int = number(64, low=0)
    """How many, before the first step and after the last; 0 evaluates nothing."""
    every: int = number(0, low=0)
    """Evaluate after every this many steps too; 0 does not."""
    patience: int = number(0, low=0)
    """End the run after so many evaluations in a row that are no better than the best one before them, by
    checkpoint.best or else by evaluation/success_once; 0 takes all steps."""
    videos: int = number(0, low=0)
    """Of how many of them a video is kept in the run directory, failures first: they are played again for it. The
    simulator must be able to render."""
    seed: int | None = number(None, low=0)
    """Of their starts, which are kept for trials: no episode of training begins by one of their seeds. null takes the
    run's seed; a number gives runs of several seeds the same trials."""
    suites: dict[str, Any] = field(default_factory=dict)
    """Further sets of environments, by name, each tried for itself: {far: {options: {distance: 2.0}, episodes: 100}},
    with options besides env.options and trials.options, and episodes or max_steps where they differ. Their metrics
    begin with evaluation/suites/NAME/, such as evaluation/suites/far/success_once."""
    options: dict[str, Any] = field(default_factory=dict)
    """What their simulators are made with besides env.options, such as {pictures: true}, which ManiSkill needs for
    videos, and which slows its building down."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of environments that trials are played in."""

    episodes: int
    """How many."""
    options: dict[str, Any]
    """Of its simulators."""
    max_steps: int | None
    """Steps after which an episode is cut off; None for the simulator's own limit."""


_SUITE = {"options": dict, "episodes": int, "max_steps": int}
"""Keys of an entry of `trials.suites`, and their types."""


def suites_of(config: EmbodiedConfig) -> dict[str, Suite]:
    """The sets of environments that trials are played in, by name; those of training are "" and come first.

    Args:
        config: without mistakes in `trials.suites`.
    """
    env, trials = config.env, config.trials
    common = {**env.options, **trials.options}
    suites = {"": Suite(trials.episodes, common, env.max_steps)}
    for name, entry in trials.suites.items():
        options = {**common, **entry.get("options", {})}
        suites[name] = Suite(entry.get("episodes", trials.episodes), options, entry.get("max_steps", env.max_steps))
    return {name: suite for name, suite in suites.items() if suite.episodes}


def suite_mistakes(suites: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake in `trials.suites`.

    Args:
        suites: as they were written.
    """
    for name, entry in suites.items():
        key = f"trials.suites.{name}"
        if not re.fullmatch(r"[\w.-]+", str(name)) or str(name).startswith("."):
            yield key, "this names metrics and directories: write it with letters, digits, - and _ alone"
        if not isinstance(entry, Mapping):
            yield key, "write {options: {...}}, and episodes or max_steps where they differ"
            continue
        for each, value in entry.items():
            if each not in _SUITE:
                yield f"{key}.{each}", f"it has no such key; its keys are {', '.join(_SUITE)}"
            elif not isinstance(value, _SUITE[each]) or isinstance(value, bool) or value == 0:
                wanted = "a mapping of options" if each == "options" else "a whole number from 1 on"
                yield f"{key}.{each}", f"{value!r}: write {wanted}"


@dataclass
class EmbodiedConfig(CommonConfig):
    """One training run of a policy that acts."""

    flow: str | None = None
    """Dotted path of the async function that is one step; it takes what it names of `step`, `env`, `policy` and
    `trainer`. Your own file works the same. null takes rlinf.flows.embodied, or rlinf.flows.sac for sac."""
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    algorithm: ControlAlgorithmConfig = field(default_factory=ControlAlgorithmConfig)
    optimizer: ControlOptimizerConfig = field(default_factory=ControlOptimizerConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    trials: TrialsConfig = field(default_factory=TrialsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: TrackingConfig = field(default_factory=TrackingConfig)
    placement: EmbodiedPlacementConfig = field(default_factory=EmbodiedPlacementConfig)
