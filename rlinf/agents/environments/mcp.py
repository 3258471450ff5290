"""MCP servers as environments: the model works with a server's tools, and the server, or you, say how well.

In: a URL, or the command line of a server. Out: an agent that opens a session of its own for each episode, offers the
model the server's tools and resources, and lets a tool of the server score what it did. A command with `{port}` is one
server for all sessions, which is kept up; one without is a server for each session, by its stdin and stdout. A server
that dies or hangs ends the episodes of its sessions, which count as not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from rlinf.agents.environments import HeldOut, Seeded, Size, checked, verdict
from rlinf.agents.environments.server import Command, Server
from rlinf.agents.tools.mcp import McpServer, mcp_server
from rlinf.agents.tools.tool import Tools, conversation, offers_tools
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError

_PATH = "/mcp"
"""Where a server that is started here answers."""


@offers_tools
class MCP(Seeded):
    """Sessions of an MCP server.

    Args:
        server: a URL, such as `http://127.0.0.1:8000/mcp`; or the words of a command that starts one: for all sessions
            by streamable HTTP at /mcp where a word has `{port}`, else for each session by stdin and stdout. Or a
            mapping of such a `command` and `starting`, the seconds that it has to be up.
        score: the tool that scores an episode; it is given columns of the task that it has arguments for, and `answer`,
            the model's last text, and returns a number, or an object whose `reward` or `score` is one. None: the run's
            reward function.
        start: the tool that begins a session and returns what the model is told; it is given columns of the task, such
            as `seed`. None: the task's own text, of `data.train`.
        instructions: system message; None for none.
        turns: answers of the model at most; calls in the last one are not run.
        timeout: seconds of one call.
        size: sessions to learn from where `start` is named, each with a seed of its own.
        held_out: sessions to be evaluated on.

    Raises:
        UserError: `server` is neither.
    """

    @checked
    def __init__(
        self,
        server: str | Sequence[str] | Command,
        *,
        score: str | None = None,
        start: str | None = None,
        instructions: str | None = None,
        turns: Size = 16,
        timeout: float = 30.0,
        size: Size = 1000,
        held_out: HeldOut = 50,
    ) -> None:
        command = Command.of(server)
        shared = isinstance(server, str) or any("{port}" in word for word in command.command)
        self._command = command
        if not shared and not command.command:
            raise UserError("mcp: server: the command has no word")
        self._server = Server("mcp", server, _PATH) if shared else None
        self._path = "" if isinstance(server, str) else _PATH
        self._score, self._start, self._instructions = score, start, instructions
        self._turns, self._timeout, self.sizes = turns, timeout, (size, held_out)

    def row(self, index: int, seed: int) -> dict[str, Any]:
        """A session; what it begins with is known when it begins."""
        if self._start is None:
            raise UserError("mcp: nobody says what the tasks are: set data.train, or `start`, the tool that begins one")
        return {"prompt": f"session {seed}", "seed": seed}

    async def __aenter__(self) -> MCP:
        if self._server is not None:
            await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._server is not None:
            await self._server.__aexit__(*error)

    async def __call__(self, task: Any, llm: Any) -> Score | None:
        """Play a session to its end.

        Raises:
            RuntimeError: the server died, hangs, or did not score.
            UserError: it does not start, or has no such tools.
        """
        async with AsyncExitStack() as stack:
            if self._server is None:
                server = await stack.enter_async_context(
                    mcp_server(self._command.command, start_timeout=self._command.starting)
                )
            else:
                server = await self._server.reach(partial(self._connected, stack))
            offered = {tool.name: tool for tool in server.tools("", self._timeout, 10_000)}
            if unknown := {self._score, self._start} - {None, *offered}:
                raise UserError(f"mcp: the server has no tool {unknown.pop()!r}; it has {', '.join(offered)}")
            hidden = [offered.pop(name) for name in dict.fromkeys((self._score, self._start)) if name is not None]
            schemas = {tool.name: tool.parameters.get("properties", {}) for tool in hidden}
            reader = await server.reader(self._timeout, 10_000)
            tools = Tools([*offered.values(), *([reader] if reader and reader.name not in offered else [])])
            answer = await self._conversation(task, llm, server, tools, schemas)
            if self._score is None:
                return None
            values = {**task.row, "answer": answer}
            return verdict(await self._asked(server, self._score, values, schemas), f"mcp: {self._score}")

    async def _connected(self, stack: AsyncExitStack) -> McpServer:
        """A session of the server that all share.

        Raises:
            ConnectionError: nobody answers there.
        """
        assert self._server is not None  # asked for only then
        try:
            return await stack.enter_async_context(mcp_server(url=self._server.url + self._path))
        except UserError as error:
            raise ConnectionError(str(error)) from error

    async def _conversation(self, task: Any, llm: Any, server: McpServer, tools: Tools, schemas: Any) -> str:
        """Let the model work, and return the last that it said."""
        text = task.text if self._start is None else await self._asked(server, self._start, task.row, schemas)
        history = None if self._start is not None else task.row.get("messages")
        messages = list(history or [{"role": "user", "content": text}])
        if self._instructions:
            messages.insert(0, {"role": "system", "content": self._instructions})
        failed = 0

        async def check() -> None:
            nonlocal failed
            if (count := tools.counts["error"] + tools.counts["timeout"]) > failed:
                failed = count
                await server.check()

        last, _ = (await conversation(messages, llm, self._turns, tools=tools, check=check))[-1]
        return str(last.content or last.text)

    async def _asked(self, server: McpServer, tool: str, values: Mapping[str, Any], schemas: Any) -> str:
        arguments = {name: values[name] for name in schemas[tool] if name in values}
        return await server.ask(tool, arguments, self._timeout)
