"""`python -m benchmarks.pictures`: does a new vision-language model learn from pictures by GRPO?

configs/pictures/shapes.yaml on three seeds, and on one seed with a model of each other family.

It learned if it answers at least 30 points more of the held-out problems right after reinforcement learning than after
its warm-up, and more than twice as many as anybody who sees the questions and not the pictures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestants import ROOT
from benchmarks.runtime import machine
from rlinf.data.datasets import toy_tasks

CONFIG = ROOT / "configs" / "pictures" / "shapes.yaml"
GAIN = 0.3
"""Gain of accuracy, over the warm-up."""
_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MODELS = {
    "qwen2_5_vl": None,  # that of the configuration
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _ROPE},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "temporal_patch_size": 1,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "internvl": {
        "model_type": "internvl",
        "text_config": {"model_type": "qwen2", **_TEXT},
        "image_seq_length": 4,
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "patch_size": [8, 8],
            "image_size": [32, 32],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    model: str
    """Its `model_type`."""
    seed: int
    """Seed of model, problems and sampling."""
    seconds: float
    """From its start to its end."""
    before: float
    """Share of held-out problems that are answered right after the warm-up, greedily."""
    after: float
    """That share at the end."""
    rewards: tuple[float, ...]
    """Mean of each step."""

    def learned(self, blind: float) -> bool:
        return self.after - self.before >= GAIN and self.after > 2 * blind


def blind_accuracy() -> float:
    """Share of held-out problems that the likeliest answer to each question gets right without a picture."""
    answers: dict[str, Counter[str]] = {}
    for row in toy_tasks.held_out():
        answers.setdefault(row["problem"], Counter())[row["answer"]] += 1
    best = sum(counts.most_common(1)[0][1] for counts in answers.values())
    return best / sum(counts.total() for counts in answers.values())


def run(model: str, seed: int, steps: int | None) -> Learned:
    """A run in a process of its own."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        words = [f"seed={seed}", f"output_dir={directory}", "trace=false"]
        words += [] if MODELS[model] is None else [f"model.config={json.dumps(MODELS[model])}"]
        words += [] if steps is None else [f"steps={steps}"]
        command = [sys.executable, str(ROOT / "launch.py"), "--config", str(CONFIG), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        path = Path(directory) / "shapes"
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    told = [row["evaluation/accuracy"] for row in rows if "evaluation/accuracy" in row]
    rewards = tuple(round(row["reward/mean"], 4) for row in rows if "reward/mean" in row)
    return Learned(model, seed, round(time.monotonic() - begun, 1), told[0], told[-1], rewards)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, help="other than the configuration's")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-pictures.json")
    asked = parser.parse_args(arguments)
    blind = blind_accuracy()
    print(f"without pictures {blind:.1%} of the held-out problems can be answered right", flush=True)
    runs: list[Learned] = []
    for number, model in enumerate(asked.models):
        for seed in asked.seeds[: 1 if number else None]:
            runs.append(run(model, seed, asked.steps))
            last = runs[-1]
            said = f"{last.before:.1%} -> {last.after:.1%} in {last.seconds:.0f} s"
            verdict = "learned" if last.learned(blind) else "DID NOT LEARN"
            print(f"{model:<11} seed {seed}: {said}, {verdict}", flush=True)
    if asked.save:
        date = datetime.date.today().isoformat()
        where = ROOT / "benchmarks" / "results" / f"{date}-pictures.json"
        told = {"date": date, "machine": machine(), "blind": blind, "runs": [asdict(each) for each in runs]}
        where.write_text(json.dumps(told, indent=1) + "\n")
        print(f"written to {where}")
    return 0 if all(each.learned(blind) for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
