"""Every key of a configuration, with its type, default and meaning, in one place.

The text under a field is what `--help` and docs/config.md print. A key stands here only if something reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from rlinf.config.common import CheckpointConfig, CommonConfig, TrackingConfig
from rlinf.config.placement import PlacementConfig
from rlinf.config.schema import number


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685): only they are trained; they are merged when weights are published."""

    r: int = number(0, low=0)
    """Rank; 0 trains all weights."""
    alpha: float = number(16.0, above=0)
    """The adapters' output is scaled by alpha / r."""
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """Names of the linear layers that get one."""


@dataclass
class ModelConfig:
    """The policy: a saved Hugging Face model, or a small one made from nothing."""

    path: str | None = None
    """Hugging Face directory (or hub name) to start from; null makes a new model from `model.config`."""
    config: dict[str, Any] = field(default_factory=lambda: {"model_type": "qwen2"})
    """Hugging Face configuration of a new model: `model_type` and that type's own keys. The vocabulary comes from the
    tokenizer."""
    tokenizer: str | None = None
    """Hugging Face directory (or hub name) of the tokenizer; null takes the one in `model.path`, or one token per
    character for a generated task."""
    lora: LoraConfig = field(default_factory=lambda: LoraConfig())


@dataclass
class DataConfig:
    """Problems of your own to learn from; without them, the generated ones of `task`."""

    train: str | None = None
    """A file (jsonl, json, csv, parquet), a directory that `datasets` saved, or a data set's name on the Hugging Face
    hub; null takes the generated task."""
    split: str = "train"
    """Which split of a data set that has several."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Where our columns are in yours, such as {prompt: question, answer: reward_model.ground_truth}; what is not named
    here has our own name: `prompt`, `answer`, `response` for the warm-up, `choices` for multiple choice."""
    template: str | None = None
    """Makes the prompt's text from columns, such as "Question: {question}\\nAnswer:"; null takes the prompt column,
    text or chat messages."""
    chat: bool = False
    """Texts are what a user says, to be put into the tokenizer's chat template; lists of messages always are."""
    system: str | None = None
    """System message for chats that have none; makes every prompt a chat."""
    chat_template: str | None = None
    """Jinja text, or a file with it; null takes the tokenizer's."""
    chat_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    max_prompt_tokens: int | None = number(None, low=1)
    """Longest prompt; null for no limit."""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """What becomes of longer ones: left out and counted, cut at their beginning, or refused."""
    shuffle: bool = True
    """Draw the problems in an order made from (seed, pass); false keeps theirs."""


@dataclass
class TaskConfig:
    """Generated problems with known answers, for trying things out."""

    name: Literal["sort", "copy"] = "sort"
    """Kind of problem: `sort` (3142 -> 1234) or `copy` (3142 -> 3142)."""
    digits: int = number(4, low=1, high=9)
    """Digits per problem."""


@dataclass
class RewardConfig:
    """What scores an answer."""

    function: str = "rlinf.rewards.exact.exact"
    """Dotted path of the function: `reward(response, answer, **row) -> float`, plain or async; it takes what it names
    of the response, the answer and the row's columns. `rlinf.rewards.math` compares mathematics; your own file works
    the same, and so do functions written for verl or TRL."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for the function, by name."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Several functions by name, whose values are summed, instead of `function`: each a dotted path, or a mapping with
    `function`, `weight` and `args`."""
    timeout: float = number(10.0, above=0)
    """Seconds for one answer; one that takes longer counts as not drawn, never as wrong."""
    workers: int | None = number(None, low=1)
    """Child processes per judge that run the function; null takes half of its machine's cores, from 2 to 8."""
    isolate: Literal["auto", "always", "never"] = "auto"
    """Run the function in child processes that can be killed. `auto` leaves out those of ours that cannot hang."""


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
    """How samples become a gradient: a recipe by its name, any part of which can be changed. `algorithm: dapo` is short
    for its name alone; docs/algorithms.md has the recipes and what each part takes."""

    __shorthand__: ClassVar[str] = "name"

    name: str = "grpo"
    """The recipe: grpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce_pp, ppo, opd and others."""
    prompts_per_step: int = number(64, low=1)
    """Prompts drawn for each step."""
    group_size: int = number(8, low=1)
    """Answers sampled for each prompt; where a recipe compares them with each other, at least 2."""
    epochs: int = number(1, low=1)
    """How often each batch of samples is learned from."""
    minibatches: int = number(1, low=1)
    """Optimizer steps per epoch, each on its share of the batch's groups."""
    advantage: Any = field(default_factory=dict)
    """Changes what an answer is compared with: {scale: none}, another one by name, such as leave_one_out, or your own
    function by dotted path."""
    loss: Any = field(default_factory=dict)
    """Changes the loss: {clip_low: 0.2, clip_high: 0.28}, another one by name, such as sapo, {name: sapo, tau_neg:
    1.1}, or your own function by dotted path."""
    aggregation: dict[str, Any] = field(default_factory=dict)
    """Changes how losses of tokens become one: {how: token-mean}; norm_length is rollout.max_new_tokens unless set."""
    kl: Any = field(default_factory=dict)
    """Penalty for leaving the reference policy: {place: loss, kind: k3, beta: 0.001}; null for none."""
    entropy_bonus: float | None = number(None, low=0)
    """Weight of the reward for staying undecided; null as in the recipe."""
    correction: Any = field(default_factory=dict)
    """Importance sampling between engine and trainer: {cap: 2.0, level: token, outside: truncate}; null for none."""
    max_drift: float | None = number(None, above=0)
    """Bad answers that the policy has left further behind, nats per token, are left out; null for no bound."""
    shaping: Any = field(default_factory=dict)
    """Penalty near the length limit: {cache: 4096}; longest is rollout.max_new_tokens unless set; null for none."""
    truncated: Literal["keep", "mask"] | None = None
    """Answers that the length limit cut are learned from, or give no gradient; null as in the recipe."""
    sampling: Any = field(default_factory=dict)
    """Draw more prompts in place of those whose answers are all equally good: {max_rounds: 10}; null for none."""
    critic: Any = field(default_factory=dict)
    """Changes the critic's loss where there is one: {clip: 0.2, error: huber}."""


