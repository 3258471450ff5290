"""Sizes of a transformer, whole or split over processes, the peak of a training step, and the values of `auto` keys.

In: a transformers config; for a peak, how the model is trained; how a copy is split. Out: counts and bytes, of a split
model those of the process that has the most. No weights are read and no device is touched.
`tests/runs/dry_run/test_peak.py` holds the peaks against what torch's own tracker counts.

Keys that are left to the kind of devices are precision, tokens of a micro-batch and checkpointing. From a configuration
and what its devices are, or are said to be, comes the same configuration with a value in place of every `auto`, and
lines that say which and why. It is done here and nowhere else: roles are given values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rlinf.config.common import PlacementConfig
from rlinf.config.gguf import CACHE
from rlinf.config.learning import ParallelConfig, TrainerConfig
from rlinf.config.load import InputError
from rlinf.config.text import RunConfig
from rlinf.data.images import auto_class
from rlinf.data.routes import experts_of
from rlinf.data.step import works_ahead
from rlinf.data.tokenizer import pretrained, without_own_code
from rlinf.placement.hardware import cpu_products
from rlinf.placement.seats import Placed
from rlinf.storage.files import replace_text

T = TypeVar("T")
_ENGINE = Path(__file__).parents[2] / "engines" / "transformers" / "model.py"

ALLOWANCE = 0.05
"""Share of what comes and goes in a step by which CUDA's allocator takes more than it hands out: blocks that a later,
slightly larger tensor does not fit into."""


def parameters_of(model_config: Any, kind: Any = None) -> int:
    """Number of parameters of a model, counted on a model without storage.

    Args:
        model_config: of it, from transformers.
        kind: the class of transformers that makes it; None: that of a language model.
    """
    return _counted(model_config, kind)[0]


def _counted(model_config: Any, kind: Any) -> tuple[int, int]:
    """Parameters of a model, and those that are in experts of which a token takes some."""
    config: Any = type(model_config)
    return _counted_by(model_config.to_json_string(), config, kind)


@lru_cache(64)  # a search for settings asks for the same models again and again
def _counted_by(text: str, config: Any, kind: Any) -> tuple[int, int]:
    def count() -> list[int]:
        with torch.device("meta"):
            model_config = config.from_dict(json.loads(text))
            named = [*without_own_code(auto_class(model_config, kind), model_config).named_parameters()]
        return [sum(one.numel() for name, one in named if part in name) for part in ("", ".experts.")]

    whole, in_experts = remembered(f"parameters {config.__qualname__} {getattr(kind, '__name__', None)} {text}", count)
    return whole, in_experts


def remembered(what: str, find: Callable[[], T]) -> T:
    """Result of a trial on models without storage, which an earlier process of this user may have found: the classes
    of models take more than a second to import.

    Args:
        what: is tried, in all that the result depends on beside the versions of libraries and this package's code.
        find: tries it; the result is plain JSON. What it raises is not remembered.
    """
    import transformers  # takes half a second, which runs that act do without

    stamps = [path.stat().st_mtime_ns for path in (*Path(__file__).parent.glob("*.py"), _ENGINE)]
    key = json.dumps([what, stamps, torch.__version__, transformers.__version__])
    file = CACHE.expanduser() / "trials" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    try:
        earlier: T = json.loads(file.read_text(encoding="utf-8"))
        return earlier
    except (OSError, ValueError):
        result = find()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(result))
    except OSError:  # then the next process tries it, too
        pass
    return result


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a transformer."""

    parameters: int
    outside: int
    """Parameters of the embeddings, which belong to no layer."""
    layers: int
    hidden: int
    inner: int
    """Columns of the layer's MLP; of experts, those together that a token takes."""
    vocabulary: int
    queries: int
    """Heads times their size."""
    keys: int
    """Heads of keys times their size; as many of values."""
    expert_parameters: int = 0
    """Parameters in experts, of which a token takes some."""
    experts: int = 1
    """Experts of a layer."""
    active_experts: int = 1
    """Experts that a token takes."""

    @staticmethod
    def of(model_config: Any, kind: Any = None) -> Shape:
        """Read off a transformers config; `kind` as in `parameters_of`."""
        text = model_config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        tied = getattr(
            text, "tie_word_embeddings", model_config.tie_word_embeddings
        )  # the whole model's, of several parts
        shared = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        parameters, in_experts = _counted(model_config, kind)
        experts = max(1, experts_of(text)) if in_experts else 1
        active_experts = min(experts, getattr(text, "num_experts_per_tok", 1)) if in_experts else 1
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        if in_experts:
            inner = active_experts * (getattr(text, "moe_intermediate_size", None) or inner)
            inner += getattr(text, "shared_expert_intermediate_size", None) or 0
        return Shape(
            parameters=parameters,
            outside=text.vocab_size * text.hidden_size * (1 if tied else 2),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            inner=inner,
            vocabulary=text.vocab_size,
            queries=head * text.num_attention_heads,
            keys=head * shared,
            expert_parameters=in_experts,
            experts=experts,
            active_experts=active_experts,
        )

    @property
    def activations(self) -> int:
        """Numbers that a layer keeps of each token for its gradient: input and normed input of attention and MLP, q, k,
        v, what attention says, and gate, up, their activation and product; of experts, besides, the input in the order
        of the experts and what each says."""
        routed = 2 * self.active_experts * self.hidden if self.expert_parameters else 0
        return 4 * self.hidden + 2 * self.queries + 2 * self.keys + 4 * self.inner + routed

    @property
    def passing(self) -> int:
        """Numbers of each token that are there at once in a layer without gradient: its input, and the MLP's."""
        return 2 * self.hidden + 3 * self.inner

    @property
    def layer(self) -> float:
        """Parameters of one."""
        return (self.parameters - self.outside) / self.layers

    @property
    def active(self) -> int:
        """Parameters that a token passes through."""
        return int(self.parameters - self.expert_parameters * (1 - self.active_experts / self.experts))

    @property
    def head(self) -> int:
        """Numbers of the output embedding."""
        return self.vocabulary * self.hidden

    def activation_bytes(self, width: int) -> float:
        """Bytes that a layer keeps of each token, at most: `activations`, keys once more as they are before rotation,
        and the float32 copies that both norms make.

        Args:
            width: bytes of a number that it computes in.
        """
        return float((self.activations + self.keys) * width + 2 * self.hidden * 4)

    def passing_bytes(self, width: int) -> float:
        """Bytes of each token that are there at once in a layer without gradient, at most: the same copies counted."""
        return float((self.passing + 2 * self.queries) * width + 2 * self.hidden * 4)


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained, as far as its peak depends on it."""

    width: int
    """Bytes of a number that it computes in; masters and gradients are float32."""
    tokens: int
    """Tokens of a micro-batch."""
    chunk: int
    """Tokens whose logits are in memory at once."""
    checkpointed: bool
    """Only the input of each layer is kept."""
    spread: bool
    """FSDP2 gathers layers and casts them; otherwise float32 weights are used as they lie."""
    learns_weights: bool = True
    """And not adapters alone, under which no weight has a gradient."""
    head: bool = True
    """Tokens are predicted; a critic predicts a number."""


def logit_bytes(shape: Shape, chunk: int) -> float:
    """Bytes of a chunk's logits and of what is made of them without a gradient: three copies in float32, and masks."""
    return float(chunk * shape.vocabulary * 14)


