"""An interpreter in the sandbox that keeps its variables from one piece of code to the next.

In: pieces of code, one after the other. Out: a `Result` for each. Who wakes whom: a piece waits for the one before it,
then for its answer. One that does not end in time ends the interpreter; the next piece starts a new one, with nothing
in it.

    async with PythonSession() as session:
        await session.run("x = 2")
        print((await session.run("x + 1")).stdout)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

from rlinf.sandbox.inside import interpreter
from rlinf.sandbox.limits import ChannelError, Limits, Outcome, Program, Result
from rlinf.sandbox.sandbox import Sandbox, shared

_SOURCE = Path(interpreter.__file__).read_text(encoding="utf-8")
_LIFE = 24 * 3600.0
"""Seconds that an interpreter may exist: longer than an episode."""


class PythonSession:
    """Runs pieces of code in one interpreter. Takes memory while it is open: some 10 MB, and four processes.

    Args:
        sandbox: where; None takes the one that the running event loop shares, when the first piece comes.
        limits: seconds and output, in characters, are of one piece; all else is of the interpreter, processor time too.
            None takes the usual ones with 120 s of processor time.
        allow_weak: see `Sandbox`, where none is given.
    """

    def __init__(self, sandbox: Sandbox | None = None, *, limits: Limits | None = None, allow_weak: bool = False):
        self._sandbox, self._allow_weak = sandbox, allow_weak
        self._limits = limits or Limits(cpu_seconds=120.0)
        self._open: contextlib.AsyncExitStack | None = None
        self._program: Program | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> PythonSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str) -> Result:
        """Run a piece of code, with the variables of those before it; the value of a last expression is shown.

        Returns:
            What became of it. `timeout` and `killed` mean that the interpreter has ended, and its variables are gone.

        Raises:
            SandboxError: programs cannot be kept apart here, or the sandbox failed.
        """
        async with self._turn:
            program, limits, start = await self._started()
            try:
                async with asyncio.timeout(limits.wall_seconds):
                    await program.channel.send(json.dumps(code).encode())
                    status, out, err, lost = _checked(json.loads(await program.channel.receive()))
            except TimeoutError:
                await self._end()
                return Result("timeout", "", "", None, time.monotonic() - start)
            except (ChannelError, ValueError, RecursionError):  # it ended, or forged an answer
                await self._end()
                return Result("killed", "", "", None, time.monotonic() - start)
            except asyncio.CancelledError:
                await self._end()  # its answer would be taken for the next one's
                raise
            outcome: Outcome = "output" if lost else "error" if status else "ok"
            return Result(outcome, out, err, status, time.monotonic() - start)

    async def close(self) -> None:
        """End the interpreter."""
        await self._end()

    async def _started(self) -> tuple[Program, Limits, float]:
        sandbox = self._sandbox or shared(allow_weak=self._allow_weak)
        limits = self._limits
        if self._program is None:
            async with contextlib.AsyncExitStack() as stack:
                whole = replace(limits, wall_seconds=_LIFE)
                args = [str(limits.output_bytes // 2)]
                self._program = await stack.enter_async_context(
                    sandbox.program(_SOURCE, args=args, limits=whole, channel=True)
                )
                self._open = stack.pop_all()
        return self._program, limits, time.monotonic()

    async def _end(self) -> None:
        stack, self._open, self._program = self._open, None, None
        if stack is not None:
            await stack.aclose()


def _checked(answer: object) -> tuple[int, str, str, int]:
    """The interpreter's answer, which code in it may have forged.

    Raises:
        ValueError: it is none.
    """
    if isinstance(answer, list) and len(answer) == 4:
        status, out, err, lost = answer
        if isinstance(status, int) and isinstance(out, str) and isinstance(err, str) and isinstance(lost, int):
            return status, out, err, lost
    raise ValueError("no answer of the interpreter")