@dataclass
class CriticConfig:
    """The critic, where the algorithm trains one (ppo): it predicts the reward to come before each token."""

    model: str | None = None
    """Hugging Face directory (or hub name) of its model; null starts from the policy's own weights."""
    lr: float = number(1e-5, above=0)
    """Learning rate after warm-up."""
    warmup_steps: int = number(0, low=0)
    """Optimizer steps over which its learning rate rises linearly from 0."""
    head_start: int = number(0, low=0)
    """Steps of the flow at the beginning in which the critic learns alone."""
    grad_clip: float = number(1.0, above=0)
    """Gradients with a larger global norm are scaled down to it."""
    weight_decay: float = number(0.0, low=0)
    """Decoupled weight decay."""


@dataclass
class ReferenceConfig:
    """The policy that a KL penalty holds on to, where the algorithm has one."""

    kind: Literal["frozen", "ema", "adapters_off"] = "frozen"
    """`frozen`: the policy as it was before reinforcement learning. `ema`: a running mean of it. `adapters_off`: the
    model under its own LoRA adapters, which needs no second copy in memory."""
    model: str | None = None
    """Hugging Face directory (or hub name) of another policy to hold on to; null takes the policy itself."""
    decay: float = number(0.99, above=0, below=1)
    """How much of an `ema` reference stays as it is in each step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which it computes."""


@dataclass
class TeacherConfig:
    """The model whose judgement of every token is learned from, where the algorithm distils (opd)."""

    model: str | None = None
    """Hugging Face directory (or hub name); its tokens must be those of the policy."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which it computes."""


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
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, until the last step."""
    min_lr_ratio: float = number(0.0, low=0, high=1)
    """Share of the learning rate that is left at the end of a linear or cosine schedule."""


@dataclass
class RolloutConfig:
    """How answers are sampled while training."""

    engine: str = "transformers"
    """What generates: `transformers`, in the rollout's own processes, or the dotted path of an engine of your own, such
    as one around an inference server; see docs/engines.md."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for the engine, by name."""
    temperature: float = number(1.0, above=0)
    """Logits are divided by it; 1 samples from the model itself."""
    top_p: float = number(1.0, above=0, high=1)
    """Draw only from the likeliest tokens that together have this probability; 1 draws from all."""
    top_k: int = number(0, low=0)
    """Draw only from so many of the likeliest tokens; 0 draws from all."""
    min_p: float = number(0.0, low=0, below=1)
    """Draw only from tokens at least so likely, relative to the likeliest; 0 draws from all."""
    max_new_tokens: int = number(16, low=1)
    """An answer without an end token is cut after this many tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, besides the end token."""
    max_rows: int = number(128, low=1)
    """Answers decoded together; fewer finish sooner, so that scoring and training start sooner."""
    max_tokens: int | None = number(None, low=1)
    """Tokens for which the key-value cache has room, prompts and answers together; null makes room for max_rows."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which answers are generated."""
    rescale: bool = False
    """When the last answers of a step are few, gather them on fewer ranks, so that the devices of the others are free
    earlier. Samples stay the same up to rounding; see docs/rescaling.md for when it pays."""


