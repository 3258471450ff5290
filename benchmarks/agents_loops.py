"""`python -m benchmarks.agents_loops`: what agents cost that wait for something, such as a tool or a person.

Every one of 2,000 episodes of a session has asked the model once, and then waits for one event. While all wait, memory
and processor time of the whole process are looked at; what they need beyond an idle session is theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import psutil

import rlinf

LOOPS = 2000
MEGABYTES, SHARE = 200.0, 0.05
"""The bars: memory of all loops, and share of a core that they use while they wait."""
_MODEL = {
    "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


async def waiting_loops(loops: int = LOOPS, seconds: float = 5.0) -> dict[str, float]:
    """Let agents wait, and look at what they need.

    Args:
        loops: how many.
        seconds: to look for.

    Returns:
        `megabytes` of all loops, beyond the session's; `idle` and `waiting`, shares of a core without and with them;
        `seconds_to_end` from the event to the last group.
    """
    ready, go, waiting = asyncio.Event(), asyncio.Event(), 0

    async def agent(task: Any, llm: Any) -> float:
        nonlocal waiting
        await llm.generate("?", max_new_tokens=1)
        waiting += 1
        if waiting == loops:
            ready.set()
        await go.wait()
        return 1.0

    async def short(task: Any, llm: Any) -> float:
        await llm.generate("?", max_new_tokens=1)
        return 1.0

    with tempfile.TemporaryDirectory() as directory:
        async with rlinf.Session.local(
            model=_MODEL, tokenizer={"characters": "0123?"}, run_dir=f"{directory}/run", trace=False
        ) as session:
            await session.gather_groups(range(loops // 8), short, n=8)  # what the engine needs is there already
            idle, before = await _share(seconds), _megabytes()
            played = asyncio.ensure_future(session.gather_groups(range(loops // 8), agent, n=8, at_once=loops))
            await ready.wait()
            share, memory = await _share(seconds), _megabytes()
            began = time.perf_counter()
            go.set()
            groups = await played
            took = time.perf_counter() - began
    assert len(groups) == loops // 8
    return {"megabytes": memory - before, "idle": idle, "waiting": share, "seconds_to_end": took}


async def _share(seconds: float) -> float:
    """Share of a core that the process uses while nothing is asked of it."""
    began, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.perf_counter() - began)


def _megabytes() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


def shown(found: Mapping[str, float], loops: int) -> str:
    """A sentence for people."""
    return (
        f"{loops:,} waiting loops: {found['megabytes']:.1f} MB (bar {MEGABYTES:g}), {found['waiting']:.2%} of a core "
        f"(bar {SHARE:.0%}; the idle session {found['idle']:.2%}); all ended {found['seconds_to_end']:.2f} s after the "
        "event"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=LOOPS, help="how many, a multiple of 8 (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="to look for (default: %(default)s)")
    options = parser.parse_args()
    found = asyncio.run(waiting_loops(options.loops, options.seconds))
    print(shown(found, options.loops))
    return 0 if found["megabytes"] <= MEGABYTES and found["waiting"] <= SHARE else 1


if __name__ == "__main__":
    raise SystemExit(main())
