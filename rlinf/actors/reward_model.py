"""The reward model: scores answers on devices, with a classifier or a language model that is asked to judge.

Consumes groups, as a list or as a stream that its ranks share; produces the same groups with the score in their
rewards, beside the judge's or instead of it, computed as soon as they come; unblocked by the next group. Every rank has
the whole model. An answer that cannot be scored has no reward, and a remark that says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from rlinf.actors.base import ModelActor, configured
from rlinf.actors.judge import FailureStreak
from rlinf.actors.reference import Arrivals
from rlinf.actors.rollout import Rollout
from rlinf.config.learning import RewardModelConfig
from rlinf.data.sample import Group, Prompt
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.fsdp import dtype_of
from rlinf.models.scoring import Choices, SequenceClassifier, load_choices, load_classifier, longest_question
from rlinf.rewards.base import Verdict
from rlinf.rewards.by_model import NAME, Question, read_reply, rewarded, scored, to_be_asked, too_long
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.streams.stream import each
from rlinf.training.checkpoint import held


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
        asked, refused = {}, {}
        for sample, ids in zip(samples, self._question.ids(samples), strict=True):
            if most is not None and len(ids) > most:
                refused[sample.index] = too_long(len(ids), most)
            else:
                asked[sample.index] = ids
        return asked, refused

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

    @endpoint(device=True)
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
            while taken := await arrivals.take():
                verdicts = await self.on_model(self._verdicts, taken)
                for group, found in zip(taken, verdicts, strict=True):
                    yield self.rewarded(group, found)
        finally:
            await arrivals.close()

    def _verdicts(self, groups: Sequence[Group]) -> list[dict[int, Verdict]]:
        asked, verdicts = map(list, zip(*(self.questions(group) for group in groups), strict=True))
        for numbers in [range(len(groups))] if self._together else [[number] for number in range(len(groups))]:
            places = [(number, index) for number in numbers for index in asked[number]]
            sequences = [asked[number][index] for number, index in places]
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

    @endpoint(device=True)
    async def score(self, groups: Iterable[Group] | AsyncIterable[Group]) -> AsyncIterator[Group]:
        """Score answers; see `RewardModel.score`. Questions on further groups are asked while others are answered."""
        open_groups: dict[int, tuple[Group, dict[int, Verdict], int]] = {}
        of_question: dict[int, tuple[int, int]] = {}
        complete: list[Group] = []

        async def questions() -> AsyncIterator[Prompt]:
            number = asked_before = 0
            async for group in each(groups):
                asked, verdicts = await self.compute(self.questions, group)
                open_groups[number] = group, verdicts, len(asked) + len(verdicts)
                if not asked:
                    complete.append(self.rewarded(*open_groups.pop(number)[:2]))
                for index, ids in asked.items():
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
