"""Making the vLLM engine, `rollout.engine: vllm`.

Flows in: what every engine is made from. Flows out: an engine whose server is up. Nobody waits here but for its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.engines.make import EngineSetup
from rlinf.engines.served.child import ServerChild, environment_of
from rlinf.engines.served.engine import ServedEngine
from rlinf.engines.served.model_files import model_files
from rlinf.engines.vllm.server import VllmServer


class VllmEngine(ServedEngine):
    """An engine around a vLLM server. Token k of an answer is drawn by random number k of its seed, as in the
    `transformers` engine, so both give the same answers up to rounding, and continue each other's."""


ENGINE = VllmEngine


def interpreter(python: str | None = None) -> str:
    """The interpreter of vLLM's environment. Raises ValueError if there is none."""
    return environment_of("vLLM", python, "RLINF_VLLM_PYTHON", ".venv-vllm", "vllm")


def lacking(args: Mapping[str, Any]) -> str | None:
    """See `rlinf.engines.make.lacking`."""
    try:
        interpreter(args.get("python"))
    except ValueError as error:
        return str(error)
    return None


async def build(
    setup: EngineSetup,
    *,
    python: str | None = None,
    tensor_parallel: int = 1,
    memory_share: float | None = None,
    start_deadline: float = 600.0,
    deadline: float = 300.0,
    silence: float = 300.0,
    max_restarts: int = 3,
    args: Mapping[str, Any] | None = None,
) -> VllmEngine:
    """Start a vLLM server, and make the engine around it; see `make`.

    Args:
        setup: what every engine is made from.
        python: interpreter of an environment with vLLM and aiohttp. Default: $RLINF_VLLM_PYTHON, or .venv-vllm, which
            `make vllm` creates.
        tensor_parallel: GPUs over which the model is split.
        memory_share: share of a GPU's memory for weights and KV cache. Default: vLLM's own.
        start_deadline: seconds from the server's start until it must answer.
        deadline: seconds for a change of weights, for going to sleep and for waking, each; then it is started again.
        silence: seconds without a token after which an answer is asked for again.
        max_restarts: deaths in a row that are followed by a restart.
        args: further arguments of vLLM's `AsyncEngineArgs`, such as `max_num_batched_tokens`.

    Raises:
        ValueError: there is no such environment, or `args` has what the engine itself sets.
        ChildDied: the server did not come up; with the last lines of its output.
    """
    if setup.pictures is not None:
        raise ValueError("rollout.engine=vllm reads no pictures, and the model does: take sglang or transformers")
    own: dict[str, Any] = {
        "dtype": str(setup.dtype).removeprefix("torch."),
        "max_num_seqs": setup.max_rows,
        "max_model_len": setup.max_length,
        "tensor_parallel_size": tensor_parallel,
        "gpu_memory_utilization": memory_share,
    }
    if taken := sorted(own.keys() & (args or {}).keys()):
        raise ValueError(
            f"rollout.engine_args.args: {', '.join(taken)} cannot be given here: the engine sets dtype by "
            "rollout.dtype, max_num_seqs by rollout.max_rows, max_model_len by the model, tensor_parallel_size and "
            "gpu_memory_utilization by rollout.engine_args.tensor_parallel and memory_share"
        )
    settings = {name: value for name, value in own.items() if value is not None} | dict(args or {})
    server = VllmServer(interpreter(python), settings, deadline)
    files = await setup.compute(model_files, setup)
    engine = VllmEngine(setup, files, deadline=deadline)
    child = ServerChild(
        server,
        files.directory,
        f"vLLM of {setup.name}",
        engine.prepare,
        engine.busy,
        log=None if setup.directory is None else Path(setup.directory) / f"vllm-{setup.name}.log",
        start_deadline=start_deadline,
        max_restarts=max_restarts,
        silence=silence,
    )
    try:
        await engine.start(child)
    except BaseException:
        files.remove()
        raise
    return engine
