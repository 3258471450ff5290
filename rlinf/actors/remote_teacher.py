"""A teacher behind an address: log-probs of answers by a server of somebody else, as a role of the run.

A request has an answer's tokens behind those of its prompt, as the prompt of one completion, of which nothing is
wanted: what comes back are the log-probs that the server's model gives to tokens it reads. Three dialects tell them,
see `TeacherServerConfig.dialect`. It does for flows what `Reference` does, by the same columns.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import numpy as np

from rlinf.actors.base import configured
from rlinf.actors.reference import Blend
from rlinf.config.learning import ReferenceSettings, TeacherServerConfig
from rlinf.data.alignment import Translator, carried_over
from rlinf.data.sample import Group, Sample
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.engines.served.server import Http, Lost, Refused
from rlinf.models.distillation import TOP
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.streams.stream import each

_PAUSE = 0.5
"""Seconds before a second attempt; twice as long before each further one."""
_KEYS = {"vllm": "prompt_logprobs", "sglang": "meta_info.input_token_logprobs", "echo": "logprobs.token_logprobs"}
"""Where a reply has log-probs."""


class TokenScores(NamedTuple):
    """Log-probs of a text's tokens from some token on, in a server's words."""

    logprobs: Sequence[float]
    """Of each token."""
    likeliest: Sequence[Sequence[tuple[int, float]]] = ()
    """Of each token's place, the likeliest tokens and their log-probs, the likeliest first."""


class RemoteTeacher(Actor):
    """Log-probs by a model that somebody else serves."""

    @configured(ReferenceSettings)
    async def setup(
        self,
        *,
        server: TeacherServerConfig,
        settings: ReferenceSettings,
        tokenizer: TokenizerSource,
        blend: Blend | None = None,
    ) -> None:
        """Open connections; nothing is asked yet.

        Args:
            server: where it is.
            settings: the column that is filled, and what beside it; whose tokens the server's model reads.
            tokenizer: the policy's.
            blend: it is one of several teachers.

        Raises:
            ValueError: there is no address, or no key in the environment, or the dialect does not tell what is asked.
        """
        url = urlsplit(server.url or "")
        for name, advice in server.mistakes():
            raise WrongSetting(f"teacher.server.{name}={getattr(server, name)!r}: {advice}")
        if settings.distribution == "hidden" or (settings.distribution == "top" and server.dialect == "echo"):
            raise WrongSetting(_tells_less(server.dialect))
        key = None if server.key_env is None else os.environ.get(server.key_env)
        if server.key_env is not None and not key:
            raise WrongSetting(f"teacher.server.key_env: the environment has no {server.key_env}")
        self._server, self._settings, self._blend = server, settings, blend
        self._path = url.path.rstrip("/")
        self._translator: Translator | None = None
        if settings.tokenizer is not None:
            both = [await self.compute(load_tokenizer, source) for source in (tokenizer, settings.tokenizer)]
            self._translator = Translator(*both)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = Http(f"{url.scheme}://{url.netloc}", f"the teacher at {server.url}:", headers=headers)
        self._places = asyncio.Semaphore(server.at_once)

    async def close(self) -> None:
        """Close connections."""
        await self._http.close()

    @endpoint
    async def logprobs(self, groups: Iterable[Group] | AsyncIterable[Group]) -> AsyncIterator[Group]:
        """Say how likely every token of these answers is; see `Reference.logprobs`.

        Raises:
            ValueError: an answer was sampled at a temperature other than 1, at which servers tell none; or the server
                does not tell what it was asked.
            Lost: it cannot be reached, or fails, in all attempts.
        """
        running = set[asyncio.Task[Group]]()
        try:
            async for group in each(groups):
                running.add(asyncio.create_task(self._scored(group)))
                if len(running) < self._server.at_once:
                    continue
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield await task
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield await task
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _scored(self, group: Group) -> Group:
        if self._blend is not None and not self._blend.asks(group.prompt):
            return group
        tasks = [asyncio.create_task(self._columns(sample)) for sample in group.samples]
        try:
            columns = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # of answers beside one that failed
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for name in columns[0] if columns else ():
            group = group.with_column(name, [each[name] for each in columns])
        return group if self._blend is None else self._blend.added(group, self._settings.column)

    async def _columns(self, sample: Sample) -> dict[str, np.ndarray]:
        """Columns of one answer, [response] each."""
        if sample.temperature not in (0.0, 1.0):
            raise ValueError(
                f"{self._http.kind} servers tell log-probs at temperature 1, and prompt {sample.prompt.id} was "
                f"answered at {sample.temperature:g}: set rollout.temperature to 1"
            )
        column, translator = self._settings.column, self._translator
        if translator is not None:
            row, spans = await self.compute(translator.row, sample)
            scores = await self._asked(row.prompt_ids, row.response_ids)
            return {column: carried_over(sample, spans, np.asarray(scores.logprobs, np.float64))}
        scores = await self._asked(sample.prompt.token_ids, sample.response_ids)
        columns = {column: np.asarray(scores.logprobs, np.float32)}
        if self._settings.distribution == "top":
            columns[TOP] = np.array([[*zip(*place, strict=True)] for place in scores.likeliest], np.float32).reshape(
                len(scores.likeliest), 2, self._settings.top_k
            )
        return columns

    async def _asked(self, prompt: np.ndarray, response: np.ndarray) -> TokenScores:
        """Log-probs of a response, by the server."""
        if not len(response):
            return TokenScores([], [])
        ids, count = [*prompt.tolist(), *response.tolist()], len(response)
        top = self._settings.top_k if self._settings.distribution == "top" else 0
        path, body = _request(self._server, ids, top)
        reply = await self._reply(self._path + path, body)
        try:
            return _READ[self._server.dialect](reply, ids, count, top)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            self._refuse(path, error, reply)

    async def _reply(self, path: str, body: Mapping[str, Any]) -> Any:
        server = self._server
        async with self._places:
            for attempt in range(server.attempts):
                try:
                    return await self._http.post(path, body, seconds=server.timeout)
                except Refused as error:
                    raise ValueError(f"{error} (teacher.server.dialect={server.dialect})") from None
                except Lost:
                    if attempt + 1 == server.attempts:
                        raise
                    await asyncio.sleep(_PAUSE * 2**attempt)
        raise AssertionError("there is at least one attempt")

    def _refuse(self, path: str, error: Exception, reply: Any) -> NoReturn:
        key = _KEYS[self._server.dialect]
        raise ValueError(
            f"{self._http.kind} {path} does not tell {key} of the tokens it was given "
            f"({type(error).__name__}: {error}). Is it a server of teacher.server.dialect={self._server.dialect}? "
            f"It says {str(reply)[:300]}"
        ) from error


