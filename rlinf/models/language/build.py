"""Making language models: those that are trained, and those that roles compute with.

`build_module` makes what a trainer or a critic learns with: it takes a `ModelSpec` and the ranks that share the model,
and returns a `PolicyModel` or a subclass on its device, with its weights. The head of a new value model gives 0.
`build_model` makes the plain model of transformers, saved or new. `sources.py` has what is known of a model before.

A saved model that is spread is never whole anywhere, and one that computes in half precision on its device alone: it is
built without memory (on the meta device), spread, given memory for its slices, and each rank reads its slices from the
safetensors files. What those do not hold, such as the angles of rotary embeddings, is made anew: memory that nobody
fills raises no error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlinf.config.learning import LearningSettings
from rlinf.data.images import Pictures, auto_class
from rlinf.data.library_progress import fold_transformers
from rlinf.data.rng import ONE_AT_A_TIME, mix
from rlinf.data.tokenizer import pretrained, without_own_code
from rlinf.models.language.cost import ModelCost
from rlinf.models.language.four_bits import round_layer
from rlinf.models.language.fsdp import ALONE, Layout, dtype_of, shard
from rlinf.models.language.lora import (
    POLICY,
    adapter_values,
    add_adapters,
    is_adapter,
    lora_targets,
    plain_name,
    saved_names,
)
from rlinf.models.language.moe import StackedExperts, split_experts
from rlinf.models.language.policy_model import PolicyModel, ScoreModel, ValueModel, head_is_plain
from rlinf.models.language.sources import ModelSource, files_of, new_config, pictures_of
from rlinf.models.language.tensor_parallel import TensorRanks, halves, split_matrices
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.base.progress import work

fold_transformers()

# `ONE_AT_A_TIME` is held while a model is made or tried out, too: transformers switches the default dtype of the whole
# process meanwhile. Trying out a model that is spread over ranks is a collective, so two groups with hosts in common
# must be spawned one after the other, or each may hold it where the other waits.


_NAMES = {torch.bfloat16: "BF16"}
"""Names of dtypes in safetensors."""


def build_model(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kind: type[Any] = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Load a language model, or make a new one.

    Args:
        source: a Hugging Face directory (or hub name), or `{"model_type": "qwen2", "hidden_size": 64, ...}`.
        tokenizer: gives a new model its vocabulary and its special tokens.
        seed: of a new model's weights; the same seed makes the same model in every role and process, up to the rounding
            of `dtype`.
        dtype: of its weights.
        kind: the class that makes it: a causal language model, or a sequence classifier, which gets one label, and
            whose head is drawn from `seed` where a saved model has none.

    Returns:
        The model, on the CPU.

    Raises:
        ValueError: a configuration without `model_type`, or with one that transformers does not know.
        InputError: the saved weights are not those of the saved configuration.
    """
    labels = {} if kind is AutoModelForCausalLM else {"num_labels": 1}
    if isinstance(source, str):
        if Path(source).is_dir() and not any(files_of(Path(source))):
            raise _input_error(f"the model in {source} has no weights: neither *.safetensors nor pytorch_model*.bin")
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(seed))
            maker = auto_class(pretrained(AutoConfig, source), kind)
            loaded, report = pretrained(maker, source, dtype=dtype, output_loading_info=True, **labels)
        if labels:
            return _scoring(loaded, tokenizer)
        _check_whole(source, report["missing_keys"])
        return loaded  # type: ignore[no-any-return]
    config = new_config({**source, **labels}, tokenizer)
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed))
        model: PreTrainedModel = without_own_code(auto_class(config, kind), config, dtype=torch.float32)
    for parameter in model.parameters():  # and no buffers: angles of rotary embeddings must stay precise
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _input_error(message: str) -> Exception:
    from rlinf.config.load import InputError  # wants omegaconf, without which models are built all the same

    return InputError(message)


def _check_whole(source: str, missing: Collection[str]) -> None:
    """Refuse a model that transformers would complete by random weights, with a warning that nobody reads."""
    if missing:
        raise _input_error(
            f"the model in {source} has no weights for {len(missing)} of its tensors, such as {min(missing)}: its "
            "config.json is of another model, or files are missing"
        )


