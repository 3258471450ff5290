"""The SGLang engine, `rollout.engine: sglang`: how its server is started and spoken to, and gets its weights.

Flows in: asks, and the buckets of `Weights`. Flows out: chunks of tokens. Nobody waits here but for the server's start
and its replies; `served/engine.py` awaits all of it. Weights go in by one of several routes, bucket by bucket, under
the names of the checkpoint: the server fuses and shards for itself.

Its log-probs are log-softmax(logits / temperature) before top-k, top-p and min-p, which is what ours mean. Its random
numbers, with `--enable-deterministic-inference`, are a hash of seed and position, so an answer that is continued goes
on as it would have.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import pickle
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pydantic
import torch
from torch import Tensor

from rlinf.config.schema import CLOSED
from rlinf.config.schema import settings as settings_of
from rlinf.data.images import content_of
from rlinf.data.routes import compact_type
from rlinf.data.safetensors_io import write_tensors
from rlinf.data.sample import ImageRef
from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, Request, RequestRefused, TextScores
from rlinf.engines.served import far_side
from rlinf.engines.served.adapters import LAYERS, Calls, NamedAdapters
from rlinf.engines.served.engine import ServedEngine, start_server
from rlinf.engines.served.server import (
    Ask,
    Chunk,
    Experts,
    Http,
    Lost,
    Refused,
    ServerSettings,
    environment_of,
    model_files,
)
from rlinf.engines.served.shared_memory import SharedMemory
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.base.tasks import OwnDirectory, in_thread
from rlinf.runtime.base.tensors import own_device


@dataclass(frozen=True, slots=True)
class Differences:
    """The requirements of one version of SGLang, and of those after it up to the next row of the table."""

    since: tuple[int, ...]
    """The first version of which this is true."""
    sessions: bool
    """New weights go between /begin_weight_update and /end_weight_update; without these they are refused."""
    run: tuple[str, ...]
    """Versions that this was tried with."""


TABLE = (
    Differences(since=(0, 5, 12), sessions=False, run=("0.5.20",)),
    Differences(since=(0, 5, 21), sessions=True, run=()),
)
"""Oldest first."""


def differences(version: str) -> Differences:
    """The row of the table for a version such as "0.5.20" or "0.5.20.post1"; of one that cannot be read, the newest.

    Raises:
        ValueError: it is older than the table.
    """
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    if not numbers:
        return TABLE[-1]
    rows = [row for row in TABLE if row.since <= tuple(numbers)]
    if not rows:
        oldest = ".".join(map(str, TABLE[0].since))
        raise ValueError(f"SGLang {version} is older than {oldest}, the oldest version whose interface is known here")
    return rows[-1]


_BUCKET = 600.0
"""Seconds for one bucket; the deadline of the whole is the engine's."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that takes weights."""

    http: Http
    """To it."""
    ranks: int
    """Processes over which its model is split; each reads everything and keeps its part."""
    device: str
    """"cuda" or "cpu"."""


class Route(Protocol):
    """One way in."""

    sessions: bool
    """It goes between /begin_weight_update and /end_weight_update, where a version has these."""

    async def send(self, target: Target, weights: Weights) -> None:
        """Have the server use these weights. Raises `Refused` or `Lost`."""

    def close(self) -> None:
        """Let go of what is held for the server."""


