"""The keys of runs in which a policy acts in environments, and how such a configuration is read.

A file with a section `env` is one of these; every other one is for text (`text.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields
from operator import attrgetter
from typing import Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlinf.config.common import (
    CheckpointConfig,
    CommonConfig,
    EmbodiedPlacementConfig,
    TrackingConfig,
    best_mistakes,
)
from rlinf.config.importing import mistake_in, shipped_file
from rlinf.config.learning import Decay
from rlinf.config.schema import CLOSED, entry_mistakes
from rlinf.config.text import PolicyLoraConfig

OFF_POLICY = ("sac", "crossq", "iql")
"""Algorithms that learn from a replay buffer, by `off_policy`."""
IMITATION = "imitation"
"""The algorithm that learns from demonstrations alone."""
DAGGER = "dagger"
"""The algorithm that learns from what an expert would do."""

ENSEMBLE = "ensemble"
"""The world model that comes with rlinf."""

_WITH_TARGETS = ("sac", "iql")
"""Algorithms that keep a second copy of the critics."""
_OFF_POLICY_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch", "capacity"), (*OFF_POLICY, DAGGER)),
    **dict.fromkeys(("demonstrations", "failed_demonstrations"), (*OFF_POLICY, DAGGER)),
    **dict.fromkeys(("warmup", "utd", "actor_every", "gamma", "returns", "n_step", "solved_only"), OFF_POLICY),
    **dict.fromkeys(("demo_share", "offline_steps", "offline_updates"), OFF_POLICY),
    **dict.fromkeys(("tau",), _WITH_TARGETS),
    "gripper_penalty": ("sac",),
    **dict.fromkeys(("alpha", "alpha_lr", "target_entropy", "backup_entropy", "subset", "shift"), ("sac", "crossq")),
    "imitation": ("sac", "crossq"),
    **dict.fromkeys(("expectile", "beta"), ("iql",)),
}
"""Which algorithms read each key of `off_policy`."""

_OPTIMIZER_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "betas", "grad_clip"), (*OFF_POLICY, DAGGER, IMITATION)),
    "critic_lr": OFF_POLICY,
    "weight_decay": (DAGGER, IMITATION),
    **dict.fromkeys(("schedule", "warmup_steps", "min_lr_ratio"), (IMITATION,)),
}
"""Which of them, and of imitation, read each key of `optimizer`; the others are PPO's and its like."""
_PREPARED = ("dtype", "train", "lora", "gradient_checkpointing", "sharding")
_READ_BY: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "off_policy": _OFF_POLICY_KEYS,
    "optimizer": _OPTIMIZER_KEYS,
    "policy": dict.fromkeys(_PREPARED, (IMITATION,)),
    "algorithm": {"micro_batch": (IMITATION,), "staleness": (*OFF_POLICY, DAGGER)},  # of flows that work ahead
}
"""Which of them read each key of a section, where PPO and its like read all but `off_policy`."""


@dataclass(config=CLOSED)
class CurriculumConfig:
    """Which of `env.tasks` are played how often, by how often they are solved."""

    floor: float = Field(default=1.0, gt=0, le=1)
    """Share of its weight that a task keeps while its success rate lies outside of low and high; 1 lets weights be."""
    low: float = Field(default=0.1, ge=0, le=1)
    """Success rate below which a task is too hard as yet."""
    high: float = Field(default=0.9, ge=0, le=1)
    """Success rate above which it is learned."""
    memory: float = Field(default=0.8, ge=0, lt=1)
    """Share of a task's earlier rate in each step that finishes episodes of it."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.low > self.high:
            yield "low", f"it must be at most env.curriculum.high, {self.high}"


@dataclass(config=CLOSED)
class TaskEntry:
    """A task of a mixture: an entry of `env.tasks`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Its simulators' options besides env.options."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, strict=True)
    """Its share of the episodes, relative to the others'."""
    name: Any = None
    """Its name; None takes the texts among its options."""


@dataclass(config=CLOSED)
class SuiteEntry:
    """A further set of environments to evaluate in: an entry of `trials.suites`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Its simulators' options besides env.options and trials.options."""
    episodes: int | None = Field(default=None, ge=1, strict=True)
    """How many; None as in trials."""
    max_steps: int | None = Field(default=None, ge=1, strict=True)
    """Steps after which an episode is cut off; None as in env."""


@dataclass(frozen=True, slots=True)
class EvalSuite:
    """A set of environments that trials are played in."""

    episodes: int
    """How many."""
    options: dict[str, Any]
    """Options of its simulators."""
    max_steps: int | None
    """Steps after which an episode is cut off; None for the simulator's own limit."""


