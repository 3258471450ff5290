"""A forward whose next token is a plain function of the whole text, read off the cache: what is wrong there shows."""

import asyncio
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers import engine as transformers
from rlinf.engines.transformers.cache import Layers
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.model import positions_of

VOCABULARY = 11


def following(text, version=0):
    """The token after a text."""
    return (sum((token + 1) * (place + 1) for place, token in enumerate(text)) * 7 + len(text) + version) % VOCABULARY


def answer(prompt, sampling, version=0):
    """What the scripted model answers, told without any cache."""
    text = list(prompt)
    for count in range(1, sampling.max_new_tokens + 1):
        text.append(following(text, version))
        if text[-1] in sampling.stop_ids and count >= sampling.min_new_tokens:
            break
    return text[len(prompt) :]


class Scripted:
    """Keys are tokens, values are positions, and the state is the sum of all tokens; `steps` has the tokens that each
    step read."""

    device, dtype, reads_images, pads, continues = torch.device("cpu"), torch.float32, False, True, True
    vocabulary, padding, slower, int8 = None, None, None, ()  # any token will do
    adapters = rounded = None

    def __init__(self):
        self.version = 0
        self.reads, self.steps, self.moves, self.widths, self.images = [], [], [], [], []
        self.failing = False

    def rows_by(self, names):
        assert not any(names)

    def versions_of(self, names):
        return self.version

    def allowed(self, logits):
        return logits

    def routes(self):
        return None

    def read(self, ids, real, images=(), past=None):
        self.reads.append(tuple(ids.shape))
        self.images.append(list(images))
        positions = positions_of(ids, real)
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        keys, values = ids[:, None, :, None].float(), positions[:, None, :, None].float()
        if past is not None:
            keys, values = (torch.cat(both, dim=2) for both in zip(past.pairs[0], (keys, values), strict=True))
        every, places = keys[:, 0, :, 0].long(), values[:, 0, :, 0].long()
        sums = (every * real).sum(1)
        logits = [self._logits(*row) for row in zip(every, places, real, sums, strict=True)]
        return torch.stack(logits), Layers([(keys, values)], [sums[:, None]], [(0, "recurrent_states", 0)])

    def step(self, ids, positions, bands):
        if self.failing:
            raise RuntimeError("the device is on fire")
        self.steps.append(ids.tolist())
        self.widths.append([band.width for band in bands])
        logits, start = [], 0
        for band in bands:
            rows = slice(start, start + len(band))
            start = rows.stop
            keys, values = band.write(0, ids[rows, None, None].float(), positions[rows, None, None].float())
            mask = band.mask()
            seen = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool) if mask is None else mask[:, 0, 0] == 0
            ((_, sums),) = band.states()
            sums += ids[rows, None]
            texts = zip(keys[:, 0, :, 0], values[:, 0, :, 0], seen.expand(len(keys), -1), sums[:, 0], strict=True)
            logits += [self._logits(*text) for text in texts]
        return torch.stack(logits)

    def _logits(self, tokens, positions, seen, total):
        text = tokens[seen].long().tolist()
        if positions[seen].long().tolist() != list(range(len(text))) or sum(text) != total:
            text = [0]  # not a text: only rows that have ended may look so
        return torch.nn.functional.one_hot(torch.tensor(following(text, self.version)), VOCABULARY).float() * 50

    def check(self, weights):
        pass

    def check_current(self):
        pass

    def load(self, weights):
        self.version = weights.version

    def park(self):
        self.moves.append("off")

    def unpark(self):
        self.moves.append("on")


class _NoModel(torch.nn.Module):
    pass


def scripted(**settings):
    """An engine around a scripted forward, and the forward."""
    forward = Scripted()
    with mock.patch.object(transformers, "fastest", return_value=forward):
        return TransformersEngine(_NoModel(), **settings), forward


def request(number, prompt, sampling, seed=0):
    return Request(number, np.array(prompt, dtype=np.int64), sampling, seed)


def ragged(count, seed=0, longest=12, room=12, **settings):
    """Requests with prompts and answers of uneven length."""
    rng = np.random.default_rng(seed)
    return [
        request(
            number,
            rng.integers(0, VOCABULARY, rng.integers(1, longest + 1)),
            Sampling(int(rng.integers(1, room + 1)), **settings),
        )
        for number in range(count)
    ]


async def answers(engine, requests):
    found = [completion async for completion in engine.generate(requests)]
    assert len({completion.id for completion in found}) == len(found)
    return {completion.id: completion for completion in found}


def right(requests, found, version=0):
    """Every request got the scripted model's answer."""
    assert sorted(found) == sorted(asked.id for asked in requests)
    for asked in requests:
        assert found[asked.id].response_ids.tolist() == answer(asked.prompt_ids.tolist(), asked.sampling, version)


class Weights(SimpleNamespace):
    """As much of real weights as the scripted forward looks at."""

    adapter = None


async def ticks(count):
    for _ in range(count):
        await asyncio.sleep(0)
