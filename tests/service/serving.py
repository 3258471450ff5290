"""A service of a tiny model that starts in a moment, and what a client would ask of it by hand."""

from __future__ import annotations

from contextlib import asynccontextmanager

import aiohttp
import numpy as np

from rlinf.runs.rules import load_config
from rlinf.service import wire
from rlinf.service.serve import serving

KEY = "tml-of-the-tests"
TINY = (
    "serve.port=0", f"serve.token={KEY}", "model.config.hidden_size=16", "model.config.intermediate_size=16",
    "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2", "model.config.num_key_value_heads=1",
    "model.config.max_position_embeddings=32", "rollout.max_new_tokens=8",
)  # fmt: skip


@asynccontextmanager
async def tiny(directory, *overrides, system=None):
    """Its URL."""
    hosts = 1 if system is None else system.hosts
    config = load_config("configs/serve/tiny.yaml", [*TINY, f"output_dir={directory}", *overrides], hosts)
    async with serving(config, lambda line: None, system) as (url, *_):
        yield url


class Http:
    """Asks a service without the official client.

    Args:
        url: the service's.
        key: that is shown.
    """

    def __init__(self, url: str, key: str = KEY) -> None:
        self._url, self._key = url, key

    async def __aenter__(self) -> Http:
        self._session = aiohttp.ClientSession(headers={"X-API-Key": self._key})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, path, body=None, method="POST", headers=None):
        """Status, and what was answered."""
        how = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self._session.request(method, f"{self._url}/api/v1/{path}", headers=headers, **how) as response:
            answer = await response.read() if response.content_type == wire.PROTOBUF else await response.json()
            return response.status, answer

    async def done(self, path, body, **more):
        """Result of what was promised."""
        status, promise = await self.ask(path, body, **more)
        assert status == 200, promise
        while True:
            result = (await self.ask("retrieve_future", {"request_id": promise["request_id"]}))[1]
            if not (isinstance(result, dict) and result.get("type") == "try_again"):
                return result

    async def model(self, **lora):
        """Id of a new one."""
        session = (await self.ask("create_session", {}))[1]["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        return (await self.done("create_model", {**body, "lora_config": {"rank": 2, "seed": 1, **lora}}))["model_id"]

    async def learn(self, model, number, **more):
        """Status and answer of a forward_backward."""
        kind = {"Content-Type": wire.PROTOBUF}
        return await self.ask("forward_backward", request(model, number, **more), headers=kind)


def request(
    model, number, tokens=(3, 4, 5), targets=(4, 5, 6), loss="cross_entropy", settings=None, only=False, **inputs
):
    """A forward pass as it is on the wire, with its gradient unless it is `only` that."""
    given = {"target_tokens": np.array(targets, np.int64)}
    given |= {name: np.array(value, np.float32) for name, value in (inputs or {"weights": [1, 1, 1]}).items()}
    tensors = [
        {"key": name, "value": {"dense": array.tobytes(), "dtype": 2 if array.dtype.kind == "i" else 1}}
        for name, array in given.items()
    ]
    chunk = {"encoded_text": {"tokens": np.array(tokens, np.int32).tobytes()}}
    numbers = [{"key": key, "value": value} for key, value in (settings or {}).items()]
    data = [{"model_input": [chunk], "loss_fn_inputs": tensors}]
    asked = {"model_id": model, "seq_id": number, "data": data, "loss_fn": loss, "loss_fn_config": numbers}
    return wire.written("ForwardBackwardRequest", **asked, forward_only=only)


def read_sample(body):
    """Tokens and log-probs of the answers of a `SampleResponse`, and the log-probs of its prompt."""
    message = wire.read("SampleResponse", body)
    logprobs = [np.frombuffer(each.logprobs, "<f4") for each in message.sequences]
    return [each.tokens for each in message.sequences], [*logprobs, np.frombuffer(message.prompt_logprobs, "<f4")]