@dataclass(config=CLOSED)
class EnvConfig:
    """Environments to act in."""

    simulator: str = "rlinf.envs.gymnasium.Gymnasium"
    """Dotted path of the simulator's class, such as rlinf.envs.maniskill.ManiSkill; your own works the same."""
    options: dict[str, Any] = field(default_factory=dict)
    """The simulator's options, such as {id: PullCube-v1, control: pd_ee_delta_pos}
    for ManiSkill."""
    tasks: list[Any] = field(default_factory=list)
    """Tasks that episodes are drawn from, by their seeds: [{options: {id: PushCube-v1}, weight: 2}, …], with options
    besides env.options and, where names should be others, a name. None leaves env.options alone."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """How the weights of tasks follow their success."""
    reward: str | None = None
    """Dotted path of a function that gives all environments their rewards, in the place of the simulator's; it takes
    what it names of observation, before, action, reward, success, terminated, instructions, tasks."""
    reward_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of that function; env.success gets those of them that it takes."""
    reward_scale: float = 1.0
    """Rewards are multiplied by it."""
    success: str | None = None
    """The same of a function that says which environments have solved their task."""
    end_solved: bool = False
    """An episode ends where env.success says that its task is solved."""
    intervener: str | None = None
    """Device or function that may act in the policy's place while it learns (sac, crossq, iql, dagger): the dotted path
    of a device in one person's hands, such as rlinf.envs.interventions.Gamepad, or of a function that stands in for a
    person. It takes what it names of observation, action, steps, instructions, tasks, and returns actions in [-1, 1]
    and in which environments it acts."""
    intervener_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the device, or further ones of the function."""
    num_envs: int = Field(default=16, ge=1)
    """Environments on each host of placement.env."""
    workers: int = Field(default=2, ge=0)
    """Child processes that they are divided over, on each host; 0 simulates in a thread of the host's own process."""
    slices: int = Field(default=1, ge=1)
    """Parts that are acted on by turns: with 2, one is simulated while actions for the other are decided."""
    group_size: int = Field(default=1, ge=1)
    """So many neighbouring environments begin their episodes alike, to be compared with each other (GRPO)."""
    expected_steps_per_second: float | None = Field(default=None, gt=0)
    """Simulated steps a second of all environments of a host together, by which `--dry-run` models the seconds of a
    step; nothing else depends on it, and null leaves simulating out."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps after which an episode is cut off; null takes the simulator's own limit."""
    ignore_terminations: bool = False
    """Episodes go on when their task ends, so that all last until their limit."""
    frame_stack: int = Field(default=1, ge=1, le=1024)
    """So many last observations are seen at once, the oldest first; the first one of an episode stands in for those
    before it."""
    fresh: bool = True
    """Every step of the flow begins new episodes; false goes on with those that are under way."""
    step_timeout: float = Field(default=60.0, gt=0)
    """Seconds that a worker has for the steps of one chunk; it is replaced after that, and its episodes are drawn
    anew. Resets within the chunk do not count."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds until a worker has made its simulators; also, for the episodes that begin together in it."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if (simulator := mistake_in(self.simulator)) is not None:
            yield "simulator", simulator
        parts = max(self.workers, 1) * self.slices * self.group_size
        if self.num_envs % parts:
            yield (
                "num_envs",
                f"it must be a multiple of workers x slices x group_size = {parts}, so that shares are equal; take "
                f"{max(parts, self.num_envs // parts * parts)}, or fewer workers or slices",
            )
        yield from self._task_mistakes()
        if not self.tasks and self.curriculum.floor < 1:
            yield "curriculum.floor", "there is nothing to choose from: name several env.tasks"
        if self.reward is None and self.success is None and self.reward_args:
            yield "reward_args", "there is no function that takes them: name it in env.reward or env.success"
        if self.end_solved and self.success is None:
            yield "end_solved", "nobody says so: name a function in env.success; simulators end their own tasks"
        if self.intervener is None and self.intervener_args:
            yield "intervener_args", "there is nobody who takes them: name who intervenes in env.intervener"
        for key in ("reward", "success", "intervener"):
            path = getattr(self, key)
            if path is not None and (advice := mistake_in(path)) is not None:
                yield key, advice

    def _task_mistakes(self) -> Iterator[tuple[str, str]]:
        wrong = False
        for number, task in enumerate(self.tasks):
            if not isinstance(task, Mapping):
                yield "tasks", f"env.tasks[{number}]: write {{options: {{...}}}}, and weight or name where it has them"
                return
            for key, advice in entry_mistakes(TaskEntry, task):
                yield "tasks", f"env.tasks[{number}].{key}: {advice}"
                wrong = True
        names = [] if wrong else task_names(self.tasks)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield "tasks", f"two of them are called {twice[0]!r}: give each a name of its own"


@dataclass(config=CLOSED)
class PolicyConfig:
    """The policy that acts and learns."""

    type: str | None = None
    """`mlp` and `flow` (state), `cnn` (pixels), `vla` (pixels and words), `openvla`, `openvla-oft`, `pi0`, `pi05`,
    `pi0_fast`, `gr00t`, `smolvla`, `wall_x`, `act` and `diffusion` (published ones); for sac and its like `soft`
    (state), `soft_pixels`, or `steered` (the noise of a frozen policy); or the dotted path of a class of your own. null
    takes mlp, or soft."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keys of that policy, such as {hidden: [128, 128], chunk: 4}; sizes come from the environment."""
    path: str | None = None
    """Directory of a saved policy to start from, instead of a new one; or, where `type` has a published form (openvla,
    openvla-oft, pi0, pi05, pi0_fast, gr00t, smolvla, wall_x, act, diffusion), of its authors."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the policy computes, where it acts as where it learns. What learns is kept in float32 by the
    trainer whatever this is, and so is everywhere what the policy's class keeps so, such as norms and value heads."""
    train: list[str] | None = None
    """Patterns of the parameters that learn, such as ["*", "!vision_backbone.*"]: the last that fits decides, and `!`
    excludes. null: all of them, or those that the policy's class names; with adapters, the critic beside them."""
    lora: PolicyLoraConfig = field(default_factory=PolicyLoraConfig)
    """Low-rank adapters."""
    gradient_checkpointing: bool = False
    """Compute activations of each block again on the way back: less memory, about a third more time."""
    sharding: Literal["auto", "shard", "replicate"] = "auto"
    """How a policy lies on the processes of the trainer: `shard` spreads it and its optimizer over all of them (FSDP),
    `replicate` gives each a copy. `auto` spreads one that is made of blocks, as large ones are."""
    horizon: int = Field(default=50, ge=1)
    """Decisions of each environment per step of the flow; each decides a whole chunk of actions."""

    @property
    def preparation(self) -> dict[str, Any]:
        """How it is made ready to learn, as arguments of `Preparation`."""
        names = ("dtype", "gradient_checkpointing", "sharding")
        train = None if self.train is None else tuple(self.train)
        return {"train": train, "lora": self.lora.settings, **{name: getattr(self, name) for name in names}}

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.path is not None and not os.path.isdir(os.path.expanduser(self.path)):
            yield "path", "there is no such directory; name the `policy` directory of a checkpoint"


