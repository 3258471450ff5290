"""Keys of how models learn from text: the algorithm, its optimizer, the models beside the policy, and the section
`supervised` of runs that learn from given texts (`algorithm: sft`, `dpo` or `reward_model`).

The text under a field is what `--help` and docs/config.md print. A key stands here only if something reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import field, fields
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Lt
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlinf.config.common import Delta, MetricsConfig, Place, join_mistake
from rlinf.config.importing import mistake_in
from rlinf.config.schema import CLOSED

Decay = Annotated[float, Ge(0), Lt(1)]
"""Of a running mean."""

S = TypeVar("S")
BACK_ENDS = {
    "fsdp": "rlinf.training.fsdp.FsdpBackEnd",
    "megatron": "rlinf.training.megatron.backend.MegatronBackEnd",
}
"""Classes by the short names of `trainer.backend`."""


@dataclass(config=CLOSED)
class AlgorithmConfig:
    """How samples become a gradient: a recipe by its name, any part of which can be changed. `algorithm: dapo` is short
    for its name alone; docs/algorithms.md has the recipes and what each part takes."""

    __shorthand__: ClassVar[str] = "name"

    name: str = "grpo"
    """The recipe: grpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce_pp, ppo, opd and others; or sft, dpo,
    reward_model, which learn from given texts and take their keys from `supervised`."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts drawn for each step."""
    group_size: int = Field(default=8, ge=1)
    """Answers sampled for each prompt; where a recipe compares them with each other, at least 2."""
    epochs: int = Field(default=1, ge=1)
    """How often each batch of samples is learned from."""
    minibatches: int = Field(default=1, ge=1)
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
    """Penalty for leaving the reference policy: {place: loss, kind: k3, beta: 0.001, cut: 10}; null for none. k3 is cut
    at so many nats, beyond which a token is not pulled back (`kl/cut`); cut: null as published."""
    entropy_bonus: float | None = Field(default=None, ge=0)
    """Weight of the reward for staying undecided; null as in the recipe."""
    correction: Any = field(default_factory=dict)
    """Importance sampling between engine and trainer: {cap: 2.0, level: token, outside: truncate}; null for none.
    Where neither this nor rejection is set, flows that work ahead have both from staleness.max 2 on: {cap: 5.0}, and
    rejection {floor: 0.7, cap: 1.43}."""
    rejection: Any = field(default_factory=dict)
    """Leave out whole answers by the geometric mean of their tokens' ratios, trainer over engine: {floor: 0.5, cap:
    2.0}, or by one token's, {least: 0.0001}; null for none."""
    max_drift: float | None = Field(default=None, gt=0)
    """Bad answers that the policy has left further behind, nats per token, are left out; null for no bound."""
    shaping: Any = field(default_factory=dict)
    """Penalty near the length limit: {cache: 4096, penalty: 0.5}; longest is rollout.max_new_tokens unless set, and
    cache a fifth of it; null for none."""
    truncated: Literal["keep", "mask"] | None = None
    """Answers that the length limit cut are learned from, or give no gradient; null as in the recipe."""
    sampling: Any = field(default_factory=dict)
    """Draw more prompts in place of those whose groups give no gradient: {max_rounds: 10}; null for none."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Weight of the auxiliary loss that spreads tokens evenly over the experts of a mixture: docs/models.md. 0: none,
    as is usual in reinforcement learning."""
    critic: Any = field(default_factory=dict)
    """Changes the critic's loss where there is one: {clip: 0.2, error: huber}."""


