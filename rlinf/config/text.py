"""Every key of a configuration, with its type, default and meaning, in one place.

The text under a field is what `--help` and docs/config.md print. A key stands here only if something reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from operator import attrgetter
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlinf.config.common import (
    CommonConfig,
    Delta,
    MetricsConfig,
    ModelCheckpointConfig,
    Place,
    PlacementConfig,
    best_mistakes,
    join_mistake,
)
from rlinf.config.importing import looks_local, mistake_in, shipped_file
from rlinf.config.learning import (
    SUPERVISED,
    AlgorithmConfig,
    CriticConfig,
    MuonConfig,
    NamedTeacher,
    OptimizerConfig,
    ReferenceConfig,
    RewardModelConfig,
    SupervisedConfig,
    TeacherConfig,
    TrainerConfig,
)
from rlinf.config.schema import CLOSED, entry_mistakes


@dataclass(config=CLOSED)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685): only they are trained; they are merged when weights are published."""

    r: int = Field(default=0, ge=0)
    """Rank; 0 trains all weights, unless `path` names adapters."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapters' output is scaled by alpha / r."""
    target_modules: list[str] = field(default_factory=lambda: ["auto"])
    """Linear layers that get one: `auto` (those of attention, whatever the architecture calls them), `all-linear` (all
    but the output embedding and the routers of experts), `unembed` (the output embedding, where it is not the input
    embedding, too), names such as q_proj or the ends of dotted names, or regular expressions of whole ones."""
    path: Place | None = None
    """Directory of saved adapters, in peft's format, to start from; they say their rank and layers themselves."""
    base: Literal["full", "nf4"] = "full"
    """`nf4` holds the frozen linear layers, but for the output embedding and routers, in 4.5 bits a weight while it
    trains (QLoRA, arXiv:2305.14314), by bitsandbytes. What is published and saved as a model is that base, rounded so,
    with the adapters merged."""

    @property
    def on(self) -> bool:
        """Adapters are trained, and nothing else."""
        return self.r > 0 or self.path is not None

    @property
    def settings(self) -> dict[str, Any] | None:
        """Arguments of `add_adapters`; None trains all weights."""
        return vars(self).copy() if self.on else None

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.base != "full" and not self.on:
            yield "base", "without adapters all weights learn, which 4 bits cannot: set model.lora.r"


@dataclass(config=CLOSED)
class PolicyLoraConfig(LoraConfig):
    """Low-rank adapters (arXiv:2106.09685): they learn, and what is the policy's own, such as its critic; they are
    merged when weights are published. `r: 0` and no `path`: none."""

    target_modules: list[str] = field(default_factory=lambda: ["auto"])
    """Linear layers that get one: `auto` (those that were published for the policy, else those of attention),
    `all-linear`, names such as q_proj or the ends of dotted names, or regular expressions of whole ones."""
    base: Literal["full"] = "full"
    """Policies have no base of 4 bits."""


@dataclass(config=CLOSED)
class ModelConfig:
    """The policy: a saved Hugging Face model, or a small one made from nothing."""

    path: Place | None = None
    """Hugging Face directory (or hub name) to start from, or a GGUF file; null makes a new model from
    `model.config`."""
    config: dict[str, Any] = field(default_factory=lambda: {"model_type": "qwen2"})
    """Hugging Face configuration of a new model: `model_type` and that type's own keys. The vocabulary comes from the
    tokenizer."""
    tokenizer: Place | None = Field(default=None, examples=["characters:0123456789>"])
    """Hugging Face directory (or hub name) of the tokenizer, or `characters:` and an alphabet: a token for each
    (`characters+pictures:` for a new model that reads pictures); null takes the one in `model.path`, or a token per
    character of a generated task."""
    freeze: list[str] = field(default_factory=list)
    """Parts of the model whose weights do not learn, by the names of modules, such as [visual], what reads pictures in
    Qwen's models ([vision_tower] in InternVL's), or [embed_tokens]; the rest learns."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(config=CLOSED)
class DataConfig:
    """Problems of your own to learn from; without them, the generated ones of `task`."""

    train: str | None = None
    """A file (jsonl, json, csv, parquet), a directory that `datasets` saved, or a data set's name on the Hugging Face
    hub; null takes the generated task."""
    split: str = "train"
    """Which split of a data set that has several."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Where our columns are in yours, such as {prompt: question, answer: reward_model.ground_truth}; what is not named
    here has our own name: `prompt`, `answer`, `response` for the warm-up, `choices` for multiple choice, `images` for
    pictures (null: none). Runs on given texts have other ones, see docs/supervised.md."""
    template: str | None = None
    """Makes the prompt's text from columns, such as "Question: {question}\\nAnswer:"; null takes the prompt column,
    text or chat messages."""
    chat: bool = False
    """Texts are what a user says, to be put into the tokenizer's chat template; lists of messages always are."""
    system: str | None = None
    """System message for chats that have none; makes every prompt a chat."""
    chat_template: str | None = None
    """Jinja text, or a file with it, saved with the model; null takes the tokenizer's."""
    chat_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt; null for as long as the model, its engine and an answer behind it leave room for."""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """Longer ones are left out and counted, cut at their beginning, or refused."""
    unusable: Literal["drop", "error"] = "drop"
    """Fate of rows that do not fit once they are drawn: a chat that its template refuses, a picture that is
    broken, a text without a token of this model. `drop` leaves them out, counts them and names the first; `error` ends
    the run. Rows without a prompt or an answer are refused before it starts."""
    shuffle: bool = True
    """Draw the problems in an order made from (seed, pass); false keeps theirs."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if is_lacking(self.train):
            yield "train", f"there is no such file or directory; it is looked for from {os.getcwd()}"