@dataclass(config=CLOSED)
class ControlAlgorithmConfig:
    """How trajectories become a gradient: a recipe by its name (ppo with a critic, grpo and its like without), any part
    of which can be changed; sac, crossq or iql, whose settings are in `off_policy`; dagger, with `dagger`; or
    imitation, with `imitation`. `algorithm: ppo` is short for its name."""

    __shorthand__: ClassVar[str] = "name"

    name: str = "ppo"
    """The recipe."""
    epochs: int = Field(default=8, ge=1)
    """How often the decisions of each step are learned from."""
    minibatch: int = Field(default=100, ge=1)
    """Decisions per optimizer step, over all ranks of the trainer."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Decisions that each rank of the trainer computes at once: fewer need less memory and change nothing else. null
    takes all that a rank has of a minibatch."""
    critic_warmup: int = Field(default=0, ge=0)
    """Steps of the flow that teach the critic alone, before the policy learns too: for a policy that has learned
    elsewhere and a critic that has not."""
    staleness: int = Field(default=1, ge=0)
    """Where the flow is rlinf.flows.embodied_async, by how many versions the weights that act may be behind those that
    learn from it; with 0 it is rlinf.flows.embodied, which never is behind. More than 1 helps where steps take
    unequally long, and no longer repeats bit for bit."""
    kl_stop: float | None = Field(default=None, gt=0)
    """No more optimizer steps on a batch once the policy has moved so far from the one that acted, nats; null never
    stops."""
    value_coef: float = Field(default=0.5, ge=0)
    """Weight of the critic's loss beside the policy's."""
    advantage: Any = field(default_factory=dict)
    """Changes what actions are compared with: {gamma: 0.8, lam: 0.9} for ppo."""
    loss: Any = field(default_factory=dict)
    """Changes the loss: {clip_low: 0.2, clip_high: 0.2}, or another one by name."""
    aggregation: dict[str, Any] = field(default_factory=dict)
    """Changes how losses of actions become one: {how: seq-mean-token-mean} averages over episodes."""
    entropy_bonus: float | None = Field(default=None, ge=0)
    """Weight of the reward for staying undecided; null as in the recipe."""
    critic: Any = field(default_factory=dict)
    """Changes the critic's loss: {clip: 0.2, error: huber}."""
    entropy_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the entropy bonus falls, to 0 in the last step."""
    filter_returns: tuple[float, float] | None = None
    """Groups of episodes whose mean return lies outside of these bounds are not learned from (grpo and its like), such
    as [0.5, 4.5] where a solved task earns 5; null for no bounds."""
    filter_success: tuple[float, float] | None = None
    """The same of the share of a group's episodes that solved the task, such as [0.1, 0.9], where a simulator says it.
    Groups in which all did, or not one, are never learned from."""
    reward_scaling: bool = False
    """Divide rewards by the running standard deviation of discounted returns (gae alone), for tasks whose rewards are
    large or small."""


@dataclass(config=CLOSED)
class ControlOptimizerConfig:
    """AdamW."""

    lr: float = Field(default=3e-4, gt=0)
    """Learning rate."""
    critic_lr: float | None = Field(default=None, gt=0)
    """Of the part that only values need; null takes lr."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip: float | None = Field(default=None, gt=0)
    """Gradients with a larger global norm are scaled down to it; null takes 0.5, and no bound for sac."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How learning rates fall after warm-up, until the last step; sac and its like, and dagger, keep them."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of the flow over which learning rates rise linearly from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rates that a linear or cosine schedule comes down to; the last step is a little above."""


