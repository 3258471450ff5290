"""A second engine, whose model lives in another process, as an inference server's does; for Qwen2 and plain sampling.

All state is on this side: the child only draws next tokens, so it may crash at any moment. It is slow, since it has no
KV cache, and short. Whoever waits for answers drives: it has the child draw one token for every row, and wakes others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rlinf.data.rng import uniforms
from rlinf.data.weights import misfits
from rlinf.engines.base import Completion, Engine, PartialAnswer, named
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.processes.supervisor import ChildDied, Worker
from rlinf.runtime.streams.stream import each


@dataclass(eq=False)
class Call:
    reader: asyncio.Task | None = None
    waiting: object = None  # the request that has been read and does not fit yet
    finished: list = field(default_factory=list)
    error: BaseException | None = None


@dataclass(eq=False)
class Row:
    request: object
    call: Call
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    versions: list = field(default_factory=list)

    def __post_init__(self):
        if (partial := self.request.partial) is not None:
            self.tokens, self.logprobs = partial.response_ids.tolist(), partial.logprobs.tolist()
            self.versions = partial.versions.tolist()

    @property
    def ids(self):
        return np.array([*self.request.prompt_ids, *self.tokens], dtype=np.int64)

    @property
    def arrays(self):
        return np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32), np.array(self.versions, np.int32)

    @property
    def partial(self):
        return replace(self.request, partial=PartialAnswer(*self.arrays) if self.tokens else None)

    def ended(self, finish):
        return Completion(self.request.id, *self.arrays, finish)


class ScriptedProcess(Engine):
    hands_over = sleeps = reads_images = True
    version = 0

    def __init__(self, setup, model, max_length):
        self.max_rows, self.max_tokens, self.max_length = setup.max_rows, setup.max_tokens, max_length
        self.reads_text = setup.tokenizer is not None
        self.passes = 0
        self._setup = setup
        self._arrays = {name: _array(tensor) for name, tensor in model.named_parameters()}
        config = model.config
        description = {
            "heads": config.num_attention_heads,
            "groups": config.num_key_value_heads,
            "epsilon": config.rms_norm_eps,
            "frequencies": model.model.rotary_emb.inv_freq.numpy(),
        }
        self.worker = Worker(
            "tests.engines.scripted_child:Model", description, name=setup.name, backoff=(0.0, 1.0, 0.0),
            env={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._rows = []
        self._turn = asyncio.Lock()  # the child is at work
        self._calls = []
        self._changed = asyncio.Event()
        self._paused = self._asleep = False

    async def batches(self, requests):
        call = Call()
        self._calls.append(call)
        call.reader = asyncio.create_task(self._read(call, requests))
        try:
            while True:
                changed = self._changed
                if call.finished:
                    finished, call.finished = call.finished, []
                    yield finished
                elif call.error is not None:
                    raise call.error
                elif call.reader.done() and all(row.call is not call for row in self._rows):
                    return
                elif not self._rows or not await self._step():
                    await changed.wait()
        finally:
            self._calls.remove(call)
            self._rows = [row for row in self._rows if row.call is not call]
            call.reader.cancel()
            await asyncio.gather(call.reader, return_exceptions=True)
            self._wake()

    async def abort(self, ids=None):
        for call, request in self._let_go(ids):
            call.finished.append(request.ended("abort"))
        if ids is None:
            for call in self._calls:
                call.reader.cancel()
        self._wake()

    async def partial(self, ids):
        wanted = set(ids)
        waiting = [call.waiting for call in self._calls if call.waiting is not None and call.waiting.id in wanted]
        return [*waiting, *(row.partial for row in self._rows if row.request.id in wanted)]

    async def take_out(self, ids):
        taken = [request for _, request in self._let_go(ids)]
        self._wake()
        return taken

    def _let_go(self, ids):
        """Requests that are no longer in flight here, with what there is of them, and whose they were."""
        wanted = None if ids is None else set(ids)
        gone = [(row.call, row.partial) for row in self._rows if wanted is None or row.request.id in wanted]
        self._rows = [row for row in self._rows if wanted is not None and row.request.id not in wanted]
        for call in self._calls:
            if call.waiting is not None and (wanted is None or call.waiting.id in wanted):
                gone.append((call, call.waiting))
                call.waiting = None
        return gone

    async def pause(self):
        self._paused = True
        async with self._turn:
            pass

    async def resume(self):
        self._paused = False
        self._wake()

    async def check(self, weights):
        own = {name: array.shape for name, array in self._arrays.items()}
        if problems := misfits(own, weights.shapes):
            raise ValueError(f"weights of version {weights.version} do not fit {self._setup.name}: {problems}")

    async def load(self, weights):
        await self.check(weights)
        arrays = {name: _array(tensor) for name, tensor in weights.named()}
        async with self._turn:
            self._arrays, self.version = arrays, weights.version

    async def sleep(self):
        async with self._turn:
            self._asleep = True
            await self.worker.call("load", None, {})

    async def wake(self):
        self._asleep = False
        self._wake()

    async def close(self):
        await self.worker.stop()

    async def _read(self, call, requests):
        try:
            async for request in each(requests):
                self.check_request(request)
                call.waiting = request
                while call.waiting is request and not self._fits(request):
                    await self._changed.wait()
                if call.waiting is request:
                    call.waiting = None
                    self._rows.append(Row(request, call))
                    self._wake()
        except Exception as error:
            call.error = error
        finally:
            asyncio.get_running_loop().call_soon(self._wake)  # when this task is done

    def _fits(self, request):
        taken = sum(row.request.cache_tokens for row in self._rows)
        room = self.max_tokens is None or taken + request.cache_tokens <= self.max_tokens
        return len(self._rows) < self.max_rows and (room or not self._rows)

    async def _step(self):
        """Draw a token for every row. False if there is nothing to do before something changes."""
        step = asyncio.ensure_future(self._drawn())
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await finish(step)  # cancelled, the child's call would cost it its process
            raise

    async def _drawn(self):
        async with self._setup.on_device(), self._turn:
            if self._paused or self._asleep:
                return False
            if rows := list(self._rows):
                try:
                    drawn = await self._ask(rows)
                except Exception as error:
                    error.add_note(f"the engine was answering {named(row.request for row in rows)}")
                    self._rows = []
                    for row in rows:
                        row.call.error = error
                else:
                    for row, (token, logprob) in zip(rows, drawn, strict=True):
                        if row in self._rows:  # nobody took it out, or left
                            self._extend(row, token, logprob)
        self._wake()
        return True

    async def _ask(self, rows):
        """The next token of each row and its log-prob; equal prefixes (tokens and images) are read once."""
        texts, draws = {}, []
        for row in rows:
            key = row.request.prefix_key(row.ids)
            texts.setdefault(key, (row.ids.tolist(), key[1]))
            seed, place = torch.tensor(row.request.seed), torch.tensor(len(row.tokens))
            draws.append((list(texts).index(key), float(uniforms(seed, place)), row.request.sampling.temperature))
        while True:
            try:
                drawn = await self.worker.call("next", self.version, list(texts.values()), draws)
                if drawn is not None:
                    self.passes += len(texts)
                    return drawn
                await self.worker.call("load", self.version, self._arrays)
            except ChildDied:
                await self.worker.ready()  # it is restarted, and asked again; or raises that it is not

    def _extend(self, row, token, logprob):
        sampling = row.request.sampling
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.versions.append(self.version)
        reason = None
        if len(row.tokens) >= sampling.min_new_tokens:
            if token in sampling.stop_ids:
                reason = "stop"
            elif sampling.stop_texts:
                text, before = map(self._setup.tokenizer.decode, (row.tokens, row.tokens[:-1]))
                if any(text.count(stop) > before.count(stop) for stop in sampling.stop_texts):
                    reason = "text"
        if reason is None and len(row.tokens) == sampling.max_new_tokens:
            reason = "length"
        if reason is not None:
            self._rows.remove(row)
            row.call.finished.append(row.ended(reason))

    def _wake(self):
        self._changed.set()
        self._changed = asyncio.Event()


def _array(tensor):
    return tensor.detach().float().cpu().numpy().copy()


async def build(setup, *, max_length=None):
    with setup.build_model() as model:
        engine = ScriptedProcess(setup, model, max_length)
    await engine.worker.start()
    return engine
