"""`python -m benchmarks.long_answers`: what a long answer takes of each process, by `trainer.parallel.context`.

The trainer learns the same batches on 1, 2 and 4 processes on this machine, by its own actor and FSDP2:

    long     one answer of 16,300 tokens, beside one of 64
    mixed    one of 8,192 tokens, and 64 of 64 to 512
    short    64 of 64 to 512

Memory is how far the peak of the fullest process rises above what it had before the step, at which the optimizer's
state and the weights are there: activations, gradients and buffers. Processor time is that of all processes together,
since they share this machine's cores. What is learned must be the same: the norm of the gradient of every step is
compared with one process's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import rlinf
from benchmarks.contestants import _torchrun, run
from benchmarks.placement_planned import Row
from rlinf import Stream, endpoint
from rlinf.actors.trainer import Trainer
from rlinf.config.learning import ParallelConfig
from rlinf.data.sample import Group, Prompt, Sample

MARK = "measured "
TOKENIZER = {"characters": "0123456789>"}
MODEL: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
"""Of the proportions that models of 1B to 70B parameters have: 3 x the width in an MLP, 4 heads of queries to a key."""
CASES: dict[str, tuple[int, ...]] = {
    "long": (16300, 64),
    "mixed": (8192, *np.random.default_rng(0).integers(64, 512, 64).tolist()),
    "short": tuple(np.random.default_rng(0).integers(64, 512, 64).tolist()),
}
"""Tokens of answers."""
BUDGET = 16384
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
"""Tensors go back to the system when they are freed; otherwise glibc's holes are a good part of the peak."""
BAR = 0.35
"""Most of one process's memory that each of four may take for the long answer."""


class Measured(Trainer):
    """Tells what a call took of its process."""

    @endpoint
    async def begin(self) -> None:
        """Forget the peak so far."""
        self._began = _forgotten(), time.process_time()

    @endpoint
    async def took(self) -> tuple[float, float]:
        """MiB that the peak rose since, and seconds of processor time."""
        before, start = self._began
        return _peak() - before, time.process_time() - start


def _forgotten() -> float:
    """The memory that is left of the peak so far, MiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def groups(case: str, step: int) -> list[Group]:
    """Judged answers, two to a prompt where there are several."""
    rng = np.random.default_rng(step)
    made = []
    lengths = CASES[case]
    for number, start in enumerate(range(0, len(lengths), 2)):
        prompt = Prompt(step * len(lengths) + number, rng.integers(3, 13, 8))
        answers = [
            Sample(
                prompt, index, rng.integers(3, 13, length), np.full(length, -2.6, np.float32),
                np.zeros(length, np.int32), "", False, reward=float(index), outcome="ok",
            )
            for index, length in enumerate(lengths[start : start + 2])
        ]  # fmt: skip
        made.append(Group(prompt, tuple(answers)))
    return made


async def worker(system: rlinf.ActorSystem, case: str, processes: int, context: int) -> None:
    """Two steps, of which the first makes the optimizer's state; the second is measured."""
    trainer = await system.spawn(
        Measured, name="trainer", hosts=list(range(processes)), model=MODEL, tokenizer=TOKENIZER, lr=1e-4,
        micro_batch_tokens=BUDGET // processes * context, parallel=ParallelConfig(context=context),
        sharding="shard",
    )  # fmt: skip
    taken, norms = [], []
    for step in range(2):
        await trainer.begin()
        numbers = await trainer.train(Stream.of(groups(case, step)))
        taken.append(await trainer.took())
        norms.append(float(numbers["grad_norm"]))
    memory, seconds = max(peak for peak, _ in taken[1]), sum(each for _, each in taken[1])
    print(MARK + json.dumps({"MiB": memory, "s": seconds, "norms": norms}), flush=True)


def measure(case: str, processes: int, context: int) -> dict[str, Any]:
    """What a job of its own measured."""
    arguments = ["--worker", case, "--processes", str(processes), "--context", str(context)]
    out = run([*_torchrun(processes), "-m", "benchmarks.long_answers", *arguments], GIVEN_BACK)
    line = next(line for line in out.splitlines() if line.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


def rows(cases: list[str]) -> list[Row]:
    """Every case on one process, on two and four by contexts, and on four by answers alone."""
    found = []
    for case in cases:
        alone = measure(case, 1, 1)
        for processes, context in ((1, 1), (2, 2), (4, 4), (4, 1)):
            here = alone if processes == 1 else measure(case, processes, context)
            memory, seconds = here["MiB"] / alone["MiB"], here["s"] / alone["s"]
            odd = max(abs(a / b - 1) for a, b in zip(here["norms"], alone["norms"], strict=True))
            barred = case == "long" and context == 4
            found.append(
                Row(
                    f"{case}, {processes} processes, context {context}",
                    f"<= {BAR} x memory" if barred else "no bar",
                    f"{here['MiB']:,.0f} MiB ({memory:.2f} x), {here['s']:.1f} s of processor ({seconds:.2f} x), "
                    f"norms within {odd:.0e}",
                    memory <= BAR if barred else None,
                )
            )
            print(f"{found[-1].what}: {found[-1].found}", flush=True)
    return found


def main() -> int:
    """Print a line per row, and write them; 1 if one misses its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--worker", choices=CASES, help="a process of a job")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    asked = parser.parse_args()
    if asked.worker:
        rlinf.run(lambda system: worker(system, asked.worker, asked.processes, asked.context))
        return 0
    print(f"{datetime.datetime.now().astimezone():%Y-%m-%d}, {MODEL['hidden_size']} wide, {BUDGET:,} tokens at once")
    return int(any(row.met is False for row in rows(asked.cases)))


if __name__ == "__main__":
    sys.exit(main())
