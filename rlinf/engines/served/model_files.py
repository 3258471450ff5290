"""The files of a model that a server reads, and what arriving weights must look like.

In: where a model comes from. Out: a directory of checkpoint files, its own or one made for the purpose; shapes by name.
Blocking, and all memory is given back: shapes are found without a model.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlinf.engines.make import EngineSetup

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys by which configurations tell how many experts a layer has."""


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
    temporary: bool
    """Made for this server; `remove` deletes it."""
    shapes: dict[str, tuple[int, ...]]
    """Of each tensor of the model, by the name that trainers publish it under."""
    vocabulary: int
    """Tokens from 0 that it can read."""
    experts: Experts | None = None
    """Of a mixture."""

    def remove(self) -> None:
        """Delete what was made for the server."""
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def model_files(setup: EngineSetup) -> ModelFiles:
    """The files of the model of a setup: those of a directory, or of a new model, which is made and saved.

    Raises:
        ValueError: it is no language model that transformers knows.
    """
    if isinstance(setup.model, str) and Path(setup.model).is_dir():
        config = AutoConfig.from_pretrained(setup.model)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        directory = Path(setup.model).absolute()
        return ModelFiles(directory, False, _shapes(empty), _vocabulary(config), _experts(config))
    directory = Path(tempfile.mkdtemp(prefix="rlinf-model-"))
    try:
        with setup.build_model() as model:
            model.save_pretrained(directory)
            shapes, config = _shapes(model), model.config
        if setup.tokenizer is not None:
            with contextlib.suppress(AttributeError):  # a decoder that is no tokenizer of transformers
                setup.tokenizer.save_pretrained(directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return ModelFiles(directory, True, shapes, _vocabulary(config), _experts(config))


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _vocabulary(config: PretrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def _experts(config: PretrainedConfig) -> Experts | None:
    text = config.get_text_config()
    count = next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), None)
    top_k = getattr(text, "num_experts_per_tok", None)
    return Experts(int(text.num_hidden_layers), int(top_k), int(count)) if count and top_k else None
