"""An imitation of an SGLang server in this process, as far as its HTTP goes: the next token is a function of the text.

The child process that the engine supervises is a `sleep`; the imitation stands at its address, and comes and goes with
it. What it is told to do wrong, it does.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from pathlib import Path

import numpy as np
from aiohttp import web
from safetensors.numpy import load_file

from rlinf.engines.base import EngineSetup
from rlinf.engines.served.engine import ServedEngine
from rlinf.engines.served.server import Experts, ModelFiles, ServerChild, ServerSettings, Watch
from rlinf.engines.served.sglang import SGLangServer, SGLangSettings

VOCABULARY = 11
EXPERTS = Experts(layers=3, top_k=2, count=16)


def following(text, version=0):
    """The token after a text."""
    return (sum((token + 1) * (place + 1) for place, token in enumerate(text)) * 7 + len(text) + version) % VOCABULARY


def answer(prompt, count, version=0):
    text = list(prompt)
    for _ in range(count):
        text.append(following(text, version))
    return text[len(prompt) :]


def scored(text, version=0):
    """Log-probs of each token after a text: the one that follows is the likeliest, and then those behind it."""
    first = following(text, version)
    return [-0.5 - (token - first) % VOCABULARY for token in range(VOCABULARY)]


def lora_effect(directory):
    """What adapters in a directory of peft's add to the version that a text follows from: the sum of their product."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    assert (config["peft_type"], config["bias"]) == ("LORA", "none")
    total = 0
    for name in config["target_modules"]:
        part = f"base_model.model.model.layers.0.self_attn.{name}.lora_"
        down, up = tensors.pop(part + "A.weight"), tensors.pop(part + "B.weight")
        assert len(down) == config["r"]
        total += config["lora_alpha"] / config["r"] * (up @ down).sum()
    assert not tensors
    return int(total)


def routes(text):
    """Experts of what is read of a text: functions of the token, its place and the layer."""
    ids, places = np.array(text[:-1], np.int32), np.arange(len(text) - 1, dtype=np.int32)
    layers = np.arange(EXPERTS.layers * EXPERTS.top_k, dtype=np.int32).reshape(EXPERTS.layers, EXPERTS.top_k)
    return (ids[:, None, None] + places[:, None, None] + layers) % np.int32(EXPERTS.count)


