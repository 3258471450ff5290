"""Making the model that a role works with: saved, or new from a configuration."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlinf.data.library_bars import fold_transformers
from rlinf.data.pictures.processor import FAMILIES, Pictures, auto_class, picture_tokens
from rlinf.data.rng import ONE_AT_A_TIME, mix
from rlinf.data.tokenizer import pretrained, without_own_code

fold_transformers()

ModelSource = str | Mapping[str, Any]
"""A Hugging Face directory (or hub name), or the configuration of a new model: `model_type` and that type's keys."""

# `ONE_AT_A_TIME` is held while a model is made or tried out, too: transformers switches the default dtype of the whole
# process meanwhile. Trying out a model that is spread over ranks is a collective, so two groups with hosts in common
# must be spawned one after the other, or each may hold it where the other waits.


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
        if Path(source).is_dir() and not any(_files_of(Path(source))):
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
    from rlinf.config.loading import InputError  # wants omegaconf, without which models are built all the same

    return InputError(message)


def _check_whole(source: str, missing: Collection[str]) -> None:
    """Refuse a model that transformers would complete by random weights, with a warning that nobody reads."""
    if missing:
        raise _input_error(
            f"the model in {source} has no weights for {len(missing)} of its tensors, such as {min(missing)}: its "
            "config.json is of another model, or files are missing"
        )


def unreadable_weights(source: str) -> str | None:
    """Tell by their headers why the files of a model's weights cannot be read; None if nothing speaks against it.

    A directory without any may be planned for; loading it tells.

    Args:
        source: a directory; of a hub name nothing is known.
    """
    tensors, pickles = _files_of(Path(source))
    for file in tensors:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{file.name} is damaged: {error}"
    for file in () if tensors else pickles:
        try:
            torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
        except pickle.UnpicklingError:
            return f"{file.name} is a pickle that holds more than tensors, which is never run: save it as safetensors"
        except (RuntimeError, EOFError, OSError) as error:
            return f"{file.name} is damaged: {str(error).splitlines()[0]}"
    return None


def _files_of(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files of a model's weights: of tensors alone, and pickles."""
    return sorted(directory.glob("*.safetensors")), sorted(directory.glob("pytorch_model*.bin"))


def new_config(source: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The configuration of a new model, with the vocabulary and the special tokens of its tokenizer.

    Args:
        source: `model_type` and that type's keys, which count more than the tokenizer. A model of several parts has the
            vocabulary in its `text_config`.
        tokenizer: what it will read.

    Raises:
        ValueError: there is no `model_type`, or none that transformers knows.
    """
    if "model_type" not in source:
        raise ValueError(f"model: a configuration needs model_type, such as qwen2; got keys {sorted(source)}")
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    settings = copy.deepcopy(dict(source))  # transformers writes into nested settings
    if settings["model_type"] not in FAMILIES:
        return AutoConfig.for_model(**{"vocab_size": len(tokenizer), **special, **settings})
    settings["text_config"] = {"vocab_size": len(tokenizer), **special, **settings.get("text_config", {})}
    ids = picture_tokens(settings["model_type"], tokenizer)
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    found = {} if ids is None else dict(zip(names, ids, strict=True))
    return AutoConfig.for_model(**{**found, **special, **settings})


def pictures_of(source: ModelSource | None, tokenizer: PreTrainedTokenizerBase) -> Pictures | None:
    """What reads pictures for a model; None if it reads text alone, or pictures in a way that we do not know.

    Raises:
        ValueError: the tokenizer lacks the tokens of pictures.
    """
    if source is None:
        return None
    if isinstance(source, str):
        config = pretrained(AutoConfig, source)
        return Pictures(config, tokenizer, source) if config.model_type in FAMILIES else None
    return Pictures(new_config(source, tokenizer), tokenizer) if source.get("model_type") in FAMILIES else None


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
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return found if isinstance(found, torch.dtype) else getattr(torch, str(found).removeprefix("torch."))
