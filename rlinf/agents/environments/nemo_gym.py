"""Resources servers of NeMo Gym: tasks of a file, tools and scores by HTTP.

In: the URL or command line of a server, and a file of its tasks. Out: an agent that begins a session by /seed_session,
has the model's calls done by /NAME of each tool, and returns the reward of /verify, which is told all that was said in
the form of OpenAI's Responses API. A session is a cookie of the server's. Nothing of the package is needed where the
run is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from rlinf.agents.environments import HeldOut, Listed, Size, checked, verdict
from rlinf.agents.environments.server import Command, Server
from rlinf.agents.tools.formats import typed
from rlinf.agents.tools.tool import Tool, Tools, conversation, offers_tools
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError

_LONGEST = 10_000
"""Characters of a tool's output that the model is given."""
_FLOOD = 1 << 24
"""Bytes of an answer after which it is not read any further."""


@offers_tools
class NemoGym(Listed):
    """Tasks of a resources server.

    Args:
        server: its URL, or the words of a command that starts one, with `{port}`, or a mapping of such a `command` and
            `starting`, the seconds that it has to be up.
        data: a file of its tasks, JSON lines with `responses_create_params`, such as the package's example.jsonl.
        turns: answers of the model at most; calls in the last one are not run.
        timeout: seconds of a call of a tool, and of the verdict.
        held_out: tasks at the file's end that are evaluated on, at most one in eight.

    Raises:
        UserError: `server` is neither, or the file is not such a one.
    """

    @checked
    def __init__(
        self,
        server: str | list[str] | Command,
        data: str,
        *,
        turns: Size = 16,
        timeout: float = 60.0,
        held_out: HeldOut = 100,
    ) -> None:
        self._server, self._turns, self._timeout = Server("nemo_gym", server), turns, timeout
        try:
            lines = [line for line in Path(data).read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise UserError(f"nemo_gym: data={data!r}: {error.strerror}") from error
        self._tasks: list[dict[str, Any]] = []
        self._messages: list[list[dict[str, Any]]] = []
        for number, line in enumerate(lines, 1):
            try:
                self._tasks.append(json.loads(line))
                self._messages.append(_messages(self._tasks[-1]["responses_create_params"]["input"]))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"nemo_gym: {data}:{number}: this is no task of NeMo Gym: {error!r}") from error
        self.most_held_out = held_out

    def rows(self) -> list[dict[str, Any]]:
        """All tasks: what the model is told last, and the number of the task in the file."""
        return [{"prompt": each[-1]["content"], "task": number} for number, each in enumerate(self._messages)]

    async def __aenter__(self) -> NemoGym:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._server.__aexit__(*error)

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Work on a task, and return the server's verdict.

        Raises:
            RuntimeError: the server refused the task or gave no verdict.
            RunFailure: it died again and again.
        """
        row, number = self._tasks[task.row["task"]], task.row["task"]
        session: dict[str, str] = {}
        await self._server.reach(partial(self._posted, "seed_session", row, session))
        offered = row["responses_create_params"].get("tools") or []
        tools = Tools(self._tool(each, session) for each in offered)
        output = _items(await conversation(list(self._messages[number]), llm, self._turns, tools=tools))
        response = {"id": f"task_{number}", "object": "response", "created_at": 0, "model": "policy", "output": output}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": offered}
        answer = await self._posted("verify", {**row, "response": response}, session)
        return verdict(answer, "nemo_gym: /verify", besides=row.keys())

    def _tool(self, offered: Mapping[str, Any], session: dict[str, str]) -> Tool:
        name, schema = offered["name"], dict(offered.get("parameters") or {"type": "object", "properties": {}})

        async def call(**arguments: Any) -> str:
            return await self._posted(name, arguments, session, refusable=True)

        check = partial(typed, parameters=schema)
        return Tool(name, offered.get("description") or "", schema, call, check, self._timeout, _LONGEST)

    async def _posted(self, path: str, body: Any, session: dict[str, str], *, refusable: bool = False) -> str:
        """Post something in a session, and return the answer; a tool may refuse, which the model reads."""
        cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in session.items())} if session else {}
        how: dict[str, Any] = {"json": body, "headers": cookies, "timeout": aiohttp.ClientTimeout(self._timeout)}
        async with self._server.http.post(f"{self._server.url}/{path}", **how) as answer:
            body = bytearray()
            async for chunk in answer.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > _FLOOD:
                    raise RuntimeError(f"nemo_gym: /{path} answers with more than {_FLOOD:,} bytes")
            text = body.decode(errors="replace")
            session |= {name: morsel.coded_value for name, morsel in answer.cookies.items()}
        if not answer.ok and not refusable:
            raise RuntimeError(f"nemo_gym: /{path}: status {answer.status}: {text:.300}")
        return text


def _items(exchanges: Sequence[tuple[Any, Sequence[Any]]]) -> list[dict[str, Any]]:
    """A conversation as items of a response."""
    output: list[dict[str, Any]] = []
    for answer, results in exchanges:
        if (text := answer.content if answer.calls else answer.text) or not answer.calls:
            output.append(_message(text, len(output)))
        for call in answer.calls:
            item = {"type": "function_call", "call_id": call.id, "name": call.name, "status": "completed"}
            output.append({**item, "arguments": json.dumps(call.arguments)})
        for call, result in zip(answer.calls, results, strict=False):
            output.append({"type": "function_call_output", "call_id": call.id, "output": result["content"]})
    return output


def _message(text: str, number: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": content}


def _messages(value: Any) -> list[dict[str, Any]]:
    """A task's input as chat messages."""
    messages = []
    for each in [{"role": "user", "content": value}] if isinstance(value, str) else value:
        if each.get("type", "message") != "message":
            raise ValueError(f"an input of the type {each['type']} is not known")
        content = each["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        messages.append({"role": "system" if each["role"] == "developer" else each["role"], "content": text})
    if not messages:
        raise ValueError("its input has no message")
    return messages