@dataclass(config=CLOSED)
class CriticConfig:
    """The critic, where the algorithm trains one (ppo): it predicts the reward to come before each token."""

    model: Place | None = None
    """Hugging Face directory (or hub name) of its model; null starts from the policy's own weights."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which its learning rate rises linearly from 0."""
    head_start: int = Field(default=0, ge=0)
    """Steps of the flow at the beginning in which the critic learns alone."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Gradients with a larger global norm are scaled down to it."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""


@dataclass(config=CLOSED)
class ReferenceConfig:
    """The policy that a KL penalty holds on to, where the algorithm has one."""

    kind: Literal["frozen", "ema", "adapters_off", "precomputed"] = "frozen"
    """`frozen`: the policy as it was before learning. `ema`: a running mean of it. `adapters_off`: the model under its
    own LoRA adapters, which needs no second copy in memory. `precomputed`: for dpo, the data's columns
    ref_chosen_logps and ref_rejected_logps."""
    model: Place | None = None
    """Hugging Face directory (or hub name) of another policy to hold on to; null takes the policy itself."""
    adapter: Place | None = None
    """Directory of saved adapters of the policy's own base model to hold on to: the trainer computes with them in place
    of its own, so that they need no second model in memory."""
    decay: float = Field(default=0.99, gt=0, lt=1)
    """How much of an `ema` reference stays as it is in each step."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which it computes; `auto` is bfloat16 on GPUs and float32 on CPUs."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.adapter is not None and self.model is not None:
            yield "adapter", "it is either these or reference.model"
        for name in ("adapter", "model") if self.kind != "frozen" else ():
            if getattr(self, name) is not None:
                yield name, f"a reference of kind {self.kind} is made of the policy itself; remove it"

    @property
    def inside(self) -> str | None:
        """Adapters that the trainer itself computes it with: none, or a directory; None: a role of its own does."""
        return self.adapter or ("adapters_off" if self.kind == "adapters_off" else None)


Dialect = Literal["vllm", "sglang", "echo"]
"""Ways in which servers tell log-probs of tokens they are given."""


@dataclass(config=CLOSED, frozen=True, slots=True)
class TeacherServerConfig:
    """A teacher behind an address, instead of a model of the run's own."""

    url: str | None = None
    """Address of a server that tells log-probs of tokens it reads, such as http://host:8000/v1; null for none."""
    dialect: Dialect = "vllm"
    """`vllm`: POST URL/completions with prompt_logprobs. `sglang`: POST URL/generate with input_ids and return_logprob.
    `echo`: POST URL/completions with echo and logprobs, of sampled tokens alone, as OpenAI's first completions had
    it."""
    model: str | None = None
    """Name of the model there; null where it serves one that needs no name."""
    key_env: str | None = None
    """Environment variable with the key that is sent as bearer token; null sends none."""
    at_once: int = Field(default=32, ge=1)
    """Requests that are under way at the same time, from each process of the role."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds that one request may take."""
    attempts: int = Field(default=4, ge=1)
    """How often an answer is asked about before the run fails, where the server cannot be reached or fails (5xx)."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.url is not None and not re.match(r"https?://[^/?#]", self.url):
            yield "url", "it is no address; write http://HOST:PORT/v1"


@dataclass(config=CLOSED)
class TeacherConfig:
    """The model whose judgement of every token is learned from, where the algorithm distils (opd)."""

    model: Place | None = None
    """Hugging Face directory (or hub name); its tokens must be those of the policy, unless `tokenizer` names others."""
    server: TeacherServerConfig = field(default_factory=TeacherServerConfig)
    tokenizer: Place | None = None
    """Hugging Face directory (or hub name) of the teacher's tokenizer where it is not the policy's: then answers are
    aligned by their text."""
    adapter: Place | None = None
    """Instead: directory of saved adapters of the policy's own base model, with which the trainer computes, too."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which it computes; `auto` is bfloat16 on GPUs and float32 on CPUs."""
    route: str | None = None
    """With several `teachers`, the column of the data set that names the teacher of a prompt; null mixes them by
    weight."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.adapter is not None and self.model is not None:
            yield "adapter", "it is either these or teacher.model"
        if self.server.url is not None and (self.adapter, self.model) != (None, None):
            yield "server.url", "it is either this or a model of the run's own, teacher.model or teacher.adapter"
        if self.tokenizer is not None and self.server.url is None and self.model is None:
            yield "tokenizer", "it belongs to a teacher.model or teacher.server; remove it"


@dataclass(config=CLOSED, frozen=True, slots=True)
class NamedTeacher:
    """One of several teachers: an entry of `teachers`."""

    model: Place | None = None
    """Hugging Face directory (or hub name); its tokens must be those of the policy, unless `tokenizer` names others."""
    server: TeacherServerConfig = field(default_factory=TeacherServerConfig)
    """Instead of a model: {url: ADDRESS, dialect: vllm}, with the keys of teacher.server."""
    tokenizer: Place | None = None
    """As teacher.tokenizer."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, strict=True)
    """Its share in the mixture, relative to the others'."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which it computes; `auto` is bfloat16 on GPUs and float32 on CPUs."""
    devices: Any = None
    """Where it is, written like the keys of `placement`; None for the teacher's place there."""


