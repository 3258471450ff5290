"""The rollout role: samples answers to prompts.

Flows in: prompts, as a list or a stream, or one by one; partial groups of a checkpoint. Flows out: groups, each as soon
as its last sample is finished; answers to single prompts; partial groups for a checkpoint. Who wakes whom: every call
of `generate` has a task that uses the engine (`engines/base.py`) and passes finished groups, one batch at a time, to
whoever iterates the call; the engine wakes the caller of each `answer`. New weights arrive through `load`, also while
answers are being generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinf.actors.base import configured
from rlinf.config.text import RolloutSettings
from rlinf.data.differences import Differences
from rlinf.data.face import face_of
from rlinf.data.rng import mix
from rlinf.data.sample import Group, Prompt, Sample, read_only
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer, padding_ids
from rlinf.data.weights import Weights
from rlinf.engines.base import (
    Completion,
    Compute,
    Engine,
    EngineSetup,
    Hear,
    PartialAnswer,
    PartialGroup,
    Request,
    Sampling,
    TextScores,
    make,
)
from rlinf.engines.pool.absent import Absent
from rlinf.engines.pool.pool import Pool
from rlinf.engines.transformers.plain import outline
from rlinf.joining.listener import fewest, listen_beside, listens_at
from rlinf.metrics.limits import BYTES, DECODE, READ
from rlinf.models.language.build import ONE_AT_A_TIME, ModelSource, build_model, config_of, cost_of, pictures_of
from rlinf.models.language.cost import ModelCost
from rlinf.models.language.sources import Limits, limits
from rlinf.models.language.truth import Way
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.errors import UserError, WrongSetting
from rlinf.runtime.base.tasks import InThreads, cancel_all
from rlinf.runtime.base.tensors import own_device
from rlinf.runtime.observe.stalls import Outside
from rlinf.runtime.streams.stream import Consumer, Stream, each
from rlinf.training.weight_sync import Receiver

T = TypeVar("T")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rollout(Receiver):
    """Generates groups of samples with an engine."""

    _engine: Engine
    _pool: Pool | None

    @configured(RolloutSettings)
    async def setup(
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        settings: RolloutSettings,
        seed: int = 0,
        directory: str | None = None,
    ) -> None:
        """Make the engine.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; its end token ends an answer, as
                do those of the model's configuration and generation_config.json.
            settings: how answers are sampled; or any of its keys, such as temperature=0.7.
            seed: of a new model's weights and of the samples.
            directory: of the run, where the output of an inference server goes.

        Raises:
            ValueError: a model, tokenizer or engine that cannot be made, or a setting out of range.
        """
        self._seed, self._pool, self._sent = seed, None, Counter[str]()
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        self._sampling = await self.compute(sampling_of, settings, model, self._tokenizer)
        name = f"{self._cell.name}[{self.rank}]"
        made_of: dict[str, Any] = {"model": model, "settings": settings, "seed": seed}
        how: dict[str, Any] = {"directory": directory, "compute": self.compute, "on_device": self.working}
        if settings.own_engine:
            self._engine = await engine_for(name, self._tokenizer, **made_of, **how)
        else:
            self._engine = absent_for(await self.compute(limits, model), settings)
        if settings.routes is True and not self._engine.routes:
            await self._engine.close()
            raise WrongSetting(
                f"trainer.router_replay=true: {settings.engine} does not tell to which experts of this model tokens "
                "go: auto trains without it"
            )
        self._join = settings.join
        if settings.join is not None:
            outlined = await self.compute(outline_for, model, self._tokenizer, settings)
            await self._open_pool(settings, {"tokenizer": tokenizer, "outlined": outlined, **made_of}, directory)
        self.through_host = self._engine.through_host
        cost, dtype = await self.compute(cost_of, model, self._tokenizer), _DTYPES[settings.dtype]
        self._notes = None if cost is None else GenerationWork(self._engine, cost, dtype, self.note)
        self._ids = itertools.count()  # of requests and groups, unique among calls that overlap
        self._calls: list[GenerateCall] = []  # in progress
        self._answer_names: dict[int, str] = {}  # of calls of `answer` in progress, by the id of their request

    async def _open_pool(self, settings: RolloutSettings, made_of: Mapping[str, Any], directory: str | None) -> None:
        """Have other engines join the own one."""
        leads = self._fewest if self.rank == 0 and self.world_size > 1 else None
        name = self._cell.name
        self._pool = Pool(self._engine, self.compute, made_of, name, waiting=Outside, elsewhere=leads)
        if settings.delta != "off":
            self._pool.differences = Differences(f"{name}[{self.rank}]", self._joiners_were_sent)
        self._engine = self._pool
        try:
            if self.rank == 0:
                await self._pool.listen(listens_at(str(self._join)), directory)
        except UserError:
            await self._pool.close()
            raise

    def _joiners_were_sent(self, what: str, *, bytes: int) -> None:
        self._sent[what] += bytes  # told with the next weights: it happens after the step's end, beside the next

    @endpoint
    async def joinable(self, token: str, one_more: bool = False) -> tuple[int, str]:
        """How many engines have joined this rank or are about to, and where one more may: rank 0 sends those who come
        to whoever has fewest.

        Args:
            token: that one who joins must know.
            one_more: another one is sent here.

        Raises:
            UserError: it cannot listen.
        """
        assert self._pool is not None
        if self._pool.where is None:
            await listen_beside(self._pool.listen, str(self._join), token)
        return self._pool.coming(one_more=one_more), str(self._pool.where)

    async def _fewest(self, token: str, here: int) -> str | None:
        """Where the next engine is to join; None: at rank 0, which has so many."""
        return await fewest(lambda rank, sent: self.group[rank].joinable(token, sent), range(1, self.world_size), here)

    @endpoint
    async def computes(self) -> Way:
        """How the engine decodes, if it says it."""
        return self._engine.way

    async def close(self) -> None:
        """End what the engine started."""
        await self._engine.close()

    @endpoint(device=True, stays=face_of)
    async def generate(
        self,
        prompts: Iterable[Prompt | PartialGroup] | AsyncIterable[Prompt | PartialGroup],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        listed: bool = True,
        **sampling: Any,
    ) -> AsyncIterator[Group]:
        """Answer every prompt `n` times.

        A sample is a function of the weights and of (seed, prompt id, index): which rank makes it, and in which
        company, does not matter, up to rounding.

        Args:
            prompts: what to answer, a list or a stream. Called on several ranks, they share a stream between them; a
                list is answered by each. A partial group, as `in_flight` returns it, is continued; one of which all
                answers have ended comes out at once.
            n: samples per prompt.
            temperature: logits are divided by it; 0 takes the likeliest token. Default: the actor's own.
            max_new_tokens: default: the actor's own.
            listed: `in_flight`, `settled` and `drop` are about these prompts too. False for answers that no checkpoint
                keeps, such as those of an evaluation, whose prompts are numbered like others.
            sampling: any of top_p, top_k, min_p, min_new_tokens and stop; default: the actor's own.

        Yields:
            One group per prompt, in order of completion. After `abort`, groups have the samples that had begun, and
            prompts of which none had are not answered.

        Raises:
            ValueError: `n` below 1, an empty prompt, or a setting out of range.
            TypeError: a setting that there is not.
        """
        if n < 1:
            raise ValueError(f"generate: n={n} must be at least 1")
        rules = _overridden(
            "generate", self._sampling, temperature=temperature, max_new_tokens=max_new_tokens, **sampling
        )
        call = GenerateCall(self._engine, self._ids, listed=listed)

        async def requests() -> AsyncIterator[Request]:
            async for prompt in one_by_one(prompts):
                if isinstance(prompt, PartialGroup):
                    group = call.resumed_group(prompt)
                elif not isinstance(prompt, Prompt):
                    raise TypeError(
                        f"generate: a prompt is a {type(prompt).__name__}: pass rlinf.data.sample.Prompt objects, such "
                        "as Prompt(0, token_ids)"
                    )
                else:
                    group = call.new_group(prompt, (mix(self._seed, prompt.id, i) for i in range(n)), rules)
                for request in call.requests(group):
                    yield request

        self._calls.append(call)
        try:
            call.start(requests())
            async for complete in call.complete():
                if complete and self._notes is not None:
                    self._notes.note([(len(one.prompt.token_ids), one.done.values()) for one in complete])
                for partial, group in zip(complete, await self._groups(complete), strict=True):
                    if group.samples and call.puts_out(partial):
                        yield group
        finally:
            await call.close()
            self._calls.remove(call)

    @endpoint(device=True)
    async def answer(
        self,
        prompt: Prompt | Sequence[int] | np.ndarray,
        *,
        seed: int,
        conversation: int | None = None,
        name: str | None = None,
        begun: PartialAnswer | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """One answer to one prompt; any number of callers at once share the running batch.

        It is a function of the weights, the prompt and the seed, up to rounding: callers who want different answers
        give different seeds. A caller who is cancelled gives its row back. `abort` ends it where it stands, `pause`
        and a parked device make it wait; `answering` tells how far it is, `in_flight` does not list it.

        Args:
            prompt: a prompt, or its token ids, int64 [prompt].
            seed: of the random choices.
            conversation: names the conversation of which this is a turn, unique on this rank. If the next prompt of
                that name begins with this prompt and its answer, the engine may read only what follows them; call
                `forget` when there will be none. It changes no answer, up to rounding.
            name: of the call, unique: `answering` tells by it how far the answer is. None: it does not.
            begun: the beginning of the answer, as `answering` told it: it is read, not made again, where the engine can
                go on with it.
            adapter: name of the adapters that answer, which `load` brought; None: the model itself.
            sampling: any of temperature (0 takes the likeliest token), max_new_tokens, top_p, top_k, min_p,
                min_new_tokens, stop, stop_ids in place of the model's end tokens, and form, see `Sampling`; default:
                the actor's own.

        Raises:
            ValueError: an empty prompt, one that is too long, or a setting out of range.
            TypeError: a setting that there is not.
        """
        how: dict[str, Any] = {"conversation": conversation, "name": name, "partial": begun, "adapter": adapter}
        return await self._answer(prompt, None, seed=seed, **how, **sampling)

    @endpoint(device=True)
    async def stream(
        self, prompt: Prompt | Sequence[int] | np.ndarray, **how: Any
    ) -> AsyncIterator[list[int] | Completion]:
        """One answer to one prompt, told as it comes.

        Args:
            prompt, how: as of `answer`, and it is the same answer.

        Yields:
            New tokens, as many as have come since, those of `begun` first; then the answer. Tokens are told once the
            answer goes on behind them, so the last is not; an engine that does not tell them gives the answer alone.

        Raises:
            ValueError, TypeError: as `answer`.
        """
        news: asyncio.Queue[Sequence[int] | None] = asyncio.Queue()
        how["partial"] = how.pop("begun", None)
        answering = asyncio.create_task(self._answer(prompt, news.put_nowait, **how))
        answering.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (tokens := await news.get()) is not None:
                yield [*tokens]
            yield await answering
        finally:  # who stops listening wants no answer
            await cancel_all([answering])

    @endpoint(device=True)
    async def scores(self, texts: Sequence[np.ndarray], top: int = 0) -> list[TextScores]:
        """Score the tokens of texts; see `Engine.score`.

        Raises:
            UserError: the engine does not.
            ValueError: a text that is too long, or has ids that the model has not.
        """
        if not self._engine.scores:
            engine = type(self._engine).__name__
            raise UserError(f"{engine} tells no log-probs of tokens that it is given: take rollout.engine=transformers")
        return await self._engine.score(texts, top)

    async def _answer(
        self,
        prompt: Prompt | Sequence[int] | np.ndarray,
        hear: Hear | None,
        *,
        seed: int,
        conversation: int | None = None,
        name: str | None = None,
        partial: PartialAnswer | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        if isinstance(prompt, str):
            raise ValueError("answer: the prompt is a str: give its token ids, as the tokenizer encodes it")
        ids, images = (prompt.token_ids, prompt.images) if isinstance(prompt, Prompt) else (np.asarray(prompt), ())
        rules = _overridden("answer", self._sampling, **sampling)
        partial = partial if self._engine.hands_over else None
        request = Request(next(self._ids), ids, rules, seed, partial, images, conversation, adapter)
        if name is not None:
            self._answer_names[request.id] = name
        listening = () if hear is None or not self._engine.streams else (hear,)
        if listening and partial is not None:
            listening[0](partial.response_ids.tolist())
        try:
            completion = await self._engine.answer(request, *listening)
        finally:
            self._answer_names.pop(request.id, None)
        if self._notes is not None:
            self._notes.note([(len(ids), [completion])])
        return completion

    @endpoint
    async def answering(self) -> dict[str, PartialAnswer]:
        """How far the calls of `answer` are that have a name, by that name: their tokens so far. They go on here; those
        that have no token yet are left out."""
        answers: dict[str, PartialAnswer] = {}
        # One that ends while the engine is asked is not in what the engine says. Asking once more for those that were
        # not gives its completion the time to leave before this reply does.
        for _ in range(2):
            missing = {id: name for id, name in self._answer_names.items() if name not in answers}
            for request in await self._engine.partial(missing) if missing else ():
                if request.partial is not None:
                    answers[missing[request.id]] = request.partial
        return answers

    @endpoint
    async def forget(self, conversations: Sequence[int] | None = None) -> None:
        """Keep nothing more of these conversations, or of all: they are over."""
        await self._engine.forget(conversations)

    def _listed(self) -> list[GenerateCall]:
        return [call for call in self._calls if call.listed]

    async def _groups(self, answered: Sequence[PartialGroup]) -> list[Group]:
        return await self.compute(groups_of, answered, self._tokenizer) if answered else []

    @endpoint
    async def in_flight(self) -> list[PartialGroup]:
        """The groups of this rank that are being answered, with their answers so far: what a checkpoint keeps. After
        them those that have come out of a `generate` which goes on, until they are `settled`: with nothing left.

        They go on here; `generate` of a rollout with the same weights continues them to the same samples, up to
        rounding.
        """
        return [group for call in self._listed() for group in await call.partial()]

    @endpoint
    async def settled(self, answers: Iterable[int] | Mapping[int, Collection[int] | None]) -> None:
        """Keep these groups no more for `in_flight`: whoever got them looks after them now.

        Args:
            answers: ids of prompts; or by prompt the indices of those of its answers that arrived, None for all. Others
                than those of this rank are ignored.
        """
        for call in self._listed():
            call.settled(answers if isinstance(answers, Mapping) else dict.fromkeys(answers))

    @endpoint
    async def drop(self, prompts: Iterable[int]) -> dict[int, int]:
        """End the answers to prompts, given by their ids; `generate` yields nothing for them.

        Returns:
            Tokens that are thrown away, by prompt, for those that were in flight on this rank. Of any other it has
            nothing, or has put it out before.
        """
        wanted, tokens = set(prompts), Counter[int]()
        for call in self._listed():
            tokens.update(await call.drop(wanted))
        return dict(tokens)

    @endpoint
    async def split(self, least: int = 2) -> int:
        """Let the finished answers to a prompt come out of `generate` now, as a group of their own, and the others as
        another later: of each group with at least so many finished answers, and as many that are not.

        Indices stay those of the whole group, so that no sample is made twice. Returns how many groups were split.
        """
        if least < 2:
            raise ValueError(f"split: least={least} must be at least 2: rewards are compared within a group")
        return sum(call.split(least) for call in self._listed())

    @endpoint
    async def abort(self) -> None:
        """End all answers in flight where they stand, and read no more prompts: `generate` yields what there is."""
        await self._engine.abort()

    @endpoint
    async def takes_adapters(self, unembed: bool = False) -> bool:
        """`load` takes weights that are adapters, by which answers are then made beside those of the model.

        Args:
            unembed: of the output embedding, too.
        """
        return self._engine.adapters is not None and (self._engine.unembeds or not unembed)

    @endpoint
    async def unload(self, adapter: str) -> None:
        """Hold adapters no more that `load` brought and nobody is answered by.

        Raises:
            ValueError: somebody is, or there are none of that name.
        """
        await self._engine.unload(adapter)

    @endpoint
    async def pause(self) -> None:
        """Stop generating after the step in progress; returns when the device is idle."""
        await self._engine.pause()

    @endpoint
    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._engine.resume()

    @endpoint
    async def version(self) -> int:
        """Version of the weights in use."""
        return self._engine.version

    async def check_weights(self, weights: Weights) -> None:
        await self._engine.check(weights)

    async def switch_weights(self, weights: Weights) -> None:
        await self._engine.load(weights)
        self._tell_rounding()
        if self._pool is not None:
            self.note("rollout/joined_count", bytes=len(self._pool.members))
            for what, size in self._sent.items():
                self.note(what, bytes=size)
            self._sent.clear()

    def _tell_rounding(self) -> None:
        for name, error in self._engine.rounding.items():
            self.note(name, bytes=error)

    async def offload(self) -> None:
        """Give the device's memory back, if the engine can; answers in flight wait."""
        await (self._engine.sleep() if self._engine.sleeps else self._engine.pause())

    async def onload(self) -> None:
        """Come back to the device; with the weights that are coming, which an engine that sleeps takes as it wakes."""
        if self._engine.sleeps and (coming := self.coming) is not None:
            await self._engine.load(coming)
            self._tell_rounding()
            self.early = coming
        await (self._engine.wake() if self._engine.sleeps else self._engine.resume())


