"""The API over HTTP: routes, and requests as they are written on the wire.

In: JSON, or protobuf for forward passes. Out: ids of promises; results when they are fetched. Errors are `{"error": …,
"category": "user" | "server"}`, with a status of HTTP where a request was refused, and as its result where it failed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from aiohttp import web

from rlinf.config.reading import parse_json
from rlinf.runtime.base.errors import UserError
from rlinf.service.checkpoints import OWNER, CheckpointPath, Refused, expiry, moment
from rlinf.service.journal import ANSWERS, SERVICE, Line, Record
from rlinf.service.keys import KEY, Busy
from rlinf.service.promises import failure
from rlinf.service.samplers import MOST_LIKELIEST, SampleRequest
from rlinf.service.service import Model, Service
from rlinf.service.wire import PROTOBUF, PassRequest, Targets, pass_head, read

_POLL = 30.0
"""Seconds for which a fetch waits for its result; clients give up after 45."""
_KEYS_KEPT = 4096
"""Idempotency keys whose answers are remembered."""
_MOST_SEED = 2**63 - 1
_FILES = "/files/"
"""Files of checkpoints lie below it, for whoever has a URL with a signature."""
_SIGNED_FOR = 3600.0
"""Seconds for which such a URL is good."""
Answer = Mapping[str, Any] | web.StreamResponse
_POSTS = (
    *("client/config", "client/dynamic_config", "telemetry", "create_session", "session_heartbeat", "create_model"),
    *("unload_model", "get_info", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights"),
    *("weights_info", "create_sampling_session", "asample", "save_weights_external", "copy_weights"),
    "join_sampling_session",
)
"""Paths of calls in JSON, each answered by the method of its name."""
_GETS = {
    "healthz": "_healthz",
    "get_server_capabilities": "_capabilities",
    "samplers/{id}": "_sampler",
    "checkpoints": "_checkpoints",
    "training_runs": "_runs",
    "training_runs/{run}": "_run",
    "training_runs/{run}/checkpoints": "_checkpoints",
    "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": "_urls",
    "sessions": "_sessions",
    "usage": "_usage",
    "sessions/{id}": "_session",
}
"""Paths of lists, and the methods that answer them."""


def wanted(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """A value of a request; null is as good as none.

    Raises:
        Refused: it is missing or of another type.
    """
    value = body.get(name)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(each.__name__ for each in kind)
        raise Refused(f"{name}={str(value)[:100]!r} must be {names}")
    return value


async def _object(request: web.Request) -> dict[str, Any]:
    """A body in JSON; none is as good as one without values."""
    body = parse_json(await request.read() or b"{}")
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


def _model_number(body: Mapping[str, Any]) -> int:
    """Number of a model within its session, of which there are checkpoints by name."""
    number: int = wanted(body, "model_seq_id", int)
    if not 0 <= number < 10**9:
        raise Refused(f"model_seq_id={number} must be from 0 to {10**9 - 1}")
    return number


class App:
    """Answers requests.

    Args:
        service: what clients have.
        tokenizer: where clients find the base model's.
    """

    def __init__(self, service: Service, tokenizer: str) -> None:
        self._service, self.tokenizer = service, tokenizer
        self._answers: dict[str, asyncio.Task[Answer]] = {}  # by idempotency key

    def application(self) -> web.Application:
        """For aiohttp's server."""
        size = int(self._service.config.max_body_mb * 2**20)
        app = web.Application(middlewares=[self._answered], client_max_size=size)
        routes: Any = app.router  # `_answered` makes responses of what they return
        for name in _POSTS:
            routes.add_post(f"/api/v1/{name}", self._of_json(getattr(self, f"_{name.replace('/', '_')}")))
        routes.add_post("/api/v1/forward_backward", self._forward)
        routes.add_post("/api/v1/retrieve_future", self._retrieve)
        for name, handler in _GETS.items():
            routes.add_get(f"/api/v1/{name}", getattr(self, handler))
        routes.add_post("/api/v1/sessions/{id}/finish", self._finish)
        routes.add_put("/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/ttl", self._expire)
        routes.add_delete("/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", self._delete)
        routes.add_get(f"{_FILES}{{run}}/{{kind}}/{{name}}/{{file}}", self._file)
        return app

    async def called(self, call: str, body: dict[str, Any] | bytes) -> Any:
        """Do for a program in this process what is asked over HTTP otherwise; what is promised there is its result.

        Args:
            call: the path's name, such as optim_step.
            body: of the request.

        Raises:
            Refused: it cannot be served.
        """
        try:
            promise = self._pass(body) if isinstance(body, bytes) else await getattr(self, f"_{call}")(body)
        except ValueError as error:
            raise Refused(str(error)) from error
        finally:
            await self._service.journal.synced()
        if "request_id" not in promise:
            return promise
        result = await self._service.promises.result(promise["request_id"], None)
        if isinstance(result, dict) and "error" in result:
            raise Refused(result["error"]) if result["category"] == "user" else RuntimeError(result["error"])
        return result

    @web.middleware
    async def _answered(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
    ) -> web.StreamResponse:
        """Check the token, and make responses of what handlers return and raise."""
        key = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            if request.path != "/api/v1/healthz" and not request.path.startswith(_FILES):  # those have a signature
                KEY.set(self._service.keys.named(key))
            try:
                answer = await handler(request)
            finally:
                await self._service.journal.synced()  # what it promised, and what it refused as a model's next request
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        except web.HTTPException as error:
            unserved = error.status in (404, 405)
            text = f"rlinf serve has no {request.method} {request.path[:200]}" if unserved else str(error.reason)
            if isinstance(error, web.HTTPRequestEntityTooLarge):
                text = self._too_long
            return web.json_response({"error": text, "category": "user"}, status=error.status)
        except (UserError, ValueError) as error:
            wait = {"Retry-After": "1"} if isinstance(error, Busy) else {}
            return web.json_response(failure(error), status=getattr(error, "status", 400), headers=wait)
        except Exception as error:  # a bug, or a disk that takes nothing: the log has all of it
            return web.json_response(failure(error), status=500)

    @property
    def _too_long(self) -> str:
        return f"the request is longer than serve.max_body_mb={self._service.config.max_body_mb:g}"

    # After a restart ----------------------------------------------------------------------------------------------

    async def restore(self, lines: Mapping[str, Line], base: str) -> None:
        """Have what clients had, and begin with what they were promised.

        Args:
            lines: of the journal.
            base: what the base model is made of.

        Raises:
            InputError: it is of another base model.
        """
        service = self._service
        service.restore(lines.get(SERVICE) or Line(0, []), base)
        for model in list(service.models.values()):
            if (line := lines.get(model.line)) is not None:
                service.restore_model(model, line)
                for record in line.requests(done=True):
                    await self._repeat(model, record)
        for name in lines.keys() - {SERVICE, ANSWERS, *(model.line for model in service.models.values())}:
            service.journal.end(name)  # a death came before its first answer, or after its last
        if (answers := lines.get(ANSWERS)) is not None:
            service.restore_answers(answers)
            for record in answers.requests(done=False):
                try:
                    await self._asample(record.facts["body"])
                except Refused as error:  # its checkpoint is gone
                    service.promises.restore({record.facts["id"]: failure(error)}, ())

    async def _repeat(self, model: Model, record: Record) -> None:
        """Run a request of a model again."""
        facts = record.facts
        call, number = facts["call"], facts["seq_id"]
        with suppress(UserError, ValueError):  # it has its turn all the same: a checkpoint was deleted since
            if call == "refuse":
                self._service.refuse(model, number, Refused(facts["error"]), spoils=facts["spoils"])
            elif call == "forward_backward":
                self._pass(record.body, number)
            else:
                await getattr(self, f"_{call}")(facts["body"])

    @contextmanager
    def _refusing(self, model: Model, number: int | None, *, spoils: bool = False) -> Iterator[None]:
        """Have a request that is refused take its turn, so that those behind it do not wait for it."""
        try:
            yield
        except Busy:  # it comes again
            raise
        except Exception as error:  # a bug, too: whatever it is, later requests wait for the turn of this one
            self._service.refuse(model, number, error, spoils=spoils)
            raise

    def _promised(self, model: Model, call: str, id: str, body: dict[str, Any] | bytes) -> Answer:
        """Answer with a promise to keep, whatever happens.

        Args:
            model: of which something was asked.
            call: what.
            id: of the promise.
            body: of the request.
        """
        facts: dict[str, Any] = {"call": call, "seq_id": int(id.rpartition(":")[2])}
        if isinstance(body, dict):
            facts["body"] = {**body, "seq_id": facts["seq_id"]}
        self._service.keep_request(model, id, facts, body if isinstance(body, bytes) else b"")
        return {"request_id": id, "model_id": model.id}

    def _of_json(self, handler: Callable[[Any], Awaitable[Answer]]) -> Callable[[web.Request], Awaitable[Answer]]:
        """Read a body; with an idempotency key that was seen, the answer is the one that was given."""

        async def handle(request: web.Request) -> Answer:
            key = request.headers.get("X-Idempotency-Key")
            body = await _object(request)
            if key is None:
                return await handler(body)
            key = f"{KEY.get()} {request.path} {key}"
            if key not in self._answers:
                self._answers[key] = asyncio.ensure_future(handler(body))
                while len(self._answers) > _KEYS_KEPT:
                    del self._answers[next(iter(self._answers))]
            try:
                return await asyncio.shield(self._answers[key])
            except Exception as error:  # what may come out otherwise the next time is asked again
                if isinstance(error, Busy) or not isinstance(error, UserError | ValueError):
                    self._answers.pop(key, None)
                raise

        return handle

    # What every client asks -----------------------------------------------------------------------------------------

    async def _client_config(self, body: Mapping[str, Any]) -> Answer:
        return {}  # clients' own defaults hold

    _client_dynamic_config = _client_config

    async def _telemetry(self, body: Mapping[str, Any]) -> Answer:
        return {"status": "accepted"}

    async def _healthz(self, request: web.Request) -> Answer:
        return {"status": "ok"}

    async def _capabilities(self, request: web.Request) -> Answer:
        name, longest = self._service.config.model_name, self._service.session.limits[1]
        about = {"model_name": name, "max_context_length": longest, "trainable": True, "sampleable": True}
        return {"supported_models": [about]}

    async def _create_session(self, body: Mapping[str, Any]) -> Answer:
        return {"type": "create_session", "session_id": self._service.create_session()}

    async def _session_heartbeat(self, body: Mapping[str, Any]) -> Answer:
        self._service.check_session(body.get("session_id"))
        return {"type": "session_heartbeat"}

    async def _retrieve(self, request: web.Request) -> Answer:
        body = await _object(request)
        id = wanted(body, "request_id", str)
        if not self._service.visible(id):
            raise Refused(f"there is no request {id[:200]!r}", 404)
        self._service.sign(id)
        result = await self._service.promises.result(id, _POLL)
        if result is None:
            state: dict[str, Any] = {"queue_state": "active"}
            if (reason := self._service.waits(id)) is not None:
                state = {"queue_state": "paused_capacity", "queue_state_reason": reason}  # which clients print
            return web.json_response({"type": "try_again", "request_id": id, **state}, status=408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return result

    # Models -------------------------------------------------------------------------------------------------------

    def _of_model(self, body: Mapping[str, Any]) -> tuple[Model, int | None]:
        return self._service.model(wanted(body, "model_id", str)), wanted(body, "seq_id", int, None)

    async def _create_model(self, body: Mapping[str, Any]) -> Answer:
        self._service.check_base(body.get("base_model"))
        lora = wanted(body, "lora_config", dict, {"rank": 0})  # without any, all weights
        kind = wanted(body, "optimizer_config", dict, {}).get("type", "adamw")
        if kind != "adamw":
            raise Refused(f"optimizer_config.type={str(kind)[:50]!r}: this service has adamw alone")
        about = {
            "rank": wanted(lora, "rank", int),
            "seed": wanted(lora, "seed", int, int(np.random.default_rng().integers(2**31))),
            "attn": wanted(lora, "train_attn", bool, True),
            "mlp": wanted(lora, "train_mlp", bool, True),
            "unembed": wanted(lora, "train_unembed", bool, True),
            "user_metadata": wanted(body, "user_metadata", dict, None),
        }
        id = self._service.create_model(wanted(body, "session_id", str), _model_number(body), about)
        return {"request_id": id, "model_id": id}

    async def _unload_model(self, body: dict[str, Any]) -> Answer:
        model, number = self._of_model(body)
        return self._promised(model, "unload_model", self._service.unload(model, number), body)

    async def _get_info(self, body: Mapping[str, Any]) -> Answer:
        model, name = self._of_model(body)[0], self._service.config.model_name
        data = {"model_name": name, "tokenizer_id": self.tokenizer, "arch": "unknown"}
        about = {"model_data": data, "model_id": model.id, "model_name": name}
        return {"type": "get_info", **about, **_adapters_of(model.about)}

    async def _forward(self, request: web.Request) -> Answer:
        if request.content_type != PROTOBUF:
            raise Refused(f"forward_backward is read as {PROTOBUF} alone: take a client of 0.35 or later", 415)
        body, most = bytearray(), int(self._service.config.max_body_mb * 2**20)
        async for chunk in request.content.iter_any():  # what is too long has its turn, too: its head says whose
            body += chunk
            if len(body) > most:
                head = pass_head(body)
                with self._refusing(self._service.model(head.model_id), head.seq_id or None, spoils=True):
                    raise Refused(self._too_long, 413)
        return self._pass(bytes(body))

    def _pass(self, body: bytes, number: int | None = None) -> Answer:
        """Promise a forward pass.

        Args:
            body: as it is on the wire.
            number: of the request, where it is not the body's.
        """
        message = read("ForwardBackwardRequest", body)
        model, number = self._service.model(message.model_id), number or message.seq_id or None
        with self._refusing(model, number, spoils=not message.forward_only):
            id = self._service.forward(model, number, PassRequest.of(message, self._service.session.limits[1]))
        return self._promised(model, "forward_backward", id, body)

    async def _optim_step(self, body: dict[str, Any]) -> Answer:
        model, number = self._of_model(body)
        with self._refusing(model, number, spoils=True):
            if body.get("optimizer_params") is not None:
                raise Refused("optimizer_params: this service has adam_params alone")
            id = self._service.optim_step(model, number, wanted(body, "adam_params", dict))
        return self._promised(model, "optim_step", id, body)

    def _how(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "ttl_seconds": body.get("ttl_seconds"),
            "user_metadata": wanted(body, "user_metadata", dict, None),
            "overwrite": wanted(body, "overwrite", bool, False),
        }

    async def _save_weights(self, body: dict[str, Any]) -> Answer:
        model, number = self._of_model(body)
        with self._refusing(model, number):
            path = CheckpointPath.named(model.id, "weights", body.get("path") or f"{model.number(number):06d}")
            id = self._service.save(model, number, path, self._how(body))
        return self._promised(model, "save_weights", id, {**body, "path": path.name})

    async def _save_weights_for_sampler(self, body: dict[str, Any]) -> Answer:
        model, number = self._of_model(body)
        with self._refusing(model, number):
            how, name = self._how(body), body.get("path")
            if name is None:
                session, seq = model.id.partition(":")[0], wanted(body, "sampling_session_seq_id", int)
                how["sampler"], name = f"{session}:sample:{seq}", f"session-{seq}"
            id = self._service.save(model, number, CheckpointPath.named(model.id, "sampler_weights", name), how)
        return self._promised(model, "save_weights_for_sampler", id, body)

    async def _save_weights_external(self, body: dict[str, Any]) -> Answer:
        model, number = self._of_model(body)
        with self._refusing(model, number):
            if body.get("age_encryption_recipients"):
                raise Refused("age_encryption_recipients: this service writes no encrypted files")
            path = CheckpointPath.named(model.id, "external_weights", body.get("path"))
            id = self._service.save(model, number, path, self._how(body))
        return self._promised(model, "save_weights_external", id, body)

    async def _copy_weights(self, body: Mapping[str, Any]) -> Answer:
        source = CheckpointPath.of(body.get("source_path"))
        if body.get("session_id") is None:  # into a project, of which there are none: all is of one owner
            session, number = self._service.create_session(), 0
        else:
            session, number = wanted(body, "session_id", str), _model_number(body)
        return {"tinker_path": str(await self._service.copy(session, number, source, body.get("ttl_seconds")))}

    async def _load_weights(self, body: dict[str, Any]) -> Answer:
        if body.get("model_id") is not None:
            model, number = self._of_model(body)
            with self._refusing(model, number):
                path, optimizer = CheckpointPath.of(body.get("path")), wanted(body, "optimizer", bool)
                id = self._service.load(model, number, path, optimizer=optimizer)
            return self._promised(model, "load_weights", id, body)
        path, optimizer = CheckpointPath.of(body.get("path")), wanted(body, "optimizer", bool)
        if body.get("base_model") is not None:
            self._service.check_base(body["base_model"])
        about = {"user_metadata": wanted(body, "user_metadata", dict, None)}
        session, number = wanted(body, "session_id", str), _model_number(body)
        id = self._service.create_model(session, number, about, (str(path), optimizer))
        return {"request_id": id, "model_id": id}

    # Answers ------------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, body: Mapping[str, Any]) -> Answer:
        path = wanted(body, "model_path", str, None)
        if path is None or body.get("base_model") is not None:
            self._service.check_base(body.get("base_model"))
        session, number = wanted(body, "session_id", str), wanted(body, "sampling_session_seq_id", int)
        id = self._service.create_sampler(session, number, path)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    async def _join_sampling_session(self, body: Mapping[str, Any]) -> Answer:
        self._service.sampler(wanted(body, "sampling_session_id", str))
        return {"type": "join_sampling_session", "client_counter": 1 + secrets.randbelow(2**30)}

    async def _asample(self, body: Mapping[str, Any]) -> Answer:
        sampler = self._service.sampler(wanted(body, "sampling_session_id", str))
        if body.get("prompt_alt_tokens_k"):
            raise Refused("prompt_alt_tokens_k: this service draws nothing in place of a prompt's tokens")
        request = self._read_sample(body)
        id = self._service.sample(sampler, wanted(body, "seq_id", int, None), request)
        params = {**body["sampling_params"], "seed": request.seed}
        again = {**body, "seq_id": int(id.rpartition(":")[2]), "sampling_params": params}
        if not self._service.promises.over(id):
            self._service.journal.request(ANSWERS, id, {"call": "asample", "body": again})
        return {"request_id": id, "sample_sequence_ids": [f"{id}:{number}" for number in range(request.count)]}

    def _read_sample(self, body: Mapping[str, Any]) -> SampleRequest:
        """Read what is asked of the model.

        Raises:
            Refused: it cannot be answered.
        """
        vocabulary, longest = self._service.session.limits
        prompt = _tokens(wanted(body, "prompt", dict), vocabulary)
        params = wanted(body, "sampling_params", dict)
        count, most = wanted(body, "num_samples", int, 1), self._service.config.max_samples
        if not 1 <= count <= most:
            raise Refused(f"num_samples={count} must be from 1 to {most}")
        room = None if longest is None else longest - len(prompt)
        if room is not None and room < 1:
            raise Refused(f"the prompt has {len(prompt)} tokens, and the model takes {longest} with its answer")
        wished = wanted(params, "max_tokens", int, room)
        if wished is None or wished < 1:
            raise Refused(f"sampling_params.max_tokens={wished} must be at least 1")
        top_k = wanted(params, "top_k", int, -1)
        sampling: dict[str, Any] = {
            "max_new_tokens": wished if room is None else min(wished, room),
            "temperature": _within(params, "temperature", 0.0, 1e6, 1.0),
            "top_p": _within(params, "top_p", 1e-9, 1.0, 1.0),
            "top_k": max(top_k, 0),
            **_stops(params.get("stop")),
        }
        seed, last = (
            wanted(params, "seed", int, secrets.randbits(48)),
            wanted(body, "prompt_logprobs_last_n", int, None),
        )
        if not 0 <= seed <= _MOST_SEED:
            raise Refused(f"sampling_params.seed={seed} must be from 0 to {_MOST_SEED}")
        targets = wanted(body, "target_prompt_logprobs", dict, None)
        about = None if targets is None else Targets.of(targets, len(prompt) - 1, vocabulary or 2**31)
        wants_prompt = wanted(body, "prompt_logprobs", bool, False)
        likeliest = [wanted(body, f"topk_{part}_logprobs", int, 0) for part in ("prompt", "sample")]
        most = min(MOST_LIKELIEST, vocabulary or MOST_LIKELIEST)
        if not all(0 <= each <= most for each in likeliest):
            raise Refused(f"topk_prompt_logprobs, topk_sample_logprobs: {likeliest} must be from 0 to {most}")
        return SampleRequest(prompt, count, seed, sampling, wants_prompt, last, about, *likeliest)

    # Lists --------------------------------------------------------------------------------------------------------

    async def _sampler(self, request: web.Request) -> Answer:
        sampler = self._service.sampler(request.match_info["id"])
        name = self._service.config.model_name
        return {"sampler_id": sampler.id, "base_model": name, "model_path": sampler.weights or None}

    async def _checkpoints(self, request: web.Request) -> Answer:
        run = request.match_info.get("run")
        listed = await asyncio.to_thread(self._service.store.list, run, KEY.get())
        page, cursor = _page(request, listed)
        return {"checkpoints": page, **({} if run else {"cursor": cursor})}

    def _about(self, model: Model) -> dict[str, Any]:
        return self._run_facts(model.id, model.last_request, model.about, model.about["user_metadata"])

    def _run_facts(
        self, id: str, last: float, about: Mapping[str, Any], metadata: Any, owner: str | None = None
    ) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "training_run_id": id,
            "base_model": self._service.config.model_name,
            "model_owner": owner or self._service.owner(id),
        }
        facts |= {**_adapters_of(about), "last_request_time": moment(last)}
        return {**facts, "user_metadata": metadata}

    async def _runs(self, request: web.Request) -> Answer:
        page, cursor = _page(
            request, [self._about(each) for each in self._service.models.values() if self._service.visible(each.id)]
        )
        return {"training_runs": page, "cursor": cursor}

    async def _run(self, request: web.Request) -> Answer:
        id = request.match_info["run"]
        if id in self._service.models:
            return self._about(self._service.model(id))
        about = await asyncio.to_thread(self._service.store.newest, id)
        self._service.checkpoint(CheckpointPath.of(about["path"]))
        return self._run_facts(id, about["time"], about, about.get("run_metadata"), about.get("owner", OWNER))

    async def _sessions(self, request: web.Request) -> Answer:
        return {"sessions": _page(request, [each for each in self._service.sessions if self._service.visible(each)])[0]}

    async def _session(self, request: web.Request) -> Answer:
        id = self._service.check_session(request.match_info["id"], finished=True)
        samplers = [each for each in self._service.samplers if each.startswith(f"{id}:")]
        return {"training_run_ids": self._service.sessions[id], "sampler_ids": samplers}

    async def _usage(self, request: web.Request) -> Answer:
        return {"usage": self._service.usage()}

    async def _weights_info(self, body: Mapping[str, Any]) -> Answer:
        about = self._service.checkpoint(CheckpointPath.of(body.get("tinker_path")))
        layers = {f"train_{name}": about.get(name, False) for name in ("unembed", "mlp", "attn")}
        return {"base_model": about["base_model"], **_adapters_of(about), **(layers if about["rank"] else {})}

    def _named(self, request: web.Request) -> CheckpointPath:
        """The checkpoint that a URL names, which may be seen."""
        path = CheckpointPath.of("tinker://{run}/{kind}/{name}".format(**request.match_info))
        self._service.checkpoint(path)
        return path

    async def _finish(self, request: web.Request) -> Answer:
        await self._finish_session({"session_id": request.match_info["id"]})
        return web.Response(status=204)

    async def _finish_session(self, body: Mapping[str, Any]) -> Answer:
        ids = []
        for model in self._service.finish(wanted(body, "session_id", str)):
            ids.append(self._service.unload(model, None))
            self._promised(model, "unload_model", ids[-1], {"model_id": model.id})
        await asyncio.gather(*(self._service.promises.result(id, _POLL) for id in ids))
        return {}

    async def _delete(self, request: web.Request) -> Answer:
        await self._service.store.delete(self._named(request))
        return web.Response(status=204)

    async def _expire(self, request: web.Request) -> Answer:
        body = await _object(request)
        await self._service.store.expire(self._named(request), expiry(body.get("ttl_seconds")))
        return web.Response(status=204)

    # Downloads ----------------------------------------------------------------------------------------------------

    def _signature(self, path: CheckpointPath, place: str, until: str) -> str:
        owner = self._service.checkpoint(path).get("owner", OWNER)
        return self._service.keys.signature(owner, f"{place} {until}")

    async def _urls(self, request: web.Request) -> Answer:
        path, end = self._named(request), time.time() + _SIGNED_FOR
        urls = {}
        for file in await asyncio.to_thread(self._service.store.files, path):
            place, until = f"{_FILES}{path.run}/{path.kind}/{path.name}/{file}", str(int(end))
            query = {"until": until, "signature": self._signature(path, place, until)}
            urls[file] = str(request.url.with_path(place).with_query(query))
        return {"urls": urls, "expires": moment(end)}

    async def _file(self, request: web.Request) -> Answer:
        path, until = self._named(request), request.query.get("until", "")
        sign = self._signature(path, request.path, until)
        proof = request.query.get("signature", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(sign.encode(), proof) or float(until) < time.time():
            raise Refused("the URL's signature is wrong, or too old; ask for the URLs again", 403)
        file = request.match_info["file"]
        if file not in await asyncio.to_thread(self._service.store.files, path):
            raise Refused(f"{path} has no file {file[:200]!r}", 404)
        return web.FileResponse(self._service.store.directory(path) / file)


def _adapters_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Tell a model of adapters from one of all weights, by what either is made by."""
    return {"is_lora": about["rank"] > 0, "lora_rank": about["rank"] or None}


def _page(request: web.Request, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """The part of a list that is asked for, and where it is in it."""
    limit, offset = (request.query.get(name, str(default)) for name, default in (("limit", 100), ("offset", 0)))
    if not (limit.isdecimal() and offset.isdecimal()):
        raise Refused("limit and offset must be whole numbers")
    first, count = int(offset), int(limit)
    return rows[first : first + count], {"offset": first, "limit": count, "total_count": len(rows)}


def _tokens(prompt: Mapping[str, Any], vocabulary: int | None) -> np.ndarray:
    """Tokens of a prompt, int64.

    Raises:
        Refused: there are none, or others than the model has.
    """
    tokens: list[Any] = []
    for chunk in wanted(prompt, "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise Refused("prompt has a chunk that is not encoded_text, which this service does not read")
        tokens += wanted(chunk, "tokens", list)
    most = 2**31 if vocabulary is None else vocabulary
    if not tokens or not all(type(each) is int and 0 <= each < most for each in tokens):
        raise Refused(f"prompt must have tokens, each from 0 to {most - 1}")
    return np.array(tokens, np.int64)


def _within(params: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = float(wanted(params, name, (int, float), default))
    if not low <= value <= high:
        raise Refused(f"sampling_params.{name}={value:g} must be from {low:g} to {high:g}")
    return value


def _stops(stop: Any) -> dict[str, Any]:
    """Settings of what ends an answer: None keeps the model's own end tokens, a list takes their place.

    Raises:
        Refused: neither texts nor tokens.
    """
    if stop is None:
        return {}
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and all(isinstance(each, str) and each for each in stops) and stops:
        return {"stop": stops, "stop_ids": ()}
    if isinstance(stops, list) and all(type(each) is int and 0 <= each < 2**31 for each in stops):
        return {"stop": (), "stop_ids": tuple(stops)}
    raise Refused(f"sampling_params.stop={str(stop)[:100]!r} must be texts, or tokens")