@dataclass(config=CLOSED)
class RewardModelConfig:
    """A model that scores answers, instead of the reward function or beside it: docs/roles.md."""

    path: Place | None = None
    """Hugging Face directory (or hub name) of a model that scores answers; null: none does."""
    kind: Literal["classifier", "generative"] = "classifier"
    """`classifier`: a sequence-classification model. `generative`: a language model that is asked by `template`, and
    replies with one of `choices` or a text that has a number."""
    tokenizer: Place | None = None
    """Hugging Face directory (or hub name) of its tokenizer; null takes the one in `path`."""
    template: str | None = None
    """Text that it reads, such as "Question: {prompt}\\nAnswer: {response}\\nRight: {answer}\\nGrade:", with columns of
    the data set in braces; null, for a classifier, is the conversation or else the prompt and the response."""
    chat: bool | None = None
    """Put that text into its tokenizer's chat template; null does where it has one, for a generative judge and for
    prompts that are chats."""
    label: int | None = Field(default=None, ge=0)
    """Of a classifier with several labels, the one whose log-probability is the score; null needs a single label."""
    choices: dict[str, Any] = field(default_factory=dict)
    """Replies that a generative judge chooses from, and what each is worth, {" yes": 1, " no": 0}: the score is the
    expected value by their probabilities, and nothing is generated."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """Where the score stands in a reply that is generated: a regular expression whose first group is the number. The
    last match counts; a reply without one leaves the answer without a reward."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest reply that is generated, always by the likeliest token."""
    weight: float = 1.0
    """Share of its score in the reward."""
    normalize: Literal["none", "sigmoid", "group"] = "none"
    """Change of a score before it is weighted: none, 1 / (1 + exp(-score)), or its distance from the mean of
    its group in standard deviations."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest text that it reads, in its tokens; a longer one leaves the answer without a reward. null takes what
    the model has positions for, less what a generative judge needs for its reply; it is never more than that."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens (padding included) that each process computes at once; a longer text stands alone."""
    max_rows: int = Field(default=64, ge=1)
    """Replies that are generated together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which it computes."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        if self.path is None:
            for key in ("template", "tokenizer", "label"):
                if getattr(self, key) is not None:
                    yield key, "there is no reward model: name it in reward_model.path, or remove this"
            return
        if self.kind == "generative":
            yield from self._judge_mistakes()
        elif self.choices:
            yield "choices", "a classifier gives no replies; remove it, or set kind: generative"
        if self.template is not None and "{response}" not in self.template:
            yield "template", "it does not show the answer: write {response} where it belongs"

    def _judge_mistakes(self) -> Iterator[tuple[str, str]]:
        if self.template is None:
            yield "template", "a generative judge is asked by it: write what it reads, with {response}"
        if self.label is not None:
            yield "label", "a generative judge has no labels; remove it, or set kind: classifier"
        values = self.choices.values()
        if len(values) == 1 or any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
            yield "choices", 'write at least two replies and what each is worth, {" yes": 1, " no": 0}'
        try:
            if not re.compile(self.pattern).groups:
                yield "pattern", "put the number into a group, such as Score: (\\d+)"
        except re.error as error:
            yield "pattern", f"this is no regular expression: {error}"


@dataclass(config=CLOSED)
class MuonConfig:
    """Muon's steps on hidden matrices, with `optimizer.kind: muon`."""

    lr_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of the matrices in multiples of that of all else, `optimizer.lr` or a critic's; with `adjust:
    original` some 20 to 70 are usual."""
    momentum: Decay = 0.95
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Add the gradient to the running mean once more before a step."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """By what the learning rate is multiplied for a matrix of n rows and m columns: 0.2 sqrt(max(n, m)), with which
    steps are as large as AdamW's, whose learning rate and weight decay then fit (arXiv:2502.16982); or the author's
    sqrt(max(1, n / m))."""


@dataclass(config=CLOSED)
class OptimizerConfig:
    """AdamW or Muon for reinforcement learning."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` keeps the running means in 8 bits, by bitsandbytes: a quarter of their memory. Checkpoints have them
    in float32; going on from one rounds them anew. `muon` learns hidden matrices by Muon, with one running mean in
    place of two, and embeddings, output head, routers and all that is no matrix by AdamW; docs/training.md."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay of the running means of the gradient and of its square."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Gradients with a larger global norm are scaled down to it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, until the last step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that a linear or cosine schedule comes down to; the last step is a little above."""


@dataclass(config=CLOSED)
class ForwardConfig:
    """How a model is run over answers; nothing here changes what comes of it, up to rounding."""

    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens (prompts included) that each rank computes at once; a longer sample stands alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; weights that learn, gradients and the optimizer stay in float32."""
    order: Literal["prompt", "arrival", "free", "auto"] = "prompt"
    """`prompt` cuts micro-batches in the order of the prompts, which several rollouts answer in turn, so that a run
    repeats bit for bit; `arrival` takes groups as they finish, and rollouts take prompts as they have room, which is
    faster where a few answers are much longer than the others. `free` does too, and
    with `sharding` replicate or hybrid each copy of the model learns on its own as its devices become free, so that
    those whose answers are done train while others still generate; `auto` tries `arrival` and `free` by turns, keeps
    the quicker one, says so, and tries again now and then; docs/training.md."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Tokens whose logits over the vocabulary are in memory at once."""
    attention: Literal["auto", "packed", "padded", "flash"] = "auto"
    """How sequences of a micro-batch lie: `packed` one behind another, without padding; `padded` to one length, with
    the model's own attention; `flash` packed, by the flash_attn package. `auto` packs, by flash_attn where it is
    installed and else by torch's own kernel, and pads models that cannot be packed on the CPU alone; on a GPU those are
    an error, unless `padded` is asked for."""
    compile: Literal["auto", True, False] = "auto"
    """Have torch.compile fuse what lies between products of matrices, block by block and in the head, which takes time.
    `auto` does on GPUs, once the first steps have shown that it saves more than that in the steps that are left, and
    says what it decided; true does at the start, on CPUs, too, and is an error where it cannot."""


