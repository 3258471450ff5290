"""Tools of MCP servers (Model Context Protocol): programs that are started, or addresses that are called.

In: a command line or a URL. Out: `Tools`, one for each that the server lists. A server that dies, is late or answers
nonsense becomes a text for the model, as with every tool; one that died is started again for the next call, and the log
says so. Who wakes whom: a task of its own holds the connection, so that its end cancels nobody; an answer of the server
wakes the call that waits for it, and the end of the `async with` wakes that task, which ends the server. A server that
was started belongs to a keeper (`runtime/processes/keeper.py`), which ends it and all that it started when this process
is gone, however it ended.

    async with mcp_tools(command=["uvx", "mcp-server-time"]) as tools:
        messages = await tools.run(parsed.calls)
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import IO, Any

from rlinf.agents.arguments import WrongValue
from rlinf.agents.tools.formats import typed
from rlinf.agents.tools.tool import Tool, ToolFailed, Tools, output_text
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.processes import keeper

logger = logging.getLogger(__name__)
_KEPT = (
    "import runpy, socket, sys; ours, held = socket.socketpair(); "
    "runpy.run_path(sys.argv[1])['keep'](int(sys.argv[2]), ours.fileno(), -1, sys.argv[3:])"
)
"""Runs a command in a keeper's hands; it watches our process itself, since no descriptor of ours comes through."""
_PING = 5.0
"""Seconds in which a server that is there lists its tools."""
_DEATHS_SAID = 3
"""Deaths of one server that the log tells."""
_PAGES = 100
"""Pages of tools that are read: a server that lists without end cannot hold the start."""
_LAST_WORDS = 400
"""Characters of a server's stderr that an error shows."""


@asynccontextmanager
async def mcp_tools(
    command: Sequence[str] | None = None,
    url: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    prefix: str = "",
    timeout: float = 30.0,  # noqa: ASYNC109 - of each call
    longest: int = 10_000,
    start_timeout: float = 60.0,
) -> AsyncIterator[Tools]:
    """The tools of an MCP server, until the end of the `async with`.

    Args:
        command: starts a server that speaks over its stdin and stdout; its stderr is shown where it does not start.
        url: of a server that runs, by streamable HTTP; in place of `command`.
        env: variables for the command, besides PATH, HOME and the like, which alone are passed on.
        headers: of HTTP requests, such as `{"Authorization": "Bearer …"}`.
        prefix: begins the tools' names, so that those of several servers differ.
        timeout: seconds of one call.
        longest: characters of an output that the model is given.
        start_timeout: seconds until the server has listed its tools.

    Raises:
        UserError: the server does not start, cannot be reached or lists no tools in time; the package is missing.
        ValueError: neither a command nor a URL, or both.
    """
    async with mcp_server(command, url, env=env, headers=headers, start_timeout=start_timeout, mends=True) as server:
        yield Tools(server.tools(prefix, timeout, longest))


@asynccontextmanager
async def mcp_server(
    command: Sequence[str] | None = None,
    url: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    start_timeout: float = 60.0,
    mends: bool = False,
) -> AsyncIterator[McpServer]:
    """A session of an MCP server, until the end of the `async with`.

    Args:
        command, url, env, headers, start_timeout: see `mcp_tools`.
        mends: a server that is gone is started again for the next call; else its session is over, see `check`.

    Raises:
        UserError, ValueError: as of `mcp_tools`.
    """
    if (command is None) == (url is None) or isinstance(command, str) or (command is not None and not command):
        raise WrongValue("mcp_tools: give a command, a list such as ['uvx', 'mcp-server-time'], or a url")
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UserError(f"mcp_tools needs the package {error.name}: pip install 'rlinf[agents,mcp]'") from None
    name = str(url) if command is None else " ".join(command)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        how = {} if mends else {"mode": "legacy"}  # its handshake begins a session; later protocols have none
        client = partial(_client, command, url, env, headers, stderr, how)
        server = McpServer(client, name, start_timeout, stderr, mends)
        try:
            await server.start()
            yield server
        finally:
            await server.end()


