"""What is wrong with a saved reward model, told before anything starts: its configuration is read, its weights are not.

In: the section `reward_model`. Out: (key, advice) for every mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from rlinf.config.learning import RewardModelConfig
from rlinf.data.tokenizer import load_tokenizer, pretrained
from rlinf.models.language.generation import limits
from rlinf.models.language.load import unreadable_weights


def mistakes_in_saved(settings: RewardModelConfig) -> Iterator[tuple[str, str]]:
    """(key of `reward_model`, advice) for what only reading the model shows; nothing where none is named."""
    if settings.path is None:
        return
    problems = list(unreadable(settings.path, partial(pretrained, AutoConfig)))
    yield from (("path", reason) for reason in problems)
    if not problems or settings.tokenizer is not None:
        key = "path" if settings.tokenizer is None else "tokenizer"
        yield from ((key, reason) for reason in unreadable(settings.tokenizer or settings.path, load_tokenizer))
    if not problems and (damage := unreadable_weights(settings.path)) is not None:
        yield "path", damage
        return
    if problems:
        return
    if settings.kind == "generative":
        length = limits(settings.path).length
        if not settings.choices and length is not None and length <= settings.max_new_tokens:
            yield "max_new_tokens", f"the model has positions for {length:,} tokens, question and reply together"
        return
    found = pretrained(AutoConfig, settings.path)
    made, labels = found.architectures or [], found.num_labels or 1
    if made and not any(name.endswith("ForSequenceClassification") for name in made):
        yield (
            "path",
            f"this is a {made[0]}, no classification model; name one that was trained to score, or set "
            "reward_model.kind: generative",
        )
    elif settings.label is None and labels > 1:
        yield "label", f"the model has {labels} labels: say which is scored, from 0 to {labels - 1}"
    elif settings.label is not None and settings.label >= labels:
        yield "label", f"the model has {labels} labels, the first of which is 0"


def longest_question(settings: RewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most tokens that a reward model can be given: what its configuration allows, and what its context length
    leaves beside a reply. None for no limit.

    Args:
        settings: with a path.
        tokenizer: of the model.
    """
    assert settings.path is not None  # of every reward model
    length = limits(settings.path).length
    if length is not None and settings.choices:
        length -= max(len(tokenizer(reply, add_special_tokens=False)["input_ids"]) for reply in settings.choices)
    elif length is not None and settings.kind == "generative":
        length -= settings.max_new_tokens
    return min((most for most in (settings.max_tokens, length) if most is not None), default=None)


def unreadable(path: str, read: Callable[[str], Any]) -> Iterator[str]:
    """Why `read(path)` fails; nothing if it does not."""
    try:
        read(path)
    except (OSError, ValueError) as error:
        yield f"transformers cannot load it: {str(error).strip().splitlines()[0]}"