def peak_bytes(shape: Shape, how: Training) -> float:
    """Bytes that come and go in a training step, at the most: all but master weights, gradients and the optimizer's.

    The largest of three moments, each beside what FSDP2 gathered: the embeddings, which stay gathered, and three layers
    (the one at work, the next one, and the buffer that it arrives in).

    1. The head on its way back: all that the layers kept, a chunk's logits, and the head's gradient in float32.
    2. The last layer on its way back: all that the layers kept, the head's gradient as it waits for the embeddings'
       turn, that layer computed again where they are checkpointed, and gradients of its activations (twice the MLP's
       and the model's width); or, when the MLP's are gone, the layer's own gradients in their place, once computed and
       once in float32 on their way to other ranks.
    3. The embeddings at the end: their gradients, computed and in float32; of tied ones there are two.

    Args:
        shape: of the model.
        how: it is trained.
    """
    width, tokens, chunk = how.width, how.tokens, min(how.chunk, how.tokens)
    per_token = shape.hidden * width if how.checkpointed else shape.activation_bytes(width)
    activations = tokens * (
        shape.layers * per_token + 10 * shape.hidden
    )  # beside the layers: embedded, normed, picked out
    outside = shape.outside if how.head else shape.head
    logits = logit_bytes(shape, chunk) if how.head else 0.0
    waits = own = whole = 0.0
    if how.learns_weights:
        own = shape.layer * (4.0 + width * how.spread)
        if how.head:
            waits = float(shape.head * width)
            slopes = chunk * shape.vocabulary * (2.0 * width + 8)  # of one chunk, and what is left of the one before
            logits = max(logits, 4.0 * shape.head + max(slopes, waits + chunk * shape.vocabulary * width))
        whole = outside * (4.0 + width) + (waits if outside == shape.head else 0.0)
    again = shape.activation_bytes(width) if how.checkpointed else 0.0
    back = tokens * (again + (2 * shape.inner + 2 * shape.hidden) * width)
    mlp = tokens * 6.0 * shape.inner * width if how.checkpointed else 0.0
    back = max(back, back - mlp + own)
    gathered = (outside + 3 * shape.layer) * width if how.spread else 0.0
    end = whole + tokens * 4.0 * shape.hidden * width
    most = max(activations + logits, activations + back + waits, end)
    return (gathered + most) * (1 + ALLOWANCE)