class SharedMemoryRoute:
    """Memory that both processes map: one copy here, while the server reads the bucket before; checksums verified
    there. For buckets in host memory."""

    sessions = True

    def __init__(self) -> None:
        self._memory = SharedMemory()

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        ready = asyncio.ensure_future(asyncio.to_thread(self._memory.copy, weights, 0))
        try:
            for index in range(len(weights.buckets)):
                manifest = torch.frombuffer(bytearray((await ready).encode()), dtype=torch.uint8)
                if index + 1 < len(weights.buckets):
                    ready = asyncio.ensure_future(asyncio.to_thread(self._memory.copy, weights, index + 1))
                await _update(target, _plain([("manifest", manifest)]), weights, "rlinf_weights.load")
                if (word := self._memory.word(index)) != "ok":
                    raise Refused(f"bucket {index} of the weights of version {weights.version}: {word or 'not read'}")
        finally:
            await asyncio.wait([ready])  # a thread cannot be stopped, and it writes where the next bucket goes

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class PickleRoute:
    """All bytes through HTTP, 4/3 of them by its encoding: works wherever there is a connection."""

    sessions = True

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        for index in range(len(weights.buckets)):
            payload = await asyncio.to_thread(_plain, _bucket(weights, index))
            await _update(target, payload, weights, None)

    def close(self) -> None:
        """Nothing is held."""


class CudaIpcRoute:
    """Handles of memory of the same GPU, which the server opens: no copy but its own. Not run yet."""

    sessions = True

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        from torch.multiprocessing.reductions import init_reductions

        init_reductions()
        for index in range(len(weights.buckets)):  # each lives until the reply
            await _update(target, _handles(_bucket(weights, index)), weights, None)

    def close(self) -> None:
        """Nothing is held."""


class DiskRoute:
    """Files that the server reads: the last resort, and the only one that undoes a failure by itself."""

    sessions = False

    def __init__(self) -> None:
        self._own = OwnDirectory("weights")
        self._directory = self._own.path

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        reply = await target.http.get("/server_info")
        config = Path(reply["model_path"]) / "config.json"

        def write() -> None:
            shutil.copyfile(config, self._directory / "config.json")
            write_tensors(self._directory / "model.safetensors", {name: one.cpu() for name, one in weights.named()})

        await asyncio.to_thread(write)
        body = {"model_path": str(self._directory), "flush_cache": False, "weight_version": str(weights.version)}
        await target.http.post("/update_weights_from_disk", body, seconds=_BUCKET)

    def close(self) -> None:
        """Delete the files."""
        self._own.remove()


ROUTES: dict[str, Callable[[], Route]] = {
    "cuda_ipc": CudaIpcRoute,
    "shared_memory": SharedMemoryRoute,
    "http": PickleRoute,
    "disk": DiskRoute,
}
"""By the name that `rollout.engine_args.route` takes, the fastest first."""


def route_for(named: str | None, weights: Weights, device: str) -> Route:
    """The route that is named, or the fastest one for buckets where they lie.

    Raises:
        Refused: there is no such route.
    """
    if named is None:
        there = {bucket.device.type for bucket in weights.buckets}
        named = "cuda_ipc" if there == {"cuda"} == {device} else "shared_memory"
    if named not in ROUTES:
        raise Refused(f"rollout.engine_args.route={named!r} must be one of {', '.join(ROUTES)}")
    return ROUTES[named]()


def _bucket(weights: Weights, number: int) -> list[tuple[str, Tensor]]:
    """Names and tensors of one bucket, as views."""
    flat = weights.buckets[number]
    slots = [slot for slot in weights.layout if slot.bucket == number]
    return [(slot.name, flat[slot.offset : slot.offset + prod(slot.shape)].view(slot.shape)) for slot in slots]


def _plain(named: list[tuple[str, Tensor]]) -> str:
    """Names and tensors with their bytes, which any server reads. Views are copied, or each would bring its bucket."""
    return base64.b64encode(pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in named])).decode()


def _handles(named: list[tuple[str, Tensor]]) -> str:
    """Names and tensors as handles of their memory."""
    from multiprocessing.reduction import ForkingPickler

    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getbuffer()).decode()


async def _update(target: Target, payload: str, weights: Weights, load_format: str | None) -> None:
    body: dict[str, Any] = {
        "serialized_named_tensors": [payload] * target.ranks,
        "load_format": load_format,
        "flush_cache": False,  # it is empty, and a flush at the wrong moment ends the server
        "weight_version": str(weights.version),
    }
    reply = await target.http.post("/update_weights_from_tensor", body, seconds=_BUCKET)
    if isinstance(reply, dict) and not reply.get("success", True):
        raise Refused(f"SGLang did not take weights of version {weights.version}: {reply.get('message')}")