@dataclass(config=CLOSED)
class ParallelConfig:
    """How one copy of a model is split over processes: `tensor` x `pipeline` x `context` of them have one copy, and
    what remains of the trainer's processes computes on further shares of the data. docs/training.md has how `fsdp`
    splits, without stages, and how `megatron` does."""

    tensor: int = Field(default=1, ge=1)
    """Processes over which every layer's matrices are split, and between them the tokens."""
    pipeline: int = Field(default=1, ge=1)
    """Stages, each of which has some of the layers; micro-batches flow through them."""
    interleave: int = Field(default=1, ge=1)
    """Parts of the layers that each stage has, one behind another in turn: a shorter bubble for more messages."""
    context: int = Field(default=1, ge=1)
    """Processes over which the tokens of each sequence are split, for long answers. `fsdp` leaves those whole on one
    that are no longer than its part of micro_batch_tokens."""
    expert: int = Field(default=1, ge=1)
    """Processes over which a mixture's experts are spread; they are among those of the copies, not further ones."""

    @property
    def copy(self) -> int:
        """Processes that one copy of the model takes."""
        return self.tensor * self.pipeline * self.context


@dataclass(config=CLOSED)
class TrainerConfig(ForwardConfig):
    """How gradients are computed; nothing here but `router_replay` changes what is learned."""

    backend: str = "fsdp"
    """Back end that trains: `fsdp`; `megatron`, which splits models as `parallel` says (extra `megatron`); or the
    dotted path of a class like `rlinf.training.backend.BackEnd`."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sharding: Literal["auto", "shard", "replicate", "hybrid"] = "auto"
    """How trainer and critic lie on their processes: `shard` spreads one copy of model and optimizer over all of them
    (FSDP), `replicate` gives each process a copy and sums gradients once per optimizer step, `hybrid` gives each
    machine a copy that is spread over its processes (HSDP). `auto` takes the first of replicate, hybrid and shard that
    fits into the devices' memory, and says which."""
    gradient_checkpointing: Literal["auto", True, False] = "auto"
    """Compute activations again on the way back: less memory, about a third more time. `auto` does on GPUs whose memory
    would not do without by the estimate of `--dry-run`, and never on CPUs."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment]  # a run gives roles its value
    """Tokens (prompts included) that each rank, or the ranks that `parallel` has compute together, computes at once; a
    longer sample stands alone. null takes 2,048 on CPUs and 16,384 on GPUs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # type: ignore[assignment]  # the same
    """Precision of the computation; weights that learn, gradients and the optimizer stay in float32. `auto` is bfloat16
    on GPUs and float32 on CPUs."""
    working_copy: Literal["auto", True, False] = "auto"
    """In bfloat16 a process with a whole copy of the model keeps its weights in bfloat16 too, cast once per optimizer
    step, which takes 2 bytes per weight; with false FSDP casts a layer whenever it is computed, which takes the
    processor a third longer. `auto` keeps them unless only without them the estimate of `--dry-run` fits the devices,
    and says so then."""
    router_replay: Literal["auto", True, False] = "auto"
    """In a mixture of experts, compute on the experts that the engine chose for each token, with the gate's weights of
    now: docs/models.md. `auto` does where the engine tells them; true is an error where it does not."""

    join: str | None = None
    """HOST:PORT at which replicas of the trainer may join the run while it goes on, `rlinf join ADDRESS --role
    trainer`, as `rollout.join` for engines: they compute gradients of micro-batches, and may leave or be lost in the
    middle of a step. Of several processes the trainer needs `order: free`; see docs/multi-node.md. null lets nobody
    in."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, advice) for every mistake in it."""
        yield from join_mistake(self.join, "trainer")
        if self.backend not in BACK_ENDS and (advice := mistake_in(self.backend)) is not None:
            yield "backend", f"{advice}; or take {' or '.join(BACK_ENDS)}"
        if self.attention == "flash" and not any(map(find_spec, ("flash_attn", "flash_attn_interface"))):
            yield "attention", "neither flash_attn nor flash_attn_interface is installed; install one, or take auto"


