"""The vLLM engine, `rollout.engine: vllm`: how its server is started and spoken to.

Flows in: asks, and weights in host memory. Flows out: chunks of tokens, and weights in memory that the server maps.
Nobody waits here but for the server's start and its replies; `served/engine.py` awaits all of it. The other end is
`vllm_inside/serve.py`.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
from torch import Tensor

from rlinf.config.schema import CLOSED
from rlinf.config.schema import settings as settings_of
from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, TextScores
from rlinf.engines.served.adapters import Calls, NamedAdapters
from rlinf.engines.served.engine import ServedEngine, start_server
from rlinf.engines.served.server import Ask, Chunk, Http, ServerSettings, environment_of, model_files
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.base.tasks import in_thread
from rlinf.runtime.base.tensors import seen_by_children

_INSIDE = Path(__file__).parent / "vllm_inside"


class VllmServer:
    """A server process around vLLM; see `served/server.py` for what it must do.

    Args:
        python: interpreter of vLLM's environment.
        settings: arguments of vLLM's `AsyncEngineArgs`.
        deadline: seconds for loading weights, and for sleeping and waking.
        forms: it keeps answers to grammars.
        adapter_rank: highest of adapters that it holds; 0: it holds none.
    """

    kind = "vLLM"
    reads_images = False
    seeded = True
    routes = False

    def __init__(
        self, python: str, settings: Mapping[str, Any], deadline: float, *, forms: bool = False, adapter_rank: int = 0
    ) -> None:
        self.forms = forms
        calls = Calls(self.kind, self._hold, self._drop)
        self.adapters = NamedAdapters(adapter_rank, calls) if adapter_rank else None
        self._python, self._settings, self._deadline = python, dict(settings), deadline
        self._memory: list[_Memory] = []
        self.version = ""
        """Version of vLLM, once it is up."""

    def command(self, model: Path, host: str, port: int) -> Sequence[str]:
        settings = json.dumps({"model": str(model), **self._settings})
        address = ["--host", host, "--port", str(port)]
        more = ["--forms"] if self.forms else []
        more += ["--adapter-rank", str(self.adapters.rank)] if self.adapters is not None else []
        return [self._python, str(_INSIDE / "serve.py"), *address, "--settings", settings, *more]

    def environment(self) -> Mapping[str, str | None]:
        return {
            "HF_HUB_OFFLINE": "1",  # the model lies here
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose logits processors are others than those of `inside/rlinf_draw.py`
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two servers on a machine would share the cores they are bound to
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            **seen_by_children(int(self._settings.get("tensor_parallel_size", 1))),  # it takes the first that it sees
        }

    async def greet(self, http: Http) -> None:
        about = await http.get("/health")
        self.version = about["vllm"]
        if self.adapters is not None:
            self.adapters.names.clear()
            self.adapters.unembeds = about["unembeds"]

    async def healthy(self, http: Http) -> None:
        await http.get("/health", seconds=60.0)  # answered between two steps

    async def generate(self, http: Http, ask: Ask) -> AsyncGenerator[Chunk, None]:
        sampling = ask.sampling
        body = {
            "rid": ask.id,
            "input_ids": list(ask.ids),
            "max_new_tokens": sampling.max_new_tokens,
            "stop_ids": list(sampling.stop_ids),
            "seed": ask.whole_seed,
            "answered": ask.answered,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "grammar": ask.grammar,
        }
        if ask.adapter is not None and self.adapters is not None:
            body["adapter"] = self.adapters.names[ask.adapter]
        async with aclosing(http.events("/generate", body)) as events:
            async for event in events:
                yield Chunk(event["ids"], event["logprobs"])

    async def score(self, http: Http, texts: Sequence[np.ndarray], top: int) -> list[TextScores]:
        body = {"texts": [ids.tolist() for ids in texts], "top": top}
        reply = await http.post("/score", body, seconds=self._deadline)
        types = (np.float32, np.int64, np.int64, np.float32)
        return [TextScores(*map(np.array, columns, types)) for columns in reply["scores"]]

    async def abort(self, http: Http, ids: Sequence[str] | None) -> None:
        await http.post("/abort", {} if ids is None else {"rids": list(ids)})

    async def quiet(self, http: Http) -> None:
        await http.post("/quiet")

    async def update(self, http: Http, weights: Weights) -> None:
        buckets = await in_thread(lambda: self._shared(weights))
        await http.post("/load", {"version": weights.version, "buckets": buckets}, seconds=self._deadline)

    async def _hold(self, http: Http, name: str, directory: Path) -> None:
        await http.post("/hold", {"name": name, "path": str(directory)}, seconds=self._deadline)

    async def _drop(self, http: Http, name: str) -> None:
        await http.post("/drop", {"name": name})

    async def release(self, http: Http) -> None:
        await http.post("/sleep", seconds=self._deadline)

    async def regain(self, http: Http, weights: Weights | None) -> None:
        await http.post("/wake", seconds=self._deadline)
        if weights is not None:
            await self.update(http, weights)

    def close(self) -> None:
        while self._memory:
            self._memory.pop().close()

    def _shared(self, weights: Weights) -> list[dict[str, Any]]:
        """Where the server finds weights, which are copied there. Blocking."""
        tensors: list[list[tuple[str, Sequence[int], int]]] = [[] for _ in weights.buckets]
        for slot in weights.layout:
            tensors[slot.bucket].append((slot.name, slot.shape, slot.offset))
        while len(self._memory) < len(weights.buckets):
            self._memory.append(_Memory())
        return [
            {
                "path": memory.write(bucket),
                "bytes": bucket.nbytes,
                "dtype": str(bucket.dtype).removeprefix("torch."),
                "checksum": checksum,
                "tensors": inside,
            }
            for memory, bucket, checksum, inside in zip(
                self._memory, weights.buckets, weights.checksums, tensors, strict=False
            )
        ]


class _Memory:
    """Memory that other processes of this user can map by a path. It has no name, so nothing is left of it however
    this process ends, and it is kept from one version to the next, since new pages cost more than copying."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rlinf-weights", os.MFD_CLOEXEC)
        self._bytes = 0
        self._view: Tensor | None = None

    def write(self, bucket: Tensor) -> str:
        """Copy a flat tensor there; returns the path."""
        if self._view is None or self._bytes < bucket.nbytes:
            os.ftruncate(self._file, bucket.nbytes)
            self._bytes = bucket.nbytes
            self._view = torch.frombuffer(mmap.mmap(self._file, self._bytes), dtype=torch.uint8)
        self._view[: bucket.nbytes].copy_(bucket.detach().view(torch.uint8))
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Give the memory back, once the server has let go of it too."""
        self._view = None
        os.close(self._file)


class VllmEngine(ServedEngine):
    """An engine around a vLLM server. Token k of an answer is drawn by random number k of its seed, as in the
    `transformers` engine, so both give the same answers up to rounding, and continue each other's."""


