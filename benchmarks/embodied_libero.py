"""`.venv-libero/bin/python -m benchmarks.embodied_libero`: LIBERO by our adapter beside robosuite's own loop.

    step       processor time of a step of one simulation, acted on by single actions and by chunks of 8, beside
               LIBERO's `step` in a loop; the three take turns, some steps each, in one process
    reset      processor time from a recorded start until objects have settled, by the same turns
    parallel   8 environments in 2 workers, by chunks of 8: environment steps/s of wall time and of processor time

The task is one of libero_spatial, pictures of both cameras are 256 x 256. `make libero` makes the environment. Shown
are medians with quartiles; a ratio is taken within each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import ROOT
from benchmarks.runtime import machine
from rlinf.envs.adapters.libero import Libero
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.workers import EnvironmentPool

SUITE, TASK, SIZE, CHUNK = "libero_spatial", 0, 256, 8
BAR = 0.95
STILL = [0.0] * 6 + [-1.0]


def theirs() -> tuple[Any, Any]:
    """A simulation made by LIBERO's own class, as OpenVLA's evaluation makes it, and the task's starts."""
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs import OffScreenRenderEnv

    suite = benchmark.get_benchmark_dict()[SUITE]()
    task = suite.get_task(TASK)
    file = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
    made = OffScreenRenderEnv(bddl_file_name=str(file), camera_heights=SIZE, camera_widths=SIZE)
    return made, suite.get_task_init_states(TASK)


def seconds(work: Callable[[], Any]) -> float:
    """Processor seconds of a call in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def turns(count: int, steps: int) -> list[dict[str, float]]:
    """Processor seconds of each contestant's steps (one each) and resets, in so many turns of so many steps."""
    environment = Environment(Libero(1, suite=SUITE, tasks=[TASK], image_size=SIZE), Rules(max_steps=10**6))
    environment.reset()
    simulation, starts = theirs()
    actions = torch.rand(steps, 1, 1, 7, generator=torch.Generator().manual_seed(0)) * 0.2 - 0.1
    rows = []

    def begin(turn: int) -> None:
        simulation.reset()
        simulation.set_init_state(starts[turn % len(starts)])
        for _ in range(10):
            simulation.step(STILL)

    for turn in range(count):
        simulation.sim._render_context_offscreen.gl_ctx.make_current()  # it takes itself to be alone
        row = {"reset, theirs": seconds(lambda turn=turn: begin(turn))}
        row["theirs"] = seconds(lambda: [simulation.step(action) for action in actions[:, 0, 0].numpy()]) / steps
        row["reset, ours"] = seconds(lambda turn=turn: environment.reset(turn))
        row["ours, single"] = seconds(lambda: [environment.step(action) for action in actions]) / steps
        chunks = actions.view(-1, 1, CHUNK, 7)
        row["ours, chunks"] = seconds(lambda chunks=chunks: [environment.step(chunk) for chunk in chunks]) / steps
        rows.append(row)
    environment.close()
    simulation.close()
    return rows


async def parallel(envs: int, workers: int, chunks: int) -> dict[str, float]:
    """Environment steps a second of a pool, by wall time, and by processor time of its workers; and their gigabytes."""
    options = {"suite": SUITE, "tasks": [TASK], "image_size": SIZE}
    async with EnvironmentPool(Libero, options, num_envs=envs, workers=workers, rules=Rules(max_steps=10**6)) as pool:
        (whole,) = pool.slices
        await whole.reset()
        start, begun = time.perf_counter(), _of_workers(pool)
        for _ in range(chunks):
            await whole.step(torch.rand(envs, CHUNK, 7) * 0.2 - 0.1)
        wall, processor = time.perf_counter() - start, _of_workers(pool) - begun
        size = sum(_gigabytes(worker.pid) for worker in pool._workers)
    steps = envs * CHUNK * chunks
    return {"steps/s, wall": steps / wall, "steps/s of a core": steps / processor, "GB": size}


def _of_workers(pool: EnvironmentPool) -> float:
    """Processor seconds of a pool's processes until now."""
    ticks = 0
    for worker in pool._workers:
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


def _gigabytes(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def _median(values: Iterable[float]) -> str:
    low, middle, high = statistics.quantiles(list(values), n=4)
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="0 leaves the loops out")
    parser.add_argument("--steps", type=int, default=16, help=f"of each turn; a multiple of {CHUNK}")
    parser.add_argument("--envs", type=int, default=8, help="of the pool; 0 leaves it out")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    asked = parser.parse_args()
    rows = turns(asked.turns, asked.steps) if asked.turns else []
    for name in rows[0] if rows else ():
        print(f"{name:16} {_median(row[name] for row in rows)} s")
    for name, base in (("ours, single", "theirs"), ("ours, chunks", "theirs"), ("reset, ours", "reset, theirs")):
        if not (ratios := [row[base] / row[name] for row in rows]):
            continue
        verdict = "" if statistics.median(ratios) >= BAR else f"  LOST: the bar is {BAR}"
        print(f"{name:16} {_median(ratios)} times as fast{verdict}")
    pool = asyncio.run(parallel(asked.envs, 2, 4)) if asked.envs else {}
    print({name: round(value, 2) for name, value in pool.items()})
    if asked.save:
        today = datetime.datetime.now(tz=datetime.UTC).date()
        path = ROOT / "benchmarks" / "results" / f"{today}-libero.json"
        path.write_text(json.dumps({"machine": machine(), "turns": rows, "parallel": pool}, indent=1) + "\n")


if __name__ == "__main__":
    main()