@dataclass(config=CLOSED)
class LearningSettings(OptimizerConfig, TrainerConfig):
    """How a role computes a model and its optimizer steps: sections of a configuration, with nothing left to choose."""

    lr: float = Field(default=OptimizerConfig.lr, ge=0)
    """Learning rate after warm-up; 0 keeps all weights as they are."""
    sharding: Literal["shard", "replicate", "hybrid"] = "shard"
    """How model and optimizer lie on the ranks; see `TrainerConfig`, whose `auto` a run replaces by what it chose, as
    it does in the next three."""
    gradient_checkpointing: bool = False
    """Compute activations again on the way back."""
    micro_batch_tokens: int = Field(default=ForwardConfig.micro_batch_tokens, ge=1)
    """Tokens that each rank computes at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation."""
    saved_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights in a checkpoint's hf/; auto: that in which the model was saved."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run, at the end of which a linear or cosine schedule has come down."""


@dataclass(config=CLOSED)
class BatchSettings(LearningSettings):
    """How a role learns from batches of judged groups."""

    epochs: int = Field(default=AlgorithmConfig.epochs, ge=1)
    """Passes over each batch of groups."""
    minibatches: int = Field(default=AlgorithmConfig.minibatches, ge=1)
    """Optimizer steps in each pass, each on a part of the groups; with more than one, training begins when the whole
    batch has come."""


PAST, OWN = "past", "own"
"""Beginnings of the names of adapters: of earlier versions of the policy's, and of those of single agents."""


def past_adapters(count: int) -> list[str]:
    """Names of so many earlier versions."""
    return [f"{PAST}{place}" for place in range(count)]


def own_adapters(agents: Sequence[str]) -> dict[str, str]:
    """Names of the adapters of agents that have their own, by agent."""
    return {agent: f"{OWN}{place}" for place, agent in enumerate(agents)}


@dataclass(config=CLOSED)
class TrainerSettings(BatchSettings):
    """How the trainer learns; `system.spawn(Trainer, lr=1e-4)` is short for `settings=TrainerSettings(lr=1e-4)`."""

    router_aux_loss: float = Field(default=AlgorithmConfig.router_aux_loss, ge=0)
    """Weight of the auxiliary loss of a mixture of experts."""
    reference: Place | None = None
    """Where the trainer computes the reference's log-probs itself: adapters_off, by its model without adapters, or the
    directory of saved adapters of its base model; None: samples bring them."""
    teacher: Place | None = None
    """Directory of a teacher's saved adapters for the trainer's base model; None: samples bring its log-probs."""
    teacher_models: tuple[Place, ...] = ()
    """Saved models of the teachers, in their order, whose output embeddings a divergence over the whole vocabulary
    needs."""
    past: int = Field(default=0, ge=0)
    """Earlier versions of the adapters that are kept, see `agent.past`."""
    own_weights: tuple[str, ...] = ()
    """Agents that have adapters of their own, see `agent.own_weights`."""
    rescue_dir: Place | None = None
    """Directory where a batch is written whose loss or gradient is not finite; None writes none."""
    staleness: int = Field(default=0, ge=0)
    """Versions by which tokens may be older than the weights that learn from them; above 0, metrics tell their ages
    apart."""
    publishes: Literal["float32", "bfloat16"] = "float32"
    """Precision in which weights leave the trainer: the widest of those who take them over."""
    delta: Delta = "auto"
    """See `weights.delta`."""
    lends: bool = False
    """The rollout, in the trainer's process, computes on the trainer's own tensors."""
    shown_samples: int = Field(default=MetricsConfig.samples, ge=0)
    """Samples of a batch that `Trainer.samples` can show where groups stay where they were made."""