ENGINE = VllmEngine


def interpreter(python: str | None = None) -> str:
    """The interpreter of vLLM's environment. Raises ValueError if there is none."""
    return environment_of("vLLM", python, "RLINF_VLLM_PYTHON", ".venv-vllm", "vllm")


def lacking(args: Mapping[str, Any]) -> str | None:
    """See `rlinf.engines.base.lacking`."""
    try:
        interpreter(args.get("python"))
    except ValueError as error:
        return str(error)
    return None


@pydantic.dataclasses.dataclass(config=CLOSED, frozen=True, slots=True)
class VllmSettings(ServerSettings):
    """Keys of `rollout.engine_args`."""

    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `max_num_batched_tokens`."""


async def build(setup: EngineSetup, **args: Any) -> VllmEngine:
    """Start a vLLM server, and make the engine around it; see `make`.

    Args:
        setup: what every engine is made from.
        args: any of `VllmSettings`.

    Raises:
        ValueError: there is no such environment, an argument is unknown, or `args` has what the engine itself sets.
        ChildDied: the server did not come up; with the last lines of its output.
    """
    settings = settings_of(VllmSettings, args, "rollout.engine_args")
    if setup.pictures is not None:
        raise WrongSetting("rollout.engine=vllm reads no pictures, and the model does: take sglang or transformers")
    arguments = _engine_args(setup, settings)
    server = VllmServer(
        interpreter(settings.python),
        arguments,
        settings.deadline,
        forms=settings.schemas,
        adapter_rank=settings.adapter_rank,
    )
    files = await setup.compute(model_files, setup)
    if settings.adapter_rank and files.experts is not None:
        files.remove()
        raise WrongSetting("rollout.engine_args.adapter_rank: adapters beside models with experts were not tried")
    return await start_server(VllmEngine, server, setup, files, settings)


def _engine_args(setup: EngineSetup, settings: VllmSettings) -> dict[str, Any]:
    own: dict[str, Any] = {
        "dtype": str(setup.dtype).removeprefix("torch."),
        "max_num_seqs": setup.max_rows,
        "max_model_len": setup.max_length,
        "tensor_parallel_size": settings.tensor_parallel,
        "gpu_memory_utilization": settings.memory_share,
    }
    if reserved := sorted(own.keys() & settings.args.keys()):
        raise WrongSetting(
            f"rollout.engine_args.args: {', '.join(reserved)} cannot be given here: the engine sets dtype by "
            "rollout.dtype, max_num_seqs by rollout.max_rows, max_model_len by the model, tensor_parallel_size and "
            "gpu_memory_utilization by rollout.engine_args.tensor_parallel and memory_share"
        )
    if settings.args.get("speculative_config") is not None:
        raise WrongSetting(
            "rollout.engine_args.args: vLLM takes no speculative_config beside a logits processor, by which answers "
            "are drawn from their seeds here: leave it out, or take rollout.engine=transformers with rollout.drafts"
        )
    return {name: value for name, value in own.items() if value is not None} | settings.args
