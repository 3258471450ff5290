"""Answers by saved checkpoints, on the roles of one `rlinf.Session`.

In: the path of a checkpoint, or the base model, and what is asked. Out: the result as clients read it. The rollout gets
a checkpoint's adapters when it is asked for answers by them; whole models in turn, and merged ones where the engine
takes no adapters; what is asked of the prompt, and which tokens were likeliest, the trainer computes with the same
weights.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlinf.agents.llm import RolloutModel
from rlinf.data.packing import Row
from rlinf.data.rng import mix
from rlinf.data.sample import Datum
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion
from rlinf.models.language.lora import POLICY, scaled_tensors
from rlinf.runs.library.session import Session
from rlinf.service.checkpoints import CheckpointPath, Store
from rlinf.service.promises import Residents, Switching
from rlinf.service.wire import Likeliest, Scores, Targets, sample_result

_OPEN = 4
"""Checkpoints whose adapters stay in the trainer, to be merged or asked for log-probs again."""
_OPEN_WHOLE = 1
"""Whole models likewise, each as large as the base."""
_HELD = 64
"""Checkpoints whose adapters stay in the engine when nobody is answered by them."""
BASE = ""
"""In place of a checkpoint: the base model."""
MOST_LIKELIEST = 128
"""Likeliest tokens at a place that can be asked for."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Answers that were asked for."""

    prompt: np.ndarray
    count: int
    seed: int
    sampling: Mapping[str, Any]
    """For the rollout's `answer`."""
    prompt_logprobs: bool = False
    last: int | None = None
    """So many of the prompt's last tokens get log-probs; None: all but the first."""
    targets: Targets | None = None
    """Tokens whose log-probs are asked for within the prompt."""
    likeliest_of_prompt: int = 0
    """So many of the likeliest tokens in place of each of the prompt's are asked for."""
    likeliest_of_answers: int = 0
    """And of each answer's."""


