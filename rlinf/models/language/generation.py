"""What a model's files say about generating with it: how long a text may become, and which tokens end one.

In: a configuration of transformers, or where a model comes from. Out: plain numbers. Nobody waits here but for files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from rlinf.data.tokenizer import pretrained
from rlinf.models.language.load import ModelSource

_BEHIND_PADDING = {
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod", "data2vec-text", "mpnet",
    "longformer", "ibert",
}  # fmt: skip
"""Kinds of models whose positions are counted from behind the padding token's id, so that so many are never used."""
_STRETCHED = {"linear", "dynamic"}
"""Kinds of rotary scaling whose configuration tells the length before scaling."""


def context_length(config: PretrainedConfig) -> int | None:
    """The most tokens, prompt and answer together, for which a model has positions; None if it has no limit.

    A table of positions (GPT-2, OPT) ends there. Rotary angles go on, but the model has never seen them, and its text
    falls apart. Scaled rotary angles reach as far as their scaling says; a sliding window limits what a token sees and
    not where it stands; ALiBi and recurrent models have no limit.

    Args:
        config: of the model, as `AutoConfig` gives it; of a model of several parts, that of its text counts.
    """
    text: Any = config.get_text_config()
    longest: int | None = getattr(text, "max_position_embeddings", None)
    if longest is None or getattr(text, "alibi", False):
        return None
    if text.model_type in _BEHIND_PADDING:
        return longest - (text.pad_token_id or 0) - 1
    rotary = getattr(text, "rope_parameters", None) or {}
    rotary = rotary.get("full_attention", rotary)  # some models have one set per kind of layer
    kind, factor = rotary.get("rope_type"), float(rotary.get("factor") or 1.0)
    if kind in _STRETCHED:
        return int(longest * factor)
    if kind == "yarn":  # some tell the length before scaling, others that after it
        return max(longest, int((rotary.get("original_max_position_embeddings") or longest) * factor))
    return longest


@dataclass(frozen=True, slots=True)
class Limits:
    """Where texts of a model end."""

    length: int | None = None
    """See `context_length`."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, by the model's configuration and by its generation_config.json: chat models list the
    end of a turn there, beside the end of a text that the tokenizer knows."""
    vocabulary: int | None = None
    """Token ids are below it; None: a new model's are those of its tokenizer."""


def limits(source: ModelSource) -> Limits:
    """What a model says about where its texts end.

    A model that cannot be read says nothing: loading it tells why.

    Args:
        source: a Hugging Face directory (or hub name), or the configuration of a new model, whose end token is the
            tokenizer's unless it names others.
    """
    if not isinstance(source, str):
        if "model_type" not in source:
            return Limits()
        text = {**source, **source.get("text_config", {})}
        return Limits(context_length(AutoConfig.for_model(**source)), _ids(source), text.get("vocab_size"))
    try:
        config = pretrained(AutoConfig, source)
    except (OSError, ValueError):
        return Limits()
    try:
        generation = GenerationConfig.from_pretrained(source).to_dict()
    except OSError:  # few models lack the file
        generation = {}
    text = config.get_text_config()
    ends = _ids(text.to_dict()) | _ids(generation)
    return Limits(context_length(config), ends, getattr(text, "vocab_size", None))


def _ids(settings: Mapping[str, Any]) -> frozenset[int]:
    found = settings.get("eos_token_id")
    return frozenset() if found is None else frozenset(found if isinstance(found, (list, tuple)) else [found])
