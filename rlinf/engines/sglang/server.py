"""An SGLang server as `served/engine.py` wants one: its command line, its HTTP interface, its weights.

In: what `served/server.py` says. Out: HTTP requests. Nobody waits here but for the server.

Its log-probs are log-softmax(logits / temperature) before top-k, top-p and min-p, which is what ours mean. Its random
numbers, with `--enable-deterministic-inference`, are a hash of seed and position, so an answer that is continued goes
on as it would have.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.pictures.images import content_of
from rlinf.data.routing.routes import compact_type
from rlinf.data.sample import ImageRef
from rlinf.data.weights import Weights
from rlinf.engines.served import far_side
from rlinf.engines.served.http import Http, Lost, Refused
from rlinf.engines.served.model_files import Experts
from rlinf.engines.served.server import Ask, Chunk
from rlinf.engines.sglang import stand_ins
from rlinf.engines.sglang.routes import Route, Target, route_for
from rlinf.engines.sglang.versions import Differences, differences
from rlinf.runtime.base.tasks import in_thread
from rlinf.runtime.gpu.own_device import own_device

_GREETING = 30.0
"""Seconds for one token of a server that has just said that it is up; the first forward may compile."""
_NEVER = -1e9
"""Added to the logits of tokens that are never drawn; JSON has no infinity."""
_IDLE = 1.0
"""Seconds for which the server itself waits until it is idle, before it says that it is not."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the server is run."""

    python: str
    """Interpreter of its environment."""
    device: str
    """"cuda" or "cpu"."""
    first_device: int = 0
    """Number of the first GPU that it takes."""
    dtype: str = "float32"
    """In which it computes."""
    tensor_parallel: int = 1
    """GPUs, or processes on a CPU, over which the model is split."""
    max_rows: int = 128
    """Answers decoded together."""
    max_tokens: int | None = None
    """Tokens of KV cache; None: on a CPU as many as `max_rows` answers may come to, on a GPU what fits."""
    max_length: int | None = None
    """Tokens, prompt and answer together; None: what the model's files say."""
    memory_share: float | None = None
    """Share of a GPU's memory for weights and KV cache; None: SGLang's own choice."""
    seeded: bool = True
    """Seeds count, at some cost in speed on GPUs."""
    stream_interval: int = 8
    """Tokens that come in one piece."""
    seed: int = 0
    """Of everything else that is random."""
    route: str | None = None
    """How weights get in; None: the fastest that works."""
    experts: Experts | None = None
    """Of the model, to have it told which ones tokens went to; None: it is not told."""
    args: tuple[str, ...] = ()
    """Further words of the command line."""


