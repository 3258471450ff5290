"""A program that starts an MCP server, prints its process id and that of what it started, and is killed."""

import asyncio
import os
import signal
import sys

from rlinf.agents.tools.mcp import mcp_tools


async def main():
    async with mcp_tools(sys.argv[1:]) as tools:
        print(await tools["spawn"].call({}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main())
