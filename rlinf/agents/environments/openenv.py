"""Environments of OpenEnv: servers that are reached by their URL, or started beside the run.

In: a URL, or the command line of a server. Out: an agent that plays one session to its end: an observation is a
message to the model, its answer an action, and the reward is the sum of the steps' rewards. It speaks OpenEnv's
WebSocket, so nothing of OpenEnv is needed where the run is. A server that is started here is supervised: it is started
again when it dies, and ends with the run.
"""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import aiohttp

from rlinf.agents.environments import HeldOut, Seconds, Seeded, Size, checked
from rlinf.agents.environments.server import Command, Server
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cancel_all

_LONGEST = 1 << 26
"""Bytes of an observation."""


class OpenEnv(Seeded):
    """Sessions of an OpenEnv server.

    Args:
        server: its URL, such as `http://127.0.0.1:8000`; or the words of a command that starts it, in which `{port}`
            stands for its port: `["uvicorn", "my_env.server.app:app", "--port", "{port}"]`. With `{host}` it is given
            an address of this machine's own that others do not guess; without, it is to listen on 127.0.0.1. Or a
            mapping of such a `command` and `starting`, the seconds that it has to be up, 120 by default.
        action: field of the action that takes the model's text; None: the only one that the server's schema has beside
            `metadata`.
        observation: text of an observation, a template such as `"{prompt} {feedback}"` of its fields; None: all that
            are texts, in the server's order.
        instructions: system message; None for none.
        turns: after which a session is ended.
        timeout: seconds that the server has to begin a session, and for each step of it.
        size: sessions to learn from, each with a seed of its own, which the server may use or not.
        held_out: sessions to be evaluated on.

    Raises:
        UserError: `server` is neither.
    """

    @checked
    def __init__(
        self,
        server: str | Sequence[str] | Command,
        *,
        action: str | None = None,
        observation: str | None = None,
        instructions: str | None = None,
        turns: Size = 30,
        timeout: Seconds = 60.0,
        size: Size = 1000,
        held_out: HeldOut = 50,
    ) -> None:
        try:
            list(string.Formatter().parse(observation or ""))
        except ValueError as error:
            raise UserError(f"openenv: observation={observation!r}: {error}") from None
        self._server = Server("openenv", server, "/health")
        self._action, self._observation = action or "", observation
        self._instructions, self._turns, self.sizes = instructions, turns, (size, held_out)
        self._timeout = timeout

    def row(self, index: int, seed: int) -> dict[str, Any]:
        """A session; what it begins with is known when it begins."""
        return {"prompt": self._instructions or f"session {seed}", "seed": seed}

    async def __aenter__(self) -> OpenEnv:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            self._action = self._field(await self._schema())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Play a session to its end.

        Raises:
            RuntimeError: the server answered with an error or nonsense, not within its time, or hung up.
            RunFailure: it died again and again.
        """
        messages = [{"role": "system", "content": self._instructions}] if self._instructions else []
        total, steps = 0.0, 0
        async with _Session(await self._server.reach(self._connected)) as session:
            state = await self._asked(session, "reset", {"seed": task.row["seed"]})
            while not state["done"] and steps < self._turns:
                messages.append({"role": "user", "content": self._text(state["observation"])})
                answer = await llm.chat(messages)
                messages.append(answer.message)
                state = await self._asked(session, "step", {self._action: answer.text})
                total, steps = total + state["reward"], steps + 1
            await session.ends()
        return Score(total, {"done": float(state["done"]), "turns": float(steps)})

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        return await self._server.http.ws_connect(f"{self._server.url}/ws", max_msg_size=_LONGEST)

    async def _asked(self, session: _Session, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await session.ask({"type": kind, "data": data})
        except TimeoutError as error:
            raise RuntimeError(f"openenv: {kind}: no answer within {self._timeout:g} s (agent.args.timeout)") from error
        return _state(answer, kind)

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

    async def _schema(self) -> dict[str, Any]:
        """The server's schema of an action.

        Raises:
            UserError: nobody answers at its address, or something else than a server of OpenEnv.
        """
        where, status = f"openenv: server={self._server.url}", 0
        try:
            async with (
                asyncio.timeout(self._server.starting),
                self._server.http.get(f"{self._server.url}/schema") as answer,
            ):
                status = answer.status
                schema = json.loads(await answer.read())["action"]
                return dict(schema)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UserError(f"{where}: nobody answers there: {error or type(error).__name__}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: this is no server of OpenEnv: /schema has status {status}, no action") from error

    def _field(self, schema: Mapping[str, Any]) -> str:
        """The field of an action that takes a text: the one that is named, or the only one.

        Raises:
            UserError: there are several, none, or none of that name.
        """
        fields = [name for name in schema.get("properties", {}) if name != "metadata"]
        if self._action and (not fields or self._action in fields):
            return self._action
        if self._action or len(fields) != 1:
            named = f" has no {self._action!r}" if self._action else ""
            raise UserError(f"openenv: agent.args.action{named}: name the field that takes the text: {fields}")
        return fields[0]


class _Session:
    """A connection to a server, which is listened to while the model thinks, too.

    Pings are answered by nobody but who listens, and a server whose pings are not answered hangs up: uvicorn after
    40 s, in which a large model has not ended its turn.

    Args:
        socket: the connection.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def __aenter__(self) -> Self:
        self._listen()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await cancel_all([self._coming])
        await self._socket.close()

    async def ask(self, question: Mapping[str, Any]) -> aiohttp.WSMessage:
        """Put a question, unless the server has hung up; what it says next."""
        if not self._socket.closed:
            await self._socket.send_json(question)
        answer = await self._coming
        self._listen()
        return answer

    async def ends(self) -> None:
        """Tell the server that the session is over."""
        await self._socket.send_json({"type": "close"})

    def _listen(self) -> None:
        self._coming = asyncio.create_task(self._socket.receive(), name="what a server of OpenEnv says")


def _state(answer: aiohttp.WSMessage, kind: str) -> dict[str, Any]:
    """The answer to something that was asked for: `observation`, `reward` and `done`.

    Raises:
        RuntimeError: it is an error, or no answer.
    """
    if answer.type is not aiohttp.WSMsgType.TEXT:
        why = f": {answer.data}" if answer.type is aiohttp.WSMsgType.ERROR else ""
        raise RuntimeError(f"openenv: the server hung up at {kind}{why}")
    try:
        message = json.loads(answer.data)
        if message["type"] != "observation":
            raise RuntimeError(f"openenv: {kind}: {_refusal(message.get('data', message))}")
        state = message["data"]
        reward, observation = float(state.get("reward") or 0.0), dict(state["observation"])
        return {"observation": observation, "reward": reward, "done": bool(state["done"])}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"openenv: {kind}: the server answered nonsense: {answer.data!r:.200}") from error


def _refusal(error: Any) -> str:
    """A server's error; where it has no room for a session, with the keys that bound how many there are."""
    if isinstance(error, Mapping) and error.get("code") == "CAPACITY_REACHED":
        room = error.get("max_sessions")
        return f"{error.get('message')} Set agent.at_once={room}, or the server's own max_concurrent_envs higher."
    return f"{error!s:.500}"
