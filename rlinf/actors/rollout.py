"""The rollout role: samples answers to prompts.

Flows in: prompts, as a list or a stream, or one by one. Flows out: groups, each as soon as its last sample is finished;
answers to single prompts. Who wakes whom: the engine (`engines/base.py`) wakes the running `generate` or `answer`. New
weights arrive through `load`, also while answers are being generated. Towards the end ranks may hand what they have
left over to each other (`tail_migration.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinf.actors.in_flight import Generation, PartialGroup, SingleAnswers, groups_of, one_by_one
from rlinf.actors.tail_migration import TailMigration
from rlinf.data.rng import mix
from rlinf.data.sample import Group, Prompt
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer, padding_ids
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Engine, EngineSetup, Kv, PartialAnswer, Request, Sampling, make
from rlinf.models.language.build import ONE_AT_A_TIME, ModelSource, build_model, limits, pictures_of
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.tensors import own_device
from rlinf.training.weight_sync import Receiver

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rollout(Receiver, TailMigration):
    """Generates groups of samples with an engine."""

    async def setup(  # type: ignore[override]
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        engine: str = "transformers",
        engine_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_new_tokens: int = 16,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        max_rows: int = 128,
        max_tokens: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        kv: Kv | None = None,
        rescale: bool = False,
        routes: Literal["auto", True, False] = False,
        directory: str | None = None,
    ) -> None:
        """Make the engine.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; its end token ends an answer, as
                do those of the model's configuration and generation_config.json.
            engine: what generates: `transformers`, `sglang`, `vllm`, or a dotted path; see `engines.make`.
            engine_args: further arguments of the engine.
            seed: of a new model's weights and of the samples.
            temperature, top_p, top_k, min_p: for `generate` when it is not given them; see `Sampling`.
            max_new_tokens: an answer without an end token is cut after this many tokens.
            stop: texts that end an answer too; they stay in it.
            stop_token_ids: tokens that end an answer too; such a token is its last, and not part of its text.
            max_rows: answers decoded together. More is faster to generate; fewer finish sooner, so that the roles after
                this one start sooner.
            max_tokens: for which the KV cache has room, prompts and possible answers together; None for as many as
                `max_rows` answers may have.
            dtype: in which answers are computed; weights of another are cast.
            kv: what becomes of keys and values when weights change in the middle of answers: `keep` those of the old
                weights, or `reread` all with the new. None: the engine's own choice.
            rescale: when the last answers of a shared stream of prompts are few, gather them on fewer ranks, so that
                the devices of the others are free earlier. The samples stay the same, up to rounding.
            routes: have samples tell to which experts of a mixture their tokens went, `Sample.routes`; auto: where the
                engine can and the model has experts.
            directory: of the run, where the output of an inference server goes.

        Raises:
            ValueError: a model, tokenizer or engine that cannot be made, or a setting out of range.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"rollout: dtype={dtype!r} must be one of {', '.join(_DTYPES)}")
        self._seed, self._rescale = seed, rescale
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        said = await self.compute(limits, model)
        if said.length is not None and max_new_tokens >= said.length:
            raise ValueError(
                f"rollout.max_new_tokens={max_new_tokens} leaves no room for a prompt: the model has positions for "
                f"{said.length} tokens, prompt and answer together"
            )
        ends = {*said.end_ids, *stop_token_ids, self._tokenizer.eos_token_id} - {None}
        self._sampling = Sampling(
            max_new_tokens, temperature, top_k, top_p, min_p, stop_ids=tuple(sorted(ends)), stop_texts=tuple(stop)
        )
        setup = EngineSetup(
            name=f"{self._cell.name}[{self.rank}]",
            model=model,
            build_model=lambda: _model(model, self._tokenizer, seed, _DTYPES[dtype]),
            tokenizer=self._tokenizer,
            pictures=await self.compute(pictures_of, model, self._tokenizer),
            seed=seed,
            dtype=_DTYPES[dtype],
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_length=said.length,
            padding=tuple(id for id in padding_ids(self._tokenizer, said.vocabulary) if id not in ends),
            kv=kv,
            routes=routes is not False,
            directory=directory,
            compute=self.compute,
            on_device=self.working,
        )
        self._engine = await make(engine, setup, engine_args)
        if (lacking := _lacking(self._engine, engine, rescale=rescale, routes=routes is True)) is not None:
            await self._engine.close()
            raise ValueError(lacking)
        self._single, self.through_host = SingleAnswers(self._engine), self._engine.through_host
        self._ids = itertools.count()  # of requests and groups, unique among calls that overlap

    async def close(self) -> None:
        """End what the engine started."""
        await self._engine.close()

    @endpoint(device=True)
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
        call = Generation(self._engine, self._ids, listed=listed)
        key = self._key(prompts) if self._rescale else None

        async def requests() -> AsyncIterator[Request]:
            async for prompt in one_by_one(prompts):
                if isinstance(prompt, PartialGroup):
                    group = call.continued(prompt)
                elif not isinstance(prompt, Prompt):
                    raise TypeError(
                        f"generate: a prompt is a {type(prompt).__name__}: pass rlinf.data.sample.Prompt objects, such "
                        "as Prompt(0, token_ids)"
                    )
                else:
                    group = call.asked(prompt, (mix(self._seed, prompt.id, i) for i in range(n)), rules)
                for request in call.requests(group):
                    yield request
            call.exhausted = True
            self._tell(key)

        calls = self._in_flight.calls
        calls[key or call] = call
        try:
            call.start(requests())
            async for complete in call.complete():
                self._tell(key)
                for partial, group in zip(complete, await self._groups(complete), strict=True):
                    if group.samples and call.puts_out(partial):
                        yield group
        finally:
            await call.close()
            self._tell(key)
            del calls[key or call]

    @endpoint(device=True)
    async def answer(
        self,
        prompt: Prompt | Sequence[int] | np.ndarray,
        *,
        seed: int,
        conversation: int | None = None,
        name: str | None = None,
        begun: PartialAnswer | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
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
            temperature: logits are divided by it; 0 takes the likeliest token. Default: the actor's own.
            max_new_tokens: default: the actor's own.
            sampling: any of top_p, top_k, min_p, min_new_tokens and stop; default: the actor's own.

        Raises:
            ValueError: an empty prompt, one that is too long, or a setting out of range.
            TypeError: a setting that there is not.
        """
        if isinstance(prompt, str):
            raise ValueError("answer: the prompt is a str: give its token ids, as the tokenizer encodes it")
        ids, images = (prompt.token_ids, prompt.images) if isinstance(prompt, Prompt) else (np.asarray(prompt), ())
        given = {"temperature": temperature, "max_new_tokens": max_new_tokens, **sampling}
        rules = _overridden("answer", self._sampling, **given)
        request = Request(next(self._ids), ids, rules, seed, begun, images, conversation)
        return await self._single.answer(request, name)

    @endpoint
    async def answering(self) -> dict[str, PartialAnswer]:
        """How far the calls of `answer` are that have a name, by that name: their tokens so far. They go on here; those
        that have no token yet are left out."""
        return await self._single.partial()

    @endpoint
    async def forget(self, conversations: Sequence[int] | None = None) -> None:
        """Keep nothing more of these conversations, or of all: they are over."""
        await self._engine.forget(conversations)

    async def _groups(self, answered: Sequence[PartialGroup]) -> list[Group]:
        return await self.compute(groups_of, answered, self._tokenizer) if answered else []

    @endpoint
    async def in_flight(self) -> list[PartialGroup]:
        """The groups of this rank that are being answered, with their answers so far: what a checkpoint keeps. After
        them those that have come out of a `generate` which goes on, until they are `settled`: with nothing left.

        They go on here; `generate` of a rollout with the same weights continues them to the same samples, up to
        rounding.
        """
        return await self._in_flight.partial()

    @endpoint
    async def settled(self, answers: Iterable[int] | Mapping[int, Collection[int] | None]) -> None:
        """Keep these groups no more for `in_flight`: whoever got them looks after them now.

        Args:
            answers: ids of prompts; or by prompt the indices of those of its answers that arrived, None for all. Others
                than those of this rank are ignored.
        """
        self._in_flight.settled(answers if isinstance(answers, Mapping) else dict.fromkeys(answers))

    @endpoint
    async def drop(self, prompts: Iterable[int]) -> dict[int, int]:
        """End the answers to prompts, given by their ids; `generate` yields nothing for them.

        Returns:
            Tokens that are thrown away, by prompt, for those that were in flight on this rank. Of any other it has
            nothing, or has put it out before.
        """
        return await self._in_flight.drop(set(prompts))

    @endpoint
    async def split(self, least: int = 2) -> int:
        """Let the finished answers to a prompt come out of `generate` now, as a group of their own, and the others as
        another later: of each group with at least so many finished answers, and as many that are not.

        Indices stay those of the whole group, so that no sample is made twice. Returns how many groups were split.
        """
        if least < 2:
            raise ValueError(f"split: least={least} must be at least 2: rewards are compared within a group")
        return self._in_flight.split(least)

    @endpoint
    async def abort(self) -> None:
        """End all answers in flight where they stand, and read no more prompts: `generate` yields what there is."""
        self._in_flight.abort()
        await self._engine.abort()

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

    async def offload(self) -> None:
        """Give the device's memory back, if the engine can; answers in flight wait."""
        await (self._engine.sleep() if self._engine.sleeps else self._engine.pause())

    async def onload(self) -> None:
        """Come back to the device; with the weights that are coming, which an engine that sleeps takes as it wakes."""
        if self._engine.sleeps and (coming := self.coming) is not None:
            await self._engine.load(coming)
            self.early = coming
        await (self._engine.wake() if self._engine.sleeps else self._engine.resume())


def _lacking(engine: Engine, name: str, *, rescale: bool, routes: bool) -> str | None:
    """What is asked of an engine that it cannot do, in words."""
    if rescale and not engine.hands_over:
        return f"rollout.rescale: {name} does not hand over partial answers; set rollout.rescale=false"
    if routes and not engine.routes:
        return (
            f"trainer.router_replay=true: {name} does not tell to which experts of this model tokens go: auto trains "
            "without it"
        )
    return None


def _overridden(call: str, own: Sampling, **changes: Any) -> Sampling:
    """The actor's settings with those of a call, as far as they are not None, in their place."""
    known = ("temperature", "max_new_tokens", "top_p", "top_k", "min_p", "min_new_tokens", "stop")
    if unknown := sorted(changes.keys() - set(known)):
        raise TypeError(f"{call}: there is no setting {', '.join(unknown)}; those of a call are {', '.join(known)}")
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
