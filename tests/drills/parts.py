"""What drills run beside the reward in `rewards`: an engine with one, an engine that counts what it makes, and an
agent of several calls."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

from rlinf.engines.base import Completion, EngineSetup, Request
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.runtime.streams.stream import each
from tests.drills.rewards import reward

TOKENS = "RLINF_DRILL_TOKENS"
"""Environment variable: the file to which `counting` adds how many tokens it has made, a number per line."""


async def agent(task: Any, llm: Any) -> float:
    """Answers, and answers again with the first answer before its eyes."""
    first = await llm.generate(task.text, max_new_tokens=8)
    second = await llm.generate(f"{task.text}{first.text}>", max_new_tokens=8)
    return reward(second.text, task.answer)


class Counting(TransformersEngine):
    """Adds the tokens of each answer to a file when it is complete, less those that it was given; not those of
    evaluations, which are greedy."""

    async def batches(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[Any, None]:
        given: dict[int, int] = {}

        async def noted() -> AsyncGenerator[Request, None]:
            async for request in each(requests):
                if request.sampling.temperature:
                    given[request.id] = request.answered
                yield request

        async for found in super().batches(noted()):
            _add(sum(len(one.response_ids) - given.pop(one.id) for one in found if one.id in given))
            yield found

    async def answer(self, request: Request) -> Completion:
        found = await super().answer(request)
        if request.sampling.temperature:
            _add(len(found.response_ids) - request.answered)
        return found


def _add(made: int) -> None:
    if (path := os.environ.get(TOKENS)) and made:
        with open(path, "a") as file:
            file.write(f"{made}\n")


async def counting(setup: EngineSetup) -> Counting:
    """The engine in the process, counting."""

    def made() -> Counting:
        with setup.build_model() as model:
            return Counting(
                model,
                compute=setup.compute,
                max_rows=setup.max_rows,
                max_tokens=setup.max_tokens,
                max_length=setup.max_length,
                tokenizer=setup.tokenizer,
            )

    return await setup.compute(made)


async def imitation(setup: EngineSetup) -> Any:
    """The engine around an imitated SGLang server, whose child process may be killed."""
    from tests.engines.served import imitation as served

    def shapes() -> dict[str, tuple[int, ...]]:
        with setup.build_model() as model:
            served.VOCABULARY = model.config.vocab_size
            return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}

    return await served.imitated(setup, served.Imitation(), await setup.compute(shapes))
