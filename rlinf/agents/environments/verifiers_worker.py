"""A process that plays the environments of verifiers, in an environment of its own: it imports nothing of rlinf.

In: as arguments, the environment's configuration as JSON, and the path of a socket; there, a connection for each
episode, with a line of JSON that names its task and the endpoint of its model. Out: a line with its rewards, metrics
and errors. Hanging up cancels it. Without a socket, the tasks are printed, a line for each as it is made.

An agent for which no harness is named speaks to its model from inside this process (`chat`): the harness `null` of
verifiers says the same from a process that it starts for each turn.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
import json
import os
import ssl
import sys
import types
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.envs.single_agent.env import SingleAgentEnv
from verifiers.v1.runtimes import PrimeConfig, ProgramResult, SubprocessConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
"""One for all clients: verifiers makes a client for each episode, and certificates cost ten times the episode."""

_LONGEST = 2000
"""Characters of an error that are told."""
_WAITING = 4096
"""Connections that wait while tasks are made, at most; as many as Linux holds by default."""
_NUMBERS = itertools.count()
CHAT = "rlinf_chat"
"""Name under which verifiers finds the harness below."""


class ChatConfig(vf.HarnessConfig):
    """Settings of the harness: none."""


class Chat(vf.Harness[ChatConfig]):
    """One answer to what was said so far, from inside this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> ProgramResult:
        if mcp_urls:
            return ProgramResult(1, "", "the task brings tools: set agent.harness.id to null, bash or another harness")
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        messages = [one if isinstance(one, dict) else message_to_wire(one) for one in opening]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        body = {"model": ctx.model, "messages": messages}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return ProgramResult(0 if answer.is_success else 1, "", "" if answer.is_success else answer.text)


def made_environment(settings: dict[str, Any]) -> vf.Env:
    """Make the environment; agents run on this machine unless told otherwise, by `Chat` where no harness is named."""
    module = types.ModuleType(CHAT)
    module.Chat, module.__all__ = Chat, ["Chat"]  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace(name=CHAT)  # type: ignore[assignment]
    sys.modules[CHAT] = module
    config = resolve_env_config(settings)
    for name, agent in config:
        if isinstance(agent, vf.AgentConfig):
            named = {field: getattr(agent, field) for field in agent.model_fields_set}
            if isinstance(agent.runtime, PrimeConfig) and "runtime" not in settings.get(name, {}):
                named["runtime"] = SubprocessConfig()
            named.setdefault("harness", ChatConfig(id=CHAT))
            setattr(config, name, agent.model_copy(update=named))
    return load_environment(config)


async def played(environment: vf.Env, task: Any, episode: dict[str, Any]) -> dict[str, Any]:
    """Play one episode: the weighted rewards and metrics of each agent's work in it, and what went wrong.

    Where there may be several, each is named to the endpoint by its trace's id, which the client sends as X-Session-ID.
    """
    several, url = not isinstance(environment, SingleAgentEnv), episode["url"]
    variable = f"RLINF_KEY_{next(_NUMBERS)}"  # verifiers takes a key from the process's variables alone
    os.environ[variable] = episode["key"]
    client = vf.EvalClientConfig(
        base_url=url.replace(f"/s/{episode['key']}/", "/") if several else url, api_key_var=variable
    )
    places: collections.Counter[str] = collections.Counter()

    def name(trace: Any) -> None:
        if several:
            places[trace.agent.name] += 1
            trace.id = f"{episode['key']}.{trace.agent.name}-{places[trace.agent.name]}"

    try:
        ended = await environment.run_episode(task, vf.ModelContext(model="policy", client=client), on_trace=name)
    finally:
        os.environ.pop(variable, None)
    errors = [str(each.message)[:_LONGEST] for each in ended.errors]
    agents: dict[str, Any] = {}
    for trace in ended.traces:
        errors += [str(each.message)[:_LONGEST] for each in trace.errors]
        scored = {name: None if one is None else one.value for name, one in trace.rewards.items()}
        errors += [f"the reward {name} was not computed" for name, value in scored.items() if value is None]
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        unweighted = [pair for pair in trace.rewards.items() if pair[1] and not pair[1].weight]
        metrics |= {name: one.score for name, one in unweighted}  # what is to be looked at, and adds nothing
        agents[trace.id.partition(".")[2]] = {"rewards": scored, "metrics": metrics, "learns": trace.agent.trainable}
    return {"agents": agents, "errors": [] if ended.ok else errors or ["it ended without success"]}


class Server:
    """Plays an episode for each connection.

    Args:
        environment: what is played.
    """

    def __init__(self, environment: vf.Env) -> None:
        self._environment = environment
        self.tasks: list[Any] = []
        """Its tasks."""

    async def connected(self, lines: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        """Play an episode to its end, or until nobody waits for it any more."""
        if line := await lines.readline():
            playing = asyncio.create_task(self._play(json.loads(line)))
            hanging_up = asyncio.create_task(lines.read())
            await asyncio.wait([playing, hanging_up], return_when=asyncio.FIRST_COMPLETED)
            for one in (playing, hanging_up):
                one.cancel()
            result, _ = await asyncio.gather(playing, hanging_up, return_exceptions=True)
            if isinstance(result, dict):
                out.write(json.dumps(result).encode() + b"\n")
        out.close()

    async def _play(self, episode: dict[str, Any]) -> dict[str, Any]:
        if not episode:  # whoever asks for none waits until the tasks are made
            return {}
        try:
            return await played(self._environment, self.tasks[episode["task"]], episode)
        except Exception as error:  # whatever somebody's environment raises is this episode's outcome
            return {"errors": [f"{type(error).__name__}: {error}"[:_LONGEST]]}


def row_of(data: Any, columns: list[str]) -> dict[str, Any]:
    """A task as a row: its prompt and name, and fields of its data that were asked for."""
    if missing := [name for name in columns if name not in type(data).model_fields]:
        sys.exit(f"columns: a task has no {missing[0]!r}; it has {', '.join(type(data).model_fields)}")
    return {**data.model_dump(mode="json", include=set(columns)), "prompt": data.prompt_text, "name": data.name}


async def main(request: str, path: str | None = None) -> None:
    """List the tasks, or play episodes."""
    out, sys.stdout = sys.stdout, sys.stderr  # what environments print belongs beside their errors
    os.environ["PATH"] = (
        f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"  # harnesses look for uv there
    )
    sys.path.append(os.getcwd())  # a taskset may be a module where the run was started, as an agent of one's own is
    wanted = json.loads(request)
    environment = made_environment(wanted["environment"])
    tasks = itertools.islice(iter(environment.taskset.take(wanted["tasks"])), wanted["tasks"])
    if path is None:
        for task in tasks:
            print(json.dumps(row_of(task.data, wanted["columns"])), file=out, flush=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that died
    server = Server(environment)
    listening = await asyncio.start_unix_server(server.connected, path, limit=1 << 26, backlog=_WAITING)
    async with environment.serving(), listening:
        server.tasks = list(tasks)  # who connects meanwhile waits
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