@dataclass
class ForwardConfig:
    """How a model is run over answers; nothing here changes what comes of it, up to rounding."""

    micro_batch_tokens: int = number(2048, low=1)
    """Tokens (prompts included) that each rank computes at once; a longer sample stands alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; weights, gradients and the optimizer stay in float32."""
    order: Literal["prompt", "arrival"] = "prompt"
    """`prompt` cuts micro-batches in the order of the prompts, so that a run repeats bit for bit; `arrival` takes
    groups as they finish, which is faster where a few answers are much longer than the others."""
    logprob_chunk: int = number(1024, low=1)
    """Tokens whose logits over the vocabulary are in memory at once."""


@dataclass
class TrainerConfig(ForwardConfig):
    """How gradients are computed; nothing here changes what is learned."""

    backend: str = "fsdp"
    """What trains: `fsdp`, or the dotted path of a class like `rlinf.training.backend.BackEnd`."""
    sharding: Literal["auto", "shard", "replicate", "hybrid"] = "auto"
    """How trainer and critic lie on their processes: `shard` spreads one copy of model and optimizer over all of them
    (FSDP), `replicate` gives each process a copy and sums gradients once per optimizer step, `hybrid` gives each
    machine a copy that is spread over its processes (HSDP). `auto` takes the first of replicate, hybrid and shard that
    fits into the devices' memory, and says which."""
    gradient_checkpointing: bool = False
    """Compute activations again on the way back: less memory, about a third more time."""


@dataclass
class TrainerSettings(OptimizerConfig, TrainerConfig):
    """How a trainer learns: what it takes by keyword beside model, tokenizer and algorithm."""

    lr: float = number(OptimizerConfig.lr, low=0)
    """Learning rate after warm-up; 0 keeps all weights as they are."""
    sharding: Literal["shard", "replicate", "hybrid"] = "shard"
    """How model and optimizer lie on the ranks; see `TrainerConfig`, whose `auto` a run replaces by what it chose."""
    epochs: int = number(AlgorithmConfig.epochs, low=1)
    """Passes over each batch of groups."""
    minibatches: int = number(AlgorithmConfig.minibatches, low=1)
    """Optimizer steps in each pass, each on a part of the groups; with more than one, training begins when the whole
    batch has come."""
    total_steps: int | None = number(None, low=1)
    """Optimizer steps of the whole run, at the end of which a linear or cosine schedule has come down."""

    @property
    def learner(self) -> dict[str, Any]:
        """Those of the optimizer and its schedule, as `Learner` takes them."""
        names = (*(each.name for each in fields(OptimizerConfig)), "total_steps")
        return {name: getattr(self, name) for name in names}


@dataclass
class CriticSettings(TrainerSettings):
    """How a critic learns: what it takes by keyword beside model, tokenizer and algorithm."""

    lr: float = number(CriticConfig.lr, low=0)
    """Learning rate after warm-up; 0 keeps all weights as they are."""


@dataclass
class EvaluationConfig:
    """Answers to problems that are never trained on."""

    data: str | None = None
    """File, directory or hub name, like data.train; null takes held-out problems of the generated task, or evaluates
    nothing where data.train is yours."""
    split: str = "test"
    """Which split of a data set that has several."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Like data.columns, for this data set; what is not named here is as there."""
    problems: int = number(500, low=1)
    """How many of them at most; the same ones every time."""
    every: int = number(0, low=0)
    """Evaluate after every this many steps; 0 evaluates only before and after."""
    samples: int = number(1, low=1)
    """Answers per problem."""
    temperature: float = number(0.0, low=0)
    """0 takes the likeliest token; several samples per problem need more."""
    top_p: float = number(1.0, above=0, high=1)
    """As in rollout."""
    max_new_tokens: int | None = number(None, low=1)
    """Longest answer; null takes rollout.max_new_tokens."""
    k: list[int] = number([], low=1)
    """For which k to tell pass@k (one of k answers is right) and maj@k (the most frequent of k is), up to samples."""


@dataclass
class MetricsConfig(TrackingConfig):
    """Where a run's numbers go, besides metrics.jsonl, and when to warn about them."""

    samples: int = number(8, low=0)
    """Answers of each step that are written to samples.jsonl."""
    mismatch_mean: float | None = number(0.05, above=0)
    """Warn when log-probs of engine and trainer differ by more than this on average, nats; null never warns."""
    mismatch_max: float | None = number(5.0, above=0)
    """Warn when those of any one token differ by more than this, nats; null never warns."""


@dataclass
class RunConfig(CommonConfig):
    """One training run."""

    flow: str | None = None
    """Dotted path of the async function that is one step: `package.module.function`, or a module with a function of
    its own name. Your own file works the same. null takes the algorithm's: rlinf.flows.grpo, or rlinf.flows.ppo where
    there is a critic."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