def sampling_of(settings: RolloutSettings, model: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How answers are sampled unless a call says otherwise. Blocking.

    Raises:
        ValueError: an answer would leave no room for its prompt.
    """
    limit = limits(model)
    if limit.length is not None and settings.max_new_tokens >= limit.length:
        raise WrongSetting(
            f"rollout.max_new_tokens={settings.max_new_tokens} leaves no room for a prompt: the model has "
            f"positions for {limit.length} tokens, prompt and answer together"
        )
    ends = {*limit.end_ids, *settings.stop_token_ids, tokenizer.eos_token_id} - {None}
    return Sampling(
        settings.max_new_tokens,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        stop_ids=tuple(sorted(ends)),
        stop_texts=tuple(settings.stop),
    )


async def engine_for(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: ModelSource,
    settings: RolloutSettings,
    seed: int,
    compute: Compute,
    **more: Any,
) -> Engine:
    """The engine that settings ask for.

    Args:
        name, more: see `EngineSetup`.
        model, tokenizer, settings, seed: see `Rollout.setup`.
        compute: runs blocking work.

    Raises:
        ValueError: it cannot be made.
    """
    limit = await compute(limits, model)
    dtype = _DTYPES[settings.dtype]
    setup = EngineSetup(
        name=name,
        model=model,
        build_model=lambda: _model(model, tokenizer, seed, dtype),
        tokenizer=tokenizer,
        pictures=await compute(pictures_of, model, tokenizer),
        seed=seed,
        dtype=dtype,
        weights=settings.weights,
        drafts=settings.drafts,
        max_rows=settings.max_rows,
        max_tokens=settings.max_tokens,
        max_length=limit.length,
        padding=await compute(_padding, model, tokenizer, settings),
        kv=settings.kv,
        routes=settings.routes is not False,
        compute=compute,
        **more,
    )
    return await make(settings.engine, setup, settings.engine_args)


def absent_for(limit: Limits, settings: RolloutSettings) -> Engine:
    """No engine, where all are to join; see `Absent`."""
    bounds = {"max_rows": settings.max_rows, "max_tokens": settings.max_tokens, "routes": settings.routes is True}
    texts = {"max_length": limit.length, "vocabulary": limit.vocabulary, "reads_text": True}
    return Absent(settings.engine, {**bounds, **texts})


def _padding(model: ModelSource, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings) -> tuple[int, ...]:
    """Ids of the model's head that no answer has."""
    ends = sampling_of(settings, model, tokenizer).stop_ids
    return tuple(id for id in padding_ids(tokenizer, limits(model).vocabulary) if id not in ends)


def outline_for(
    model: ModelSource, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings
) -> dict[str, Any] | None:
    """Arguments of `outlined_engine`, for one that joins without transformers; None: it needs that. Blocking."""
    if settings.engine != "transformers" or settings.weights != "full":
        return None
    about = outline(config_of(model, tokenizer))
    padding = _padding(model, tokenizer, settings)
    return None if about is None else {"outline": about, "max_length": limits(model).length, "padding": padding}


async def joining_engine(
    name: str, *, model: ModelSource, tokenizer: TokenizerSource, settings: RolloutSettings, seed: int
) -> Engine:
    """The engine of a process that joins a job, of what the job's rollout says that its own is made from."""
    compute = InThreads()
    return await engine_for(
        name, await compute(load_tokenizer, tokenizer), model=model, settings=settings, seed=seed, compute=compute
    )


class _Place(NamedTuple):
    """The answer that a request of the engine is for."""

    group: int
    """Number of its group in this call."""
    answer: int
    """Which of the group's answers."""


class GenerateCall:
    """One call of `generate`: the groups that it has in flight on this rank, and those that have come out of it and are
    not settled yet.

    Args:
        engine: answers.
        ids: names for requests and groups, unique among all calls.
        listed: the rollout's `in_flight`, `settled`, `split` and `drop` are about its groups.
    """

    def __init__(self, engine: Engine, ids: Iterator[int], *, listed: bool = True):
        self.listed = listed
        self._over = False
        self._engine, self._ids = engine, ids
        self._groups: dict[int, PartialGroup] = {}
        self._dropped: dict[int, PartialGroup] = {}  # by the same numbers, while their answers are being ended
        self._ready: dict[PartialGroup, None] = {}  # complete, and not put out yet
        self._out: dict[PartialGroup, None] = {}  # put out, and not settled yet
        self._places: dict[int, _Place] = {}  # of requests that the engine has, by id
        self._news: asyncio.Queue[list[PartialGroup] | PartialGroup | None] = asyncio.Queue()
        self._room = asyncio.Semaphore()  # the engine waits for our reader
        self._noted = asyncio.Event()

    def new_group(self, prompt: Prompt, seeds: Iterable[int], sampling: Sampling) -> PartialGroup:
        """A new group, one answer per seed."""
        ids, images = prompt.token_ids, prompt.images
        requests = (Request(next(self._ids), ids, sampling, seed, images=images) for seed in seeds)
        return PartialGroup(prompt, {}, dict(enumerate(requests)), sampling.temperature)

    def resumed_group(self, group: PartialGroup) -> PartialGroup:
        """A group of a checkpoint, its requests named anew; where the engine cannot go on, answers begin anew."""
        continues = self._engine.hands_over
        unfinished = {
            index: replace(request, id=next(self._ids), partial=request.partial if continues else None)
            for index, request in group.left.items()
        }
        return replace(group, done=dict(group.done), left=unfinished)

    def requests(self, group: PartialGroup) -> Iterator[Request]:
        """The unfinished answers of a group; each is in flight from when it is taken. Without any it is complete."""
        if not group.left:
            self._ready[group] = None
            self._news.put_nowait(group)
            return
        number = next(self._ids)
        self._groups[number] = group
        for index, request in list(group.left.items()):
            if number not in self._groups:  # dropped meanwhile
                return
            self._places[request.id] = _Place(number, index)
            yield request

    def start(self, requests: AsyncIterable[Request]) -> None:
        """Have the engine answer them."""
        self._task = asyncio.create_task(self._answer(requests))
        self._task.add_done_callback(lambda _: self._news.put_nowait(None))

    async def complete(self) -> AsyncIterator[list[PartialGroup]]:
        """Groups of which all answers have ended; once per batch of the engine's, so perhaps none. Last come those of
        which some have ended and others were never asked for, because of `abort`."""
        while (news := await self._news.get()) is not None:
            if isinstance(news, PartialGroup):
                yield [news]
            else:
                self._room.release()
                yield news
        await self._task  # which has ended: raises what went wrong
        self._over = True
        if rest := [replace(group, left={}) for group in self._groups.values() if group.done]:
            self._groups.clear()
            self._ready.update(dict.fromkeys(rest))
            yield rest

    def puts_out(self, group: PartialGroup) -> bool:
        """A complete group is put out now, and kept until it is settled; False: no, it was dropped."""
        if group not in self._ready:
            return False
        del self._ready[group]
        self._out[group] = None
        return True

    async def close(self) -> None:
        """End everything."""
        self._over = True
        self._tell_noted()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _answer(self, requests: AsyncIterable[Request]) -> None:
        async with contextlib.aclosing(self._engine.batches(requests)) as batches:
            async for completions in batches:
                complete = self._note(completions)
                await self._room.acquire()
                self._news.put_nowait(complete)

    def _note(self, completions: Sequence[Completion]) -> list[PartialGroup]:
        complete: list[PartialGroup] = []
        for completion in completions:
            place = self._places.pop(completion.id)
            group = self._groups.get(place.group) or self._dropped[place.group]
            group.done[place.answer] = completion
            del group.left[place.answer]
            if not group.left and place.group in self._groups:
                complete.append(self._groups.pop(place.group))
        self._ready.update(dict.fromkeys(complete))
        self._tell_noted()
        return complete

    def _tell_noted(self) -> None:
        self._noted.set()
        self._noted = asyncio.Event()

    async def partial(self) -> list[PartialGroup]:
        """All groups in flight with what there is of their answers, as a checkpoint keeps them, and then all that are
        complete and not settled, with nothing left; they go on here."""
        partials = {request.id: request for request in await self._engine.partial(list(self._places))}
        return [
            replace(
                group, done=dict(group.done), left={at: partials.get(one.id, one) for at, one in group.left.items()}
            )
            for group in (*self._groups.values(), *self._ready, *self._out)
        ]

    def settled(self, answers: Mapping[int, Collection[int] | None]) -> None:
        """Keep these no more, which were put out: by prompt the indices of answers, None for all of them."""
        for group in [group for group in self._out if group.prompt.id in answers]:
            some = answers[group.prompt.id]
            if some is None or group.done.keys() <= set(some):
                del self._out[group]

    def split(self, least: int) -> int:
        """Let the finished answers come as a group of their own where there are so many, and as many others go on."""
        parts = [one for one in self._groups.values() if min(len(one.done), len(one.left)) >= least]
        for group in parts:
            part = replace(group, left={})
            group.done = {}
            self._ready[part] = None
            self._news.put_nowait(part)
        return len(parts)

    async def drop(self, prompts: Collection[int]) -> dict[int, int]:
        """End the answers to these prompts, and put out nothing of them any more.

        Returns:
            How many tokens there were, by prompt, for those that this call has and has not put out.
        """
        dropped = {number: group for number, group in self._groups.items() if group.prompt.id in prompts}
        for number in dropped:
            self._dropped[number] = self._groups.pop(number)
        ready = [group for group in self._ready if group.prompt.id in prompts]
        for group in ready:
            del self._ready[group]
        tokens = Counter({group.prompt.id: 0 for group in (*dropped.values(), *ready)})
        wanted = {id: place for id, place in self._places.items() if place.group in dropped}
        if not self._engine.hands_over:
            await self._engine.abort(wanted)
        else:
            for request in await self._engine.take_out(wanted):
                tokens[dropped[self._places.pop(request.id).group].prompt.id] += request.answered
        while not (self._over or self._places.keys().isdisjoint(wanted)):  # ended, and on their way to `_note`
            await self._noted.wait()
        for group in (*dropped.values(), *ready):
            tokens[group.prompt.id] += sum(len(one.response_ids) for one in group.done.values())
        for number in dropped:
            del self._dropped[number]
        return dict(tokens)


class GenerationWork:
    """Notes what an engine computes and reads from its memory, as far as answers have ended.

    Args:
        engine: says how many steps it took.
        cost: of its model.
        dtype: that it computes in.
        note: takes the name of a part of the work, its seconds, and its products or bytes.
    """

    def __init__(
        self, engine: Engine, cost: ModelCost, dtype: torch.dtype, note: Callable[[str, float, int], object]
    ) -> None:
        self._engine, self._cost, self._dtype, self._note = engine, cost, dtype, note
        self._stats = engine.stats
        self._unread = 0.0  # tokens that were read of prompts whose answers have not ended

    def note(self, ended: Iterable[tuple[int, Iterable[Completion]]]) -> None:
        """Note the work since the last time.

        Args:
            ended: tokens of each prompt, and the answers to it.
        """
        cost, prompts, steps_of_rows, pairs = self._cost, list[int](), 0, 0
        for prompt, answers in ended:
            prompts.append(prompt)
            for length in (len(answer.response_ids) for answer in answers):
                steps_of_rows += max(
                    0, length - 1
                )  # the first is drawn when the prompt was read, the last is never read
                pairs += cost.pairs(prompt + max(0, length - 1), prompt)
        before, now = self._stats, self._engine.stats
        self._stats, dtype, size = now, str(self._dtype).removeprefix("torch."), self._dtype.itemsize
        if now.read_tokens:  # of kept conversations only what is new, of prompts that come again nothing
            self._unread += now.read_tokens - before.read_tokens
            tokens = min(self._unread, float(sum(prompts)))
            self._unread -= tokens
            flops = cost.forward_flops(prompts, len(prompts)) * tokens / max(1, sum(prompts))
            self._note(READ + dtype, now.read_seconds - before.read_seconds, int(flops))
        if (steps := now.steps - before.steps) > 0:
            flops = 2 * (cost.block_weights + cost.head_weights) * steps_of_rows + cost.pair * pairs
            moved = steps * cost.weight_bytes((now.rows - before.rows) / steps, size) + pairs * cost.cached * size
            self._note(DECODE + dtype, 0.0, int(flops))
            self._note(DECODE + BYTES, now.seconds - before.seconds, int(moved))
        if (read := now.draft_tokens - before.draft_tokens) > 0:
            self._note("drafts/read_tokens", 0.0, int(read))
            self._note("drafts/right_tokens", 0.0, int(now.right_tokens - before.right_tokens))
            self._note("drafts/step_tokens", 0.0, int(now.rows - before.rows))


def one_by_one(prompts: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Iterate prompts, taking nothing ahead from a stream: what one rank takes before it has rows for it, no other can
    begin with."""
    return Consumer(prompts, prefetch=False) if isinstance(prompts, Stream) else each(prompts)


def groups_of(answered: Sequence[PartialGroup], tokenizer: PreTrainedTokenizerBase) -> list[Group]:
    """The samples of each prompt, in order of their index; none where it was aborted before one began.

    Args:
        answered: all answers of each have ended.
        tokenizer: decodes them.
    """
    answers = [[each for each in sorted(group.done.items()) if len(each[1].response_ids)] for group in answered]
    visible = [one.response_ids.tolist()[: -1 if one.finish == "stop" else None] for some in answers for _, one in some]
    # Special tokens inside the answer stay visible: a reward must not take "12<pad>34" for "1234".
    texts = iter(tokenizer.batch_decode(visible, skip_special_tokens=False) if visible else ())
    return [
        Group(group.prompt, tuple(_sample(group, *each, next(texts)) for each in some))
        for group, some in zip(answered, answers, strict=True)
    ]


def _sample(group: PartialGroup, index: int, completion: Completion, text: str) -> Sample:
    return Sample(
        group.prompt,
        index,
        read_only(completion.response_ids),  # of whoever takes it: what is learned is what was sampled
        read_only(completion.logprobs),
        read_only(completion.versions),
        text,
        truncated=completion.finish in ("length", "abort"),
        temperature=group.temperature,
        routes=completion.routes,
        log_mass=completion.log_mass,
    )


def _overridden(call: str, own: Sampling, **changes: Any) -> Sampling:
    """The actor's settings with those of a call, as far as they are not None, in their place."""
    names = ("temperature", "max_new_tokens", "top_p", "top_k", "min_p", "min_new_tokens", "stop", "stop_ids", "form")
    if unknown := sorted(changes.keys() - set(names)):
        raise TypeError(f"{call}: there is no setting {', '.join(unknown)}; those of a call are {', '.join(names)}")
    settings = {name: value for name, value in changes.items() if value is not None}
    if "stop" in settings:
        settings["stop_texts"] = tuple(settings.pop("stop"))
    return replace(own, **settings)


@contextlib.contextmanager
def _model(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, seed: int, dtype: torch.dtype
) -> Iterator[PreTrainedModel]:
    """The model on this rank's device, and no other model made meanwhile."""
    with ONE_AT_A_TIME:
        built: Any = build_model(source, tokenizer, seed=seed, dtype=dtype)
        yield built.to(own_device())