def is_lacking(source: str | None) -> bool:
    """True if data can only be a file or directory here, and there is none; opening a pattern tells of it."""
    if source is None or set(source) & set("*?["):
        return False
    here = looks_local(source) or source.endswith((".jsonl", ".json", ".csv", ".parquet"))
    return here and not os.path.exists(os.path.expanduser(shipped_file(source)))


@dataclass(config=CLOSED)
class TaskConfig:
    """Generated problems with known answers, for trying things out."""

    name: Literal["sort", "copy"] = "sort"
    """Kind of problem: `sort` (3142 -> 1234) or `copy` (3142 -> 3142)."""
    digits: int = Field(default=4, ge=1, le=9)
    """Digits per problem."""


@dataclass(config=CLOSED)
class RewardConfig:
    """Functions that score an answer."""

    function: str | None = "rlinf.rewards.exact.exact"
    """Dotted path of the function: `reward(response, answer, **row) -> float`, plain or async; it takes what it names
    of the response, the answer and the row's columns. `rlinf.rewards.math` compares mathematics; your own file works
    the same, and so do functions written for verl or TRL. null: none, a reward model alone scores."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for the function, by name."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Several functions by name, whose values are summed, instead of `function`: each a dotted path, or a mapping with
    `function`, `weight` and `args`."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds for one answer; one that takes longer counts as not drawn, never as wrong."""
    workers: int | None = Field(default=None, ge=1)
    """Child processes per judge that run the function; null takes half of its machine's cores, from 2 to 8."""
    isolate: Literal["auto", "always", "never"] = "auto"
    """Run the function in child processes that can be killed. `auto` leaves out those of ours that cannot hang."""
    join: str | None = None
    """HOST:PORT at which other processes may join the run while it goes on, `rlinf join ADDRESS --role reward`, as
    `rollout.join` for engines: they score answers, each with as many child processes as a judge has, and may leave or
    be lost in the middle of one. null lets nobody in."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        yield from join_mistake(self.join, "judge")
        if self.parts and self.args:
            yield "args", "with several functions, the arguments of each stand in reward.parts: {function, args}"
        for name, part in self.parts.items():
            path = part.get("function") if isinstance(part, dict) else part
            if not isinstance(path, str):
                yield "parts", f"{name} needs the dotted path of a function, or {{function: PATH, weight: 1.0}}"
            elif (advice := mistake_in(path)) is not None:
                yield "parts", f"{name}: {advice}"
        if not self.parts and self.function and (advice := mistake_in(self.function)) is not None:
            yield "function", advice

    @property
    def source(self) -> str | dict[str, Any]:
        """The scoring functions: the parts, or the function, or one that gives 0."""
        return self.parts or self.function or "rlinf.rewards.base.nothing"


@dataclass(config=CLOSED)
class SftConfig:
    """Supervised warm-up on worked problems, before reinforcement learning."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 skips the warm-up."""
    batch_size: int = Field(default=128, ge=1)
    """Worked problems per step."""
    lr: float = Field(default=2e-3, gt=0)
    """Learning rate (AdamW, constant)."""
    episodes: int = Field(default=256, ge=1)
    """Episodes that a player (agent.player) plays, on tasks of data.train, before the warm-up's first step. All that it
    says in the model's place is learned, again and again."""
    least_reward: float | None = None
    """Episodes of the player that earn less are left out; null learns from all."""