@dataclass(config=CLOSED)
class OffPolicyConfig:
    """Learning from what is remembered, where the algorithm is sac (arXiv:1812.05905), with the choices of REDQ and
    RLPD (arXiv:2302.02948), crossq (arXiv:1902.05605) or iql (arXiv:2110.06169)."""

    batch: int = Field(default=256, ge=1)
    """Transitions per optimizer step, over all ranks."""
    capacity: int = Field(default=1_000_000, ge=1)
    """Transitions that are remembered; a picture is kept once."""
    warmup: int = Field(default=1_000, ge=0)
    """Transitions collected before the first optimizer step."""
    utd: float = Field(default=1.0, gt=0)
    """Optimizer steps of the critics per transition that came after the warm-up."""
    actor_every: int = Field(default=1, ge=1)
    """Steps of the critics for each of the actor."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount per action."""
    returns: tuple[float, float] | None = None
    """Least and greatest return that the task can give, as [0, 1] of a reward of 1 for success, which ends the episode:
    the critics' targets are cut to it, so that they cannot run away from what is earned; null leaves them."""
    n_step: int = Field(default=1, ge=1)
    """Decisions that a transition spans; fewer at the end of an episode or of a step of the flow."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Share of the way that target critics go with each step; crossq has none."""
    alpha: float = Field(default=1.0, gt=0)
    """First temperature, reward per nat (sac, crossq)."""
    alpha_lr: float | None = Field(default=None, ge=0)
    """Learning rate of the temperature; null takes optimizer.lr, 0 keeps it."""
    target_entropy: float | None = None
    """Nats that the temperature aims at; null: minus the numbers in a chunk."""
    backup_entropy: bool = True
    """The critics count the entropy of what follows as reward (sac, crossq). With false, as HIL-SERL has it, only the
    actor does: of a reward that comes once, at success, the entropy of the way there can be worth more."""
    subset: int | None = Field(default=None, ge=1)
    """Target critics drawn in each step (REDQ); null takes all."""
    gripper_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a gripper that is chosen apart (policy.settings.gripper; sac), where it is told to close
    or open, and not to stay (HIL-SERL)."""
    imitation: float = Field(default=0.0, ge=0)
    """Weight in the actor's loss of the squared distance of its likeliest actions from those of demonstrations and
    interventions, for as many rows as are drawn of them (arXiv:1709.10089); sac, crossq. 0: critics alone say."""
    shift: int = Field(default=0, ge=0)
    """Pictures are moved at random by so many pixels at most when they are learned from (DrQ, arXiv:2004.13649)."""
    expectile: float = Field(default=0.7, gt=0, lt=1)
    """Which expectile of the remembered actions a state is worth (iql): higher is more optimistic."""
    beta: float = Field(default=3.0, ge=0)
    """Inverse temperature of the weights of remembered actions (iql); 0 is behaviour cloning."""
    solved_only: bool = False
    """Remember only episodes that were solved, and that end in the step in which they began."""
    demonstrations: str | None = None
    """Directory of demonstrations that a part of each batch is drawn from (RLPD); null for none. dagger begins with
    them."""
    demo_share: float = Field(default=0.5, ge=0, le=1)
    """That part; what somebody did who intervened (env.intervener) is drawn with them (HIL-SERL)."""
    failed_demonstrations: bool = False
    """Learn from recorded episodes that did not solve their task, too, as iql can."""
    offline_steps: int = Field(default=0, ge=0)
    """The first so many steps learn from demonstrations alone, and nobody acts in them."""
    offline_updates: int = Field(default=1_000, ge=1)
    """Optimizer steps in each of those."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.returns is not None and not self.returns[0] < self.returns[1]:
            yield "returns", "name the least and the greatest return, in this order, as [0, 1]"
        if self.offline_steps and self.demonstrations is None:
            yield "offline_steps", "there is nothing to learn from offline: name off_policy.demonstrations"
        if self.demonstrations is not None and not os.path.exists(os.path.expanduser(self.demonstrations)):
            yield "demonstrations", "there is no such directory; name one with demonstrations"


