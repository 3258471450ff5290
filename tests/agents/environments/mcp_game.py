"""A game as an MCP server: by stdio, or by HTTP on the port that it is given; each session has a number of its own."""

import json
import os
import sys
import time

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("game")
numbers = {}


def key(context):
    headers = context.headers if len(sys.argv) > 1 else None
    return headers.get("mcp-session-id") if headers else ""


@server.resource("rules://game")
def rules() -> str:
    """How it is played."""
    return "The number is below ten."


@server.tool()
def begin(context: Context, seed: int) -> str:
    """Begin a game."""
    numbers[key(context)] = [seed % 10, 0]
    return f"Guess number {seed}."


@server.tool()
def guess(context: Context, number: int) -> str:
    """Guess the number."""
    game = numbers[key(context)]
    game[1] += 1
    return "right" if number == game[0] else "higher" if number < game[0] else "lower"


@server.tool()
def score(context: Context, answer: str) -> str:
    """Whether an answer is right, and how often was guessed."""
    number, guesses = numbers[key(context)]
    return json.dumps({"reward": float(answer.strip() == str(number)), "guesses": guesses})


@server.tool()
def die() -> str:
    """End the server."""
    print("the game is broken", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Keep the server busy for good."""
    time.sleep(1000)
    return ""


@server.tool()
async def flood(context: Context) -> str:
    """Say far too much."""
    for _ in range(500):
        await context.report_progress(1.0)
    return "much " * 1_000_000


@server.tool()
def nonsense() -> str:
    """No score."""
    return "well"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