@dataclass(config=CLOSED)
class RolloutConfig:
    """How answers are sampled while training."""

    engine: str = "transformers"
    """Engine that generates: `transformers`, in the rollout's own processes; `sglang` or `vllm`, a server beside each
    of them (`make sglang` or `make vllm` first); or the dotted path of an engine of your own; see docs/engines.md."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for the engine, by name."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by it; 1 samples from the model itself."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw only from the likeliest tokens that together have this probability; 1 draws from all."""
    top_k: int = Field(default=0, ge=0)
    """Draw only from so many of the likeliest tokens; 0 draws from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Draw only from tokens at least so likely, relative to the likeliest; 0 draws from all."""
    max_new_tokens: int = Field(default=16, ge=1)
    """An answer without an end token is cut after this many tokens."""
    expected_new_tokens: int | None = Field(default=None, ge=1)
    """Tokens of an answer on average, by which `--dry-run` models the seconds of a step; nothing else depends on it,
    and more than max_new_tokens counts as that many. null takes 0.53 of max_new_tokens, which is known of one published
    run."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, besides the end token. A special token counts with its whole text, such as
    <|im_end|>, and never with a part of it."""
    stop_token_ids: list[Annotated[int, Ge(0)]] = field(default_factory=list)
    """Tokens that end an answer, besides those of the tokenizer and of the model's config.json and
    generation_config.json."""
    max_rows: int = Field(default=128, ge=1)
    """Answers decoded together; fewer finish sooner, so that scoring and training start sooner."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens for which the key-value cache has room, prompts and answers together; null makes room for max_rows."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which answers are generated; `auto` is bfloat16 on GPUs and float32 on CPUs, but for models of 50 M
    weights or more on several processes whose CPU has products of bfloat16."""
    weights: Literal["full", "int8", "float8"] = "full"
    """The transformers engine rounds matrices as they arrive. `int8`: to 8 bits, with which a CPU that has avx512_vnni
    decodes more than twice as fast. `float8`: to e4m3 with a scale for each 128 x 128, on any device, and computes
    with what they stand for, in the time and memory of full weights. Where neither the configuration nor the recipe
    says a word of algorithm.correction, it is {cap: 2.0}."""
    drafts: bool = False
    """Have the transformers engine read drafts on CPUs: tokens that answers to a prompt, of this epoch and of earlier
    ones, had behind the same few tokens, several in one pass where that pays. It draws the tokens that it would have
    drawn, up to rounding; see docs/engines.md."""
    carry: int | None = Field(default=None, ge=0)
    """Where the flow works ahead: by how many versions an unfinished answer may be carried over before a step waits for
    it. null is staleness.max: nothing is ever too old. With more, no answer holds a step up for longer than that, and
    staleness.mode says what becomes of tokens that are too old then."""
    extra: int | None = Field(default=None, ge=0)
    """Where the flow works ahead: prompts under way beside those of the step in hand; the surplus is there for the next
    step. null is staleness.max batches, and more than that never helps."""
    groups: Literal["whole", "partial"] = "whole"
    """Where the flow works ahead: learn from `whole` groups alone; or, where a step would have to wait, also from the
    finished answers to a prompt, if two or more are finished and two or more are not: each `partial` group has a
    baseline of its own, over fewer rewards."""
    join: str | None = None
    """HOST:PORT at which engines of other processes may join the run while it goes on, `rlinf join`, such as
    10.0.0.1:29600, or auto:29600 for the machine's own address; port 0 takes any free one. They may leave again, or be
    lost, and the run goes on; see docs/multi-node.md. null lets nobody in."""
    own_engine: bool = True
    """false: the run has no engine and no device for one, and generates only by engines that join (rollout.join), so
    that every process that generates may be lost; its rollout is one process, beside the devices of the first one, and
    shares the work out. Answers wait while none is there."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if "" in self.stop:
            yield "stop", "an empty text would end every answer before it begins; remove it"
        yield from join_mistake(self.join, "rollout")
        if self.join is None and not self.own_engine:
            yield "own_engine", "then engines have to join: say where, by rollout.join=HOST:PORT; port 0 takes any"


@dataclass(config=CLOSED)
class RolloutSettings(RolloutConfig):
    """How a rollout samples answers, with nothing left to choose; `system.spawn(Rollout, temperature=0.7)` is short for
    `settings=RolloutSettings(temperature=0.7)`."""

    temperature: float = Field(default=1.0, ge=0)
    """Of answers that are asked for without one: logits are divided by it; 0 takes the likeliest token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which answers are generated; weights of another are cast."""
    kv: Literal["keep", "reread"] | None = None
    """Fate of keys and values when weights change in the middle of answers: keep those of the old weights, or
    reread all with the new; null is the engine's own choice."""
    delta: Delta = "auto"
    """Part of new weights that engines that join are sent, see `weights.delta`."""
    routes: Literal["auto", True, False] = False
    """Have samples tell to which experts of a mixture their tokens went, `Sample.routes`; auto: where engine and model
    can."""