def config_of(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The configuration of a saved model, or of a new one, its defaults filled in."""
    config: PretrainedConfig = (
        pretrained(AutoConfig, source) if isinstance(source, str) else new_config(source, tokenizer)
    )
    return config


def cost_of(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> ModelCost | None:
    """Operations and bytes of a model by its configuration; None of one that is no transformer as we know them."""
    try:
        return ModelCost.of(config_of(source, tokenizer))
    except AttributeError:
        return None


def _scoring(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A sequence classifier that finds the last token of each row: it needs to know what padding is."""
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return model


def own_dtype(source: ModelSource) -> torch.dtype:
    """The precision in which a model was saved, as its configuration says; float32 where it does not, or is new."""
    if not isinstance(source, str):
        return torch.float32
    config = pretrained(AutoConfig, source)
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that is trained: where it comes from, which parts of it learn, and how it is computed."""

    source: ModelSource
    """A Hugging Face directory (or hub name), or the configuration of a new model."""
    head: Literal["logprobs", "values", "scores"] = "logprobs"
    """Its outputs for each response token, see `rlinf.training.backend.Outputs`."""
    seed: int = 0
    """Seed of a new model's weights, and of adapters."""
    lora: Mapping[str, Any] | None = None
    """See `add_adapters`; None trains all weights."""
    adapters: Mapping[str, str | None] = field(default_factory=dict)
    """Directories of further adapters of the same base, which do not learn, by name; None: these begin as those that
    learn. Only with `lora`."""
    learning: Sequence[str] = ()
    """Which of these learn, too."""
    freeze: Sequence[str] = ()
    """Modules whose weights do not learn, see `ModelConfig.freeze`."""
    watches_routing: bool = False
    """Its outputs have the routing of a mixture of experts, which `compute.router_replay` may set."""
    compute: LearningSettings = field(default_factory=LearningSettings)
    """The settings of the role that trains it."""

    @property
    def of_four_bits(self) -> bool:
        """The frozen base has 4 bits."""
        return self.lora is not None and self.lora.get("base") == "nf4"


def freeze(model: nn.Module, modules: Sequence[str]) -> None:
    """Have the weights of modules of these names learn nothing.

    Raises:
        ValueError: there is no module of a name, or nothing is left that learns.
    """
    if not modules:
        return
    parameters = [(set(name.split(".")), parameter) for name, parameter in model.named_parameters()]
    for name in modules:
        if not any(name in parts for parts, _ in parameters):
            raise WrongSetting(f"model.freeze: {type(model).__name__} has no module {name!r} with weights")
    for parts, parameter in parameters:
        if parts & set(modules):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise WrongSetting(f"model.freeze={list(modules)} leaves nothing that learns")


def build_module(
    spec: ModelSpec, tokenizer: PreTrainedTokenizerBase, device: torch.device | str = "cpu", layout: Layout = ALONE
) -> PolicyModel:
    """Make a model that is trained; a collective where it is spread.

    Args:
        spec: what it is.
        tokenizer: gives a new model its vocabulary.
        device: where it computes.
        layout: the ranks that train it.

    Returns:
        A policy, a `ValueModel` with the layers of that policy, or a `ScoreModel`, as `spec.head` says.

    Raises:
        ValueError: the model or its adapters cannot be made, or cannot be split so.
    """
    kind = AutoModelForSequenceClassification if spec.head == "scores" else AutoModelForCausalLM
    with ONE_AT_A_TIME:
        dtype = dtype_of(spec.compute.dtype)
        # a new head is in no file
        straight = (layout.slices is not None or dtype != torch.float32) and spec.head != "scores"
        files = (saved_files(spec.source) if straight else None) or {}
        empty = empty_model(str(spec.source), files) if files else None
        model = build_model(spec.source, tokenizer, seed=spec.seed, kind=kind) if empty is None else empty
        module = _with_head(model, spec, layout, pictures_of(spec.source, tokenizer))
        freeze(module.model, spec.freeze)
        elsewhere = _split(module, layout)
        if empty is None:
            _start(module, spec)
            module.to(device)
        if layout.slices is not None:
            if isinstance(module, ValueModel):
                module.shard_head(layout.slices)
            shard(module, layout.slices, dtype, elsewhere)
        if empty is not None:
            if layout.slices is None:
                _narrow_frozen(module.model, files, dtype)
            _give_memory(module, device)
            fill(module.model, files)
            _start(module, spec)
        if spec.of_four_bits:
            _round_base(module.model, spec, layout)
        if layout.slices is None:
            module.compute_in(dtype)
        module.settle(layout.ranks)
        module.keeps_step = layout.ranks is not None and layout.ranks.size() > 1
        return module


def _split(module: PolicyModel, layout: Layout) -> dict[nn.Parameter, DeviceMesh]:
    """Leave this rank its part of matrices and experts; what was split, with the ranks that have the same part."""
    if module.pictures is not None and {layout.division, layout.matrices, layout.experts} != {None}:
        raise WrongSetting(
            f"trainer.parallel: {type(module.model).__name__} reads pictures, and its sequences, matrices and experts "
            "cannot be split: take the keys away"
        )
    split: dict[nn.Parameter, DeviceMesh] = {}
    if layout.matrices is not None:
        module.tensor_ranks = TensorRanks(layout.matrices)
        split |= dict.fromkeys(split_matrices(module.model, module.tensor_ranks), module.tensor_ranks.alike)
    if layout.experts is not None:
        alike, parts = halves(layout.experts)
        split |= dict.fromkeys(split_experts(module.model, parts), alike)
    return split


def _with_head(model: PreTrainedModel, spec: ModelSpec, layout: Layout, pictures: Pictures | None) -> PolicyModel:
    """The model with its adapters, run as its settings say, behind the head that it is trained by."""
    compute = spec.compute
    ways: dict[str, Any] = {
        "gradient_checkpointing": compute.gradient_checkpointing,
        "attention": compute.attention,
        "compiled": False if spec.of_four_bits else compute.compile,
        "division": layout.division,
    }
    if spec.head == "values":
        return ValueModel(model, pictures=pictures, **ways)
    if spec.lora is not None:
        add_adapters(model, spec.lora)
    if spec.head == "scores":
        return ScoreModel(model, pictures=pictures, **ways)
    for name, directory in spec.adapters.items() if spec.lora is not None else ():
        add_adapters(model, spec.lora if directory is None else {"path": directory}, name)  # type: ignore[arg-type]
    for name in spec.learning:
        for _, parameter in saved_names(model, name):
            parameter.requires_grad_(True)
    replay = compute.router_replay if spec.watches_routing else None
    return PolicyModel(model, chunk=compute.logprob_chunk, router_replay=replay, pictures=pictures, **ways)


def _round_base(model: PreTrainedModel, spec: ModelSpec, layout: Layout) -> None:
    """Round the frozen linear layers below and beside adapters to 4 bits, but for the head and routers.

    Args:
        model: with adapters and all its values.
        spec: says in which dtype it computes.
        layout: the ranks that train it.

    Raises:
        ValueError: it lies in slices or parts, is to be compiled, or its layers are of another kind.
    """
    if spec.compute.compile is True:
        raise WrongSetting(
            "trainer.compile=true: no matrices of 4 bits (model.lora.base=nf4) are compiled; leave it out"
        )
    if {layout.slices, layout.division, layout.matrices, layout.experts} != {None}:
        raise WrongSetting(
            "model.lora.base=nf4: matrices of 4 bits are whole on every process, and here the model is spread: set "
            "trainer.sharding=replicate, and leave trainer.parallel out and trainer.working_copy as it is"
        )
    layers = [model.get_submodule(name) for name in lora_targets(model, "all-linear")]
    plain: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
    if odd := {type(layer).__name__ for layer in plain if type(layer) is not nn.Linear}:
        raise WrongSetting(f"model.lora.base=nf4: layers of {type(model).__name__} are {odd.pop()}, and no nn.Linear")
    for layer in plain:
        round_layer(layer, dtype_of(spec.compute.dtype))


def _narrow_frozen(model: PreTrainedModel, files: Mapping[str, Path], dtype: torch.dtype) -> None:
    """Have frozen weights that were saved in the dtype that is computed in be in it, and in no other.

    Args:
        model: without memory and whole, with its adapters.
        files: of its tensors.
        dtype: that is computed in.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and plain_name(name) in files:
            with safe_open(files[plain_name(name)], framework="pt") as file:
                own = file.get_slice(plain_name(name)).get_dtype()
            if own == _NAMES.get(dtype):
                parameter.data = parameter.data.to(dtype)


def _give_memory(module: PolicyModel, device: torch.device | str) -> None:
    """Let tensors without memory have some; in `to_empty` plain weights that are tied would part."""
    whole = {weight for weight in module.parameters() if not isinstance(weight, DTensor)}
    real = {each: nn.Parameter(torch.empty_like(each, device=device), each.requires_grad) for each in whole}
    for part in module.modules():
        part._parameters.update({name: real.get(each, each) for name, each in part._parameters.items()})  # type: ignore[arg-type]
    module.to_empty(device=device)


def _start(module: PolicyModel, spec: ModelSpec) -> None:
    """Give a value to what no file holds."""
    if isinstance(module, ValueModel):
        module.start_head()
    if spec.lora is not None:
        own = spec.lora.get("path")
        saved = {POLICY: own, **{name: own if each is None else each for name, each in spec.adapters.items()}}
        for parameter, value in adapter_values(module.model, mix(spec.seed, 1), saved):
            place(parameter, value)


def saved_files(source: ModelSource) -> dict[str, Path] | None:
    """The safetensors file of each tensor of a saved model; None if it has none on this machine."""
    if not isinstance(source, str) or not Path(source).is_dir():
        return None
    directory = Path(source)
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in names.items()}
    if not single.exists():
        return None
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def output_embedding(directory: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a saved model's output embedding, float32, read without the rest of it.

    Raises:
        ValueError: its files do not have them.
    """
    config = pretrained(AutoConfig, directory)
    with torch.device("meta"):
        model: PreTrainedModel = without_own_code(auto_class(config), config)
    model.tie_weights()
    files, head = saved_files(directory) or {}, model.get_output_embeddings()
    if head is None or not head_is_plain(model):
        raise ValueError(f"{directory}: its logits are not one product of matrices; set top_k of the divergence")

    def read(tensor: Tensor | None) -> Tensor | None:
        names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is tensor]
        for name in names if tensor is not None else ():
            if name in files:
                with safe_open(files[name], framework="pt") as file:
                    return file.get_tensor(name).float()
        if tensor is not None:
            raise ValueError(
                f"{directory}: none of its safetensors has {' or '.join(names)}; set top_k of the divergence"
            )
        return None

    weight = read(head.weight)
    assert weight is not None
    return weight, read(getattr(head, "bias", None))


