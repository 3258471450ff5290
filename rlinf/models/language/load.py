"""Making the model that a role works with: saved, or new from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlinf.data.rng import ONE_AT_A_TIME, mix

transformers_logging.disable_progress_bar()  # of loading and saving: bars would tear the lines of a run apart

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
    """
    labels = {} if kind is AutoModelForCausalLM else {"num_labels": 1}
    if isinstance(source, str):
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(seed))
            loaded: PreTrainedModel = kind.from_pretrained(source, dtype=dtype, **labels)
        return _scoring(loaded, tokenizer) if labels else loaded
    if "model_type" not in source:
        raise ValueError(f"model: a configuration needs model_type, such as qwen2; got keys {sorted(source)}")
    settings = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **source,
        **labels,
    }
    config = AutoConfig.for_model(**settings)
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed))
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # and no buffers: angles of rotary embeddings must stay precise
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


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
    config = AutoConfig.from_pretrained(source)
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return found if isinstance(found, torch.dtype) else getattr(torch, str(found).removeprefix("torch."))