_GREETING = 30.0
"""Seconds for one token of a server that has just said that it is up; the first forward may compile."""
_NEVER = -1e9
"""Added to the logits of tokens that are never drawn; JSON has no infinity."""
_IDLE = 1.0
"""Seconds for which the server itself waits until it is idle, before it says that it is not."""


@pydantic.dataclasses.dataclass(config=CLOSED, frozen=True, slots=True)
class SGLangSettings(ServerSettings):
    """Keys of `rollout.engine_args`."""

    seeded: bool = True
    """Seeds count, so that samples can be repeated and continued; on GPUs this costs speed, and only some attention
    back ends can."""
    stream_interval: int = pydantic.Field(default=8, ge=1)
    """Tokens that come in one piece: fewer are kept sooner, more are cheaper."""
    route: str | None = None
    """How weights get in: cuda_ipc, shared_memory, http or disk; null: the fastest that works."""
    args: list[Any] = field(default_factory=list)
    """Further words of the server's command line."""


_TOGETHER = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))
"""Layers that the server computes as one."""


class SGLangServer:
    """One SGLang server; a `Server`.

    Args:
        settings: how it is run.
        setup: what every engine is made from.
        python: interpreter of its environment.
        device: "cuda" or "cpu", and the number of the first GPU that it takes.
        experts: of the model, to have it told which ones tokens went to; None: it is not told.
    """

    kind = "SGLang"
    reads_images = True

    def __init__(
        self,
        settings: SGLangSettings,
        setup: EngineSetup,
        python: str,
        device: tuple[str, int],
        experts: Experts | None = None,
    ) -> None:
        self.seeded, self.routes, self.forms = settings.seeded, experts is not None, settings.schemas
        # The output embedding gets none: with it 0.5.20 gave wrong log-probs where answers shared a batch, on a CPU.
        calls = Calls(self.kind, self._hold, self._drop, together=_TOGETHER)
        self.adapters = NamedAdapters(settings.adapter_rank, calls) if settings.adapter_rank else None
        self.version = "?"
        """Version of the server, in its own words."""
        self._settings, self._setup, self._python, self._experts = settings, setup, python, experts
        self._device, self._first_device = device
        self._differences: Differences | None = None
        self._model = Path()
        self._route: Route | None = None
        self._held: tuple[Any, ...] | None = None  # `Weights.key` of what it has; None: its model's own

    # Adapters ----------------------------------------------------------------------------------------------------

    async def _hold(self, http: Http, name: str, directory: Path) -> None:
        await self._change(http, "/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def _drop(self, http: Http, name: str) -> None:
        with contextlib.suppress(Refused):  # with --max-loaded-loras it may have let go of them by itself
            await self._change(http, "/unload_lora_adapter", {"lora_name": name})

    async def _change(self, http: Http, path: str, body: Mapping[str, str]) -> None:
        reply = await http.post(path, body, seconds=_BUCKET)
        if not reply.get("success", True):
            raise Refused(f"SGLang {path}: {reply.get('error_message')}")

    # The process -------------------------------------------------------------------------------------------------

    def command(self, model: Path, host: str, port: int) -> Sequence[str]:
        self._model, settings, setup = model, self._settings, self._setup
        dtype = str(setup.dtype).removeprefix("torch.")
        words: list[Any] = [
            *(self._python, "-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", port),
            *("--device", self._device, "--dtype", dtype, "--tp-size", settings.tensor_parallel),
            *("--max-running-requests", setup.max_rows, "--stream-interval", settings.stream_interval),
            *("--random-seed", setup.seed % (1 << 31), "--log-level", "warning"),
            *("--skip-server-warmup", "--incremental-streaming-output"),
            *("--grammar-backend", "llguidance" if settings.schemas else "none"),
            *("--custom-weight-loader", "rlinf_weights.load"),
        ]
        if not settings.schemas:  # text is this side's business
            words += ["--skip-tokenizer-init"]
        if setup.max_length is not None:
            words += ["--context-length", setup.max_length]
        if settings.seeded:
            words += ["--enable-deterministic-inference"]
        if self._experts is not None:
            words += ["--enable-return-routed-experts"]
        if self.adapters is not None:
            words += ["--enable-lora", "--max-lora-rank", self.adapters.rank, "--lora-target-modules", *LAYERS]
        if self._device == "cpu":
            words += ["--lora-backend", "torch_native"] if self.adapters is not None else []
            words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
            words += ["--disable-overlap-schedule", "--mem-fraction-static", "0.1"]
            most = setup.max_tokens or setup.max_rows * min(setup.max_length or 2048, 4096)
            words += ["--max-total-tokens", most]
        else:
            words += ["--base-gpu-id", self._first_device, "--enable-memory-saver"]
            if setup.max_tokens is not None:
                words += ["--max-total-tokens", setup.max_tokens]
            if settings.memory_share is not None:
                words += ["--mem-fraction-static", settings.memory_share]
        return [*map(str, words), *map(str, settings.args)]

    def environment(self) -> Mapping[str, str | None]:
        variables: dict[str, str | None] = {"HF_HUB_OFFLINE": "1"}
        if self._device == "cpu":
            variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return {**variables, "PYTHONPATH": os.pathsep.join(far_side.__path__)}

    async def greet(self, http: Http) -> None:
        reply = await http.get("/server_info")
        self.version = str(reply.get("version", "?"))
        self._differences = differences(self.version)
        self._held = None
        if self.adapters is not None:
            self.adapters.names.clear()
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
        if ask.grammar is not None:
            rules["ebnf"] = ask.grammar  # llguidance tells its own grammars by their looks
        if self.seeded:
            rules["sampling_seed"] = ask.seed
        body = {
            "rid": ask.id,
            "input_ids": list(ask.ids),
            "sampling_params": rules,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "return_routed_experts": self.routes,
        }
        if ask.adapter is not None and self.adapters is not None:
            body["lora_path"] = self.adapters.names[ask.adapter]
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
            experts_text = meta.get("routed_experts")
            routes = (
                None if experts_text is None or self._experts is None else decode_routes(experts_text, self._experts)
            )
            if news > 0 and (entries := (meta.get("output_token_logprobs") or ())[-news:]):
                got += len(entries)
                yield Chunk([entry[1] for entry in entries], [entry[0] for entry in entries], routes)
            elif routes is not None:
                yield Chunk((), (), routes)
            reason = meta.get("finish_reason") or {}
            if reason.get("type") == "abort" and reason.get("status_code"):
                raise Lost(f"SGLang /generate gave up: {reason.get('message')}")

    async def score(self, http: Http, texts: Sequence[np.ndarray], top: int) -> list[TextScores]:
        body = {
            "input_ids": [ids.tolist() for ids in texts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }
        replies = await http.post("/generate", body, seconds=_BUCKET)
        return [_scores_of(ids, reply["meta_info"], top) for ids, reply in zip(texts, replies, strict=True)]

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
        target = Target(http, self._settings.tensor_parallel, self._device)
        if self._route is None:
            self._route = route_for(self._settings.route, weights, self._device)
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
        lost = self._device != "cpu"  # the memory saver is for GPUs; on a CPU nothing was given back
        if weights is not None and (lost or self._held != weights.key):
            await self.update(http, weights)
        elif weights is None and lost:
            await http.post("/update_weights_from_disk", {"model_path": str(self._model)}, seconds=600.0)

    def close(self) -> None:
        if self._route is not None:
            self._route.close()


def _scores_of(ids: np.ndarray, meta: Mapping[str, Any], top: int) -> TextScores:
    """Scores of a text, from `input_token_logprobs`, which has [log-prob, id, text] of each token, and
    `input_top_logprobs`, which has lists of such.

    Raises:
        Lost: they are not of all its tokens, as of what was aborted.
    """
    own = meta.get("input_token_logprobs") or ()
    if [entry[1] for entry in own] != ids.tolist():
        raise Lost(f"SGLang /generate scored {len(own)} of {len(ids)} tokens: {meta.get('finish_reason')}")
    places = [place[:top] for place in meta["input_top_logprobs"][1:]] if top else [[]] * (len(ids) - 1)
    likeliest = np.array([[entry[1] for entry in place] for place in places], np.int64).reshape(-1, top)
    values = np.array([[entry[0] for entry in place] for place in places], np.float32).reshape(-1, top)
    same = likeliest == ids[1:, None]
    ranks = np.where(same.any(axis=1), same.argmax(axis=1) + 1, 0) if top else np.zeros(len(ids) - 1, np.int64)
    return TextScores(np.array([entry[0] for entry in own[1:]], np.float32), ranks, likeliest, values)


def _as_url(image: ImageRef) -> str:
    """A picture as text."""
    return f"data:;base64,{base64.b64encode(content_of(image)).decode()}"


def decode_routes(encoded: str, experts: Experts) -> np.ndarray:
    """Routes as the server writes them: int32 [tokens read, layers of the model, experts per token], in base64.

    Raises:
        Refused: it has another model than we.
    """
    flat = np.frombuffer(base64.b64decode(encoded), np.int32)
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


class SGLangEngine(ServedEngine):
    """An engine around an SGLang server."""

    def check_request(self, request: Request) -> None:
        super().check_request(request)
        if request.sampling.min_p and self.seeded:  # its sampler asserts that there is no seed, and the server ends
            raise RequestRefused(
                f"request {request.id} has min_p={request.sampling.min_p}, which SGLang cannot draw by a seed: set "
                "rollout.min_p=0, or rollout.engine_args.seeded=false"
            )


ENGINE = SGLangEngine


def interpreter(python: str | None = None) -> str:
    """The interpreter of SGLang's environment. Raises ValueError if there is none."""
    return environment_of("SGLang", python, "RLINF_SGLANG_PYTHON", ".venv-sglang", "sglang")


def lacking(args: Mapping[str, Any]) -> str | None:
    """See `rlinf.engines.base.lacking`."""
    try:
        interpreter(args.get("python"))
    except ValueError as error:
        return str(error)
    return None


async def build(setup: EngineSetup, **args: Any) -> SGLangEngine:
    """Start a server, and make the engine around it; see `make`.

    Args:
        setup: what every engine is made from.
        args: any of `SGLangSettings`.

    Raises:
        ValueError: there is no environment, or an argument is unknown or out of range.
        ChildDied: the server did not come up; with the last lines of its output.
    """
    settings = settings_of(SGLangSettings, args, "rollout.engine_args")
    if settings.seeded and any(str(word).startswith("--speculative") for word in settings.args):
        raise WrongSetting(
            "rollout.engine_args.args: SGLang verifies drafts by random numbers of its own, and seeds are to count: "
            "set rollout.engine_args.seeded=false, or leave out what is speculative"
        )
    python = interpreter(settings.python)
    files = await setup.compute(model_files, setup)
    if settings.adapter_rank and (setup.pictures is not None or files.experts is not None):
        files.remove()
        raise WrongSetting(
            "rollout.engine_args.adapter_rank: adapters beside models with experts, or that read pictures, were not "
            "tried: leave it out"
        )
    server = SGLangServer(settings, setup, python, device_here(), files.experts if setup.routes else None)
    return await start_server(SGLangEngine, server, setup, files, settings)