def empty_model(directory: str, files: Mapping[str, Path]) -> PreTrainedModel | None:
    """The saved model without memory; None if its files and it do not match tensor by tensor, as when transformers
    renames or joins tensors while loading. Then it is loaded whole on every rank, and spread afterwards."""
    config = pretrained(AutoConfig, directory)
    with torch.device("meta"):
        model: PreTrainedModel = without_own_code(auto_class(config), config, dtype=torch.float32)
    if (Path(directory) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    saved = {name: tuple(_shape(path, name)) for name, path in files.items() if name in wanted}
    stacked = {name: StackedExperts.of(name, files) for name in wanted.keys() - saved.keys()}
    saved |= {name: experts.shape for name, experts in stacked.items() if experts is not None}
    return model if wanted == saved and _remade_buffers(model) is not None else None


def _shape(path: Path, name: str) -> list[int]:
    with safe_open(path, framework="pt") as file:
        shape: list[int] = file.get_slice(name).get_shape()
    return shape


def _remade_buffers(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]] | None:
    """Pairs of a buffer of `model` and its value; None if a module cannot be made again from the configuration."""
    pairs = []
    for module in model.modules():
        mine = dict(module.named_buffers(recurse=False))
        if not mine:
            continue
        try:
            again: nn.Module = type(module)(config=model.config)
        except TypeError:
            return None
        fresh = dict(again.named_buffers(recurse=False))
        if {name: buffer.shape for name, buffer in fresh.items()} != {name: b.shape for name, b in mine.items()}:
            return None
        pairs += [(buffer, fresh[name]) for name, buffer in mine.items()]
    return pairs


@torch.no_grad()
def fill(model: PreTrainedModel, files: Mapping[str, Path]) -> None:
    """Read this rank's slices of what the files have, and make the buffers anew."""
    for buffer, value in _remade_buffers(model) or ():
        buffer.copy_(value)
    stacked: list[tuple[nn.Parameter, StackedExperts]] = []
    by_file: dict[Path, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        if (experts := StackedExperts.of(plain_name(name), files)) is not None:
            stacked.append((parameter, experts))
        elif plain_name(name) in files:
            by_file.setdefault(files[plain_name(name)], []).append((plain_name(name), parameter))
    total = len(stacked) + sum(map(len, by_file.values()))
    with work("loading weights", total, "tensors") as loading:
        for parameter, experts in stacked:
            place(parameter, experts)
            loading.advance()
        for path, members in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name, parameter in members:
                    place(parameter, file.get_slice(name))
                    loading.advance()


@torch.no_grad()
def place(parameter: Tensor, values: Any) -> None:
    """Write values, a whole tensor or a slice of a file, into a parameter, or this rank's part of them."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(values[...])
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if all(shape):
        part = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
        parameter.to_local().copy_(values[part])
