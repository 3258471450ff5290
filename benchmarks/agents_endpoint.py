"""The endpoint's cost over the engine's own time: agents that call `llm.chat` beside agents that ask over HTTP.

64 agents at once, each of several turns; the client is another process with one connection per agent, kept alive. The
engine is modelled: it answers after so many milliseconds, however many ask; agents begin spread over that time, as
agents do whose answers differ in length. What a call takes longer over HTTP than directly, over the engine's time, is
the overhead; both take turns, and shown are medians over the rounds.

With 64 agents, answers of 50 ms are 1,280 calls a second, which saturate the one event loop that serves them: that row
measures throughput, and the others what an agent waits longer.

    python -m benchmarks.agents_endpoint            # rows of 50, 250 and 1,000 ms
    python -m benchmarks.agents_endpoint --streams  # the first words, and the throughput, of streamed answers

`--streams` asks a rollout of the quickstart's model instead, streamed and whole in turns: answers of 64 tokens, from
one client and from 16 at once.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlinf.agents.agent import AgentLLM, Attempt
from rlinf.agents.chat import ChatFormat
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.agents.llm import Setting
from rlinf.agents.tools.formats import call_format
from rlinf.engines.base import Completion
from tests.agents.speaking import STYLES, tokenizer_of

SESSIONS, TURNS, BAR = 64, 8, 0.05
TOKENS = 64
"""Tokens of each answer of `--streams`."""
_ASKED = (
    "how many letters a has the word banana, and how many has bandana? think of it step by step, then say one number"
)


@dataclass(frozen=True)
class Row:
    """One engine."""

    engine_ms: float
    """It answers after so long."""
    direct_ms: float
    """A call of `llm.chat`."""
    endpoint_ms: float
    """A call over HTTP, as its client sees it."""
    server_us: float
    """Computing of this process per HTTP call, the record's included."""
    direct_us: float
    """Computing of this process per direct call."""

    @property
    def overhead(self) -> float:
        """Overhead of the endpoint over the engine's time."""
        return (self.endpoint_ms - self.direct_ms) / self.engine_ms


