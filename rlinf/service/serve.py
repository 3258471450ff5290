"""Opens a service: a session on a configuration's base model, and the server that clients speak to.

In: a configuration, of which `model`, `rollout`, `trainer`, `placement` and `serve` count. Out: a URL and a key. It
runs until it is told to end. Checkpoints of clients lie beside the run's directory, in `NAME-service`, and stay.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import getproxies, proxy_bypass

from aiohttp import web

from rlinf.config.load import InputError
from rlinf.config.schema import leaves
from rlinf.config.text import RunConfig
from rlinf.models.language.build import cost_of
from rlinf.runs.library.session import Session
from rlinf.runtime.system.system import ActorSystem
from rlinf.service.app import App
from rlinf.service.checkpoints import OWNER
from rlinf.service.keys import Keys
from rlinf.service.service import Service
from rlinf.storage.files import replace_text

_READ = ("model", "rollout", "trainer", "placement", "metrics", "seed", "trace", "log_every")
"""Sections and keys that a service's session has of its configuration."""


def steady_products() -> None:
    """Have MKL cut no sum among threads by how many rows there are, before its first product: so that several models
    learn in one batch with several threads, too. Whoever has set its mode keeps it."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


@asynccontextmanager
async def serving(
    config: RunConfig, say: Callable[[str], None], system: ActorSystem | None = None
) -> AsyncIterator[tuple[str, str, App]]:
    """A service that listens.

    Args:
        config: checked.
        say: prints a line for people.
        system: whose processes have the roles, by `placement`; None: this one has them all.

    Yields:
        Its URL, its key, and what answers.

    Raises:
        InputError: it cannot listen, anybody could use it from elsewhere, or the configuration cannot be run.
    """
    host, token = config.serve.host.strip("[]"), config.serve.token
    local = host in ("localhost", "::1") or host.startswith("127.")
    if token is None and not config.serve.keys and not local:
        raise InputError(f"serve.host={host}: whoever reaches it could train and sample; set serve.token=tml-…")
    rank = config.rollout.engine_args.get("adapter_rank")
    if isinstance(rank, int) and 0 < rank < config.serve.max_rank:
        raise InputError(
            f"serve.max_rank={config.serve.max_rank}: the engine holds adapters of up to "
            f"rollout.engine_args.adapter_rank={rank}; lower the one, or raise the other"
        )
    directory = _directory(config)
    root = directory.with_name(f"{directory.name}-service")
    named = dict(config.serve.keys)
    if token is not None or not named:
        token = named[OWNER] = token or _token(root / "token")
    if len({*named.values()}) < len(named) or (OWNER in config.serve.keys and token is not None):
        raise InputError("serve.keys: two keys are the same, or one has the name of serve.token, which is local")
    keys = Keys(named, config.serve.max_requests, config.serve.max_tokens)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_bound(host, config.serve.port))
        settings = {"run_dir": directory, **_settings(config)}
        context = Session.local(**settings) if system is None else Session.connect(system, **settings)
        session = await stack.enter_async_context(context)
        why_alone = await _try_models(session, whole=config.serve.max_whole > 0)
        service = Service(session, config.serve, root, keys, unembeds=await _unembeds(session, config))
        stack.push_async_callback(service.close)
        session.tokenizer.save_pretrained(root / "tokenizer")
        app = App(service, str(root / "tokenizer"))
        await app.restore(service.journal.recover(), _base(config))
        runner = web.AppRunner(app.application(), access_log=None, shutdown_timeout=1.0)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        port = listener.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"{config.name}: serves {config.serve.model_name} to clients of the Tinker API; checkpoints go to {root}")
        if why_alone:
            say(f"  models learn one after the other, not in common batches: {why_alone}")
        if service.sessions:
            count = f"{len(service.models)} models and {len(service.samplers)} samplers"
            say(f"  it goes on with what clients had: {count} of {len(service.sessions)} sessions")
        around = f" NO_PROXY={host}" if local and getproxies() and not proxy_bypass(host) else ""
        say(f"  TINKER_BASE_URL={url} TINKER_API_KEY={token or 'one of serve.keys'}{around}")
        if around:
            say("  NO_PROXY, since a proxy is set, which clients would ask for this machine's own address, in silence")
        if not local:
            say(f"  serve.host={host}: the key and all data cross the network unencrypted; put TLS before it")
        yield url, token or next(iter(named.values())), app


async def _try_models(session: Session, *, whole: bool) -> str:
    """See that the trainer can have models of clients, `whole` ones, too; why they do not learn in common batches, if
    they do not.

    Raises:
        InputError: it cannot.
    """
    for lora in ({"r": 1, "alpha": 1, "target_modules": "auto"}, *([None] if whole else [])):
        try:
            await session.trainer.open_model("probe", lora)
        except ValueError as error:
            raise InputError(f"rlinf serve: models of clients cannot be trained so: {error}") from None
        await session.trainer.close_model("probe")
    return await session.trainer.why_alone()


async def _unembeds(session: Session, config: RunConfig) -> bool:
    """True if answers can be by adapters of the output embedding: as they are, or merged into it alone."""
    if all(await session.rollout.takes_adapters()):
        return all(await session.rollout.takes_adapters(unembed=True))
    cost = cost_of(config.model.path or config.model.config, session.tokenizer)
    return cost is not None and not cost.tied


def _directory(config: RunConfig) -> Path:
    """Directory of the session's run."""
    return (Path(config.output_dir).expanduser() / config.name).absolute()


def _token(path: Path) -> str:
    """The key that was made at the first start: clients go on with it after a restart."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, f"tml-{secrets.token_urlsafe(18)}\n", mode=0o600)
    return path.read_text(encoding="utf-8").strip()


def _base(config: RunConfig) -> str:
    """Names what the base model is made of."""
    return json.dumps({"model": asdict(config.model), "seed": config.seed}, sort_keys=True, default=str)


def _settings(config: RunConfig) -> dict[str, Any]:
    """Keys of a configuration that are not as they are anyway, for a session of which nothing is trained but what
    clients bring: the base model stays frozen below adapters of its own, which nobody trains."""
    settings: dict[str, Any] = {}
    for leaf in leaves(RunConfig):
        value: Any = config
        for part in leaf.key.split("."):
            value = getattr(value, part)
        if leaf.key.partition(".")[0] in _READ and value != leaf.default:
            settings[leaf.key] = value
    if not config.model.lora.on:
        settings["model.lora.r"] = 1
    return settings


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        InputError: the address cannot be had.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"serve.host={host}, serve.port={port}: it cannot be listened on: {error}; set serve.port to another one"
        ) from None
