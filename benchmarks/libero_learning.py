"""A tiny policy learns a task of LIBERO from a few demonstrations, then from its own success.

    make libero
    .venv-libero/bin/python -m benchmarks.libero_learning --seeds 0 1 2

In: seeds. Out: in `--output` the demonstrations and a run per seed; of each a line of the share of episodes that were
solved: from the 25 starts that nobody learned from, by the likeliest actions, after imitation, on the way and at the
end; and of those that it learned from, by actions that were drawn, step by step.

A script shows the task, `libero_bowl.expert`, while its hand does more than it is told; a policy imitates it, and PPO
goes on with nothing but success as reward. All settings are in `libero_bowl.yaml`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.contestants import ROOT

_CONFIG = Path("benchmarks/libero_bowl.yaml")
_DISTURBED = "env.options.make={starts: even, noise: 0.3}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=5, help="that are shown (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/libero"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of the runs")
    options = parser.parse_args()
    shown = options.output.absolute() / f"shown-{options.episodes}"
    if not shown.exists():
        script = ["--expert", "benchmarks.libero_bowl.expert", "--episodes", str(options.episodes), "--out", str(shown)]
        _run("record", *script, "env.num_envs=10", _DISTURBED)
    for seed in options.seeds:
        begun = time.monotonic()
        where = (f"output_dir={options.output.absolute()}", f"name=bowl-{seed}")
        _run("train", f"seed={seed}", f"imitation.path={shown}", *where, *options.set)
        minutes = (time.monotonic() - begun) / 60
        print(told(seed, options.output / f"bowl-{seed}"), f"{minutes:.0f} min", flush=True)


def told(seed: int, directory: Path) -> str:
    """A run in words."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    tried = {row["step"]: row["evaluation/success_once"] for row in rows if "evaluation/success_once" in row}
    lived = [row["success_once"] for row in rows if "success_once" in row]
    trials = ", ".join(f"{100 * share:.0f} % after {step}" for step, share in tried.items())
    shares = " ".join(f"{100 * share:.0f}" for share in lived)
    total = max((row["env_steps/total"] for row in rows if "env_steps/total" in row), default=0.0)
    return f"seed {seed}: {trials} steps; while learning {shares} %; {total:,.0f} environment steps,"


def _run(command: str, *arguments: str) -> None:
    """A command of rlinf's; where it fails, it has said why."""
    done = subprocess.run([sys.executable, "-m", "rlinf", command, "--config", str(_CONFIG), *arguments], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