@dataclass(config=CLOSED)
class EndpointConfig:
    """Where programs that speak OpenAI's or Anthropic's protocol find the model: `llm.base_url`, `session.serve()`. It
    listens from the first time that one of them is asked for."""

    host: str = "127.0.0.1"
    """Address that it listens on; others than this machine's own reach it by 0.0.0.0 alone."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes any free one."""
    token: str | None = None
    """Key that clients of `session.serve()` have to show as `Authorization: Bearer …`; null asks for nothing. Agents
    have keys of their own."""
    models: list[str] = field(default_factory=list)
    """Names that it answers to besides `policy`; `*` is any."""
    max_body_mb: float = Field(default=32.0, gt=0)
    """Longest request."""
    max_concurrent: int = Field(default=4096, ge=1)
    """Requests that are answered at the same time; more are told to come again."""
    requests_per_minute: int = Field(default=0, ge=0)
    """Of one key; 0 for no limit."""
    reasoning: Literal["auto", "think", "none"] = "auto"
    """How the model writes what it thinks: `think` is `<think>…</think>` before the answer, which clients are given
    apart, as their protocol has it; `none` leaves it in the text. `auto`: `think` where the chat template knows it."""


@dataclass(config=CLOSED)
class ServeConfig:
    """Where `rlinf serve` listens for clients of the Tinker API, and what it has for them; docs/service.md."""

    host: str = "127.0.0.1"
    """Address that it listens on; others than this machine's own reach it by 0.0.0.0 alone."""
    port: int = Field(default=8300, ge=0, le=65535)
    """0 takes any free one."""
    token: str | None = Field(default=None, pattern="^tml-.+")
    """The key that clients have to show, `tml-` and more; null makes one at the first start, which is printed, unless
    there are `keys`. Its name is `local`."""
    keys: dict[str, Annotated[str, Field(pattern="^tml-.+")]] = field(default_factory=dict)
    """Further keys by name, such as {anna: tml-…}: clients see what was made with their own key, and nothing else."""
    max_requests: int = Field(default=4096, ge=1)
    """Requests of a key that are promised and not done; clients send those above it again later."""
    max_tokens: int = Field(default=2**24, ge=1)
    """Tokens of these requests; a key's only request may have more."""
    model_name: str = "base"
    """Name of the base model for clients, who also load its tokenizer by it unless they are told of another."""
    max_rank: int = Field(default=256, ge=1)
    """Highest rank of a client's adapters."""
    max_models: int = Field(default=64, ge=1)
    """Models of all clients together."""
    max_open: int = Field(default=64, ge=1)
    """Models in memory; of those above it that nobody asks for, adapters and optimizer wait on the disk."""
    max_whole: int = Field(default=0, ge=0)
    """The same of models that learn all weights, which clients make by rank 0: each takes four times the bytes of the
    base in float32, with gradients and optimizer. 0: there are none."""
    session_seconds: float | None = Field(default=86400.0, gt=0)
    """Seconds without a heartbeat or request of its client after which a session ends: models are unloaded, samplers
    forgotten; checkpoints stay. Official clients beat every 10 s. null: sessions end when their clients say so."""
    max_samples: int = Field(default=1024, ge=1)
    """Answers of one request."""
    max_body_mb: float = Field(default=64.0, gt=0)
    """Longest request."""
    replay_seconds: float = Field(default=30.0, ge=0)
    """Work on a model after which its state is saved at the next step: a restart does at most about so much again."""


