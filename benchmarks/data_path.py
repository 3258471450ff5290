"""Bytes of samples that pass through the controller in a step, beside those of the batch.

    python -m benchmarks.data_path                # the quickstart on four processes, each flow, two placements
    python -m benchmarks.data_path --only grpo    # one flow

Rank 0 runs the flow. It should know of samples what it decides by (rewards, lengths, ids), and leave tokens and log-
probs to the ranks that made them and those that learn from them. Counted in rank 0's process, for each step behind the
first: bytes of the arrays and texts of groups and of rows that it encodes or decodes, and of sealed items that it takes
in or gives out unread. So what only passes counts twice, once in and once out. What it is told of samples that stay
elsewhere (`faces`) is counted apart, and so are the processor seconds of rank 0. The batch's bytes are those of its
arrays and texts, counted at the learners' input by tokens: id, log-prob and version of each generated token, 16 bytes,
and the id of each of a prompt's, 8 bytes.

`apart`: rank 0 runs the flow alone; ranks 1 to 3 answer and score, 2 and 3 learn. `together`: every role is on all
four, so that rank 0 makes a quarter of all groups, and learns from a quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.runtime.programs.jobs import free_port

ROOT = Path(__file__).parent.parent
OUT = "RLINF_DATA_PATH"
"""Environment variable with the file that rank 0 writes its counts to."""
FLOWS = {
    "grpo": ("algorithm.name=grpo",),
    "grpo, dynamic sampling": ("algorithm.name=dapo",),
    "grpo_async": ("algorithm.name=grpo", "flow=rlinf.flows.grpo_async.grpo_async", "staleness.max=1"),
    "grpo_async, dynamic sampling": (
        "algorithm.name=dapo",
        "flow=rlinf.flows.grpo_async.grpo_async",
        "staleness.max=1",
    ),
    "agentic_async": (
        "algorithm.name=grpo",
        "flow=rlinf.flows.agentic.agentic_async",
        "staleness.max=1",
        "agent.function=tests.drills.parts.agent",
    ),
}
PLACEMENTS = {
    "apart": ("placement.idle_processes=true", "placement.rollout=1-3", "placement.judge=1-3", "placement.trainer=2-3"),
    "together": ("placement.rollout=0-3", "placement.judge=0-3", "placement.trainer=0-3"),
}
SHORT = ("sft.steps=20", "evaluation.problems=8", "checkpoint.every=0", "log_every=1", "placement.device_kind=cpu")
"""Some answers are right and some wrong after so much warm-up, as dynamic sampling needs."""
counts: Counter[str] = Counter()
"""In rank 0's process: bytes since the last step ended."""


def size_of(values: Iterable[Any]) -> int:
    """Bytes of the arrays and texts among values, in lists and dictionaries too."""
    total = 0
    for value in values:
        if isinstance(value, str | bytes):
            total += len(value)
        elif hasattr(value, "nbytes"):
            total += int(value.nbytes)
        elif isinstance(value, dict):
            total += size_of(value.values())
        elif isinstance(value, list | tuple):
            total += size_of(value)
    return total


def watch_codecs() -> None:
    """Count what this process encodes and decodes from now on."""
    from rlinf.data import packing, sample
    from rlinf.runtime.streams import channel

    def encodes(cls: Any, what: str) -> None:
        plain = cls.__reduce__

        def reduce(self: Any) -> Any:
            made = plain(self)
            counts[f"{what} out"] += size_of(made[1])
            return made

        cls.__reduce__ = reduce

    def decodes(module: Any, name: str, what: str) -> None:
        plain = getattr(module, name)

        def arrived(*parts: Any) -> Any:
            counts[f"{what} in"] += size_of(parts)
            return plain(*parts)

        arrived.__module__, arrived.__qualname__ = module.__name__, name  # pickled by this name
        setattr(module, name, arrived)

    encodes(sample.Group, "groups")
    decodes(sample, "_group_arrived", "groups")
    encodes(packing.Parcel, "rows")
    decodes(packing, "_unpack", "rows")
    plain_init, plain_reduce = channel.Sealed.__init__, channel.Sealed.__reduce__

    def sealed(self: Any, host: Any, blob: Any, ref: Any) -> None:
        counts["faces in" if ref is not None else "sealed in"] += len(blob or b"")
        plain_init(self, host, blob, ref)

    def reduce(self: Any) -> Any:
        counts["faces out" if self.ref is not None else "sealed out"] += len(self.blob or b"")
        return plain_reduce(self)

    channel.Sealed.__init__ = sealed  # type: ignore[method-assign]
    channel.Sealed.__reduce__ = reduce  # type: ignore[method-assign]


class Watch:
    """The callback of a measured run: writes a line after each step."""

    def __init__(self) -> None:
        watch_codecs()
        self._began, self._spent = time.perf_counter(), time.process_time()

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        prompts = (metrics["tokens"] - metrics["response_tokens"]) / metrics["samples"] * metrics["groups"]
        batch = 16 * metrics["response_tokens"] + 8 * prompts
        began, self._began = self._began, time.perf_counter()
        spent, self._spent = self._spent, time.process_time()
        line = {"step": step, "batch": batch, "seconds": self._began - began, "spent": self._spent - spent, **counts}
        with open(os.environ[OUT], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        counts.clear()


def measure(arguments: Iterable[str], processes: int, steps: int) -> list[dict[str, float]]:
    """The lines of a run, but for its first step."""
    with tempfile.TemporaryDirectory(prefix="rlinf-data-path-") as directory:
        lines = Path(directory) / "lines.jsonl"
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port")
        command = [sys.executable, *torchrun, str(free_port()), "launch.py", "--config", "configs/quickstart.yaml"]
        command += [
            *SHORT,
            f"steps={steps}",
            f"output_dir={directory}",
            "callbacks=[benchmarks.data_path.Watch]",
            *arguments,
        ]
        environment = {**os.environ, OUT: str(lines), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(f"{' '.join(command)}\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}")
        return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="name of one flow", choices=FLOWS)
    parser.add_argument("--placement", help="one placement", choices=PLACEMENTS)
    parser.add_argument("--processes", type=int, default=4, help="of torchrun; the placements above are for 4")
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first is not counted")
    parser.add_argument("more", nargs="*", help="further keys of the configuration, such as rollout.max_new_tokens=64")
    options = parser.parse_args()
    print(
        f"{'flow':<30}{'placement':<11}{'batch':>10}{'samples':>10}{'share':>8}{'faces':>9}  step    of rank 0  "
        "what, bytes a step"
    )
    for flow, keys in FLOWS.items():
        for placement, places in PLACEMENTS.items():
            if options.only not in (None, flow) or options.placement not in (None, placement):
                continue
            lines = measure((*keys, *places, *options.more), options.processes, options.steps)
            names = sorted({name for line in lines for name in line} - {"step", "batch", "seconds", "spent"})
            means = {name: statistics.fmean(line.get(name, 0) for line in lines) for name in names}
            batch = statistics.fmean(line["batch"] for line in lines)
            faces = sum(value for name, value in means.items() if name.startswith("faces"))
            samples = sum(means.values()) - faces
            seconds, spent = (statistics.median(line[of] for line in lines) for of in ("seconds", "spent"))
            parts = ", ".join(f"{name} {value:,.0f}" for name, value in means.items() if value)
            print(
                f"{flow:<30}{placement:<11}{batch:>10,.0f}{samples:>10,.0f}{samples / batch:>8.1%}{faces:>9,.0f}"
                f"{seconds:>6.2f} s{spent:>9.3f} s  {parts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