def _tells_less(dialect: str) -> str:
    return (
        f"teacher.server.dialect={dialect} tells no whole distributions: a divergence needs top_k, and a dialect that "
        "tells the likeliest tokens (vllm, sglang), or a teacher.model"
    )


def _request(server: TeacherServerConfig, ids: list[int], top: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request about tokens."""
    if server.dialect == "sglang":
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        about = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
        return "/generate", {"input_ids": ids, "sampling_params": sampling, **about}
    named = {} if server.model is None else {"model": server.model}
    body = {**named, "prompt": ids, "max_tokens": 1, "temperature": 1.0}
    if server.dialect == "vllm":
        return "/completions", {**body, "prompt_logprobs": top}
    return "/completions", {**body, "max_tokens": 0, "echo": True, "logprobs": 1}


def _read_vllm(reply: Any, ids: Sequence[int], count: int, top: int) -> TokenScores:
    """`choices[0].prompt_logprobs`: of each token's place, {id: {logprob, rank}} of the token and of the likeliest."""
    places = _of(reply["choices"][0]["prompt_logprobs"], len(ids))[-count:]
    scores = [{int(token): (one["rank"], float(one["logprob"])) for token, one in place.items()} for place in places]
    logprobs = [place[token][1] for place, token in zip(scores, ids[-count:], strict=True)]
    ranked = [sorted((rank, token, value) for token, (rank, value) in place.items())[:top] for place in scores]
    return TokenScores(logprobs, [_whole([(token, value) for _, token, value in place], top) for place in ranked])


def _read_sglang(reply: Any, ids: Sequence[int], count: int, top: int) -> TokenScores:
    """`meta_info.input_token_logprobs`: [log-prob, id, text] of each token; `input_top_logprobs`: such lists."""
    meta = reply["meta_info"]
    entries = _of(meta["input_token_logprobs"], len(ids))[-count:]
    if [int(token) for _, token, *_ in entries] != list(ids[-count:]):
        raise ValueError("they are of other tokens")
    likeliest = [
        _whole([(int(token), float(value)) for value, token, *_ in place[:top]], top)
        for place in (_of(meta["input_top_logprobs"], len(ids))[-count:] if top else ())
    ]
    return TokenScores([float(value) for value, *_ in entries], likeliest)


def _read_echo(reply: Any, ids: Sequence[int], count: int, top: int) -> TokenScores:
    """`choices[0].logprobs.token_logprobs`: of each token, those that were generated behind them too."""
    entries = reply["choices"][0]["logprobs"]["token_logprobs"]
    if len(entries) not in (len(ids), len(ids) + 1):  # some servers generate one token at least
        raise ValueError(f"there are {len(entries)} for {len(ids)} tokens")
    return TokenScores([float(value) for value in entries[len(ids) - count : len(ids)]])


def _of(scores: Sequence[Any], count: int) -> Sequence[Any]:
    """A list, if it has something of each token."""
    if len(scores) != count:
        raise ValueError(f"there are {len(scores)} for {count} tokens")
    return scores


def _whole(place: list[tuple[int, float]], top: int) -> list[tuple[int, float]]:
    if len(place) != top:
        raise ValueError(f"there are {len(place)} likeliest tokens and not top_k={top}: the server may allow fewer")
    return place


_READ = {"vllm": _read_vllm, "sglang": _read_sglang, "echo": _read_echo}