async def either(*events):
    """Wait until one of these is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


class Imitation(SGLangServer):
    """Speaks to itself: the client's half is the real one."""

    def __init__(self, version="0.5.20", experts=None, adapter_rank=0):
        settings = SGLangSettings(route="http", adapter_rank=adapter_rank)
        super().__init__(settings, EngineSetup("", {}, None), "-", ("cpu", 0), experts)
        self.loras, self.asked = {}, []  # what adapters add to the version, by name; and whose each request was
        self.tells, self.weights, self.calls = version, 0, []
        self.wrong = []  # what is done wrong with the next requests: a status, "half", "hang" or "nothing"
        self.running = {}  # request ids, and events that are set when they are aborted
        self.site = self.runner = None
        self.reading = asyncio.Event()  # texts are being scored
        self.hold = asyncio.Event()  # tokens come while it is set
        self.hold.set()
        self.free = 0  # so many of each request come anyway

    def command(self, model, host, port):
        self.address = host, port
        return ["sleep", "1000000"]

    async def greet(self, http):
        if self.runner is not None:
            await self.runner.cleanup()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self.runner.setup()
        await web.TCPSite(self.runner, *self.address).start()
        self.weights, self.loras = 0, {}
        await super().greet(http)

    async def handle(self, request):
        path = "/" + request.match_info["path"]
        self.calls.append(path)
        body = await request.json() if request.can_read_body else {}
        if path == "/generate" and body.get("stream"):
            return await self.stream(request, body)
        if path == "/generate" and body.get("top_logprobs_num") is not None:
            return await self.read(body)
        if path == "/server_info":
            return web.json_response({"version": self.tells})
        if path == "/abort_request":
            for id in self.running:
                if body.get("abort_all") or body.get("rid") == id:
                    self.running[id].set()
        if path == "/flush_cache" and self.running:
            return web.Response(status=400, text="Flush cache failed.\n")
        if path == "/update_weights_from_tensor":
            self.weights = int(body["weight_version"])
        if path.endswith("load_lora_adapter"):
            return self.changed(path, **body)
        return web.json_response({"success": True})

    async def read(self, body):
        """Score texts, as it was told."""
        if (wrong := self.wrong.pop(0) if self.wrong else None) is not None:
            return web.json_response({"error": {"message": "so it goes"}}, status=wrong)
        self.reading.set()
        await self.hold.wait()
        replies = []
        for ids in body["input_ids"]:
            places = [None, *(scored(ids[:place], self.weights) for place in range(1, len(ids)))]
            entries = [[None, ids[0], None], *([places[n][ids[n]], ids[n], None] for n in range(1, len(ids)))]
            order = [place and sorted(range(VOCABULARY), key=lambda token: -place[token]) for place in places]
            likeliest = [
                place and [[place[token], token, None] for token in tokens[: body["top_logprobs_num"]]]
                for place, tokens in zip(places, order, strict=True)
            ]
            replies.append({"meta_info": {"input_token_logprobs": entries, "input_top_logprobs": likeliest}})
        return web.json_response(replies)

    def changed(self, path, lora_name, lora_path=None):
        """Load or unload adapters, as it was told."""
        wrong = self.wrong.pop(0) if self.wrong else None
        if wrong is not None or (lora_path is None) != (lora_name in self.loras):
            return web.json_response({"success": False, "error_message": "so it goes"}, status=wrong or 400)
        if lora_path is None:
            del self.loras[lora_name]
        else:
            self.loras[lora_name] = lora_effect(Path(lora_path))
        return web.json_response({"success": True})

    async def stream(self, request, body):
        wrong = self.wrong.pop(0) if self.wrong else None
        self.asked.append(name := body.get("lora_path"))
        effect = 0 if name is None else self.loras[name]
        if isinstance(wrong, int):
            return web.json_response({"error": {"message": "so it goes"}}, status=wrong)
        reply = web.StreamResponse()
        await reply.prepare(request)
        rules, text, got = body["sampling_params"], list(body["input_ids"]), []
        aborted = self.running[body["rid"]] = asyncio.Event()
        try:
            while wrong != "nothing":
                await asyncio.sleep(0)
                if wrong == "hang":
                    await asyncio.Event().wait()
                if len(got) >= self.free:
                    await either(self.hold, aborted)
                token = following(text, self.weights + effect)
                text.append(token)
                got.append(token)
                reason = None
                if aborted.is_set():
                    reason = {"type": "abort", "message": "Aborted"}
                elif len(got) == rules["max_new_tokens"] or token in rules["stop_token_ids"]:
                    reason = {"type": "stop"}
                event = {
                    "meta_info": {
                        "output_token_logprobs": [[-0.5, token, None]],
                        "completion_tokens": len(got),
                        "finish_reason": reason,
                    }
                }
                if reason is not None and body["return_routed_experts"]:
                    event["meta_info"]["routed_experts"] = b64encode(routes(text).tobytes()).decode()
                await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                if wrong == "half" and len(got) == 3:
                    request.transport.abort()
                    return reply
                if reason is not None:
                    break
        finally:
            del self.running[body["rid"]]
        await reply.write(b"data: [DONE]\n\n")
        return reply


async def imitated(setup, server, shapes, *, log=None, **settings):
    """An engine around an imitation."""
    files = ModelFiles(directory=None, own=None, shapes=shapes, vocabulary=VOCABULARY)
    engine = ServedEngine(setup, files, deadline=20.0)
    watch = Watch(backoff=(0.0, 1.0, 0.0))
    child = ServerChild(
        server, None, setup.name, engine.prepare, engine.busy, ServerSettings(**settings), log=log, watch=watch
    )
    await engine.start(child)
    return engine


async def some_tokens(engine, *ids):
    """Wait until each of these requests has tokens and goes on; returns them by id. What moves is another process."""
    async with asyncio.timeout(30):
        while True:
            begun = await engine.partial(ids)
            if len(begun) == len(ids) and all(one.partial is not None for one in begun):
                return {one.id: one.partial.response_ids.tolist() for one in begun}
            await asyncio.sleep(0.01)
