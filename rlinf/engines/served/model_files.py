"""The files of a model that a server reads, and what arriving weights must look like.

In: where a model comes from. Out: a directory of checkpoint files, its own or one made for the purpose; shapes by name.
Blocking, and all memory is given back: shapes are found without a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlinf.data.pictures.processor import FAMILIES, auto_class
from rlinf.data.routing.routes import experts_of
from rlinf.data.tokenizer import pretrained, without_own_code
from rlinf.data.weights import Weights
from rlinf.engines.make import EngineSetup
from rlinf.runtime.base.shutdown import OwnDirectory


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture, as its configuration counts them."""

    layers: int
    """Of the model, those without experts among them."""
    top_k: int
    """Experts that each token goes to."""
    count: int
    """Experts of a layer."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a server starts from."""

    directory: Path
    """With config.json and safetensors."""
    own: OwnDirectory | None
    """The same where it was made for this server; `remove` deletes it."""
    shapes: dict[str, tuple[int, ...]]
    """Of each tensor of the model, by the name that trainers publish it under."""
    vocabulary: int
    """Tokens from 0 that it can read."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Of tensors that have another name in files than in memory, by the latter: servers know those of files."""
    experts: Experts | None = None
    """Of a mixture."""

    def as_saved(self, weights: Weights) -> Weights:
        """Weights by the names that their tensors have in files."""
        if not self.names:
            return weights
        layout = tuple(replace(slot, name=self.names.get(slot.name, slot.name)) for slot in weights.layout)
        return replace(weights, layout=layout)

    def remove(self) -> None:
        """Delete what was made for the server."""
        if self.own is not None:
            self.own.remove()


def model_files(setup: EngineSetup) -> ModelFiles:
    """The files of the model of a setup: those of a directory, or of a new model, which is made and saved.

    Raises:
        ValueError: it is no language model that transformers knows.
    """
    if isinstance(setup.model, str) and Path(setup.model).is_dir():
        config = pretrained(AutoConfig, setup.model)
        with torch.device("meta"):
            empty = without_own_code(auto_class(config), config)
        directory = Path(setup.model).absolute()
        return ModelFiles(directory, None, _shapes(empty), _vocabulary(config), _names(empty), _experts(config))
    own = OwnDirectory("model")
    directory = own.path
    try:
        with setup.build_model() as model:
            model.save_pretrained(directory)
            shapes, config, names = _shapes(model), model.config, _names(model)
        if setup.tokenizer is not None:
            with contextlib.suppress(AttributeError):  # a decoder that is no tokenizer of transformers
                setup.tokenizer.save_pretrained(directory)
        if setup.pictures is not None:
            setup.pictures.save(directory)
    except BaseException:
        own.remove()
        raise
    return ModelFiles(directory, own, shapes, _vocabulary(config), names, _experts(config))


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _names(model: PreTrainedModel) -> dict[str, str]:
    """Names in files of the tensors of a model that reads pictures, where they are others: transformers reads these
    models by older names than it gives their parts. Those that it joins or splits besides keep theirs."""
    if model.config.model_type not in FAMILIES:
        return {}
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    saved = revert_weight_conversion(model, dict(model.named_parameters()))
    found = {own[id(tensor)]: name for name, tensor in saved.items() if id(tensor) in own}
    return {name: other for name, other in found.items() if name != other}


def _vocabulary(config: PretrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def _experts(config: PretrainedConfig) -> Experts | None:
    text = config.get_text_config()
    count, top_k = experts_of(text), getattr(text, "num_experts_per_tok", None)
    return Experts(int(text.num_hidden_layers), int(top_k), count) if count and top_k else None
