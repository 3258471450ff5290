"""`python -m benchmarks.distillation`: how many answers a small student needs by GRPO, and from a larger teacher.

In: ways to learn and seeds. Out: a line per run: sampled answers until the mean reward of three steps on end reached
each bar, the mean reward of the last three steps, the greedy result on held-out problems before and after, and
processor seconds. All runs of a seed begin with the same student, after the quickstart's warm-up. The teacher is twice
as wide, has a layer more and has learned from worked problems, once for all; its seconds are told apart. All else
is configs/quickstart.yaml with 32 prompts a step.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TEACHER = ("sft.steps=400", "steps=2", "model.config.hidden_size=128", "model.config.num_hidden_layers=3")
WIDER = ("model.config.intermediate_size=384",)
DIVERGENCE = ("algorithm=opd", "algorithm.loss.name=divergence", "optimizer.lr=2e-3", "optimizer.schedule=cosine")
WAYS: dict[str, tuple[str, ...]] = {
    "grpo": (),  # at the quickstart's learning rate, 5e-4: twice as much collapses on some seeds
    "opd": ("algorithm=opd",),
    "opd, lr 2e-3": ("algorithm=opd", "optimizer.lr=2e-3"),
    "reverse": (*DIVERGENCE, "algorithm.loss.kind=reverse"),
    "forward": (*DIVERGENCE, "algorithm.loss.kind=forward"),
    "jsd": (*DIVERGENCE, "algorithm.loss.kind=jsd"),
    "forward, top 4": (*DIVERGENCE, "algorithm.loss.kind=forward", "algorithm.loss.top_k=4"),
}
BARS = (0.3, 0.5, 0.8)
PROMPTS, ANSWERS = 32, 8
EVERYWHERE = (
    "placement.rollout=0",
    "placement.trainer=0",
    f"algorithm.prompts_per_step={PROMPTS}",
    "trace=false",
    "metrics.live=never",
    "metrics.samples=0",
)


def run(directory: Path, name: str, *overrides: str) -> tuple[list[float], str, float]:
    """Mean rewards of a run's steps, its result on held-out problems, and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "rlinf", "train", "--config", "quickstart", f"output_dir={directory}"]
    made = subprocess.run(
        [*command, f"name={name}", *EVERYWHERE, *overrides], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise SystemExit(f"{name} failed:\n{made.stdout}{made.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = (directory / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    result = re.search(r"greedily: (.*)", made.stdout)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return rewards, "" if result is None else result[1].strip(), seconds


def reached(rewards: list[float], bar: float) -> int | None:
    """Answers that were sampled until the mean of three steps was at the bar; None if it never was."""
    for step in range(3, len(rewards) + 1):
        if statistics.mean(rewards[step - 3 : step]) >= bar:
            return step * PROMPTS * ANSWERS
    return None


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default=",".join(each for each in WAYS if ", " not in each), help="by commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60, help="of distillation")
    parser.add_argument("--grpo-steps", type=int, default=100)
    parser.add_argument("--teacher", type=Path, help="a saved one; otherwise one is made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory, teacher = Path(temporary), arguments.teacher
        if teacher is None:
            rewards, result, seconds = run(directory, "teacher", *TEACHER, *WIDER)
            print(f"teacher: reward {rewards[-1]:.2f}, {result}, {seconds:.0f} processor seconds", flush=True)
            teacher = directory / "teacher" / "checkpoints" / "latest" / "hf"
        for way in re.split(r",(?! )", arguments.ways):
            for seed in map(int, arguments.seeds.split(",")):
                steps = arguments.grpo_steps if way == "grpo" else arguments.steps
                taught = () if way == "grpo" else (f"teacher.model={teacher}",)
                name = re.sub(r"\W+", "-", way) + f"-{seed}"
                found = run(directory, name, f"seed={seed}", f"steps={steps}", *WAYS[way], *taught)
                rewards, result, seconds = found
                bars = ", ".join(f"{bar:g}: {reached(rewards, bar) or 'never'}" for bar in BARS)
                last = statistics.mean(rewards[-3:])
                print(f"{way} seed {seed}: answers to {bars}; last {last:.2f}; {result}; {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
