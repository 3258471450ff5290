"""Command-line harnesses at work on thirty broken packages, and the record of what the model said in each.

    python -m benchmarks.harnesses --python /path/to/python          # of an environment with mini-swe-agent
    python -m benchmarks.harnesses --harness claude_code --count 2   # or codex, qwen_code: programs on PATH
    python -m benchmarks.harnesses --harness mini --inside /path/to/environment --count 2

A model that is a script mends each package as its solution does, or leaves it as it is; so this is no measure of
models. Counted are the attempts that were judged as they should be, and those whose record is exact: each token that
was sampled is learned once, with its own log-prob, in one sample, and each call of the model goes on from the tokens
of the one before. Figures stand in docs/harnesses.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from examples.environments.broken_packages import write
from rlinf.agents.agent import samples_of
from rlinf.agents.environments.harbor import Harbor
from tests.agents.endpoint.serving import stand

TOOLS = {
    "bash": ("bash", "command", {}),
    "mini": ("bash", "command", {}),
    "mini_swe": ("bash", "command", {}),
    "claude_code": ("Bash", "command", {"description": "mend"}),
    "codex": ("exec_command", "cmd", {}),
    "qwen_code": ("run_shell_command", "command", {"is_background": False, "description": "mend"}),
}
"""For each harness the tool that runs commands, its argument for the command, and others that it wants."""


def called(harness: str, command: str) -> str:
    """An answer that calls the harness's tool."""
    tool, argument, more = TOOLS[harness]
    call = {"name": tool, "arguments": {argument: command, **more}}
    return f"I run this. <tool_call>{json.dumps(call)}</tool_call>"


def answers(harness: str, solution: str) -> list[str]:
    """Answers of the model: a look around, the solution if there is one, and the end."""
    steps = [called(harness, "ls; python3 -m unittest 2>&1 | tail -3")]
    steps += [called(harness, solution)] if solution else []
    submit = called(harness, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return [*steps, submit if harness in ("mini", "mini_swe") else "That is all."]


def is_exact(calls: list[Any], llm: Any) -> bool:
    """One sample has every token that was sampled, and the model read on from them."""
    learned: list[tuple[int, float]] = []
    samples = samples_of(1.0, llm)
    for one in samples:
        learned += zip(one.learned(one.response_ids).tolist(), one.learned(one.logprobs).tolist(), strict=True)
    sampled = [(int(token), -float(number)) for number, (_, ids, *_) in enumerate(calls, 1) for token in ids]
    goes_on = all(
        np.array_equal(after[: len(before) + len(ids)], [*before, *ids])
        for (before, ids, *_), (after, *_) in pairwise(calls)
    )
    return len(samples) == 1 and sorted(learned) == sorted(sampled) and goes_on


async def raced(harness: str, made: Harbor, at_once: int, *, in_container: bool) -> dict[str, Any]:
    """Have every package worked on twice: mended, and left as it is."""
    places = asyncio.Semaphore(at_once)

    async def attempt(row: dict[str, Any], *, mends: bool) -> tuple[bool, bool, int]:
        script = (made.directory(row["task"]) / "solution/solve.sh").read_text().partition("\n")[2]
        script = script if in_container else script.replace("/app/", "")
        texts = answers(harness, script if mends else "")
        async with places, stand(*texts, new=6000, limits={"models": ["*"]}) as here:
            score = await made(SimpleNamespace(row=row), here.llm)
            return score.value == float(mends), is_exact(here.model.calls, here.llm), len(here.model.calls)

    rows = made.tasks()
    results = await asyncio.gather(*(attempt(row, mends=mends) for row in rows for mends in (True, False)))
    right, exact, calls = (sum(column) for column in zip(*results, strict=True))
    return {"attempts": len(results), "judged right": right, "exact": exact, "calls": calls}


async def main() -> None:
    """Print what came of it, and the processor time that it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--harness", choices=TOOLS, default="mini_swe")
    parser.add_argument("--python", help="interpreter of an environment with mini-swe-agent")
    parser.add_argument("--inside", help="directory with the program in its bin: it runs whole inside the container")
    parser.add_argument("--count", type=int, default=30, help="packages")
    parser.add_argument("--at-once", type=int, default=8)
    asked = parser.parse_args()
    harness: dict[str, Any] = {"name": asked.harness}
    settings: dict[str, Any] = {}
    if asked.harness == "mini_swe":
        harness["python"] = asked.python
    if asked.inside:
        harness |= {"inside": True, "env": {"PATH": f"{asked.inside}/bin:/usr/local/bin:/usr/bin:/bin"}}
        settings["visible"] = [sys.base_prefix, asked.inside]
    with tempfile.TemporaryDirectory(prefix="rlinf-packages-") as folder:
        write(folder, asked.count)
        async with Harbor(folder, harness=harness, image="base", held_out=0, settings=settings) as made:
            in_container = bool(asked.inside) or asked.harness in ("bash", "mini_swe")
            print(asked.harness, await raced(asked.harness, made, asked.at_once, in_container=in_container))
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        print(f"processor seconds {used.ru_utime + used.ru_stime:.1f}, most memory {used.ru_maxrss >> 10} MB")


if __name__ == "__main__":
    asyncio.run(main())