@dataclass(config=CLOSED)
class PastConfig:
    """Earlier versions of the policy, against which it plays: agents that `llm.past(name)` gives, of which nothing is
    learned; docs/agents.md."""

    size: int = Field(default=0, ge=0, le=64)
    """How many are kept, of model.lora's adapters; all begin as the policy does. 0: the policy itself plays."""
    every: int = Field(default=10, ge=1)
    """Steps after which the policy takes the place of the oldest."""
    share: float = Field(default=0.5, ge=0, le=1)
    """Share of the tasks in which one of them plays, drawn for each task; in the others the policy itself does."""


@dataclass(config=CLOSED)
class AgentConfig:
    """A program that works on each task, calling the model as often as it likes; docs/agents.md."""

    function: str | None = None
    """Dotted path of an `async def agent(task, llm)` that returns a reward: what learns is all that the model said to
    it; or of what opens one for all episodes: a class or function that makes an async context manager. reasoning_gym,
    textarena, gymnasium_text, openenv, verifiers, harbor, mcp and nemo_gym are environments of others, which bring
    their tasks.
    null: the model answers each prompt once."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its further keyword arguments."""
    player: str | None = None
    """Dotted path of a `player(task, messages) -> text`, plain or async, that answers in the model's place in
    the warm-up's episodes (sft.steps, sft.episodes). null takes the agent's own method `player`, as reasoning_gym has
    one that knows the answers; where there is none, the warm-up takes prompts of data.train with their answers."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds after which an attempt at a task is given up, and counts as not drawn."""
    at_once: int | None = Field(default=None, ge=1)
    """Attempts that are under way at the same time; null takes as many as answers are decoded together."""
    call_format: str | None = None
    """How the model writes calls of tools: hermes, qwen3_coder, llama3_json, pythonic, deepseek_v3, mistral, or the
    dotted path of a `CallFormat` of your own; null: what its chat template shows."""
    own_weights: list[str] = field(default_factory=list)
    """Names of agents of a task, `llm.agent(name)`, that have adapters of their own, as model.lora says, which learn
    from what that agent says alone. All others share the run's; docs/agents.md."""
    past: PastConfig = field(default_factory=PastConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    """For agents in frameworks that want a server."""


@dataclass(config=CLOSED)
class StalenessConfig:
    """How old the weights may be that made what is learned from, in flows that begin steps early."""

    max: int = Field(default=1, ge=0)
    """In published versions: no token is learned that is older; 0 begins nothing early. Read by flows that work ahead:
    rlinf.flows.grpo_async, ppo_async, agentic.agentic_async, and your own where `rlinf.data.step.ahead` marks it."""
    mode: Literal["mask", "drop", "resample"] = "mask"
    """Fate of answers that were carried over for so long (rollout.carry) that some of their tokens are too old:
    `mask` learns their other tokens, `drop` leaves them out, `resample` answers their prompts again."""
    kv: Literal["keep", "reread"] | None = None
    """Fate of keys and values when weights change in the middle of answers: `keep` goes on with those of the
    old weights, which costs nothing; `reread` reads each answer so far with the new ones before its next token. null is
    keep where the engine can (transformers), otherwise reread (sglang, vllm); see docs/engines.md."""


@dataclass(config=CLOSED)
class EvaluationConfig:
    """Answers to problems that are never trained on."""

    data: str | None = None
    """File, directory or hub name, like data.train; null takes held-out problems of the generated task, or evaluates
    nothing where data.train is yours."""
    split: str = "test"
    """Which split of a data set that has several."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Like data.columns, for this data set; what is not named here is as there."""
    problems: int = Field(default=500, ge=0)
    """How many of them at most; the same ones every time. 0 evaluates nothing, as trials.episodes=0 does."""
    every: int = Field(default=0, ge=0)
    """Evaluate after every this many steps; 0 evaluates only before and after."""
    patience: int = Field(default=0, ge=0)
    """End the run after so many evaluations in a row that are no better than the best one before them, by
    checkpoint.best or else by evaluation/accuracy; 0 takes all steps."""
    samples: int = Field(default=1, ge=1)
    """Answers per problem."""
    temperature: float = Field(default=0.0, ge=0)
    """0 takes the likeliest token; several samples per problem need more."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """As in rollout."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest answer; null takes rollout.max_new_tokens."""
    k: list[Annotated[int, Ge(1)]] = field(default_factory=list)
    """For which k to tell pass@k (one of k answers is right) and maj@k (the most frequent of k is), up to samples."""
    named: dict[str, Any] = field(default_factory=dict)
    """Benchmarks to evaluate on beside, {aime24: {}, aime25: {}, gpqa-diamond: {}}, each with its own prompts, sampling
    and scoring; a file or a mapping in place of {} says where the data are and what else differs. See
    docs/evaluation.md."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if is_lacking(self.data):
            yield "data", f"there is no such file or directory; it is looked for from {os.getcwd()}"
        if self.samples > 1 and self.temperature == 0:
            yield "samples", "at temperature 0 all answers to a problem are equal; set evaluation.temperature"
        if any(k > self.samples for k in self.k):
            yield "k", f"more than the {self.samples} answers per problem; raise evaluation.samples"


_MODELS = (
    *("model.path", "model.tokenizer", "critic.model", "reference.model", "teacher.model"),
    *("reward_model.path", "reward_model.tokenizer"),
)
_NO_MODEL = "there is no such directory; name one that save_pretrained wrote, or owner/name on the hub"


@dataclass(config=CLOSED)
class RunConfig(CommonConfig):
    """One training run."""

    flow: str | None = None
    """Dotted path of the async function that is one step: `package.module.function`, or a module with a function of
    its own name. Your own file works the same. null takes rlinf.flows.agentic where there is an agent.function, else
    the algorithm's: rlinf.flows.grpo, or rlinf.flows.ppo where there is a critic."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: dict[str, Any] = field(default_factory=dict)
    """Several teachers by name, {math: {model: DIR, weight: 2.0}, code: {model: DIR, devices: 1}}, each a role of its
    own: what is learned from is their mixture, or the one that teacher.route names."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Roles of your own by name, for a flow that takes them: {index: {class: my_roles.Index, hosts: 0, settings: {top:
    5}}}, or with `devices` in place of `hosts`; docs/roles.md."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: ModelCheckpointConfig = field(default_factory=ModelCheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in keys of several sections together."""
        yield from super().mistakes()
        for key in _MODELS:
            directory = attrgetter(key)(self)
            if directory is not None and looks_local(directory) and not os.path.isdir(os.path.expanduser(directory)):
                yield key, _NO_MODEL
        if self.model.path is None and "model_type" not in self.model.config:
            yield "model.config", "a new model needs its model_type, such as qwen2; or set model.path to a saved model"
        if self.reward_model.path is None and self.reward.function is None and not self.reward.parts:
            yield "reward.function", "nothing scores: name a function, or a model in reward_model.path"
        yield from self._optimizer_mistakes()
        yield from self._joining_mistakes()
        yield from self._experts_mistakes()
        yield from self._reference_mistakes()
        for key, wanted in (("agent.past.size", self.agent.past.size), ("agent.own_weights", self.agent.own_weights)):
            if wanted and not self.model.lora.on:
                yield key, "these weights are adapters: set model.lora.r"
            elif wanted and self.rollout.engine in ("sglang", "vllm"):
                yield key, f"{self.rollout.engine} holds no adapters here: take rollout.engine=transformers"
        if self.agent.past.size and self.agent.own_weights:
            yield (
                "agent.own_weights",
                "earlier versions are those of weights that all agents share: set agent.past.size=0",
            )
        if len({*self.agent.own_weights}) < len(self.agent.own_weights):
            yield "agent.own_weights", "a name stands there twice"
        yield from self._teachers_mistakes()
        data, evaluation = self.data.train, self.evaluation
        if data is not None and self.model.path is None and self.model.tokenizer is None:
            yield "model.tokenizer", "a new model that learns from data of yours needs a tokenizer: name a saved one"
        if data is not None and evaluation.data is None and evaluation.every and not evaluation.named:
            yield (
                "evaluation.every",
                "there is nothing to evaluate on: data.train is yours, so name evaluation.data too",
            )
        yield from best_mistakes(self.checkpoint.best, evaluation.patience, evaluation.every, "evaluation")

    def _optimizer_mistakes(self) -> Iterator[tuple[str, str]]:
        """Keys of Muon without it, or Muon where it is not."""
        muon, parallel = self.optimizer.kind == "muon", self.trainer.parallel
        if not muon and self.optimizer.muon != MuonConfig():
            yield "optimizer.muon", f"{self.optimizer.kind} does not read it: set optimizer.kind=muon, or remove it"
        if muon and self.model.lora.on:
            yield (
                "optimizer.kind",
                "an adapter's two factors are not the matrix whose step Muon makes orthogonal: take adamw, or "
                "model.lora.r=0",
            )
        if muon and (self.trainer.backend == "megatron" or parallel.tensor > 1 or parallel.expert > 1):
            yield (
                "optimizer.kind",
                "Muon needs whole matrices, or slices of them by rows: take adamw, or trainer.backend=fsdp with "
                "parallel.tensor=1 and parallel.expert=1",
            )

    def _joining_mistakes(self) -> Iterator[tuple[str, str]]:
        """Trainers that replicas are to join, and cannot."""
        trainer = self.trainer
        if trainer.join is None:
            return
        if self.algorithm.name in SUPERVISED:
            yield "trainer.join", f"algorithm {self.algorithm.name} takes no replicas yet: leave it out"
        for key, right, value in (
            ("trainer.backend", trainer.backend == "fsdp", "fsdp"),
            ("trainer.parallel", trainer.parallel.copy == trainer.parallel.expert == 1, "one process for a copy"),
            ("agent.own_weights", not self.agent.own_weights, "none"),
        ):
            if not right:
                yield key, f"replicas that join (trainer.join) need {value}"

    def _experts_mistakes(self) -> Iterator[tuple[str, str]]:
        """Keys that ask for experts where the model has none, or engine or back end cannot replay their routes."""
        keys = ["trainer.router_replay"] if self.trainer.router_replay is True else []
        keys += ["algorithm.router_aux_loss"] if self.algorithm.router_aux_loss else []
        for key in keys:
            if self.model.config and not any("expert" in str(name) for name in self.model.config):
                yield key, "the model has no experts: leave the key out"
            elif self.rollout.engine == "vllm" or self.trainer.backend == "megatron":
                yield (
                    key,
                    "it needs an engine that tells of experts and a back end that replays them: transformers, fsdp",
                )

    def _reference_mistakes(self) -> Iterator[tuple[str, str]]:
        kind, adapters = self.reference.kind, self.model.lora.on
        if kind == "precomputed" and self.algorithm.name not in SUPERVISED:
            yield "reference.kind", "answers that are yet to be generated have no log-probs in the data; take frozen"
        if kind == "adapters_off" and not adapters:
            yield "reference.kind", "there are no adapters to switch off; set model.lora.r, or take frozen"
        for role, settings in (("reference", self.reference), ("teacher", self.teacher)):
            if settings.adapter is not None and not adapters:
                yield (
                    f"{role}.adapter",
                    "the trainer's own model has no adapters that these could stand in for; set lora.r",
                )

    def _teachers_mistakes(self) -> Iterator[tuple[str, str]]:
        for name, entry in self.teachers.items():
            key = f"teachers.{name}"
            if not str(name).isidentifier():
                yield key, "write a Python name"
            if not isinstance(entry, Mapping):
                yield key, "write {model: DIR}, and weight, dtype or devices if they differ"
                continue
            if wrong := [*entry_mistakes(NamedTeacher, entry)]:
                yield from ((key, f"{inner}: {advice}") for inner, advice in wrong)
                continue
            model, url = (teacher := NamedTeacher(**entry)).model, teacher.server.url
            if (model is None) == (url is None):
                yield key, "it has either a `model` or a `server` with a `url`"
            elif model is not None and looks_local(model) and not os.path.isdir(model):
                yield key, f"model: {_NO_MODEL}"
            yield from ((key, f"server.{inner}: {advice}") for inner, advice in teacher.server.mistakes())
        for key, value in (("model", self.teacher.model), ("server.url", self.teacher.server.url)):
            if self.teachers and value is not None:
                yield f"teacher.{key}", "there are several, in `teachers`: make it one of them, or remove it"
        if self.teacher.route is not None and len(self.teachers) < 2:
            yield "teacher.route", "there is nothing to route: name several `teachers`, or remove it"

    @property
    def frozen(self) -> dict[str, ReferenceConfig | TeacherConfig | NamedTeacher]:
        """The policies that do not learn, by the names of their roles."""
        return {"reference": self.reference, "teacher": self.teacher, **self.named_teachers}

    @property
    def named_teachers(self) -> dict[str, NamedTeacher]:
        """Several teachers by the names of their roles: `teacher_math` of `math`."""
        return {f"teacher_{name}": NamedTeacher(**entry) for name, entry in self.teachers.items()}
