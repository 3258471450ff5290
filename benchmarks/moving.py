"""`python -m benchmarks.moving`: seconds for which a run stands still while roles move between two steps.

Two processes under torchrun on one machine, a rollout and a trainer that has learned. Both ways take turns within each
round: through memory, as runs do it, and through a directory on the disk, as they did it before. Wall-clock, from the
first word to the old ranks until the new rollout has the new trainer's weights; shown are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import rlinf
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runs.placement_manager import relocate
from rlinf.runs.roles import restore_roles, save_roles

ROOT = Path(__file__).parents[1]
BAR = 0.5
"""Seconds for a role of the tiny model."""
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128},
    "25M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408},
}
MOVES: dict[str, dict[str, tuple[list[int], list[int]]]] = {
    "trainer to the other host": {"trainer": ([0], [1])},
    "trainer, 1 rank to 2": {"trainer": ([0], [0, 1])},
    "trainer, 2 ranks to 1": {"trainer": ([0, 1], [1])},
    "rollout to the other host": {"rollout": ([0], [1])},
    "both, collocated to disaggregated": {"rollout": ([0, 1], [0]), "trainer": ([0, 1], [1])},
}
"""By what moves: of each role that does, the hosts before and after. Others stay on host 0."""
WAYS = ("memory", "disk")
TOKENIZER = {"characters": "0123456789>"}


def settings(model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of each role."""
    made = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, **model}
    both = {"model": made, "tokenizer": TOKENIZER}
    return {"rollout": both, "trainer": {**both, "algorithm": "grpo", "lr": 1e-3}}


def batch() -> list[Group]:
    """Something to learn from, so that the optimizer has moments."""
    prompt = Prompt(0, np.array([4, 5, 6]), text="123>", answer="3")
    samples = tuple(
        Sample(
            prompt, index, np.arange(3, 8), np.full(5, -2.0, np.float32), np.zeros(5, np.int32), "", False,
            reward=float(index),
        )
        for index in range(2)
    )  # fmt: skip
    return [Group(prompt, samples)]


class Moves:
    """Roles in two processes, moved in turns.

    Args:
        system: both processes.
        model: of the roles.
        directory: on the disk.
    """

    def __init__(self, system: Any, model: Mapping[str, Any], directory: Path) -> None:
        self.system, self.directory = system, directory
        self.classes: dict[str, Any] = {"rollout": Rollout, "trainer": Trainer}
        self.settings = settings(model)
        self.spawning = 0.0
        """Seconds that it took to make the roles of the last move anew."""

    async def spawn(self, hosts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Start roles, one after the other."""
        began = time.perf_counter()
        found = {
            role: await self.system.spawn(self.classes[role], name=role, hosts=list(where), **self.settings[role])
            for role, where in hosts.items()
        }
        self.spawning = time.perf_counter() - began
        return found

    async def publish(self, roles: Mapping[str, Any]) -> None:
        """The trainer's weights to the rollout."""
        await roles["rollout"].load(roles["trainer"].weights())

    async def through_memory(self, roles: dict[str, Any], goal: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Move roles as runs do it."""

        async def spawn(moving: Collection[str]) -> dict[str, Any]:
            return await self.spawn({role: goal[role] for role in moving})

        return await relocate(self.system, roles, list(goal), self.directory, spawn=spawn, publish=self.publish)

    async def through_files(self, roles: dict[str, Any], goal: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Move roles as runs did it: a checkpoint aside, and everything anew from there."""
        aside = self.directory / "aside"
        leaving = {role: roles[role] for role in goal}
        await asyncio.to_thread(aside.mkdir)
        await save_roles(leaving, aside)
        await asyncio.gather(*(self.system.kill(group) for group in leaving.values()))
        now = {**roles, **await self.spawn(goal)}
        await restore_roles({role: now[role] for role in goal}, aside, self.directory)
        await self.publish(now)
        await asyncio.to_thread(shutil.rmtree, aside)
        return now

    async def measured(self, move: Mapping[str, tuple[list[int], list[int]]], way: str) -> tuple[float, float]:
        """Seconds of one move, and those of them in which roles were made anew."""
        before: dict[str, list[int]] = {role: move[role][0] if role in move else [0] for role in self.classes}
        roles = await self.spawn(before)
        for _ in range(2):
            await roles["trainer"].train(batch())
        await self.publish(roles)
        goal = {role: after for role, (_, after) in move.items()}
        act = self.through_memory if way == "memory" else self.through_files
        began = time.perf_counter()
        roles = await act(roles, goal)
        seconds = time.perf_counter() - began
        if await roles["rollout"].version() != [2] * len(roles["rollout"]):
            raise RuntimeError("the trainer's version was lost on the way")
        await asyncio.gather(*map(self.system.kill, roles.values()))
        return seconds, self.spawning


async def measure(system: Any) -> None:
    """All moves of all models in both ways; prints one line of JSON."""
    rounds = int(sys.argv[1])
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".moving-") as place:
        for model in sys.argv[2:]:
            moves = Moves(system, MODELS[model], Path(place))
            for what, move in MOVES.items():
                taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
                for number in range(rounds + 1):
                    for way in WAYS if number % 2 else WAYS[::-1]:
                        seconds = await moves.measured(move, way)
                        if number:  # the first round imports and maps memory
                            taken[way].append(seconds)
                found.append({"model": model, "move": what, "seconds": taken})
    print("RESULT " + json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny"], help="a round of 25M takes minutes")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-moving.json")
    given = parser.parse_args()
    rounds = 2 if given.quick else given.rounds
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, __file__, str(rounds), *given.models]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    load = [os.getloadavg()[0]]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    load.append(os.getloadavg()[0])
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    title = f"{rounds} rounds, load {load[0]:.1f} before and {load[1]:.1f} after"
    table = Table(
        "model", "what moves", "memory, s", "of that made anew", "disk, s", "slowest by memory", "", title=title
    )
    for row in found:
        middle = {way: statistics.median(seconds for seconds, _ in row["seconds"][way]) for way in WAYS}
        anew = statistics.median(spawning for _, spawning in row["seconds"]["memory"])
        slowest = max(seconds for seconds, _ in row["seconds"]["memory"])
        bar = ("met" if middle["memory"] <= BAR else "lost") if row["model"] == "tiny" else ""
        shown = (f"{each:.3f}" for each in (middle["memory"], anew, middle["disk"], slowest))
        table.add_row(row["model"], row["move"], *shown, bar)
    Console(width=140).print(table)
    if given.save:
        path = ROOT / "benchmarks" / "results" / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-moving.json"
        saved = {"load": load, "torch": torch.__version__, "moves": found}
        path.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        from benchmarks import moving  # under its own name, so that what it defines can be sent

        rlinf.run(moving.measure)
    else:
        main()
