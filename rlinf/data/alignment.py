"""Tokens of one tokenizer beside those of another: a teacher says of the same text what a student said of it.

Both texts are cut where tokens of both end: between two such places lies a *span*, of one or several tokens of each.
By the chain rule the probability of a span is the product of its tokens', under either model, so log-probs are added up
within spans and compared span by span, which is how GOLD (Hugging Face, 2025) carries universal logit distillation
(ULD, arXiv:2402.12030) to answers that are cut differently. Of GOLD only this is done: what lies beside the sampled
tokens, which it compares by sorted probabilities, is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers.decoders import DecodeStream

from rlinf.data.packing import Row
from rlinf.data.sample import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOWHERE = -1
"""End of a token within a character."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a text in tokens of both."""

    own: slice
    """Of the student's response."""
    other: slice
    """Of the teacher's."""


class Translator:
    """Puts a student's samples into a teacher's tokens, and what the teacher says of those back.

    Args:
        student, teacher: their tokenizers.

    Raises:
        ValueError: one of them does not tell where its tokens lie in a text.
    """

    def __init__(self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase):
        for role, tokenizer in (("policy", student), ("teacher", teacher)):
            if not tokenizer.is_fast:
                raise ValueError(
                    f"the {role}'s tokenizer, {type(tokenizer).__name__}, does not say where its tokens lie in texts: "
                    "answers cannot be aligned; take a model with a tokenizer.json"
                )
        self._student, self._teacher = student, teacher

    def prompt_ids(self, prompt: Prompt) -> np.ndarray:
        """A prompt in the teacher's tokens: its conversation in the teacher's own template, if both have one."""
        messages = prompt.row.get("messages")
        if messages is not None and self._teacher.chat_template is not None:
            text = self._teacher.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return self._encoded(str(text), special=False)[0]
        return self._encoded(prompt.text or str(self._student.decode(prompt.token_ids)), special=True)[0]

    def row(self, sample: Sample) -> tuple[Row, list[Span]]:
        """A sample as the teacher reads it, with all of its response learned; and how that lies beside the sample's own
        tokens."""
        ids, end = sample.response_ids.tolist(), self._student.eos_token_id
        stops = bool(ids) and ids[-1] == end
        text, own = self._ends(ids[:-1] if stops else ids)
        other_ids, other = self._encoded(text, special=False)
        spans = spans_of(own, other)
        closes = self._teacher.eos_token_id
        if stops and closes is not None:
            spans.append(Span(slice(len(own), len(own) + 1), slice(len(other), len(other) + 1)))
            other_ids = np.append(other_ids, closes)
        return Row(self.prompt_ids(sample.prompt), other_ids, temperature=sample.temperature or 1.0), spans

    def _ends(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of tokens, and where each ends in it; `_NOWHERE` within a character."""
        stream, text, ends = DecodeStream(skip_special_tokens=False), "", list[int]()
        for each in ids:
            piece = stream.step(self._student.backend_tokenizer, each)  # type: ignore[attr-defined]
            text += piece or ""
            ends.append(_NOWHERE if piece is None else len(text))
        return text, ends

    def _encoded(self, text: str, *, special: bool) -> tuple[np.ndarray, list[int]]:
        """The teacher's tokens of a text, and where each ends in it."""
        encoded = self._teacher(text, add_special_tokens=special, return_offsets_mapping=True)
        places = encoded["offset_mapping"]
        begins = [begin for begin, _ in places[1:]] + [len(text)]
        ends = [end if begin >= end else _NOWHERE for (_, end), begin in zip(places, begins, strict=False)]
        return np.asarray(encoded["input_ids"], np.int64), ends


def spans_of(own: Sequence[int], other: Sequence[int]) -> list[Span]:
    """The smallest spans of a text that tokens of both end with.

    Args:
        own, other: where each token ends, rising; `_NOWHERE` within a character.
    """
    last_of = {end: number for number, end in enumerate(other) if end > 0}
    spans, begin, begin_other = list[Span](), 0, 0
    for number, end in enumerate(own):
        if end in last_of and last_of[end] >= begin_other and own[number + 1 : number + 2] != [end]:
            spans.append(Span(slice(begin, number + 1), slice(begin_other, last_of[end] + 1)))
            begin, begin_other = number + 1, last_of[end] + 1
    return spans


def carried_over(sample: Sample, spans: Sequence[Span], logprobs: np.ndarray) -> np.ndarray:
    """Log-probs of a teacher for each token of a sample, float32 [response]: the own ones plus the difference of the
    span that it lies in.

    So a token's log-prob less the student's is what the whole span differs by, and where spans are single tokens
    it is the teacher's. Tokens of no span differ by nothing, as do those of spans with tokens
    that are not learned, or have no log-prob.

    Args:
        sample: of the student.
        spans: how the teacher's tokens lie beside its own.
        logprobs: of the teacher's tokens.
    """
    own, learned = sample.logprobs, sample.loss_mask
    carried = np.array(own, np.float32)
    for span in spans:
        if np.isfinite(own[span.own]).all() and (learned is None or learned[span.own].all()):
            carried[span.own] += np.float32(
                logprobs[span.other].sum(dtype=np.float64) - own[span.own].sum(dtype=np.float64)
            )
    return carried
