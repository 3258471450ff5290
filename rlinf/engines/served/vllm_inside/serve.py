"""The server program around vLLM: token ids in, tokens and their log-probs out, over HTTP on this machine.

It runs in vLLM's environment, which has no rlinf, so it imports the standard library, aiohttp and vllm alone;
`server.py` in the folder above starts it and speaks to it. Flows in: requests as JSON. Flows out: answers as
server-sent events, one per step. Who wakes whom: vLLM's engine core, a process of its own, wakes the answers that got
tokens; when it dies, so does this process.

    GET  /health    version of vLLM, what it computes on, and if adapters may be of the output embedding; 503 once the
                    engine core is dead
    POST /generate  an answer, streamed: `data: {"ids": [...], "logprobs": [...]}`, at its end `data: [DONE]`
    POST /score     {"texts", "top"}: of each text's tokens but the first the log-probs and ranks, and the likeliest in
                    their places with their log-probs
    POST /abort     {"rids": [...]}, or {} for all: their streams end
    POST /quiet     forget all that was read
    POST /load      {"version", "buckets"}: other weights, by their places in shared memory (`rlinf_worker.py`)
    POST /hold      {"name", "path"}: adapters in a directory of peft's, which stays, by a name that is new
    POST /drop      {"name"}: hold them no more
    POST /sleep, /wake    give memory back, as far as this build of vLLM can

What cannot be done is 400 with {"error": "..."}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NoReturn, get_args

import vllm
from aiohttp import web
from vllm import SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

OURS = {
    "skip_tokenizer_init": True,  # text is the other side's business
    "logprobs_mode": "processed_logits",  # rlinf_draw leaves one token, and its log-prob in place of its logit
    "logits_processors": ["rlinf_draw:Draw"],
    "worker_extension_cls": "rlinf_worker.Weights",
    "disable_log_stats": True,
    "max_logprobs": -1,  # of prompts as many as are asked for
}
"""Arguments of vLLM that this program depends on."""
FORMS = {"skip_tokenizer_init": False, "structured_outputs_config": {"backend": "guidance"}}
"""Those by which answers are kept to grammars of llguidance."""
ADAPTERS = {
    "enable_lora": True,
    "max_loras": 8,  # sets in one batch, as SGLang has it; each takes room beside the model at once
    "max_cpu_loras": 64,  # as many as the service keeps; others are read again from their files
    "lora_target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"],  # not the input embedding
}
"""Those by which it holds adapters, where it was not told otherwise."""
CPU = {
    "enforce_eager": True,  # compiling takes minutes and wins little
    "kv_cache_memory_bytes": 1 << 29,  # else vLLM takes most of the machine's memory
}
"""Arguments of vLLM on a CPU, where it was not told otherwise."""
HOW = ("seed", "answered", "temperature", "top_k", "top_p", "min_p")
"""Fields of a request that `rlinf_draw` needs."""


class Server:
    """One model behind HTTP.

    Args:
        engine: vLLM's, running.
        unembeds: adapters may be of the output embedding.
    """

    def __init__(self, engine: AsyncLLM, unembeds: bool):
        self._engine, self._unembeds = engine, unembeds
        self._running: set[str] = set()
        self._adapters: dict[str, LoRARequest] = {}
        self._numbers = itertools.count(1)
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the engine core is gone."""

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.get("/health", self.health), web.post("/generate", self.generate)])
        for call in (self.score, self.abort, self.quiet, self.load, self.hold, self.drop, self.sleep, self.wake):
            app.router.add_post(f"/{call.__name__}", self._answering(call))
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Answer with the version of vLLM and its device; the engine core is asked, too, so that one that hangs is
        noticed."""
        try:
            await self._engine.get_weight_version()
        except EngineDeadError as error:
            return self._died(error)
        about = {"vllm": vllm.__version__, "device": current_platform.device_name, "unembeds": self._unembeds}
        return web.json_response(about)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; one whose caller has gone away is aborted."""
        body = await request.json()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            async with contextlib.aclosing(self._chunks(body)) as chunks:
                async for chunk in chunks:
                    if not reply.prepared:
                        await reply.prepare(request)
                    await reply.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n")
        except EngineDeadError as error:
            died = self._died(error)
            if not reply.prepared:
                return died
            if request.transport is not None:
                request.transport.abort()  # an end that nobody takes for the answer's
            return reply
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        if not reply.prepared:
            await reply.prepare(request)
        await reply.write(b"data: [DONE]\n")
        return reply

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        model = self._engine.model_config
        ids, count = body["input_ids"], body["max_new_tokens"]
        vocabulary, longest = model.get_vocab_size(), model.max_model_len
        if outside := [token for token in ids if not 0 <= token < vocabulary]:
            raise ValueError(f"tokens {outside[:5]} of the prompt are not in the vocabulary of {vocabulary}")
        if len(ids) + count > longest:
            raise ValueError(
                f"{len(ids)} tokens and an answer of up to {count} are longer than the context of {longest}"
            )
        params = SamplingParams(
            temperature=0.0,  # rlinf_draw draws, and vLLM takes what it left
            max_tokens=count,
            stop_token_ids=body["stop_ids"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={key: body[key] for key in HOW},
            structured_outputs=StructuredOutputsParams(grammar=grammar) if (grammar := body.get("grammar")) else None,
        )
        self._running.add(body["rid"])
        try:
            prompt = {"prompt_token_ids": ids}
            answer = self._engine.generate(prompt, params, body["rid"], lora_request=self._adapter(body))
            async with contextlib.aclosing(answer) as outputs:
                async for output in outputs:
                    (part,) = output.outputs
                    if part.finish_reason == "error":
                        raise ValueError("vLLM ended the request with an error, which its log tells")
                    if tokens := list(part.token_ids):
                        pairs = zip(tokens, part.logprobs, strict=True)
                        yield {"ids": tokens, "logprobs": [choices[token].logprob for token, choices in pairs]}
        finally:
            self._running.discard(body["rid"])

    async def score(self, body: dict[str, Any]) -> dict[str, Any]:
        texts = (self._scored(ids, body["top"]) for ids in body["texts"])
        return {"scores": await asyncio.gather(*texts)}

    async def _scored(self, ids: list[int], top: int) -> list[list[Any]]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        answer = self._engine.generate({"prompt_token_ids": ids}, params, f"score-{next(self._numbers)}")
        async with contextlib.aclosing(answer) as outputs:
            async for output in outputs:
                places = output.prompt_logprobs[1:]
        own = [place[token] for token, place in zip(ids[1:], places, strict=True)]
        # the token itself is there, too, behind them where it is none of them
        likeliest = [sorted(place, key=lambda token: place[token].rank)[:top] for place in places]
        values = [[place[token].logprob for token in some] for place, some in zip(places, likeliest, strict=True)]
        return [[one.logprob for one in own], [one.rank for one in own], likeliest, values]

    async def abort(self, body: dict[str, Any]) -> None:
        await self._engine.abort(self._running & set(body.get("rids", self._running)))

    async def quiet(self, body: dict[str, Any]) -> None:
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    async def load(self, body: dict[str, Any]) -> None:
        """Nothing is decoded meanwhile, and nothing that was read with the old weights is used afterwards."""
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        try:
            await self._engine.collective_rpc("load_buckets", args=(body["buckets"],))
            await self._engine.update_weight_version(str(body["version"]))
        finally:
            await self._engine.resume_generation()

    async def hold(self, body: dict[str, Any]) -> None:
        adapter = LoRARequest(body["name"], next(self._numbers), body["path"])
        await self._engine.add_lora(adapter)  # which reads the files
        self._adapters[adapter.lora_name] = adapter

    async def drop(self, body: dict[str, Any]) -> None:
        await self._engine.remove_lora(self._adapters.pop(body["name"]).lora_int_id)

    def _adapter(self, body: dict[str, Any]) -> LoRARequest | None:
        return self._adapters[name] if (name := body.get("adapter")) is not None else None

    async def sleep(self, body: dict[str, Any]) -> None:
        await self._engine.sleep(level=1, mode="keep")

    async def wake(self, body: dict[str, Any]) -> None:
        await self._engine.wake_up()

    def _answering(self, call: Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            try:
                reply = await call(await request.json() if request.can_read_body else {})
            except EngineDeadError as error:
                return self._died(error)
            except Exception as error:
                return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)
            return web.json_response(reply or {})

        return answer

    def _died(self, error: BaseException) -> web.Response:
        if not self.dead.done():
            self.dead.set_result(str(error))
        return web.json_response({"error": str(error)}, status=503)


def started(settings: dict[str, Any], forms: bool, adapter_rank: int) -> AsyncLLM:
    """vLLM with these arguments of `AsyncEngineArgs`; exits with a line if it cannot run the model."""
    cpu = current_platform.is_cpu()
    if adapter_rank:
        room = min(rank for rank in get_args(MaxLoRARanks) if rank >= adapter_rank)
        settings = ADAPTERS | settings | {"max_lora_rank": room}
    if cpu:
        settings = CPU | settings
        if settings.get("tensor_parallel_size", 1) == 1:  # the core computes itself: one process less
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            settings = {"distributed_executor_backend": "uni"} | settings
    else:
        settings = {"enable_sleep_mode": True} | settings
    config = AsyncEngineArgs(**settings, **OURS | (FORMS if forms else {})).create_engine_config(
        UsageContext.ENGINE_CONTEXT
    )
    size = config.model_config.get_head_size()
    if cpu and size % 32 and size not in (80, 112):
        sys.exit(
            f"vLLM's attention on the CPU takes heads of 32, 64, 80, 96, 112, 128 or more in steps of 32, and those of "
            f"this model have {size}: take another model, or rollout.engine: transformers"
        )
    if cpu:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM sets "spawn", which imports all of it again, 6 s
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


async def serve(options: argparse.Namespace) -> NoReturn:
    """Serve until the engine core dies, and end this process then."""
    engine = started(options.settings, options.forms, options.adapter_rank)
    try:
        server = Server(engine, all(await engine.collective_rpc("prepare")))
        runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, options.host, options.port, backlog=4096).start()
        reason = await server.dead
    except BaseException:
        engine.shutdown()
        raise
    # At once, since answers are asked for again for a few seconds only; whoever started this ends what is left of it.
    sys.stderr.write(f"vLLM's engine core died: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Read the command line, and serve."""
    parser = argparse.ArgumentParser(description="vLLM behind HTTP, for rlinf")
    parser.add_argument("--host", required=True, help="address to listen at")
    parser.add_argument("--port", type=int, required=True, help="port to listen at")
    parser.add_argument("--settings", type=json.loads, required=True, help="arguments of AsyncEngineArgs, as JSON")
    parser.add_argument("--forms", action="store_true", help="keep answers to grammars of llguidance")
    parser.add_argument("--adapter-rank", type=int, default=0, help="hold adapters of up to this rank; 0: none")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
