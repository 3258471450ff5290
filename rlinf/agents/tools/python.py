"""Tools that run a model's Python code in the sandbox: each call by itself, or in an interpreter that keeps its state.

In: code. Out: a text for the model: what was printed, and how it ended where that was not well. Who wakes whom: the
sandbox's answer, which comes by the deadline of its limits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rlinf.sandbox.limits import Result
from rlinf.sandbox.sandbox import Sandbox, run_python
from rlinf.sandbox.session import PythonSession

_LONGEST = 4000
"""Characters of each of the two outputs that a model is shown, some 1,300 tokens: of longer ones both ends, since a
traceback says at its end what is wrong."""


async def python(code: str) -> str:
    """Run a Python program and return what it prints. Nothing is kept between calls, and there is no network.

    Args:
        code: the program; use print() to see results.
    """
    return result_text(await run_python(code))


def python_in(place: Sandbox | PythonSession) -> Callable[[str], Awaitable[str]]:
    """The tool with limits of one's own, or with an interpreter that keeps its variables.

    Args:
        place: a sandbox, in which each call is a program; or a session, which one conversation has for itself.
    """
    if isinstance(place, Sandbox):

        async def python(code: str) -> str:
            """Run a Python program and return what it prints. Nothing is kept between calls, and there is no network.

            Args:
                code: the program; use print() to see results.
            """
            return result_text(await place.run_python(code))

    else:

        async def python(code: str) -> str:
            """Run Python code in an interpreter that keeps its variables between calls; there is no network.

            Args:
                code: what to run; the value of a last expression is shown.
            """
            result = await place.run(code)
            lost = "; the interpreter was restarted, and its variables are gone"
            return result_text(result, lost if result.outcome in ("timeout", "killed") else "")

    return python


def result_text(result: Result, more: str = "") -> str:
    """Describe a program's output and end, as a text for the model.

    Args:
        result: of the program.
        more: said where it was ended.
    """
    parts = [_shortened(result.stdout.rstrip()), _shortened(result.stderr.rstrip())]
    ends = {
        "timeout": f"[stopped: it took longer than {result.seconds:.3g} s{more}]",
        "memory": "[it needed more memory than there is]",
        "output": "[stopped: it printed too much]",
        "killed": f"[it crashed{more}]",
        "error": "" if result.stderr.strip() else f"[it exited with status {result.exit_code}]",
        "ok": "" if any(parts) else "[it printed nothing; use print()]",
    }
    return "\n".join(part for part in [*parts, ends[result.outcome]] if part)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
