"""Reward models of transformers: scores of token ids, by a classification head or by a choice between given replies.

A sequence-classification model gives one score per sequence. The model's own forward is run, on batches padded on the
right, so encoders and decoders of every architecture that `AutoModelForSequenceClassification` has are scored as
transformers scores them.

A language model that judges gives the expected value of its reply to a question. No text is generated: the
log-probability of each whole given reply is computed after the question, which is read once.

Mistakes in the section `reward_model` are given as (key, advice) before anything starts: a saved model's
configuration is read, its weights are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rlinf.config.learning import RewardModelConfig
from rlinf.data.packing import Row, cut, pack
from rlinf.data.tokenizer import load_tokenizer, pretrained
from rlinf.models.language.build import ONE_AT_A_TIME, build_model
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.language.sources import limits, unreadable_weights


class SequenceClassifier(nn.Module):
    """Scores of whole sequences.

    Args:
        model: the classification model.
        pad_id: the token that fills batches up; None computes one sequence at a time, since decoders look for it to
            find where a sequence ends.
        label: of a model with several labels, the one whose log-probability is the score; None: the model has a single
            label, and its logit is the score.

    Raises:
        ValueError: the model has several labels and none was chosen, or not the chosen one.
    """

    def __init__(self, model: PreTrainedModel, pad_id: int | None, label: int | None = None):
        super().__init__()
        count = int(model.config.num_labels or 1)
        if label is None and count > 1:
            raise ValueError(f"the model has {count} labels: say which one is scored, label: 0 to {count - 1}")
        if label is not None and not 0 <= label < count:
            raise ValueError(f"label: {label}: the model has labels 0 to {count - 1}")
        self.model, self._label, self._pad_id = model.eval(), label, pad_id
        if pad_id is not None:
            self.model.config.get_text_config().pad_token_id = pad_id

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]], micro_batch_tokens: int) -> list[float]:
        """The score of each sequence.

        Args:
            sequences: token ids, none empty.
            micro_batch_tokens: tokens (padding included) computed at once; a longer sequence stands alone.
        """
        device = next(self.parameters()).device
        result = [0.0] * len(sequences)
        for indices in self._batches([len(sequence) for sequence in sequences], micro_batch_tokens):
            longest = max(len(sequences[index]) for index in indices)
            ids = torch.full((len(indices), longest), self._pad_id or 0)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(indices):
                ids[row, : len(sequences[index])] = torch.as_tensor(sequences[index])
                mask[row, : len(sequences[index])] = 1
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
            scored = logits[:, 0] if self._label is None else torch.log_softmax(logits, -1)[:, self._label]
            for index, score in zip(indices, scored.tolist(), strict=True):
                result[index] = score
        return result

    def _batches(self, lengths: Sequence[int], most: int) -> Iterator[list[int]]:
        """Indices of sequences that are computed together, the shortest first, so that little is padded."""
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and (self._pad_id is None or (len(batch) + 1) * lengths[index] > most):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch


def load_classifier(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    label: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> SequenceClassifier:
    """Load a saved classification model, without gradients.

    Args:
        path: a Hugging Face directory (or hub name).
        tokenizer: its own; gives the padding token where the model's configuration names none.
        label: see `SequenceClassifier`.
        dtype: of weights and computation.
        device: where it is put.

    Raises:
        ValueError: it is no classification model, or `label` does not fit it.
        OSError: there is none.
    """
    with ONE_AT_A_TIME:
        model, loading = pretrained(AutoModelForSequenceClassification, path, dtype=dtype, output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"{path} is no classification model: it has no {missing[0]}, so its scores would be random. Name a model "
            "that was trained to score, or set kind: generative"
        )
    pad_id = model.config.get_text_config().pad_token_id
    model.requires_grad_(False).to(device or "cpu")
    return SequenceClassifier(model, tokenizer.pad_token_id if pad_id is None else pad_id, label)


class Choices(nn.Module):
    """The expected value of a reply, sum over replies c of value(c) p(c), where p is the model's probability of c given
    that the reply is one of the given ones.

    Args:
        policy: the language model.
        replies: token ids of each, at least two, none empty.
        values: what each is worth.
    """

    def __init__(self, policy: PolicyModel, replies: Sequence[Sequence[int]], values: Sequence[float]):
        super().__init__()
        self.policy = policy
        self._replies = [np.asarray(reply, np.int64) for reply in replies]
        self._values = np.asarray(values, np.float64)

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]], micro_batch_tokens: int) -> list[float]:
        """The score of each question.

        Args:
            sequences: token ids of questions, none empty.
            micro_batch_tokens: tokens computed at once, replies included; a longer question stands alone.
        """
        rows = [Row(np.asarray(ids, np.int64), reply) for ids in sequences for reply in self._replies]
        device = next(self.parameters()).device
        result = []
        for some in cut(rows, [row.size for row in rows], micro_batch_tokens):
            logprobs, _ = self.policy(pack(some).to(device))
            result += [each.sum().item() for each in logprobs.double().cpu().split([row.learned for row in some])]
        logits = torch.tensor(result, dtype=torch.float64).view(len(sequences), len(self._replies))
        return (torch.softmax(logits, -1).numpy() @ self._values).tolist()  # type: ignore[no-any-return]


def load_choices(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    choices: Mapping[str, float],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Choices:
    """Load a saved causal language model, without gradients.

    Args:
        path: a Hugging Face directory (or hub name).
        tokenizer: its own.
        choices: the replies, and what each is worth.
        dtype: of weights and computation.
        device: where it is put.

    Raises:
        ValueError: the tokenizer has no token for a reply.
        OSError: there is no model.
    """
    replies = [tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in choices]
    for choice, ids in zip(choices, replies, strict=True):
        if not ids:
            raise ValueError(f"choices: {choice!r} has no token for this tokenizer")
    with ONE_AT_A_TIME:
        policy = PolicyModel(build_model(path, tokenizer, dtype=dtype))
        policy.computes_in = dtype
        policy.requires_grad_(False).to(device or "cpu")
        policy.settle()
    return Choices(policy, replies, list(choices.values()))


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
    config = pretrained(AutoConfig, settings.path)
    architectures, labels = config.architectures or [], config.num_labels or 1
    if architectures and not any(name.endswith("ForSequenceClassification") for name in architectures):
        yield (
            "path",
            f"this is a {architectures[0]}, no classification model; name one that was trained to score, or set "
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


def unreadable(path: str, reader: Callable[[str], Any]) -> Iterator[str]:
    """Why `read(path)` fails; nothing if it does not."""
    try:
        reader(path)
    except (OSError, ValueError) as error:
        yield f"transformers cannot load it: {str(error).strip().splitlines()[0]}"
