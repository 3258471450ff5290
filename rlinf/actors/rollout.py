"""The rollout: samples answers to prompts.

Consumes prompts, as a list or a stream; produces groups, each as soon as its last sample is finished; unblocked by the
engine. New weights arrive through `load`, also while answers are being generated.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable

from transformers import PreTrainedTokenizerBase

from rlinf.actors.modeling import ModelSource, build_model
from rlinf.data.iterate import each
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.seeds import mix
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Request, Sampling
from rlinf.engines.transformers import TransformersEngine
from rlinf.runtime.actor import Actor, endpoint


class Rollout(Actor):
    """Generates groups of samples with an engine in its own process."""

    async def setup(  # type: ignore[override]
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        seed: int = 0,
        temperature: float = 1.0,
        max_new_tokens: int = 16,
        max_rows: int = 128,
    ) -> None:
        """Make the model and the engine.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; its end token ends an answer.
            seed: of a new model's weights and of the samples.
            temperature: for `generate` when it is not given one.
            max_new_tokens: an answer without an end token is cut after this many tokens.
            max_rows: answers decoded together. More is faster to generate; fewer finish sooner, so that the roles after
                this one start sooner.

        Raises:
            ValueError: a model or tokenizer that cannot be made, or a setting out of range.
        """
        self._seed = seed
        self._tokenizer = await self.compute(load_tokenizer, tokenizer)
        stop_ids = () if self._tokenizer.eos_token_id is None else (int(self._tokenizer.eos_token_id),)
        self._sampling = Sampling(max_new_tokens, temperature, stop_ids=stop_ids)
        built = await self.compute(build_model, model, self._tokenizer, seed=seed)
        self._engine = TransformersEngine(built, compute=self.compute, max_rows=max_rows)

    @endpoint(device=True)
    async def generate(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
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

        Yields:
            One group per prompt, in order of completion.

        Raises:
            ValueError: `n` below 1, an empty prompt, or a setting out of range.
        """
        if n < 1:
            raise ValueError(f"generate: n={n} must be at least 1")
        sampling = Sampling(
            self._sampling.max_new_tokens if max_new_tokens is None else max_new_tokens,
            self._sampling.temperature if temperature is None else temperature,
            stop_ids=self._sampling.stop_ids,
        )
        waiting: dict[int, tuple[Prompt, list[Completion]]] = {}  # by order of arrival: prompt ids may repeat

        async def requests() -> AsyncIterator[Request]:
            arrived = 0
            async for prompt in each(prompts):
                waiting[arrived] = (prompt, [])
                for index in range(n):
                    seed = mix(self._seed, prompt.id, index)
                    yield Request(arrived * n + index, prompt.token_ids, sampling, seed)
                arrived += 1

        async with contextlib.aclosing(self._engine.generate(requests())) as completions:
            async for completion in completions:
                which = completion.id // n
                prompt, done = waiting[which]
                done.append(completion)
                if len(done) == n:
                    del waiting[which]
                    yield await self.compute(_group, prompt, done, n, sampling.temperature, self._tokenizer)

    @endpoint
    async def load(self, weights: Weights) -> int:
        """Switch to other weights: all of them or, with an error, none.

        Returns:
            The version now in use.

        Raises:
            ValueError: names or shapes differ from the model's.
        """
        await self._engine.load(weights)
        return self._engine.version

    @endpoint
    async def version(self) -> int:
        """Version of the weights in use."""
        return self._engine.version


def _group(
    prompt: Prompt, completions: list[Completion], n: int, temperature: float, tokenizer: PreTrainedTokenizerBase
) -> Group:
    """The finished samples of one prompt, in order of their index."""
    completions.sort(key=lambda completion: completion.id)
    samples = []
    for completion in completions:
        kept = completion.response_ids if completion.truncated else completion.response_ids[:-1]
        # Special tokens inside the answer stay visible: a reward must not take "12<pad>34" for "1234".
        text = str(tokenizer.decode(kept, skip_special_tokens=False))
        samples.append(
            Sample(
                prompt=prompt,
                index=completion.id % n,
                response_ids=completion.response_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                text=text,
                truncated=completion.truncated,
                temperature=temperature,
            )
        )
    return Group(prompt, tuple(samples))
