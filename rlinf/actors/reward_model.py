"""The reward model: scores answers on devices, with a classifier or a language model that is asked to judge.

Consumes groups, as a list or as a stream that its ranks share; produces the same groups with the score in their
rewards, beside the judge's or instead of it, computed as soon as they come; unblocked by the next group. Every rank has
the whole model. An answer that cannot be scored has no reward, and a remark that says why.

Questions to a reward model about answers, and the scores that follow from its replies.

In: samples, and for a generative judge the text of its reply. Out: token ids for the model; verdicts; samples with the
score in their reward. No model is run here.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlinf.actors.base import ModelActor, configured
from rlinf.actors.judge import FailureStreak
from rlinf.actors.reference import Arrivals
from rlinf.actors.rollout import Rollout
from rlinf.config.learning import RewardModelConfig
from rlinf.data.datasets.source import fill
from rlinf.data.face import face_of
from rlinf.data.sample import Group, Outcome, Prompt, Sample
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.fsdp import dtype_of
from rlinf.models.scoring import Choices, SequenceClassifier, load_choices, load_classifier, longest_question
from rlinf.rewards.base import Verdict
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.streams.stream import each
from rlinf.training.checkpoint import held

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
        ids_of_parts: list[list[int]] = []
        for text, chat in zip(texts, chats, strict=True):
            # chat templates write the special tokens out
            ids = list(self.tokenizer(text, add_special_tokens=not chat)["input_ids"])
            if self.replies and not chat and ids and ids[-1] == self.tokenizer.eos_token_id:
                ids = ids[:-1]  # some tokenizers end every text
            ids_of_parts.append(ids)
        return ids_of_parts

    def _text(self, sample: Sample) -> tuple[str, bool]:
        """The text that the model reads, and True if it went through the chat template."""
        prompt = sample.prompt
        messages = prompt.row.get("messages")
        if self.template is not None:
            columns = {**prompt.row, "prompt": prompt.text, "answer": prompt.answer, "response": sample.text}
            text = fill(self.template, columns, f"prompt {prompt.id}", NAME + ".template")
            if self.chat is not True and (self.chat is False or not self.replies or not self.tokenizer.chat_template):
                return text, False
            return self._chat([{"role": "user", "content": text}]), True
        if self.chat is True or (self.chat is None and messages is not None and self.tokenizer.chat_template):
            return self._chat(_answered(messages or [{"role": "user", "content": prompt.text}], sample.text)), True
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
            raise WrongSetting(f"{NAME}.chat: its tokenizer has no chat template; set chat: false")


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
    match = None
    for match in re.finditer(pattern, text):  # noqa: B007  # the last one
        pass
    if match is None:
        return Verdict("error", remark=f"{NAME}: no score in its reply {text[-200:]!r} (reward_model.pattern)")
    try:
        return scored(float(match[1]))
    except (TypeError, ValueError):
        return Verdict("error", remark=f"{NAME}: {match[1]!r} in its reply is no number (reward_model.pattern)")


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


class _Scoring:
    """The base of both kinds of reward model: questions before the model is run, rewards after."""

    def prepare(self, settings: RewardModelConfig, alone: bool) -> str:
        """Take the settings over; returns the model's path.

        Raises:
            ValueError: there is no path.
        """
        if settings.path is None:
            raise ValueError(f"{NAME}: path must name a saved model")
        self._settings, self._alone = settings, alone
        self._failures = FailureStreak(NAME)
        self._question = Question(
            load_tokenizer(settings.tokenizer or settings.path),
            settings.template,
            settings.chat,
            replies=settings.kind == "generative",
        )
        self._question.check()
        self._longest = longest_question(settings, self._question.tokenizer)
        return settings.path

    def questions(self, group: Group) -> tuple[dict[int, list[int]], dict[int, Verdict]]:
        """Token ids by index of the sample; and verdicts on those that the model cannot read."""
        samples, most = to_be_asked(group), self._longest
        answered, refused = {}, {}
        for sample, ids in zip(samples, self._question.ids(samples), strict=True):
            if most is not None and len(ids) > most:
                refused[sample.index] = too_long(len(ids), most)
            else:
                answered[sample.index] = ids
        return answered, refused

    def rewarded(self, group: Group, verdicts: Mapping[int, Verdict]) -> Group:
        """The group with its rewards.

        Raises:
            RewardError: not one of the last 64 samples could be scored.
        """
        for verdict in verdicts.values():
            self._failures.notice(verdict)
        settings = self._settings
        return rewarded(group, verdicts, weight=settings.weight, normalize=settings.normalize, alone=self._alone)


class RewardModel(_Scoring, ModelActor):
    """Scores by one forward pass: of a classifier, or of a language model that chooses between given replies."""

    @configured(RewardModelConfig)
    async def setup(
        self,
        *,
        settings: RewardModelConfig,
        alone: bool = False,
        order: Literal["prompt", "arrival", "free"] = "prompt",
    ) -> None:
        """Load the model.

        Args:
            settings: how answers are scored; or its keys, such as path="reward-model" and weight=0.5. A generative
                model that writes its reply is a `GenerativeJudge`.
            alone: its score is the whole reward; otherwise it is added to the judge's.
            order: with "prompt" each group is computed by itself, since the last bits of a score depend on what is
                computed beside it; "arrival" computes together whatever has come, which is faster for short answers.

        Raises:
            ValueError: a model or tokenizer that cannot be used, or a setting out of range.
        """
        path = await self.compute(self.prepare, settings, alone)
        if settings.kind == "generative" and not settings.choices:
            raise ValueError(f"{NAME}: a generative model without choices writes its reply: spawn a GenerativeJudge")
        self._together = order != "prompt"
        load: Any = {"dtype": dtype_of(settings.dtype), "device": self.device}
        tokenizer = self._question.tokenizer
        self._model: SequenceClassifier | Choices
        if settings.kind == "classifier":
            self._model = await self.compute(load_classifier, path, tokenizer, label=settings.label, **load)
        else:
            self._model = await self.compute(load_choices, path, tokenizer, settings.choices, **load)

    @endpoint(device=True, stays=face_of)
    async def score(self, groups: Iterable[Group] | AsyncIterable[Group]) -> AsyncIterator[Group]:
        """Score answers.

        Args:
            groups: a list or a stream of them, judged or not. Called on several ranks, they share a stream between
                them; a list is answered by each.

        Yields:
            Every group, with the model's score in its rewards and under `reward_model` in `scores`, in order of
            completion. Samples whose judging had failed stay as they are.

        Raises:
            DataError: the template names a column that is not there.
            RewardError: not one of the last 64 samples could be scored.
        """
        arrivals = Arrivals(groups, self._settings.micro_batch_tokens)
        try:
            while batch := await arrivals.take():
                verdicts = await self.on_model(self._verdicts, batch)
                for group, verdict in zip(batch, verdicts, strict=True):
                    yield self.rewarded(group, verdict)
        finally:
            await arrivals.close()

    def _verdicts(self, groups: Sequence[Group]) -> list[dict[int, Verdict]]:
        questions, verdicts = map(list, zip(*(self.questions(group) for group in groups), strict=True))
        for numbers in [range(len(groups))] if self._together else [[number] for number in range(len(groups))]:
            places = [(number, index) for number in numbers for index in questions[number]]
            sequences = [questions[number][index] for number, index in places]
            scores = self._model.scores(sequences, self._settings.micro_batch_tokens) if sequences else []
            for (number, index), score in zip(places, scores, strict=True):
                verdicts[number][index] = scored(score)
        return verdicts

    def _held(self) -> Iterator[Tensor]:
        yield from held(self._model)


class GenerativeJudge(_Scoring, Rollout):
    """Scores by what a language model writes when it is asked to judge an answer."""

    @configured(RewardModelConfig)
    async def setup(self, *, settings: RewardModelConfig, alone: bool = False, seed: int = 0) -> None:
        """Make the engine.

        Args:
            settings: how answers are scored; or its keys: `path` and `template` are needed.
            alone: its score is the whole reward; otherwise it is added to the judge's.
            seed: of the engine; replies are the likeliest, so it changes nothing.

        Raises:
            ValueError: a model or tokenizer that cannot be used, or a setting out of range.
        """
        settings = replace(settings, kind="generative")
        path = await self.compute(self.prepare, settings, alone)
        await super().setup(
            model=path,
            tokenizer=settings.tokenizer or path,
            seed=seed,
            temperature=0.0,
            max_new_tokens=settings.max_new_tokens,
            max_rows=settings.max_rows,
            dtype=settings.dtype,
        )

    @endpoint(device=True, stays=face_of)
    async def score(self, groups: Iterable[Group] | AsyncIterable[Group]) -> AsyncIterator[Group]:
        """Score answers; see `RewardModel.score`. Questions on further groups are asked while others are answered."""
        open_groups: dict[int, tuple[Group, dict[int, Verdict], int]] = {}
        of_question: dict[int, tuple[int, int]] = {}
        complete: list[Group] = []

        async def questions() -> AsyncIterator[Prompt]:
            number = asked_before = 0
            async for group in each(groups):
                answered, verdicts = await self.compute(self.questions, group)
                open_groups[number] = group, verdicts, len(answered) + len(verdicts)
                if not answered:
                    complete.append(self.rewarded(*open_groups.pop(number)[:2]))
                for index, ids in answered.items():
                    of_question[asked_before] = number, index
                    yield Prompt(asked_before, np.asarray(ids, np.int64))
                    asked_before += 1
                number += 1

        generated: Any = self.generate(questions())
        async with aclosing(generated) as replies:
            async for reply in replies:
                number, index = of_question.pop(reply.prompt.id)
                _, verdicts, count = open_groups[number]
                verdicts[index] = read_reply(reply.samples[0].text, self._settings.pattern)
                if len(verdicts) == count:
                    yield self.rewarded(*open_groups.pop(number)[:2])
                while complete:
                    yield complete.pop()
        while complete:
            yield complete.pop()


def reward_model_class(settings: RewardModelConfig) -> type[RewardModel] | type[GenerativeJudge]:
    """The actor that a configuration means."""
    return GenerativeJudge if settings.kind == "generative" and not settings.choices else RewardModel
