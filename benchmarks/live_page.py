"""Cost of watching a run: `python -m benchmarks.live_page`. The bar is 1 % of a step.

Two measures. A look at a system of 64 roles, in processor time of the process that is asked and asks; one is taken a
second, so that 10 ms would be 1 %. And the quickstart in one process, watched and left alone in turns of a few steps,
by another process that reads everything: medians of the steps' time, and of the ratio of neighbouring turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlinf.runs.live.feed import encoded
from rlinf.runs.live.status import PERIOD, Moments
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.system.observer import Watch
from rlinf.runtime.system.system import ActorSystem
from rlinf.storage.files import read_lines

ROLES, LOOKS, SPANS = 64, 60, 50
"""Actors; looks that are timed; computations of each actor in the second before a look."""
TURN = 5
"""Steps that the quickstart is watched, or left alone, in a row."""
READS = """
import json, socket, sys
for line in sys.stdin:
    end = socket.socket(socket.AF_UNIX)
    end.connect(line.strip())
    end.setblocking(True)
    print("on", flush=True)
    import threading
    def read():
        while end.recv(1 << 16):
            pass
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    sys.stdin.readline()
    end.shutdown(socket.SHUT_RDWR)
    thread.join()
    print("off", flush=True)
"""
"""The other process: connects when it is given a path, and hangs up at the next line."""


class Role(Actor):
    """Has a call under way, as roles have."""

    @endpoint
    async def train(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    @endpoint
    async def computed(self, alone: bool) -> None:
        """Have spans of the last second as if it had computed; `alone`: forget all others."""
        host, name = self._cell.host, self._cell.name
        if alone:
            host.tracer._spans.clear()
        for number in range(SPANS):
            start = host.now() - 1.0 + number / SPANS
            host.tracer.span("compute", name, "train", "step", start, start + 0.5 / SPANS)


async def look_cost(hosts: int, roles: int = ROLES, looks: int = LOOKS) -> float:
    """Milliseconds of processor time of a look at a local system; the median.

    Args:
        hosts: over which the roles are spread; each is asked by a message that is pickled, as between processes.
        roles: how many.
        looks: how many are timed.
    """
    async with ActorSystem.local(hosts, serialize=True) as system:
        groups = [await system.spawn(Role, name=f"role{at}", hosts=[at % hosts]) for at in range(roles)]
        calls = [asyncio.ensure_future(group[0].train()) for group in groups]
        watch = await Watch.start(system)
        moments, costs = Moments(watch), []
        for _ in range(looks):
            for at, group in enumerate(groups):
                await group[0].computed(at < hosts)
            moments.begin()  # so that each look reaches back for a second
            began = time.process_time()
            for message in await moments.next():
                encoded(message)
            costs.append(time.process_time() - began)
        await moments.close()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    return statistics.median(costs) * 1e3


class Toggle:
    """A callback of the quickstart: has another process watch it for some steps, then not."""

    def __init__(self) -> None:
        self._reader = subprocess.Popen(
            [sys.executable, "-c", READS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._watched = False
        self.turns: list[tuple[bool, float]] = []
        """For each step, whether it was watched, and the processor time that the process had used at its end."""

    def on_step(self, step: int, run: object) -> None:
        """Change turns; each step is marked by whether it was watched."""
        directory: Path = run.directory  # type: ignore[attr-defined]
        self.turns.append((self._watched, time.process_time()))
        (directory / "turns.json").write_text(json.dumps(self.turns))
        if step % TURN == 0:
            self._watched = not self._watched
            path = json.loads((directory / "live.json").read_text())["socket"]
            assert self._reader.stdin is not None
            assert self._reader.stdout is not None
            self._reader.stdin.write(f"{path}\n")
            self._reader.stdin.flush()
            self._reader.stdout.readline()


def in_turns(steps: int) -> dict[str, float]:
    """The quickstart alone and watched: medians of a step's seconds and processor seconds, and the median ratios of
    neighbouring turns, watched over alone, with the quarters between which half of them lie."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "rlinf", "train", "--config", "quickstart", f"steps={steps}"),
            *(f"output_dir={directory}", "trace=false", "log_every=100000", "metrics.live=never"),
            "callbacks=[benchmarks.live_page.Toggle]",
        ]
        root = str(Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=root)
        run = Path(directory) / "quickstart"
        turns = json.loads((run / "turns.json").read_text())
        rows = [row for row in read_lines(run / "metrics.jsonl") if "timing/step" in row]
    flags = [flag for flag, _ in turns]
    used = [0.0, *(later - earlier for (_, earlier), (_, later) in itertools.pairwise(turns))]
    found: dict[str, float] = {}
    for name, values in (("s", [float(row["timing/step"]) for row in rows]), ("processor s", used)):
        blocks = [(flags[at], values[at : at + TURN]) for at in range(0, len(values) - TURN + 1, TURN)][2:]  # warm
        medians = [(flag, statistics.median(block)) for flag, block in blocks]
        ratios = [
            (one if flag else other) / (other if flag else one)
            for (flag, one), (_, other) in zip(medians[::2], medians[1::2], strict=False)
        ]
        for which, label in ((False, "alone"), (True, "watched")):
            found[f"{label}, {name}"] = statistics.median(
                each for flag, block in blocks for each in block if flag == which
            )
        low, middle, high = statistics.quantiles(ratios, n=4)
        found |= {f"ratio, {name}": middle, f"ratio, {name}, low": low, f"ratio, {name}, high": high}
        found["pairs"] = float(len(ratios))
    return found


def main() -> None:
    """Print a row per measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=430, help="of the quickstart (default 430: 42 pairs of turns)")
    parser.add_argument("--quick", action="store_true", help="only the looks")
    parser.add_argument("--save", type=Path, help="write the figures to this file as JSON")
    given = parser.parse_args()
    found: dict[str, float] = {}
    for roles, hosts in ((3, 1), (ROLES, 1), (ROLES, 8), (ROLES, ROLES)):
        cost = asyncio.run(look_cost(hosts, roles))
        share = cost / 1e3 / PERIOD
        found[f"look of {roles} roles on {hosts} hosts, ms"] = round(cost, 2)
        print(
            f"a look at {roles:>2} roles on {hosts:>2} hosts takes {cost:.2f} ms: {share:.2%} of a core, once a second"
        )
    if not given.quick:
        found |= (turns := in_turns(given.steps))
        for name in ("s", "processor s"):
            ratio, low, high = (turns[f"ratio, {name}{part}"] - 1 for part in ("", ", low", ", high"))
            print(
                f"a step of the quickstart: {turns[f'alone, {name}']:.4f} {name} alone, "
                f"{turns[f'watched, {name}']:.4f} watched; {ratio:+.2%} by {turns['pairs']:.0f} pairs of turns "
                f"(median; half of them between {low:+.1%} and {high:+.1%})"
            )
    if given.save is not None:
        given.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
