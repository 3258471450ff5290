"""Making the SGLang engine from a configuration.

In: what every engine is made from, and `rollout.engine_args`. Out: an engine whose server is up, or an error that says
what is missing. Who waits: the caller, for the server's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.engines.base import Request, RequestRefused
from rlinf.engines.make import EngineSetup
from rlinf.engines.served.child import ServerChild, environment_of
from rlinf.engines.served.engine import ServedEngine
from rlinf.engines.served.model_files import model_files
from rlinf.engines.sglang.server import Options, SGLangServer, device_here


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
    seeded: bool = True,
    stream_interval: int = 8,
    route: str | None = None,
    start_deadline: float = 600.0,
    deadline: float = 300.0,
    silence: float = 300.0,
    max_restarts: int = 3,
    args: Sequence[str] = (),
) -> SGLangEngine:
    """Start a server, and make the engine around it; see `make`.

    Args:
        setup: what every engine is made from.
        python: interpreter of an environment with SGLang. Default: $RLINF_SGLANG_PYTHON, or .venv-sglang, which `make
            sglang` creates.
        tensor_parallel: GPUs, from this rank's on, over which the model is split.
        memory_share: share of a GPU's memory for weights and KV cache. Default: SGLang's own.
        seeded: seeds count, so that samples can be repeated and continued; on GPUs this costs speed, and only some
            attention back ends can.
        stream_interval: tokens that come in one piece: fewer are kept sooner, more are cheaper.
        route: how weights get in: cuda_ipc, shared_memory, http or disk. Default: the fastest that works.
        start_deadline: seconds for the server's start.
        deadline: seconds for a change of weights, for going to sleep and for waking, each; then it is started again.
        silence: seconds without a token after which an answer is asked for again.
        max_restarts: deaths in a row that are followed by a restart.
        args: further words of the server's command line.

    Raises:
        ValueError: there is no environment, or an argument is out of range.
        ChildDied: the server did not come up; with the last lines of its output.
    """
    if tensor_parallel < 1 or stream_interval < 1:
        raise ValueError("rollout.engine_args: tensor_parallel and stream_interval must be at least 1")
    device, first = device_here()
    found = interpreter(python)
    files = await setup.compute(model_files, setup)
    options = Options(
        python=found,
        device=device,
        first_device=first,
        dtype=str(setup.dtype).removeprefix("torch."),
        tensor_parallel=tensor_parallel,
        max_rows=setup.max_rows,
        max_tokens=setup.max_tokens,
        max_length=setup.max_length,
        memory_share=memory_share,
        seeded=seeded,
        stream_interval=stream_interval,
        seed=setup.seed % (1 << 31),
        route=route,
        experts=files.experts if setup.routes else None,
        args=tuple(map(str, args)),
    )
    engine = SGLangEngine(setup, files, deadline=deadline)
    child = ServerChild(
        SGLangServer(options),
        files.directory,
        f"SGLang of {setup.name}",
        engine.prepare,
        engine.busy,
        log=None if setup.directory is None else Path(setup.directory) / f"sglang-{setup.name}.log",
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