class McpServer:
    """A connection to a server, made by `mcp_server`.

    Args:
        open_client: connects, in a task that holds the connection.
        name: of the server, for people.
        start_timeout: seconds until it has listed its tools.
        said: its stderr.
        mends: it is made again where the server is found to be gone.
    """

    def __init__(
        self,
        open_client: Callable[[AsyncExitStack], Awaitable[Any]],
        name: str,
        start_timeout: float,
        stderr: IO[str],
        mends: bool,
    ) -> None:
        self._mends = mends
        self._listed: list[Any] = []
        self._open_client, self._name, self._start_timeout, self._said = open_client, name, start_timeout, stderr
        self._holding: asyncio.Future[None] | None = None
        self._over = asyncio.Event()
        self._client: Any = None
        self._mending = asyncio.Lock()
        self._deaths = 0

    async def start(self) -> None:
        """Connect, and have it list its tools.

        Raises:
            UserError: it does not start, cannot be reached or lists no tools in time.
        """
        listed: asyncio.Future[tuple[Any, list[Any]]] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        holding = self._holding = asyncio.ensure_future(_hold(self._open_client, listed, self._over))
        either: list[asyncio.Future[Any]] = [holding, listed]
        try:
            await asyncio.wait(either, timeout=self._start_timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not listed.done():
                holding.cancel()
        if not listed.done():
            failed = holding.done() and not holding.cancelled() and holding.exception()
            why = _reason(failed) if failed else f"it listed no tools within {self._start_timeout:g} seconds"
            raise UserError(f"MCP server {self._name}: {why}{_last_words(self._said)}")
        self._client, self._listed = listed.result()

    async def end(self) -> None:
        """Let the connection go."""
        holding, self._holding = self._holding, None
        if holding is None:
            return
        self._over.set()
        await finish(holding)  # what it raised, calls have told the model

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool of the server and return its result.

        Raises:
            Exception: the server is gone, or answers nonsense; it is there again for the next call, if it can be.
        """
        client = self._client
        try:
            return await client.call_tool(tool, dict(arguments))
        except Exception:
            async with self._mending:
                if self._mends and client is self._client:
                    await self._mend(client)
            raise

    def tools(self, prefix: str, timeout: float, longest: int) -> list[Tool]:
        """The tools that it has listed; see `mcp_tools`."""
        return [_tool(self, each, prefix, timeout, longest) for each in self._listed]

    async def ask(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """Call a tool of the server for ourselves and return its text.

        Raises:
            RuntimeError: it failed, took too long, or the server is gone.
        """
        try:
            async with asyncio.timeout(seconds):
                result = await self.call(tool, arguments)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            why = f"it took longer than {seconds:g} seconds" if late else _reason(error)
            raise RuntimeError(f"MCP server {self._name}: {tool}: {why}{_last_words(self._said)}") from error
        if result.is_error:
            raise RuntimeError(f"MCP server {self._name}: {tool}: {_text(result)}")
        return _text(result)

    async def check(self) -> None:
        """See that the session goes on.

        Raises:
            RuntimeError: the server is gone, or does not answer.
        """
        try:
            async with asyncio.timeout(_PING):
                await self._client.list_tools()
        except Exception as error:
            why = "it does not answer any more" if isinstance(error, TimeoutError) else f"it is gone: {_reason(error)}"
            raise RuntimeError(f"MCP server {self._name}: {why}{_last_words(self._said)}") from error

    async def reader(self, seconds: float, longest: int) -> Tool | None:
        """A tool that reads the server's resources; None where it has none."""
        if getattr(self._client.server_capabilities, "resources", None) is None:
            return None
        resources = (await self._client.list_resources()).resources
        if not resources:
            return None
        lines = [f"{each.uri} ({each.description or each.name})" for each in resources]

        async def read_resource(uri: str) -> str:
            try:
                result = await self._client.read_resource(uri)
            except Exception as error:
                raise ToolFailed(f"{uri} cannot be read: {_reason(error)}") from None
            return "\n".join(map(_part, result.contents))

        names = {"type": "string", "enum": [str(each.uri) for each in resources]}
        schema = {"type": "object", "properties": {"uri": names}, "required": ["uri"]}
        words = f"Read a resource: {'; '.join(lines)}"
        return Tool("read_resource", words, schema, read_resource, dict, seconds, longest)

    async def _mend(self, client: Any) -> None:
        """Start the server again if it is gone."""
        try:
            async with asyncio.timeout(_PING):
                await client.list_tools()
        except Exception as error:
            self._deaths += 1
            say = logger.warning if self._deaths <= _DEATHS_SAID else logger.debug
            say("MCP server %s is gone (%s); it is started again", self._name, _reason(error))
            await self.end()
            try:
                await self.start()
            except UserError as lost:
                say("%s; its tools fail until it is there", lost)


async def _hold(
    open_client: Callable[[AsyncExitStack], Awaitable[Any]], listed: asyncio.Future[Any], over: asyncio.Event
) -> None:
    """Hold a connection until it is over. Consumes nothing; produces `listed`; unblocked by `over`."""
    async with AsyncExitStack() as stack:
        client = await open_client(stack)
        tools: list[Any] = []
        cursor = None
        for _ in range(_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        listed.set_result((client, tools))
        await over.wait()


async def _client(
    command: Sequence[str] | None,
    url: str | None,
    env: Mapping[str, str] | None,
    headers: Mapping[str, str] | None,
    stderr: IO[str],
    how: Mapping[str, Any],
    stack: AsyncExitStack,
) -> Any:
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if command is None:
        http = await stack.enter_async_context(create_mcp_http_client(headers=dict(headers or {})))
        transport = streamable_http_client(str(url), http_client=http)
        return await stack.enter_async_context(Client(transport, cache=None, **how))
    arguments = ["-I", "-S", "-c", _KEPT, keeper.__file__, str(os.getpid()), *command]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=dict(env or {}))
    transport = stdio_client(parameters, errlog=stderr)  # type: ignore[arg-type]
    return await stack.enter_async_context(Client(transport, cache=None, **how))


def _tool(server: McpServer, listing: Any, prefix: str, seconds: float, longest: int) -> Tool:
    """A tool of the server's."""
    schema = dict(listing.input_schema)

    async def call(**arguments: Any) -> str:
        try:
            result = await server.call(listing.name, arguments)
        except Exception as error:
            raise ToolFailed(f"{listing.name} failed: {_reason(error)}") from None
        text = _text(result)
        if result.is_error:
            raise ToolFailed(text or f"{listing.name} failed")
        return text

    name, description = prefix + listing.name, listing.description or ""
    return Tool(name, description, schema, call, lambda keywords: typed(keywords, schema), seconds, longest)


def _text(result: Any) -> str:
    """The texts of a result; pictures and the like are named."""
    parts = [_part(each) for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [output_text(result.structured_content)]
    return "\n".join(parts)


def _part(content: Any) -> str:
    resource = getattr(content, "resource", content)
    text = getattr(resource, "text", None)
    if isinstance(text, str):
        return text
    where = getattr(resource, "uri", None)
    kind = getattr(resource, "mime_type", None) or getattr(content, "type", "data")
    return f"[{kind}{f' at {where}' if where else ''}]"


def _reason(error: BaseException) -> str:
    """Return an error's type and message on one line; of an exception group, those of its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _last_words(stderr: IO[str]) -> str:
    stderr.seek(0)
    words = " ".join(stderr.read().split())[-_LAST_WORDS:]
    return f"; it said: {words}" if words else ""
