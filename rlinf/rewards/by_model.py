"""Questions to a reward model about answers, and the scores that follow from its replies.

In: samples, and for a generative judge the text of its reply. Out: token ids for the model; verdicts; samples with the
score in their reward. No model is run here.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlinf.data.datasets.source import fill
from rlinf.data.sample import Group, Outcome, Sample
from rlinf.rewards.base import Verdict

NAME = "reward_model"
"""Name of its score among the parts of a reward."""
Normalize = Literal["none", "sigmoid", "group"]
"""Treatment of a score before it is weighted: none, 1 / (1 + exp(-score)), or its distance from the mean of its group
in standard deviations."""


@dataclass(frozen=True, slots=True)
class Question:
    """Makes what a reward model reads of a prompt and an answer."""

    tokenizer: PreTrainedTokenizerBase
    """The reward model's own."""
    template: str | None = None
    """Text with `{prompt}`, `{response}`, `{answer}` and columns of the data set in braces. None: the conversation,
    where the prompt is one and the tokenizer has a chat template, else the prompt's text and the response behind it."""
    chat: bool | None = None
    """The text is put into the tokenizer's chat template. None: where it has one and either the model is to reply, or
    there is no `template` and the prompt is a chat."""
    replies: bool = False
    """The model is to reply: it reads an open end."""

    def ids(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Token ids for each sample.

        Raises:
            DataError: the template names a column that is not there.
        """
        texts, chats = zip(*(self._text(sample) for sample in samples), strict=True) if samples else ((), ())
        found: list[list[int]] = []
        for text, chat in zip(texts, chats, strict=True):
            # chat templates write the special tokens out
            ids = list(self.tokenizer(text, add_special_tokens=not chat)["input_ids"])
            if self.replies and not chat and ids and ids[-1] == self.tokenizer.eos_token_id:
                ids = ids[:-1]  # some tokenizers end every text
            found.append(ids)
        return found

    def _text(self, sample: Sample) -> tuple[str, bool]:
        """The text that the model reads, and True if it went through the chat template."""
        prompt = sample.prompt
        said = prompt.row.get("messages")
        if self.template is not None:
            known = {**prompt.row, "prompt": prompt.text, "answer": prompt.answer, "response": sample.text}
            text = fill(self.template, known, f"prompt {prompt.id}", NAME + ".template")
            if self.chat is not True and (self.chat is False or not self.replies or not self.tokenizer.chat_template):
                return text, False
            return self._chat([{"role": "user", "content": text}]), True
        if self.chat is True or (self.chat is None and said is not None and self.tokenizer.chat_template):
            return self._chat(_answered(said or [{"role": "user", "content": prompt.text}], sample.text)), True
        return prompt.text + sample.text, False

    def _chat(self, messages: list[Any]) -> str:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=self.replies)
        return str(text)

    def check(self) -> None:
        """See that the tokenizer can do it.

        Raises:
            ValueError: a chat is wanted, and there is no chat template.
        """
        if self.chat and not self.tokenizer.chat_template:
            raise ValueError(f"{NAME}.chat: its tokenizer has no chat template; set chat: false")


def _answered(messages: Sequence[Any], response: str) -> list[Any]:
    """The conversation with the answer at its end; a turn of the assistant that had begun is gone on with."""
    if messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": str(messages[-1]["content"]) + response}]
    return [*messages, {"role": "assistant", "content": response}]


def read_reply(text: str, pattern: str) -> Verdict:
    """The score that a judge wrote.

    Args:
        text: its reply.
        pattern: a regular expression whose first group is the number; the last match counts.
    """
    found = None
    for found in re.finditer(pattern, text):  # noqa: B007  # the last one
        pass
    if found is None:
        return Verdict("error", remark=f"{NAME}: no score in its reply {text[-200:]!r} (reward_model.pattern)")
    try:
        return scored(float(found[1]))
    except (TypeError, ValueError):
        return Verdict("error", remark=f"{NAME}: {found[1]!r} in its reply is no number (reward_model.pattern)")


def scored(value: float) -> Verdict:
    """The verdict of a number."""
    if not math.isfinite(value):
        return Verdict("error", remark=f"{NAME}: its score is {value}")
    return Verdict("ok", value)


def too_long(tokens: int, most: int) -> Verdict:
    """The verdict on an answer that the model cannot read."""
    why = "(reward_model.max_tokens, or what its context length leaves beside a reply)"
    return Verdict("error", remark=f"{NAME}: {tokens} tokens to read, and it reads {most} {why}")


def to_be_asked(group: Group) -> list[Sample]:
    """The samples of a group that are worth a question: all but those whose judging has failed already."""
    return [sample for sample in group.samples if sample.outcome not in ("timeout", "error")]


def rewarded(
    group: Group, verdicts: Mapping[int, Verdict], *, weight: float, normalize: Normalize, alone: bool
) -> Group:
    """The group with the model's scores in its rewards.

    Args:
        group: as the judge left it, or not judged yet.
        verdicts: by index of the sample; of those that were asked.
        weight: share of the score in the reward.
        normalize: see `Normalize`. Metrics have the score as it came.
        alone: the score is the whole reward; otherwise it is added to the judge's.
    """
    values = [verdict.value for verdict in verdicts.values() if verdict.value is not None]
    mean, spread = (statistics.fmean(values), statistics.pstdev(values)) if values else (0.0, 0.0)

    def share(value: float) -> float:
        if normalize == "sigmoid":
            return (1 + math.tanh(value / 2)) / 2  # 1 / (1 + exp(-value)), which overflows
        if normalize == "group":
            return (value - mean) / spread if spread > 0 else 0.0
        return value

    def told(sample: Sample, verdict: Verdict | None) -> Sample:
        if verdict is None:
            return sample
        if verdict.value is None:
            return sample.judged(None, verdict.outcome, scores={}, remark=verdict.remark)
        parts: dict[str, float] = {}
        if not alone and sample.reward is not None:
            parts = dict(sample.scores) or {"judge": sample.reward}
        before = 0.0 if alone else sample.reward or 0.0
        outcome: Outcome = "truncated" if sample.truncated else "ok"
        return sample.judged(
            before + weight * share(verdict.value),
            outcome,
            scores={**parts, NAME: verdict.value},
            extracted=sample.extracted,
        )

    return Group(group.prompt, tuple(told(sample, verdicts.get(sample.index)) for sample in group.samples))
