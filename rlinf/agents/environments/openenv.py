"""Environments of OpenEnv: servers that are reached by their URL, or started beside the run.

In: a URL, or the command line of a server. Out: an agent that plays one session to its end: an observation is a
message to the model, its answer an action, and the reward is the sum of the steps' rewards. It speaks OpenEnv's
WebSocket, so nothing of OpenEnv is needed where the run is. A server that is started here is supervised: it is started
again when it dies, and ends with the run.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rlinf.agents.environments import HeldOut, Size, checked
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import Child

_HELD_OUT = 1 << 20
"""Distance between the seeds of what is learned and of what is held out."""
_STARTING = 120.0
"""Seconds that a server has to be up."""
_LONGEST = 1 << 26
"""Bytes of an observation."""


class OpenEnv:
    """Sessions of an OpenEnv server.

    Args:
        server: its URL, such as `http://127.0.0.1:8000`; or the words of a command that starts it, in which `{port}`
            stands for its port: `["uvicorn", "my_env.server.app:app", "--port", "{port}"]`.
        action: field of the action that takes the model's text; None: the only one that the server's schema has beside
            `metadata`.
        observation: text of an observation, a template such as `"{prompt} {feedback}"` of its fields; None: all that
            are texts, in the server's order.
        instructions: system message; None for none.
        turns: after which a session is ended.
        size: sessions to learn from, each with a seed of its own, which the server may use or not.
        held_out: sessions to be evaluated on.

    Raises:
        UserError: `server` is neither.
    """

    @checked
    def __init__(
        self,
        server: str | Sequence[str],
        *,
        action: str | None = None,
        observation: str | None = None,
        instructions: str | None = None,
        turns: Size = 30,
        size: Size = 1000,
        held_out: HeldOut = 50,
    ) -> None:
        if not server or (isinstance(server, str) and "://" not in server):
            raise UserError(f"openenv: server={server!r} is no URL such as http://127.0.0.1:8000, and no list of words")
        self._server, self._action, self._observation = server, action or "", observation
        self._instructions, self._turns, self._size, self._held_out = instructions, turns, size, held_out
        self._url = server.rstrip("/") if isinstance(server, str) else ""
        self._child: Child | None = None

    def tasks(self) -> list[dict[str, Any]]:
        """Seeds to learn from; what a session begins with is known when it begins."""
        return self._rows(self._size, 0)

    def held_out(self) -> list[dict[str, Any]]:
        """Seeds to be evaluated on."""
        return self._rows(self._held_out, _HELD_OUT)

    def _rows(self, count: int, first: int) -> list[dict[str, Any]]:
        seeds = range(first, first + count)
        return [{"prompt": self._instructions or f"session {seed}", "seed": seed} for seed in seeds]

    async def __aenter__(self) -> OpenEnv:
        timeout = aiohttp.ClientTimeout(total=None, connect=_STARTING)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            if not isinstance(self._server, str):
                self._url = f"http://127.0.0.1:{_free_port()}"
                words = [word.replace("{port}", self._url.rpartition(":")[2]) for word in self._server]
                how: dict[str, Any] = {"start_deadline": _STARTING}
                self._child = Child(words, name="openenv", health=self._healthy, **how)
                await self._child.start()
            if not self._action:
                self._action = await self._only_field()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.close()
        if self._child is not None:
            await self._child.stop()

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Play a session to its end.

        Raises:
            RuntimeError: the server answered with an error, or hung up.
        """
        if self._child is not None:
            await self._child.ready()
        messages = [{"role": "system", "content": self._instructions}] if self._instructions else []
        total, steps = 0.0, 0
        async with self._http.ws_connect(f"{self._url}/ws", max_msg_size=_LONGEST) as session:
            state = await _asked(session, "reset", {"seed": task.row["seed"]})
            while not state["done"] and steps < self._turns:
                messages.append({"role": "user", "content": self._text(state["observation"])})
                answer = await llm.chat(messages)
                messages.append(answer.message)
                state = await _asked(session, "step", {self._action: answer.text})
                total, steps = total + float(state["reward"] or 0.0), steps + 1
            await session.send_json({"type": "close"})
        return Score(total, {"done": float(state["done"]), "turns": float(steps)})

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation is None:
            return "\n".join(value for value in observation.values() if isinstance(value, str))
        try:
            return self._observation.format(**observation)
        except (KeyError, IndexError) as error:
            fields = ", ".join(observation)
            raise UserError(
                f"openenv: observation={self._observation!r}: no field {error}; there are {fields}"
            ) from None

    async def _healthy(self, child: Child) -> bool:
        async with self._http.get(f"{self._url}/health") as answer:
            return answer.ok

    async def _only_field(self) -> str:
        """The field of an action that takes a text, where the server's schema has one.

        Raises:
            UserError: it has several, or none.
        """
        async with self._http.get(f"{self._url}/schema") as answer:
            schema = (await answer.json())["action"]
        fields = [name for name in schema.get("properties", {}) if name != "metadata"]
        if len(fields) != 1:
            raise UserError(f"openenv: agent.args.action: name the action's field that takes the text: {fields}")
        return fields[0]


async def _asked(session: aiohttp.ClientWebSocketResponse, kind: str, data: Mapping[str, Any]) -> Any:
    """Ask for something, and return the observation that answers it."""
    await session.send_json({"type": kind, "data": data})
    answer = await session.receive()
    if answer.type is not aiohttp.WSMsgType.TEXT:
        raise RuntimeError(f"openenv: the server hung up at {kind}")
    message = json.loads(answer.data)
    if message.get("type") != "observation":
        raise RuntimeError(f"openenv: {kind}: {message.get('data', message)}")
    return message["data"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
