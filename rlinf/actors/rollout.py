"""The rollout: samples answers to prompts.

Consumes prompts, as a list or a stream; produces groups, each as soon as its last sample is finished; unblocked by the
engine. New weights arrive through `load`, also while answers are being generated. Towards the end ranks may hand what
they have left over to each other (`tail_migration.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from rlinf.actors.base.in_flight import Answering, Asked
from rlinf.actors.base.tail_migration import Consolidating
from rlinf.data.rng import mix
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.models.language.load import ONE_AT_A_TIME, ModelSource, build_model
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.streams.stream import each
from rlinf.weights.receive import Receiver

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rollout(Receiver, Consolidating):
    """Generates groups of samples with an engine in its own process."""

    async def setup(  # type: ignore[override]
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        seed: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_new_tokens: int = 16,
        stop: Sequence[str] = (),
        max_rows: int = 128,
        max_tokens: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        rescale: bool = False,
    ) -> None:
        """Make the model and the engine.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; its end token ends an answer.
            seed: of a new model's weights and of the samples.
            temperature, top_p, top_k, min_p: for `generate` when it is not given them; see `Sampling`.
            max_new_tokens: an answer without an end token is cut after this many tokens.
            stop: texts that end an answer too; they stay in it.
            max_rows: answers decoded together. More is faster to generate; fewer finish sooner, so that the roles after
                this one start sooner.
            max_tokens: for which the key-value cache has room, prompts and possible answers together; None for as many
                as `max_rows` answers may have.
            dtype: in which answers are computed; weights of another are cast.
            rescale: when the last answers of a shared stream of prompts are few, gather them on fewer ranks, so that
                the devices of the others are free earlier. The samples stay the same, up to rounding.

        Raises:
            ValueError: a model or tokenizer that cannot be made, or a setting out of range.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"rollout: dtype={dtype!r} must be one of {', '.join(_DTYPES)}")
        self._seed = seed
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        stop_ids = () if self._tokenizer.eos_token_id is None else (int(self._tokenizer.eos_token_id),)
        self._sampling = Sampling(
            max_new_tokens, temperature, top_k, top_p, min_p, stop_ids=stop_ids, stop_texts=tuple(stop)
        )
        settings = {"compute": self.compute, "max_rows": max_rows, "max_tokens": max_tokens}
        self._engine = await self.compute(_engine, model, self._tokenizer, seed, _DTYPES[dtype], settings)
        self._ids = itertools.count()  # of requests and prompts, unique among calls that overlap
        self._rescale = rescale

    @endpoint(device=True)
    async def generate(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Group]:
        """Answer every prompt `n` times.

        A sample is a function of the weights and of (seed, prompt id, index): which rank makes it, and in which
        company, does not matter, up to rounding.

        Args:
            prompts: what to answer, a list or a stream. Called on several ranks, they share a stream between them; a
                list is answered by each.
            n: samples per prompt.
            temperature: logits are divided by it; 0 takes the likeliest token. Default: the actor's own.
            max_new_tokens: default: the actor's own.
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
        rules = _overridden(self._sampling, temperature, max_new_tokens, sampling)
        answering = Answering(self._engine, self._ids, n)
        key = self._key(prompts) if self._rescale else None

        async def requests() -> AsyncIterator[Request]:
            async for prompt in each(prompts):
                for request in answering.requests(prompt, (mix(self._seed, prompt.id, i) for i in range(n)), rules):
                    yield request
            answering.exhausted = True
            self._tell(key)

        self._answering[key or answering] = answering
        try:
            answering.start(requests())
            async for complete in answering.complete():
                self._tell(key)
                for group in await self._groups(complete, rules.temperature):
                    yield group
            for group in await self._groups(answering.rest, rules.temperature):
                yield group
        finally:
            await answering.close()
            self._tell(key)
            del self._answering[key or answering]

    async def _groups(self, answered: Sequence[Asked], temperature: float) -> list[Group]:
        return await self.compute(_groups, answered, temperature, self._tokenizer) if answered else []

    @endpoint
    async def abort(self) -> None:
        """End all answers under way where they stand, and read no more prompts: `generate` yields what there is."""
        for answering in self._answering.values():
            answering.aborted = True
        await self._engine.abort()

    @endpoint
    async def pause(self) -> None:
        """Stop generating after the step under way; returns when the device is idle."""
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
        """Give the device's memory back; answers under way wait."""
        await self._engine.sleep()

    async def onload(self) -> None:
        """Come back to the device."""
        await self._engine.wake()


def _overridden(
    own: Sampling, temperature: float | None, max_new_tokens: int | None, others: dict[str, Any]
) -> Sampling:
    """The actor's settings with those of a call in their place."""
    known = ("top_p", "top_k", "min_p", "min_new_tokens", "stop")
    if unknown := sorted(others.keys() - set(known)):
        raise TypeError(f"generate: there is no setting {', '.join(unknown)}; those of a call are {', '.join(known)}")
    settings = {name: value for name, value in others.items() if value is not None}
    if "stop" in settings:
        settings["stop_texts"] = tuple(settings.pop("stop"))
    if temperature is not None:
        settings["temperature"] = temperature
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    return replace(own, **settings)


def _groups(answered: Sequence[Asked], temperature: float, tokenizer: PreTrainedTokenizerBase) -> list[Group]:
    """The samples of each prompt, in order of their index."""
    groups = []
    for asked in answered:
        samples = tuple(
            _sample(asked.prompt, index, completion, temperature, tokenizer)
            for index, completion in sorted(asked.done, key=lambda item: item[0])
            if len(completion.response_ids)  # nothing, where it was aborted before it began
        )
        if samples:
            groups.append(Group(asked.prompt, samples))
    return groups


def _sample(
    prompt: Prompt, index: int, completion: Completion, temperature: float, tokenizer: PreTrainedTokenizerBase
) -> Sample:
    kept = completion.response_ids[:-1] if completion.finish == "stop" else completion.response_ids
    return Sample(
        prompt=prompt,
        index=index,
        response_ids=completion.response_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        # Special tokens inside the answer stay visible: a reward must not take "12<pad>34" for "1234".
        text=str(tokenizer.decode(kept, skip_special_tokens=False)),
        truncated=completion.finish in ("length", "abort"),
        temperature=temperature,
    )


def _engine(
    model: ModelSource, tokenizer: PreTrainedTokenizerBase, seed: int, dtype: torch.dtype, settings: dict[str, Any]
) -> TransformersEngine:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with ONE_AT_A_TIME:
        built: Any = build_model(model, tokenizer, seed=seed, dtype=dtype)
        return TransformersEngine(built.to(device), tokenizer=tokenizer, **settings)