@dataclass(config=CLOSED)
class CriticSettings(BatchSettings):
    """How the critic learns."""

    lr: float = Field(default=CriticConfig.lr, ge=0)
    """Learning rate after warm-up; 0 keeps all weights as they are."""


@dataclass(config=CLOSED)
class SupervisedSettings(LearningSettings):
    """How a model learns from given texts, each batch of which is one optimizer step."""

    reference: Place | None = None
    """As the trainer's."""


@dataclass(config=CLOSED)
class ReferenceSettings(ForwardConfig):
    """How a model that does not learn computes log-probs."""

    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens (prompts included) computed at once, and read ahead; a longer sample stands alone."""
    decay: float | None = Field(default=None, gt=0, lt=1)
    """How much of the weights stays as it is when they `follow` others; None: they follow none."""
    column: str = "ref_logprobs"
    """Key of `Sample.per_token` that is filled: `teacher_logprobs` for a teacher."""
    distribution: Literal["none", "top", "hidden"] = "none"
    """Of a teacher, what it says of each token's whole distribution: its `top_k` likeliest tokens with their log-probs,
    in `teacher_top`; or the hidden states that it predicts from, in `teacher_hidden`."""
    top_k: int = Field(default=64, ge=1)
    """How many of the likeliest tokens."""
    tokenizer: Place | None = None
    """Of a teacher that has a tokenizer other than the policy's, its own: what it says is aligned by the text."""


def combine(kind: type[S], /, *sections: Any, **more: Any) -> S:
    """Settings of a role, with the values that sections of a configuration have under the same names.

    Args:
        kind: the class of the settings.
        sections: of two that have a name, the later one counts.
        more: what a run adds, or decides otherwise.
    """
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    values = {name: getattr(section, name) for section in sections for name in names & {*vars(section)}}
    return kind(**{**values, **more})


SFT, DPO, REWARD_MODEL = "sft", "dpo", "reward_model"
SUPERVISED = (SFT, DPO, REWARD_MODEL)
"""Algorithms that learn from given texts: nothing is generated, and there is no reward."""


@dataclass(config=CLOSED)
class DpoConfig:
    """The loss of `algorithm: dpo`; what it holds on to is `reference`."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """`sigmoid`: DPO (arXiv:2305.18290). `ipo` (arXiv:2310.12036), by log-probs per token. `hinge`: as in SLiC
    (arXiv:2305.10425)."""
    beta: float = Field(default=0.1, gt=0)
    """How dear it is to leave the reference; of ipo, its tau."""
    label_smoothing: float = Field(default=0.0, ge=0, le=0.5)
    """Share of pairs that are taken to be labelled the wrong way round; of sigmoid alone."""


@dataclass(config=CLOSED)
class RewardLossConfig:
    """The loss of `algorithm: reward_model`."""

    center: float = Field(default=0.0, ge=0)
    """Weight of the square of the sum of a pair's scores, which keeps scores around 0 (arXiv:2312.09244)."""


@dataclass(config=CLOSED)
class SupervisedConfig:
    """Learning from given texts, with `algorithm: sft`, `dpo` or `reward_model`: each step is one optimizer step."""

    batch_size: int = Field(default=32, ge=1)
    """Conversations, or pairs, per step."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data, which then set the number of `steps`; null leaves it to that key."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of conversations are learned: the assistant's turns, its last turn, or everything, prompts
    included."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest conversation, prompt included; null for as many as the model has positions for. What becomes of longer
    ones is `data.overlong`, which cuts them at their end."""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    reward_model: RewardLossConfig = field(default_factory=RewardLossConfig)