class SGLangServer:
    """One SGLang server; a `Server`."""

    kind = "SGLang"
    reads_images = True

    def __init__(self, options: Options) -> None:
        self.seeded, self.routes = options.seeded, options.experts is not None
        self.version = "?"
        """As the server tells it."""
        self._options = options
        self._differences: Differences | None = None
        self._model = Path()
        self._route: Route | None = None
        self._held: tuple[Any, ...] | None = None  # `Weights.key` of what it has; None: its model's own

    # The process -------------------------------------------------------------------------------------------------

    def command(self, model: Path, host: str, port: int) -> Sequence[str]:
        self._model, options = model, self._options
        words: list[Any] = [
            options.python, "-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", port,
            "--device", options.device, "--dtype", options.dtype, "--tp-size", options.tensor_parallel,
            "--max-running-requests", options.max_rows, "--stream-interval", options.stream_interval,
            "--random-seed", options.seed, "--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "warning",
            "--incremental-streaming-output", "--grammar-backend", "none",
            "--custom-weight-loader", "rlinf_weights.load",
        ]  # fmt: skip
        if options.max_length is not None:
            words += ["--context-length", options.max_length]
        if options.seeded:
            words += ["--enable-deterministic-inference"]
        if options.experts is not None:
            words += ["--enable-return-routed-experts"]
        if options.device == "cpu":
            words += [
                "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
                "--disable-overlap-schedule", "--mem-fraction-static", "0.1",
                "--max-total-tokens", options.max_tokens or options.max_rows * min(options.max_length or 2048, 4096),
            ]  # fmt: skip
        else:
            words += ["--base-gpu-id", options.first_device, "--enable-memory-saver"]
            if options.max_tokens is not None:
                words += ["--max-total-tokens", options.max_tokens]
            if options.memory_share is not None:
                words += ["--mem-fraction-static", options.memory_share]
        return [*map(str, words), *options.args]

    def environment(self) -> Mapping[str, str | None]:
        paths = [*far_side.__path__]
        variables: dict[str, str | None] = {"HF_HUB_OFFLINE": "1"}
        if self._options.device == "cpu":
            paths += stand_ins.__path__
            variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return {**variables, "PYTHONPATH": os.pathsep.join(paths)}

    async def greet(self, http: Http) -> None:
        said = await http.get("/server_info")
        self.version = str(said.get("version", "?"))
        self._differences = differences(self.version)
        self._held = None
        one = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        await http.post("/generate", one, seconds=_GREETING)

    async def healthy(self, http: Http) -> None:
        await http.get("/health_generate", seconds=60.0)

    # Answers -----------------------------------------------------------------------------------------------------

    async def generate(self, http: Http, ask: Ask) -> AsyncGenerator[Chunk, None]:
        sampling = ask.sampling
        rules: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": not sampling.stop_ids,  # an end token of the model's own then passes, too
        }
        if ask.banned:
            rules["logit_bias"] = {str(token): _NEVER for token in ask.banned}
        if self.seeded:
            rules["sampling_seed"] = ask.seed
        body = {
            "rid": ask.id, "input_ids": list(ask.ids), "sampling_params": rules, "return_logprob": True,
            "logprob_start_len": -1, "stream": True, "return_routed_experts": self.routes,
        }  # fmt: skip
        if ask.images:
            body["image_data"] = await in_thread(lambda: [_as_url(image) for image in ask.images])
        got = 0
        async for event in http.events("/generate", body):
            if (error := event.get("error")) is not None:
                text = f"SGLang /generate: {error.get('message', error)}"
                raise Refused(text) if int(error.get("code") or 500) < 500 else Lost(text)
            meta = event["meta_info"]
            # The newest entries are the news, whether the server repeats the others or not.
            news = int(meta["completion_tokens"]) - got
            told = meta.get("routed_experts")
            routes = None if told is None or self._options.experts is None else routes_told(told, self._options.experts)
            if news > 0 and (entries := (meta.get("output_token_logprobs") or ())[-news:]):
                got += len(entries)
                yield Chunk([entry[1] for entry in entries], [entry[0] for entry in entries], routes)
            elif routes is not None:
                yield Chunk((), (), routes)
            reason = meta.get("finish_reason") or {}
            if reason.get("type") == "abort" and reason.get("status_code"):
                raise Lost(f"SGLang /generate gave up: {reason.get('message')}")

    async def abort(self, http: Http, ids: Sequence[str] | None) -> None:
        if ids is None:
            await http.post("/abort_request", {"abort_all": True})
            return
        for id in ids:
            await http.post("/abort_request", {"rid": id})

    async def quiet(self, http: Http) -> None:
        pause = 0.01
        while True:
            await self.abort(http, None)
            try:
                await http.post(f"/flush_cache?timeout={_IDLE}")
                return
            except Refused:  # it is not idle yet
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)

    # Weights and memory ------------------------------------------------------------------------------------------

    async def update(self, http: Http, weights: Weights) -> None:
        assert self._differences is not None
        target = Target(http, self._options.tensor_parallel, self._options.device)
        if self._route is None:
            self._route = route_for(self._options.route, weights, self._options.device)
        self._held = ("mixed",)
        if self._differences.sessions and self._route.sessions:
            await http.post("/begin_weight_update", {})
            try:
                await self._route.send(target, weights)
            finally:
                await http.post("/end_weight_update", {})
        else:
            await self._route.send(target, weights)
        self._held = weights.key

    async def release(self, http: Http) -> None:
        await http.post("/release_memory_occupation", {})

    async def regain(self, http: Http, weights: Weights | None) -> None:
        await http.post("/resume_memory_occupation", {})
        lost = self._options.device != "cpu"  # the memory saver is for GPUs; on a CPU nothing was given back
        if weights is not None and (lost or self._held != weights.key):
            await self.update(http, weights)
        elif weights is None and lost:
            await http.post("/update_weights_from_disk", {"model_path": str(self._model)}, seconds=600.0)

    def close(self) -> None:
        if self._route is not None:
            self._route.close()


def _as_url(image: ImageRef) -> str:
    """A picture as text."""
    return f"data:;base64,{base64.b64encode(content_of(image)).decode()}"


def routes_told(told: str, experts: Experts) -> np.ndarray:
    """Routes as the server writes them: int32 [tokens read, layers of the model, experts per token], in base64.

    Raises:
        Refused: it has another model than we.
    """
    flat = np.frombuffer(base64.b64decode(told), np.int32)
    if len(flat) % (experts.layers * experts.top_k) or (flat >= experts.count).any():
        raise Refused(
            f"SGLang tells of {len(flat)} experts, which are not those of {experts.layers} layers with {experts.top_k} "
            f"of {experts.count} experts per token: set trainer.router_replay=false"
        )
    return flat.reshape(-1, experts.layers, experts.top_k).astype(compact_type(experts.count))


def device_here() -> tuple[str, int]:
    """Where a server of this process computes, and on which GPU first."""
    device = own_device()
    return device.type, device.index or 0