class Modelled:
    """Answers after a time."""

    def __init__(self, said: np.ndarray, seconds: float) -> None:
        self.said, self.seconds = said, seconds

    async def answer(self, ids: np.ndarray, *, seed: int, conversation: int | None, **sampling: Any) -> Completion:
        await asyncio.sleep(self.seconds)
        count = len(self.said)
        return Completion(0, self.said, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")

    def ended(self, conversation: int) -> None:
        """It keeps nothing."""


def maker(seconds: float, endpoint: Endpoint | None) -> Any:
    """Maker of agents' models."""
    tokenizer = tokenizer_of(STYLES["chatml"])
    said = np.asarray([*tokenizer("the word has three of them")["input_ids"], tokenizer.eos_token_id], np.int64)
    numbers, chat, calls = itertools.count(), ChatFormat(tokenizer), call_format("hermes", tokenizer)
    setting = Setting(Modelled(said, seconds), 1.0, 64, None, len(tokenizer))

    def make() -> AgentLLM:
        opening = None if endpoint is None else endpoint.session
        return AgentLLM(Attempt(setting, calls, lambda: next(numbers), open=opening), chat, (1,))

    return make


async def _agent(chat: Any, start: float, turns: int) -> list[float]:
    """Seconds of each call."""
    await asyncio.sleep(start)
    messages: list[Any] = [{"role": "system", "content": "Be good."}]
    took = []
    for _ in range(turns):
        messages.append({"role": "user", "content": _ASKED})
        begun = time.perf_counter()
        messages.append(await chat(messages))
        took.append(time.perf_counter() - begun)
    return took


async def directly(seconds: float, turns: int) -> tuple[list[float], float]:
    make = maker(seconds, None)

    def asking(llm: AgentLLM) -> Any:
        async def chat(messages: Any) -> Any:
            return (await llm.chat(messages)).message

        return chat

    begun = time.process_time()
    starts = [seconds * n / SESSIONS for n in range(SESSIONS)]
    took = await asyncio.gather(*(_agent(asking(make()), start, turns) for start in starts))
    return [each for one in took for each in one], time.process_time() - begun


def _client(urls: list[str], seconds: float, turns: int) -> list[float]:
    """Agents of another process."""

    async def run() -> list[float]:
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            def asking(url: str) -> Any:
                async def chat(messages: Any) -> Any:
                    body = {"model": "policy", "messages": messages}
                    async with client.post(f"{url}/chat/completions", json=body) as got:
                        return (await got.json())["choices"][0]["message"]

                return chat

            starts = [seconds * n / SESSIONS for n in range(SESSIONS)]
            pairs = zip(urls, starts, strict=True)
            took = await asyncio.gather(*(_agent(asking(url), start, turns) for url, start in pairs))
            return [each for one in took for each in one]

    return asyncio.run(run())


async def over_http(seconds: float, turns: int, pool: Executor) -> tuple[list[float], float]:
    endpoint = Endpoint()
    make = maker(seconds, endpoint)
    agents = [make() for _ in range(SESSIONS)]
    urls = [llm.base_url for llm in agents]
    try:
        begun = time.process_time()
        took = await asyncio.get_running_loop().run_in_executor(pool, _client, urls, seconds, turns)
        return took, time.process_time() - begun
    finally:
        await endpoint.close()


def overhead(engine_ms: float = 50.0, turns: int = TURNS, rounds: int = 3) -> Row:
    """Measure one engine.

    Args:
        engine_ms: it answers after so long.
        turns: of each agent.
        rounds: of both contestants.
    """
    import uvloop

    seconds = engine_ms / 1000
    direct, http, costs = [], [], []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number in range(rounds + 1):
            ours, ours_cpu = uvloop.run(directly(seconds, turns))
            theirs, theirs_cpu = uvloop.run(over_http(seconds, turns, pool))
            if number:  # the first one imports and warms up
                direct.append(statistics.mean(ours))
                http.append(statistics.mean(theirs))
                costs.append((theirs_cpu / len(theirs), ours_cpu / len(ours)))
    server, own = (statistics.median(each) * 1e6 for each in zip(*costs, strict=True))
    return Row(engine_ms, statistics.median(direct) * 1000, statistics.median(http) * 1000, server, own)


@dataclass(frozen=True)
class StreamRow:
    """Answers of a rollout over HTTP, streamed and whole."""

    clients: int
    """That ask at once."""
    whole_ms: float
    """An answer that comes whole, as its client sees it."""
    streamed_ms: float
    """A streamed answer, to its end."""
    ends: list[float]
    """That over the whole one of the turn before: least, median and most of the rounds."""
    first_ms: float
    """A streamed answer, to its first words."""
    whole_cpu: float
    """Processor milliseconds of this process, model included, for an answer."""
    streamed_cpu: float
    """Processor milliseconds for a streamed answer."""


def _stream_client(url: str, clients: int, streamed: bool, answers: int) -> list[tuple[float, float]]:
    """Seconds to the first words and to the end, of each answer."""

    async def run() -> list[tuple[float, float]]:
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def ask(seed: int) -> tuple[float, float]:
                sampling = {"max_tokens": TOKENS, "min_tokens": TOKENS, "seed": seed}
                begun, first = time.perf_counter(), 0.0
                body = {"model": "policy", "prompt": [3, 4, 5, 6], "stream": streamed, **sampling}
                async with client.post(f"{url}/completions", json=body) as got:
                    async for line in got.content:
                        if line.startswith(b"data: {"):
                            first = first or time.perf_counter() - begun
                return first, time.perf_counter() - begun

            rounds = [await asyncio.gather(*map(ask, range(clients))) for _ in range(answers // clients)]
            return [each for one in rounds for each in one]

    return asyncio.run(run())


async def streams(clients: int, rounds: int = 9, answers: int = 16) -> StreamRow:
    """Measure streamed answers beside whole ones, in turns."""
    from rlinf import ActorSystem, load_config
    from rlinf.actors.rollout import Rollout
    from rlinf.agents.llm import RolloutModel
    from rlinf.data.tokenizer import load_tokenizer

    source = {"characters": "0123456789>"}
    tokenizer = load_tokenizer(source)
    model = dict(load_config("configs/quickstart.yaml").model.config or {})
    numbers, endpoint = itertools.count(), Endpoint()
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        async with ActorSystem.local() as system:
            rollout = await system.spawn(Rollout, name="rollout", model=model, tokenizer=source, max_new_tokens=TOKENS)
            setting = Setting(RolloutModel(lambda: rollout), 1.0, TOKENS, None, len(tokenizer))
            calls = call_format("hermes", tokenizer)
            for number in range(2 * rounds + 2):
                attempt = Attempt(setting, calls, lambda: next(numbers), open=endpoint.session)
                llm, streamed = AgentLLM(attempt, ChatFormat(tokenizer), (1,)), bool(number % 2)
                ask = functools.partial(_stream_client, llm.base_url, clients, streamed, answers)
                begun = time.process_time()
                took = await asyncio.get_running_loop().run_in_executor(pool, ask)
                cost = (time.process_time() - begun) / answers
                if number > 1:  # the first two import and warm up
                    firsts, ends = zip(*took, strict=True)
                    found[streamed].append((statistics.median(firsts), statistics.median(ends), cost))
                llm.end()
            await endpoint.close()
    whole, live = ([statistics.median(each) * 1000 for each in zip(*rows, strict=True)] for rows in found.values())
    ratios = sorted(ours[1] / its[1] for its, ours in zip(*found.values(), strict=True))
    ends = [ratios[0], statistics.median(ratios), ratios[-1]]
    return StreamRow(clients, whole[1], live[1], ends, live[0], whole[2], live[2])


def main() -> None:
    """Print the rows."""
    if "--streams" in sys.argv[1:]:
        for clients in (1, 16):
            print(json.dumps(asdict(asyncio.run(streams(clients)))), flush=True)
        return
    for engine_ms in (50.0, 250.0, 1000.0):
        row = overhead(engine_ms, turns=TURNS if engine_ms < 500 else 4)
        print(json.dumps({**asdict(row), "overhead": row.overhead, "met": row.overhead <= BAR}))


if __name__ == "__main__":
    main()
