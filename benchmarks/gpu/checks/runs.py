"""Does a run learn on the GPU, started as a user starts it: in one process, then in two that share the card?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks.device import SHARED
from benchmarks.gpu.checks.judging import Bound, judge, required
from benchmarks.gpu.checks.ranks import spans
from benchmarks.gpu.harness import ROOT
from benchmarks.gpu.scale import Outcome, Scale

LEARNED = "all 100 steps"
RUN = (
    *(Bound(f"{who}_exit", equals=0) for who in ("one_process", "two_processes")),
    *(Bound(f"{who}_accuracy", least=0.95, needs=LEARNED) for who in ("one_process", "two_processes")),
    *(Bound(f"{who}_steps", least=2) for who in ("one_process", "two_processes")),
    Bound("two_processes_ipc_payloads", least=1, needs=SHARED),
    Bound("two_processes_payloads", least=1),
)
"""Three seeds of the quickstart came to 0.98, 0.99 and 0.974 on a CPU (benchmarks/results/2026-11-22-learning.json):
0.95 is their mean less four times their spread."""
TINY = (
    "steps=2", "sft.steps=1", "sft.batch_size=4", "evaluation.problems=4", "algorithm.prompts_per_step=2",
    "algorithm.group_size=2", "model.config.hidden_size=16", "model.config.intermediate_size=16",
    "model.config.num_hidden_layers=1",
)  # fmt: skip
ALONE = ("placement.rollout=0", "placement.judge=0", "placement.trainer=1")
"""Weights go from one process to the other, which is what the route is about."""


def quickstart(scale: Scale) -> Outcome:
    """configs/quickstart.yaml, in one process and in two."""
    required("omegaconf", "which reads configurations")
    figures: dict[str, float | int | str] = {}
    for who, processes in (("one_process", 0), ("two_processes", 2)):
        directory = scale.work / f"quickstart-{who}-{os.getpid()}"
        figures |= {f"{who}_{name}": value for name, value in _run(scale, directory, processes).items()}
    return judge(scale, figures, RUN)


def _run(scale: Scale, directory: Path, processes: int) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [
        sys.executable,
        *torchrun,
        str(ROOT / "launch.py"),
        "--config",
        str(ROOT / "configs" / "quickstart.yaml"),
    ]
    keys = [
        *scale.of((), TINY),
        *(ALONE if processes else ()),
        "placement.device_kind=auto",
        f"output_dir={directory.parent}",
        f"name={directory.name}",
    ]
    done = subprocess.run([*command, *keys], cwd=ROOT, capture_output=True, text=True, timeout=scale.limit, check=False)
    print(done.stdout[-2000:], done.stderr[-2000:])
    if done.returncode:
        return {"exit": done.returncode, "said": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""}
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]
    seconds = sorted(line["timing/step"] for line in lines if "timing/step" in line)
    sent = spans(directory / "trace.json", "payload")
    return {
        "exit": 0,
        "accuracy": accuracies[-1],
        "steps": lines[-1]["step"],
        "step_s": seconds[len(seconds) // 2] if seconds else float("nan"),
        "ipc_payloads": sum(event["name"] == "ipc" for event in sent),
        "payloads": len(sent),
    }