@lru_cache
def saved_shape(path: str, kind: Any) -> Shape:
    """The shape of a saved model."""
    from transformers import AutoConfig

    return Shape.of(pretrained(AutoConfig, path), kind)


def splits_whole(trainer: TrainerConfig) -> bool:
    """True if processes have parts of their own, which stay; otherwise all share one copy, or each has one (FSDP)."""
    return trainer.backend == "megatron"


def part_of(shape: Shape, parallel: ParallelConfig) -> Shape:
    """The largest part of a model that is split by Megatron-core, with weights that stay where they are.

    A stage has ceil(layers / pipeline) layers, of which a process has 1 / tensor of the matrices and 1 / expert of the
    experts. The first has the input embedding and the last the output embedding, 1 / tensor of each; of tied ones both
    have a copy. Norms and routers, which every process of a stage has, are counted as if they were split.

    Args:
        shape: of the whole model.
        parallel: how it is split.
    """
    stages, tensor = parallel.pipeline, parallel.tensor
    layers = -(-shape.layers // stages)
    dense = shape.layer - shape.expert_parameters / shape.layers
    inside = layers * (dense / tensor + shape.expert_parameters / shape.layers / parallel.expert)
    outside = (shape.outside if stages == 1 else shape.head) / tensor
    return replace(
        shape,
        parameters=int(inside + outside),
        outside=int(outside),
        layers=layers,
        vocabulary=-(-shape.vocabulary // tensor),
        expert_parameters=int(layers * shape.expert_parameters / shape.layers / parallel.expert),
    )


def tokens_of(tokens: int, parallel: ParallelConfig) -> int:
    """Tokens of a micro-batch whose activations a process keeps: contexts divide them, and so do tensors, since what is
    not split by heads or columns is split by tokens (sequence parallelism)."""
    return -(-tokens // (parallel.context * parallel.tensor))


def gathered_of(shape: Shape, parallel: ParallelConfig) -> Shape:
    """Return the shape that FSDP2 gathers where layers are split by tensors or experts, too: a process's own part.

    Widths stay: of what lies between matrices a process has all columns of its part of the tokens (`tokens_of`), and
    within them its columns of all tokens, which is as much.
    """
    experts = shape.expert_parameters / parallel.expert
    dense = shape.parameters - shape.outside - shape.expert_parameters
    outside = shape.outside / parallel.tensor
    return replace(
        shape,
        parameters=int(dense / parallel.tensor + experts + outside),
        outside=int(outside),
        expert_parameters=int(experts),
    )


def engine_split(engine_args: dict[str, Any]) -> int:
    """Devices over which an engine splits a model, by `rollout.engine_args.tensor_parallel`."""
    split = engine_args.get("tensor_parallel", 1)
    return split if isinstance(split, int) and split > 0 else 1


Kind = Literal["cpu", "cuda"]
_DTYPES: dict[Kind, str] = {"cpu": "float32", "cuda": "bfloat16"}
_TOKENS: dict[Kind, int] = {"cpu": 2048, "cuda": 16_384}
"""Tokens of a micro-batch. A GPU is busy with as many: products of fewer rows wait for the weights to be read."""


_LARGE = 50_000_000
"""Weights of a model from which on a CPU spends most of decoding in products."""


def device_kind(wanted: PlacementConfig) -> Kind:
    """Return the kind of the run's devices: as `placement.device_kind` says, or as this machine's."""
    if wanted.device_kind != "auto":
        return wanted.device_kind
    return "cuda" if torch.cuda.is_available() else "cpu"


def elsewhere(wanted: PlacementConfig) -> bool:
    """True if `placement.device_kind` names other devices than this machine's, where only a dry run comes of it."""
    return wanted.device_kind not in ("auto", "cuda" if torch.cuda.is_available() else "cpu")


def refuse_other_kind(wanted: PlacementConfig) -> None:
    """See that a run that starts has the devices that its configuration names.

    Raises:
        InputError: it names others than this machine's.
    """
    if elsewhere(wanted):
        advice = "this machine has no GPU that torch can use; it is for --dry-run alone, so leave it at auto in a run"
        if torch.cuda.is_available():
            advice = (
                "this process uses GPUs already; start the run in another, or one with CUDA_VISIBLE_DEVICES= (none)"
            )
        raise InputError(f"placement.device_kind = {wanted.device_kind}: {advice}")


def by_kind(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """A configuration with what follows from the kind of its devices; of one that has it nothing changes.

    Returns:
        The configuration, and `key=value` of all that was left to the kind.
    """
    kind, became = device_kind(config.placement), []

    def dtype(key: str, wanted_dtype: str) -> Any:
        if wanted_dtype == "auto":
            became.append(f"{key}={_DTYPES[kind]}")
        return _DTYPES[kind] if wanted_dtype == "auto" else wanted_dtype

    trainer = replace(config.trainer, dtype=dtype("trainer.dtype", config.trainer.dtype))
    if trainer.micro_batch_tokens is None:
        trainer = replace(trainer, micro_batch_tokens=_TOKENS[kind])
        became.append(f"trainer.micro_batch_tokens={_TOKENS[kind]}")
    changed: dict[str, Any] = {
        name: replace(section, dtype=dtype(f"{name}.dtype", section.dtype))
        for name in ("rollout", "reference", "teacher")
        for section in (getattr(config, name),)
    }
    changed["teachers"] = {
        name: {**entry, "dtype": dtype(f"teachers.{name}.dtype", str(entry.get("dtype", "auto")))}
        for name, entry in config.teachers.items()
    }
    return replace(config, trainer=trainer, **changed), became


def share_tensors(config: RunConfig, placed: Placed, flow: Any) -> bool:
    """True if the rollout can compute on the trainer's own tensors: in one process, on a CPU, in one precision, and
    where the flow generates and trains in turn."""
    one = placed.devices == 1 and not placed.turns and device_kind(config.placement) == "cpu"
    alike = (config.rollout.engine, config.trainer.backend) == ("transformers", "fsdp")
    alike &= config.rollout.dtype == config.trainer.dtype == "float32" and config.rollout.own_engine
    return one and alike and not config.model.lora.on and getattr(flow, "alternates", False) and not works_ahead(flow)


def rollout_precision(config: RunConfig, model_config: Any, placed: Placed, flow: Any) -> tuple[RunConfig, str]:
    """A configuration with `rollout.dtype` as this CPU is fastest with, where it is a CPU and has the choice.

    The first process decides for all, whatever CPUs others have: roles are given values.

    Args:
        config: of the run.
        model_config: of its model, from transformers.
        placed: where the roles are. A single process stays with float32: it may decode with the trainer's tensors.
        flow: of the run.

    Returns:
        The configuration, and why it became what it is; empty where there was nothing to choose.
    """
    products = cpu_products() & {"amx_bf16", "avx512_bf16"}
    chooses = device_kind(config.placement) == "cpu" and config.rollout.dtype == "auto" and bool(products)
    usual = config.rollout.engine == "transformers" and config.rollout.weights == "full"
    if not (chooses and usual) or (count := parameters_of(model_config)) < _LARGE:
        return config, ""
    if placed.devices == 1 and config.trainer.dtype != "bfloat16":
        exact = {name: replace(getattr(config, name), dtype="float32") for name in ("rollout", "trainer")}
        why = "one process decodes in the precision that it trains in"
        if share_tensors(replace(config, **exact), placed, flow):
            why = "one process decodes with the trainer's own tensors, which takes no memory and needs no publishing"
        return config, f"rollout.dtype=float32: {why}; bfloat16 decodes faster here"
    changed = replace(config, rollout=replace(config.rollout, dtype="bfloat16"))
    size = f"{count / 1e6:,.0f} M weights"
    return changed, f"rollout.dtype=bfloat16: this CPU has products of it ({min(products)}), and the model {size}"


def unequal_precision(config: RunConfig) -> str:
    """A line where engine and trainer compute in two precisions and nothing corrects for it; empty elsewhere.

    Args:
        config: of the run, with what follows from the kind of devices.
    """
    learns, answers = config.trainer.dtype, config.rollout.dtype
    if learns == answers or config.rollout.weights != "full" or config.algorithm.correction:
        return ""
    return (
        f"trainer.dtype={learns}, rollout.dtype={answers}: small steps of the weights vanish in the one and not in the "
        "other, so log-probs of engine and trainer drift apart; set both alike, or algorithm.correction={cap: 2}"
    )


def checkpointing(config: RunConfig, memory: int | None, fits: Callable[[RunConfig], bool]) -> tuple[RunConfig, str]:
    """A configuration with `trainer.gradient_checkpointing` as true or false.

    Args:
        config: with what follows from the kind of devices.
        memory: bytes of each device; None where that is not known.
        fits: whether learning roles fit into the devices, by the estimate, with such a configuration.

    Returns:
        The configuration, and why it became what it is; empty where it was given.
    """
    if config.trainer.gradient_checkpointing != "auto":
        return config, ""

    def where(on: bool) -> RunConfig:
        return replace(config, trainer=replace(config.trainer, gradient_checkpointing=on))

    if device_kind(config.placement) == "cpu":
        return where(False), "as on every CPU"
    if memory is None:
        return where(True), "the devices' memory is not known; set placement.device_memory_gb"
    on = not fits(where(False))
    return where(on), f"{memory / 1e9:.3g} GB a device " + ("would not do without" if on else "are enough without")


def working_copy(config: RunConfig, fits: Callable[[RunConfig], bool]) -> tuple[RunConfig, str]:
    """A configuration with `trainer.working_copy` as true or false where that matters, and a line about it if it is
    false because of memory; arguments as for `checkpointing`."""
    trainer = config.trainer
    if trainer.working_copy != "auto" or trainer.dtype == "float32" or trainer.backend != "fsdp":
        return config, ""
    copied, cast = (replace(config, trainer=replace(trainer, working_copy=on)) for on in (True, False))
    if fits(copied):
        return copied, ""
    return (
        cast,
        "trainer.working_copy=false: the devices have no room for weights in bfloat16 beside those in float32",
    )