class Samplers:
    """Answers by any number of checkpoints.

    Args:
        session: open.
        store: has the checkpoints.
    """

    def __init__(self, session: Session, store: Store) -> None:
        self._session, self._store = session, store
        self._names, self._published = itertools.count(1), itertools.count(session.step + 1)
        self._opened = Residents(self._open, lambda name: session.trainer.close_model(name), _OPEN)
        """Adapters in the trainer, by the keys of checkpoints."""
        self._opened_whole = Residents(self._open, lambda name: session.trainer.close_model(name), _OPEN_WHOLE)
        """Whole models there."""
        self._held = Residents(self._hold, lambda pair: session.rollout.unload(pair[0]), _HELD)
        """Adapters in the engine and their versions, by the keys of checkpoints."""
        self._takes_adapters: bool | None = None
        self._version = 0
        self._rollout = RolloutModel(lambda: session.rollout)
        self._weights = Switching(self._publish)

    async def close(self) -> None:
        """Give up what is under way."""
        await self._weights.close()
        await self._held.close()
        await self._opened.close()
        await self._opened_whole.close()

    async def answer(self, path: str, request: SampleRequest) -> tuple[bytes, int]:
        """Answer; the result as clients read it, and how many tokens were sampled.

        Args:
            path: of a checkpoint, or `BASE`.
            request: what is asked.

        Raises:
            Refused: there is no such checkpoint any more.
        """
        weights = self._key(path)
        async with self._answering(weights) as (adapter, version):
            how = {**request.sampling, **({} if adapter is None else {"adapter": adapter})}
            answers: list[Completion] = await asyncio.gather(
                *(
                    self._rollout.answer(request.prompt, seed=mix(request.seed, index), **how)
                    for index in range(request.count)
                )
            )
            scores = await self._scored(weights, request, answers)
        if any((each.versions != version).any() for each in answers):
            raise RuntimeError(f"answers by {path or 'the base model'} are not all by version {version} of the weights")
        ended = {"stop": "stop", "text": "stop"}
        parts = ((ended.get(each.finish, "length"), each.response_ids, each.logprobs) for each in answers)
        return sample_result(parts, scores), sum(len(each.response_ids) for each in answers)

    @asynccontextmanager
    async def _answering(self, weights: str) -> AsyncIterator[tuple[str | None, int]]:
        """The weights of a key answer: by which adapters in the engine, None for the model itself, and which version
        they are. The engine has one set of whole or merged weights at a time; adapters answer beside the base's."""
        rollout = self._session.rollout
        if self._takes_adapters is None:
            takes, version = all(await rollout.takes_adapters()), (await rollout.version())[0]
            if self._takes_adapters is None:  # nobody else has asked meanwhile
                self._takes_adapters = takes
                if takes:  # it began with the base
                    self._weights.state, self._version = BASE, version
        state = BASE if self._takes_adapters and not self._whole(weights) else weights
        async with self._weights.at(state):
            if state == weights:
                yield None, self._version
                return
            async with self._held.at(weights) as pair:
                yield pair

    def _whole(self, weights: str) -> bool:
        """These are a whole model's, and no adapters."""
        return weights != BASE and not self._store.about(CheckpointPath.of(weights.rpartition("@")[0]))["rank"]

    def _in_trainer(self, weights: str) -> AbstractAsyncContextManager[str]:
        """The model of a key is in the trainer, by the name that it is given."""
        return (self._opened_whole if self._whole(weights) else self._opened).at(weights)

    async def _hold(self, weights: str) -> tuple[str, int]:
        """Have the engine hold the adapters of a key; their name there, and their version."""
        directory = self._store.directory(CheckpointPath.of(weights.rpartition("@")[0]))
        name, version = f"s{next(self._names)}", next(self._published)
        packed = await asyncio.to_thread(lambda: Weights.pack(scaled_tensors(directory), version))
        await self._session.rollout.load(replace(packed, adapter=name))
        return name, version

    async def _scored(self, weights: str, request: SampleRequest, answers: Sequence[Completion]) -> Scores:
        """Log-probs that are asked for of the prompt, and in place of the answers' tokens, by the weights of a key."""
        wishes = (request.likeliest_of_prompt, request.likeliest_of_answers, request.prompt_logprobs)
        if not any(wishes) and request.targets is None:
            return Scores()
        if weights == BASE:  # which the session's own adapters are, that nobody trains
            return await self._scored_by(POLICY, request, answers)
        async with self._in_trainer(weights) as name:
            return await self._scored_by(name, request, answers)

    async def _scored_by(self, name: str, request: SampleRequest, answers: Sequence[Completion]) -> Scores:
        ids, targets = request.prompt, request.targets
        others = [] if targets is None else [np.where(each < 0, ids[1:], each) for each in targets.tokens.T]
        data = [Datum(ids[:-1], each) for each in (*([ids[1:]] if request.prompt_logprobs else []), *others)]
        scores: list[np.ndarray] = []
        if data and len(ids) > 1:
            scores = await self._session.trainer.forward(data, name)
        of_targets = None if targets is None else (targets, np.stack(scores[len(data) - len(others) :], axis=1))
        unscored = 1 if request.last is None else max(1, len(ids) - request.last)
        logprobs = np.full(len(ids), np.nan, np.float32) if request.prompt_logprobs else None
        if logprobs is not None and scores:
            logprobs[unscored:] = scores[0][unscored - 1 :]
        rows = [Row(ids[:unscored], ids[unscored:])] if unscored < len(ids) else []
        of_prompt = await self._likeliest(name, rows, request.likeliest_of_prompt)
        # as their log-probs are meant: of greedy ones at temperature 1
        temperature = request.sampling["temperature"] or 1.0
        rows = [Row(ids, each.response_ids, temperature=temperature) for each in answers]
        of_answers = await self._likeliest(name, rows, request.likeliest_of_answers)
        return Scores(logprobs, of_targets, of_prompt[0].behind(unscored) if of_prompt else None, of_answers)

    async def _likeliest(self, name: str, rows: Sequence[Row], count: int) -> list[Likeliest]:
        """So many likeliest tokens in place of each learned one, by adapters of a name; none if 0 are asked for."""
        if not rows or not count:
            return []
        return [Likeliest(*each) for each in await self._session.trainer.likeliest(rows, count, name)]

    def _key(self, weights: str) -> str:
        """Name these weights, with when they were saved: another checkpoint may have taken the path since.

        Raises:
            Refused: there is none of that path any more.
        """
        return BASE if weights == BASE else f"{weights}@{self._store.about(CheckpointPath.of(weights))['time']}"

    async def _publish(self, weights: str) -> None:
        """Have the rollout answer by the weights of a key, whole or merged."""
        trainer, self._version = self._session.trainer, next(self._published)
        if weights == BASE:
            await self._session.rollout.load(trainer.model_weights(None, self._version))
        else:
            async with self._in_trainer(weights) as name:
                await self._session.rollout.load(trainer.model_weights(name, self._version))

    async def _open(self, weights: str) -> str:
        """Have the trainer open the model of a key; its name there."""
        trainer, name = self._session.trainer, f"s{next(self._names)}"
        directory = str(self._store.directory(CheckpointPath.of(weights.rpartition("@")[0])))
        if not self._whole(weights):
            await trainer.open_model(name, {"path": directory}, 0)
            return name
        await trainer.open_model(name, None)
        try:
            await trainer.load_model(name, directory, False)
        except BaseException:  # whatever came, cancelled too: its memory is wanted by others
            await trainer.close_model(name)
            raise
        return name