@dataclass(config=CLOSED)
class DaggerConfig:
    """Learning from what an expert would do in the states that the policy gets into (arXiv:1011.0686), where the
    algorithm is dagger; off_policy.batch, capacity and demonstrations hold for it, too. Without an expert it learns
    from the actions of whoever intervenes, env.intervener, and from those alone (HG-DAgger, arXiv:1810.02890)."""

    expert: str | None = None
    """The expert: the dotted path of a function that takes observations and instructions and gives actions in
    [-1, 1], float32 [N, C, A]; or the directory of a saved policy. null where somebody intervenes instead."""
    beta: float = Field(default=0.0, ge=0, le=1)
    """First share of decisions in which the expert's action is done instead of the policy's."""
    decay: float = Field(default=0.5, ge=0, le=1)
    """The share falls to this much of itself with each step."""
    updates: int = Field(default=200, ge=1)
    """Optimizer steps per step of the flow, on all that was labelled so far."""


@dataclass(config=CLOSED)
class WorldConfig:
    """A world model, which learns what the environments show and reward: each step of the run acts in `env`, teaches
    the model, and then has the policy learn inside it; see docs/world-models.md."""

    model: str | None = None
    """`ensemble` of networks that predict states (arXiv:1802.10592), or the dotted path of a class of your own; null:
    there is none, and the policy learns outside."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further arguments of that model, such as {members: 5, hidden: [128, 128], penalty: 0.5}; sizes come from the
    environment."""
    num_envs: int = Field(default=64, ge=1)
    """Environments inside, on each process of placement.world."""
    horizon: int = Field(default=10, ge=1)
    """Decisions of each of them per step inside, after which its episode is cut: errors have few steps to grow in."""
    steps: int = Field(default=10, ge=1)
    """Steps inside that follow on each one outside."""
    updates: int = Field(default=500, ge=1)
    """Optimizer steps of the model before them, on all transitions so far."""
    batch: int = Field(default=256, ge=1)
    """Transitions in each, for each network of an ensemble."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the model (AdamW)."""
    demonstrations: str | None = None
    """Directory of recorded episodes that the model also learns from, single actions each; null for none."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        usual = WorldConfig()
        if self.model is None:
            for key in fields(self):
                if getattr(self, key.name) != getattr(usual, key.name):
                    yield key.name, "there is no world model: set world.model=ensemble, or remove it"
        elif self.model != ENSEMBLE and (advice := mistake_in(self.model)) is not None:
            yield "model", f"take {ENSEMBLE}, or the dotted path of a class: {advice}"
        if self.demonstrations is not None and not os.path.exists(os.path.expanduser(self.demonstrations)):
            yield "demonstrations", "there is no such directory; name one with recorded episodes"


@dataclass(config=CLOSED)
class ImitationConfig:
    """Supervised learning from demonstrations: a warm-up before learning by acting, or, where the algorithm is
    imitation, all that the run does (with the optimizer of `optimizer`)."""

    path: str | None = None
    """Demonstrations: a directory of `rlinf record`, a LeRobot data set (2 or 3), a trajectory of ManiSkill, files of
    robomimic or LIBERO (all HDF5), or RLDS-like archives (npz); null skips the warm-up."""
    format: Literal["rlinf", "lerobot", "maniskill", "robomimic", "rlds"] | None = None
    """Format of what lies there; null goes by its files."""
    names: dict[str, str] = field(default_factory=dict)
    """Our name for each feature of the data set, such as {observation.images.front: rgb, observation.state: state,
    action: actions}; features of one name are joined, as cameras are; empty takes the format's own choice."""
    bounds: Any = None
    """Values that become -1 and 1 of each number of an action: {low: [...], high: [...]}, or min_max or q01_q99 of the
    data set itself; null takes actions as they are."""
    statistics: str | None = None
    """Name under which a published policy gets statistics of these demonstrations, by which it acts then and which its
    checkpoints have (OpenVLA: data set, pi0: asset, GR00T: tag of the robot); null keeps those that it has."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """Several data sets instead of path: by name {path, weight: 1.0, format, names, bounds}. Of every batch each has
    its share."""
    solved: bool = True
    """Leave out episodes that did not solve their task, where the data says so."""
    broken: Literal["refuse", "drop"] = "refuse"
    """Episodes that cannot be read or have numbers that are not finite: end the run with their name, or leave them out
    with a line (pictures are not looked at before)."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the episodes of each data set that is not learned from; evaluations of a run of imitation tell the loss
    on it, a warm-up only leaves it out."""
    frame_stack: int = Field(default=1, ge=1, le=1024)
    """So many last observations of an episode are seen at once, the oldest first, as env.frame_stack shows them: for
    data sets that show one at a time, as LeRobot's do. Episodes that were recorded with env.frame_stack have them."""
    memory_gb: float = Field(default=4.0, gt=0)
    """Episodes that each process of the trainer holds at a time, GB; of larger data sets windows of this size are read
    one after the other."""
    steps: int = Field(default=300, ge=1)
    """Optimizer steps of the warm-up; of a run of imitation, in each of its `steps`."""
    batch: int = Field(default=64, ge=1)
    """Decisions in each, over all ranks."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the warm-up (AdamW); a run of imitation has optimizer.lr."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.mixture and self.path is not None:
            yield "path", "it is one data set or several: name all of them in imitation.mixture, or remove that"
        if self.statistics is not None and not (self.mixture or self.path):
            yield "statistics", "there are no demonstrations: name them in imitation.path, or remove it"
        if self.statistics is not None and not all(part.strip(". ") for part in self.statistics.split("/")):
            yield "statistics", "checkpoints keep files under it: take a name, such as my_robot or me/my_robot"
        paths: dict[str, Any] = {} if self.path is None else {"path": self.path}
        for name, about in self.mixture.items():
            paths[f"mixture.{name}"] = about.get("path") if isinstance(about, Mapping) else None
        for key, path in paths.items():
            if not isinstance(path, str):
                yield key, "write {path: DIRECTORY}, and weight, format, names, bounds where they differ"
            elif not os.path.exists(os.path.expanduser(shipped_file(path))):
                yield key, "there is no such directory or file; name one with demonstrations"


@dataclass(config=CLOSED)
class TrialsConfig:
    """Evaluation: whole episodes in environments of their own, the same starts each time."""

    episodes: int = Field(default=64, ge=0)
    """How many, before the first step and after the last; 0 evaluates nothing."""
    greedy: bool | Literal["from_noise"] = True
    """By the likeliest actions; false draws them as in training, the same draws each time. from_noise, of policies that
    denoise: by the ODE alone from a random start, as openpi, NVIDIA and RLinf evaluate, the same starts each time; true
    begins at 0, the middle of them."""
    every: int = Field(default=0, ge=0)
    """Evaluate after every this many steps too; 0 does not."""
    patience: int = Field(default=0, ge=0)
    """End the run after so many evaluations in a row that are no better than the best one before them, by
    checkpoint.best or else by evaluation/success_once; 0 takes all steps."""
    videos: int = Field(default=0, ge=0)
    """Of how many of them a video is kept in the run directory, failures first: they are played again for it. The
    simulator must be able to render."""
    seed: int | None = Field(default=None, ge=0)
    """Of their starts, which are kept for trials: no episode of training begins by one of their seeds. null takes the
    run's seed; a number gives runs of several seeds the same trials."""
    suites: dict[str, Any] = field(default_factory=dict)
    """Further sets of environments, by name, each tried for itself: {far: {options: {distance: 2.0}, episodes: 100}},
    with options besides env.options and trials.options, and episodes or max_steps where they differ. Their metrics
    begin with evaluation/suites/NAME/, such as evaluation/suites/far/success_once."""
    options: dict[str, Any] = field(default_factory=dict)
    """Their simulators' options besides env.options, such as {pictures: true}, which ManiSkill needs for
    videos, and which slows its building down."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in its suites."""
        for name, entry in self.suites.items():
            key = f"suites.{name}"
            if not re.fullmatch(r"[\w.-]+", str(name)) or str(name).startswith("."):
                yield key, "this names metrics and directories: write it with letters, digits, - and _ alone"
            if isinstance(entry, Mapping):
                yield from ((f"{key}.{inner}", advice) for inner, advice in entry_mistakes(SuiteEntry, entry))
            else:
                yield key, "write {options: {...}}, and episodes or max_steps where they differ"


