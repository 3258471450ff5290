"""Making the model that a trainer or a critic learns with, whole on one rank or spread over many.

In: where the model comes from, and how it is to be trained. Out: a `PolicyModel` or a `ValueModel` on its device with
its weights in it; the head of a new value model says 0.

A saved model that is spread is never whole anywhere: it is built without memory (on the meta device), spread, given
memory for its slices, and each rank reads its slices from the safetensors files. What those do not hold, such as the
angles of rotary embeddings, is made anew: memory that nobody fills is the trap here, for it raises no error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlinf.data.pictures.processor import Pictures, auto_class
from rlinf.data.rng import ONE_AT_A_TIME, mix
from rlinf.data.tokenizer import pretrained, without_own_code
from rlinf.models.language.fsdp import shard
from rlinf.models.language.load import ModelSource, build_model, pictures_of
from rlinf.models.language.lora import POLICY, adapter_values, add_adapters, is_adapter, plain_name
from rlinf.models.language.mixture.replay import Replay
from rlinf.models.language.parallel.expert_files import StackedExperts
from rlinf.models.language.parallel.experts import split_experts
from rlinf.models.language.parallel.matrices import TensorRanks, halves, split_matrices
from rlinf.models.language.parallel.tokens import Division
from rlinf.models.language.policy_model import Attention, Compile, PolicyModel
from rlinf.models.language.value_model import ScoreModel, ValueModel
from rlinf.runtime.base.progress import work

M = TypeVar("M", bound=PolicyModel)


@dataclass(frozen=True, slots=True)
class Build:
    """How a model is made."""

    source: ModelSource
    """A Hugging Face directory (or hub name), or the configuration of a new model."""
    seed: int
    """Of a new model's weights, and of adapters."""
    lora: Mapping[str, Any] | None
    """See `add_adapters`; None trains all weights."""
    dtype: torch.dtype
    """To compute in; weights are float32."""
    device: torch.device
    """Where it lives."""
    mesh: DeviceMesh | None
    """The ranks to spread it over; None leaves it whole."""
    gradient_checkpointing: bool
    """See `PolicyModel`."""
    chunk: int
    """See `PolicyModel`."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Directories of further adapters, which do not learn, by name."""
    attention: Attention = "any"
    """See `PolicyModel`."""
    compiled: Compile = False
    """See `PolicyModel`."""
    ranks: DeviceMesh | None = None
    """All that train it, who agree on how it is run; None for one."""
    division: Division | None = None
    """See `PolicyModel`."""
    matrices: DeviceMesh | None = None
    """Over which matrices are split, see `fsdp.Layout`."""
    experts: DeviceMesh | None = None
    """Over which experts are."""
    router_replay: Replay | None = None
    """See `PolicyModel`."""
    freeze: Sequence[str] = ()
    """Modules whose weights do not learn."""


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
            raise ValueError(f"model.freeze: {type(model).__name__} has no module {name!r} with weights")
    for parts, parameter in parameters:
        if parts & set(modules):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise ValueError(f"model.freeze={list(modules)} leaves nothing that learns")


def build_policy(build: Build, tokenizer: PreTrainedTokenizerBase) -> PolicyModel:
    """Make a policy; a collective where it is spread.

    Raises:
        ValueError: the model or its adapters cannot be made.
    """
    return _built(build, tokenizer, _policy)


def build_values(build: Build, tokenizer: PreTrainedTokenizerBase) -> ValueModel:
    """Make a value model, which has the layers of the policy that `build` describes; a collective where it is spread.

    Raises:
        ValueError: the model cannot be made.
    """
    return _built(build, tokenizer, _values)


def build_scores(build: Build, tokenizer: PreTrainedTokenizerBase) -> ScoreModel:
    """Make a reward model, a sequence classifier of one label; a collective where it is spread.

    Raises:
        ValueError: the model cannot be made, or transformers has no such classifier of it.
    """
    return _built(build, tokenizer, _scores, AutoModelForSequenceClassification)


def _built(
    build: Build,
    tokenizer: PreTrainedTokenizerBase,
    wrap: Callable[[PreTrainedModel, Build, Pictures | None], M],
    kind: type[Any] = AutoModelForCausalLM,
) -> M:
    with ONE_AT_A_TIME:
        spread = build.mesh is not None and kind is AutoModelForCausalLM  # a new head is in no file
        files = (saved_files(build.source) if spread else None) or {}
        empty = empty_model(str(build.source), files) if files else None
        made = build_model(build.source, tokenizer, seed=build.seed, kind=kind) if empty is None else empty
        pictures = pictures_of(build.source, tokenizer)
        module = wrap(made, build, pictures)
        freeze(module.model, build.freeze)
        elsewhere = _split(module, build)
        if empty is None:
            _start(module, build)
            module.to(build.device)
        if build.mesh is not None:
            if isinstance(module, ValueModel):
                module.shard_head(build.mesh)
            shard(module, build.mesh, build.dtype, elsewhere)
        if empty is not None:
            module.to_empty(device=build.device)
            fill(module.model, files)
            _start(module, build)
        module.settle(build.ranks)
        module.keeps_step = build.ranks is not None and build.ranks.size() > 1
        return module


def _split(module: PolicyModel, build: Build) -> dict[nn.Parameter, DeviceMesh]:
    """Leave this rank its part of matrices and experts; what was split, with the ranks that have the same part."""
    if module.pictures is not None and {build.division, build.matrices, build.experts} != {None}:
        raise ValueError(
            f"trainer.parallel: {type(module.model).__name__} reads pictures, and its sequences, matrices and experts "
            "cannot be split: take the keys away"
        )
    found: dict[nn.Parameter, DeviceMesh] = {}
    if build.matrices is not None:
        module.tensor_ranks = TensorRanks(build.matrices)
        found |= dict.fromkeys(split_matrices(module.model, module.tensor_ranks), module.tensor_ranks.alike)
    if build.experts is not None:
        alike, parts = halves(build.experts)
        found |= dict.fromkeys(split_experts(module.model, parts), alike)
    return found


def _policy(model: PreTrainedModel, build: Build, pictures: Pictures | None) -> PolicyModel:
    if build.lora is not None:
        add_adapters(model, build.lora)
        for name, directory in build.adapters.items():
            add_adapters(model, {"path": directory}, name)
    return PolicyModel(model, chunk=build.chunk, router_replay=build.router_replay, pictures=pictures, **_run(build))


def _run(build: Build) -> dict[str, Any]:
    """How models of all kinds are run."""
    names = ("gradient_checkpointing", "attention", "compiled", "division")
    return {name: getattr(build, name) for name in names}


def _values(model: PreTrainedModel, build: Build, pictures: Pictures | None) -> ValueModel:
    return ValueModel(model, pictures=pictures, **_run(build))


def _scores(model: PreTrainedModel, build: Build, pictures: Pictures | None) -> ScoreModel:
    if build.lora is not None:
        add_adapters(model, build.lora)
    return ScoreModel(model, pictures=pictures, **_run(build))


def _start(module: PolicyModel, build: Build) -> None:
    """Give a value to what no file holds."""
    if isinstance(module, ValueModel):
        module.start_head()
    if build.lora is not None:
        own = build.lora.get("path")
        saved = {**({} if own is None else {POLICY: own}), **build.adapters}
        for parameter, value in adapter_values(module.model, mix(build.seed, 1), saved):
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