def task_names(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of a mixture's tasks: those given, or else the texts among their options.

    Args:
        tasks: entries of `env.tasks`.
    """
    names = []
    for index, task in enumerate(tasks):
        texts = [value for value in task.get("options", {}).values() if isinstance(value, str)]
        names.append(str(task.get("name") or " ".join(texts) or f"task {index}"))
    return names


@dataclass(config=CLOSED)
class EmbodiedConfig(CommonConfig):
    """One training run of a policy that acts."""

    flow: str | None = None
    """Dotted path of the async function that is one step; it takes what it names of `step`, `env`, `policy` and
    `trainer`, and `world` and `world_trainer` where there is a world model. Your own file works the same. null takes
    rlinf.flows.embodied, rlinf.flows.sac for sac, crossq and iql, or with a world model
    rlinf.flows.embodied.model_based."""
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    algorithm: ControlAlgorithmConfig = field(default_factory=ControlAlgorithmConfig)
    optimizer: ControlOptimizerConfig = field(default_factory=ControlOptimizerConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    dagger: DaggerConfig = field(default_factory=DaggerConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    trials: TrialsConfig = field(default_factory=TrialsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: TrackingConfig = field(default_factory=TrackingConfig)
    placement: EmbodiedPlacementConfig = field(default_factory=EmbodiedPlacementConfig)

    @property
    def has_targets(self) -> bool:
        """The algorithm keeps a second copy of the critics."""
        return self.algorithm.name in _WITH_TARGETS

    def reads(self, section: str, key: str) -> bool:
        """True if the algorithm, where it is none of PPO's like, reads a key of a section."""
        return self.algorithm.name in _READ_BY[section].get(key, ())

    @property
    def policy_settings(self) -> dict[str, Any]:
        """`type` and settings of the policy, with what its algorithm stands on where nothing else is said."""
        name = self.algorithm.name
        kind = self.policy.type or ("soft" if name in OFF_POLICY else "mlp")
        own: dict[str, Any] = {"batch_norm": True} if name == "crossq" else {}
        return {"type": kind, **own, **self.policy.settings}

    @property
    def eval_suites(self) -> dict[str, EvalSuite]:
        """The sets of environments that trials are played in, by name; those of training are "" and come first."""
        suites = {}
        for name, entry in {"": {}, **self.trials.suites}.items():
            own = SuiteEntry(**entry)
            options = {**self.env.options, **self.trials.options, **own.options}
            episodes = self.trials.episodes if own.episodes is None else own.episodes
            suites[name] = EvalSuite(episodes, options, self.env.max_steps if own.max_steps is None else own.max_steps)
        return {name: suite for name, suite in suites.items() if suite.episodes}

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in keys of several sections together."""
        yield from super().mistakes()
        yield from self._unread()
        yield from self._off_policy_mistakes()
        yield from self._dagger_mistakes()
        if self.env.intervener is not None and self.algorithm.name not in (*OFF_POLICY, DAGGER):
            readers = ", ".join((*OFF_POLICY, DAGGER))
            yield "env.intervener", f"{self.algorithm.name} learns from its own actions alone, but {readers}: remove it"
        yield from self._world_mistakes()
        if self.algorithm.name == IMITATION and self.policy.type in ("soft", "soft_pixels", "steered"):
            yield "policy.type", f"{self.policy.type} is of sac and its like: take another for imitation"
        trials = self.trials
        if any(trials.mistakes()):
            return
        most = max((suite.episodes for suite in self.eval_suites.values()), default=0)
        if trials.videos > most:
            yield "trials.videos", f"there are only {most} episodes; raise trials.episodes"
        every = trials.every if most or self.algorithm.name == IMITATION else 0  # which has held-out episodes, too
        yield from best_mistakes(self.checkpoint.best, trials.patience, every, "trials")

    def _unread(self) -> Iterator[tuple[str, str]]:
        """Keys that were set and that the algorithm does not read."""
        name, usual = self.algorithm.name, EmbodiedConfig()
        alone = name in (*OFF_POLICY, DAGGER, IMITATION)
        for section, read_by in _READ_BY.items() if alone else (("off_policy", _OFF_POLICY_KEYS),):
            values, first = getattr(self, section), getattr(usual, section)
            keys = read_by if section == "policy" else [key.name for key in fields(values) if key.name != "name"]
            for key in keys:
                readers = read_by.get(key, ())
                if name not in readers and getattr(values, key) != getattr(first, key):
                    others = f", but {', '.join(readers)}" if readers else ""
                    yield f"{section}.{key}", f"{name} does not read it{others}: remove it"

    def _off_policy_mistakes(self) -> Iterator[tuple[str, str]]:
        name, settings, policy = self.algorithm.name, self.off_policy, self.policy
        norm = self.policy_settings.get("batch_norm")
        if norm is True and name in _WITH_TARGETS:
            yield "policy.settings.batch_norm", "it is for crossq, which has no target critics: remove it"
        if norm is False and name == "crossq":
            yield "policy.settings.batch_norm", "crossq stands on it: remove this"
        if settings.solved_only and not self.env.fresh:
            yield (
                "off_policy.solved_only",
                "an episode must begin and end in one step: set env.fresh=true, or remove it",
            )
        if settings.shift and policy.type in (None, "soft", "steered"):
            yield "off_policy.shift", f"policy.type={policy.type or 'soft'} looks at no pictures: take soft_pixels"
        if self.policy_settings.get("gripper") is True and name != "sac":
            yield "policy.settings.gripper", "its choices are learned by sac alone: remove it, or set algorithm=sac"
        if settings.imitation and settings.demonstrations is None and self.env.intervener is None:
            yield "off_policy.imitation", "nobody shows anything: name off_policy.demonstrations or env.intervener"
        if settings.gripper_penalty and self.policy_settings.get("gripper") is not True:
            yield "off_policy.gripper_penalty", "no gripper is chosen apart: set policy.settings.gripper=true"
        if name == "iql" and policy.type not in (None, "soft"):
            yield "policy.type", "iql learns from states: take soft"
        if policy.type == "steered":
            base = policy.settings.get("base")
            if not isinstance(base, str) or not os.path.isdir(os.path.expanduser(base)):
                yield "policy.settings.base", f"{base!r} is no directory: name that of the policy that is steered"
            for key in ("imitation.path", "off_policy.demonstrations"):
                if attrgetter(key)(self) is not None:
                    yield key, "a steered policy cannot learn from demonstrations; that in settings.base can: remove it"

    def _world_mistakes(self) -> Iterator[tuple[str, str]]:
        if self.world.model is None:
            for role in ("world", "world_trainer"):
                if getattr(self.placement, role) is not None:
                    yield f"placement.{role}", "there is no world model: set world.model=ensemble, or remove it"
            return
        if self.algorithm.name in (DAGGER, IMITATION):
            yield "world.model", f"{self.algorithm.name} learns from somebody else's actions, not inside: remove it"
        if self.world.num_envs % self.env.group_size:
            yield "world.num_envs", f"it must be a multiple of env.group_size = {self.env.group_size}"
        if self.policy.settings.get("memory"):
            yield "policy.settings.memory", "a world model is learned decision by decision: remove it"
        if self.env.frame_stack > 1:
            yield "env.frame_stack", "a world model would have to predict the same numbers several times: take 1"

    def _dagger_mistakes(self) -> Iterator[tuple[str, str]]:
        expert = self.dagger.expert
        if self.algorithm.name != DAGGER:
            if self.dagger != DaggerConfig():
                yield "dagger", f"{self.algorithm.name} asks no expert: set algorithm=dagger, or remove it"
            return
        person = self.env.intervener
        if expert is None and person is None:
            yield (
                "dagger.expert",
                "dagger learns from an expert: name a function, or the directory of a saved policy; or name who "
                "intervenes in env.intervener",
            )
        elif expert is None:
            if self.dagger.beta:
                yield "dagger.beta", "there is no expert whose actions could be done: remove it"
        elif person is not None:
            yield (
                "dagger.expert",
                "it is asked about everything, so nobody can intervene: remove it, or env.intervener",
            )
        elif not os.path.isdir(os.path.expanduser(expert)) and (advice := mistake_in(expert)) is not None:
            yield "dagger.expert", f"it is no directory, and as a function: {advice}"
        if self.policy.settings.get("memory"):
            yield "policy.settings.memory", "dagger learns decision by decision, without what came before: remove it"
        if self.off_policy.failed_demonstrations:
            yield "off_policy.failed_demonstrations", "dagger imitates what it begins with: leave out what failed"
