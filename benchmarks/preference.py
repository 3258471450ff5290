"""`python -m benchmarks.preference`: supervised training, DPO and reward models beside TRL's trainers, in one run.

Both start from the same model and see the same rows in the same order, with the same batch, AdamW and schedule, on one
core. They run side by side and take turns, a step each, the other waiting; speed is that of the median step, ratios are
taken within a round, and shown are medians over the rounds. TRL takes part with micro-batches of several sizes, and the
fastest counts; it logs a line per step, which its losses are read from. A figure that misses its bar says LOST.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.contestants import ROOT, TurnFailed
from benchmarks.grpo_contestants import TRL, median_step, pinned
from benchmarks.grpo_turns import Command, in_turn
from benchmarks.peers.grpo_job import Result
from benchmarks.runtime import machine
from rlinf.data.tokenizer import character_tokenizer
from rlinf.models.language.build import build_model

KINDS = ("sft", "dpo", "reward")
ALGORITHMS = {"sft": "sft", "dpo": "dpo", "reward": "reward_model"}
ROWS = (8, 32)
"""Rows of TRL's micro-batches: small ones pad less, large ones call less."""
BATCH = 32
FASTER, APART = 1.2, 1e-3
"""The bars: samples per second relative to TRL's, and how far losses may be from each other."""
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>"
    "{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MODEL = {
    "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 384, "tie_word_embeddings": True,
}  # fmt: skip


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    """Made-up conversations of one to three turns, sorting letters; of pairs, the rejected answer is in the wrong
    order."""
    drawn = random.Random(0)
    rows = []
    for _ in range(count):
        turns = []
        for _ in range(drawn.randint(1, 3)):
            word = "".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(3, 40)))
            turns += [{"role": "user", "content": f"sort {word}"}]
            turns += [{"role": "assistant", "content": "".join(sorted(word))}]
        *before, last = turns
        wrong = {**last, "content": last["content"][::-1]}
        rows.append({"messages": turns} if kind == "sft" else {"prompt": before, "chosen": [last], "rejected": [wrong]})
    return rows


def job_of(kind: str, directory: Path, steps: int) -> dict[str, Any]:
    """Make model and data of a job; what both sides are given."""
    tokenizer = character_tokenizer(string.ascii_letters + " \n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<e>"]})
    tokenizer.chat_template = TEMPLATE
    place, data = directory / kind / "model", directory / kind / "rows.jsonl"
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    made = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    torch.manual_seed(0)
    build_model(MODEL, tokenizer, kind=made).save_pretrained(place)
    tokenizer.save_pretrained(place)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind, BATCH * steps)))
    return {
        "kind": kind, "model": str(place), "data": str(data), "batch": BATCH, "steps": steps, "lr": 1e-3,
        "betas": [0.9, 0.99], "warmup_steps": 5, "beta": 0.1,
    }  # fmt: skip


def ours(job: dict[str, Any], directory: Path) -> Command:
    """A run by way of the command line."""
    config = {
        "name": job["kind"], "output_dir": str(directory), "algorithm": ALGORITHMS[job["kind"]],
        "flow": "benchmarks.preference_ours." + ("timed_dpo" if job["kind"] == "dpo" else "timed"),
        "steps": job["steps"], "model": {"path": job["model"]}, "data": {"train": job["data"], "shuffle": False},
        "supervised": {"batch_size": job["batch"]}, "trainer": {"micro_batch_tokens": 2048},
        "optimizer": {"lr": job["lr"], "betas": job["betas"], "warmup_steps": job["warmup_steps"]},
    }  # fmt: skip
    path = directory / "config.yaml"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return Command([*pinned(1), sys.executable, "-m", "benchmarks.preference_ours", "--config", str(path)], {})


def theirs(job: dict[str, Any], directory: Path, rows: int) -> Command:
    """TRL's trainer."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "job.json"
    path.write_text(json.dumps(job))
    words = [*pinned(1), str(TRL), "-m", "benchmarks.peers.trl_preference", str(path), "--rows", str(rows)]
    return Command(words, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def measure(kind: str, rounds: int, steps: int) -> dict[str, Any]:
    """Losses and speeds of one kind of run.

    Raises:
        TurnFailed: somebody failed.
    """
    found: dict[str, Any] = {"kind": kind, "ours": [], "theirs": {rows: [] for rows in ROWS}}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job = job_of(kind, directory, steps)
        for number in range(rounds):
            place = directory / str(number)
            commands = [ours(job, place / "ours"), *(theirs(job, place / str(rows), rows) for rows in ROWS)]
            results = []
            for outcome in in_turn(commands):
                if isinstance(outcome, TurnFailed):
                    raise outcome
                results.append(Result.heard(outcome))
            found["losses"] = {"ours": results[0].losses, "theirs": results[1].losses}
            found["versions"] = [results[0].version, results[1].version]
            found["ours"].append(median_step(results[0].seconds))
            for rows, result in zip(ROWS, results[1:], strict=True):
                found["theirs"][rows].append(median_step(result.seconds))
            print(f"{kind}: round {number + 1} of {rounds}", file=sys.stderr)
    return judged(found)


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """With what is compared: the furthest distance of the losses, samples per second, and their ratio by round."""
    pairs = zip(found["losses"]["ours"], found["losses"]["theirs"], strict=True)
    best = min(found["theirs"], key=lambda rows: statistics.median(found["theirs"][rows]))
    ratios = [them / us for us, them in zip(found["ours"], found["theirs"][best], strict=True)]
    return {
        **found,
        "apart": max(abs(one - other) for one, other in pairs),
        "samples_per_s": [BATCH / statistics.median(found["ours"]), BATCH / statistics.median(found["theirs"][best])],
        "best_rows": best,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def told(found: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    lines = [f"{'':8}{'losses apart':>14}{'bar':>8}{'':6}{'rlinf/s':>9}{'TRL/s':>8}{'ratio':>7}{'range':>12}{'bar':>5}"]
    for each in found:
        close = "pass" if each["apart"] <= APART else "LOST"
        fast = "pass" if each["ratio"] >= FASTER else "LOST"
        here, there = each["samples_per_s"]
        spread = f"{min(each['ratios']):.2f}-{max(each['ratios']):.2f}"
        lines.append(
            f"{each['kind']:8}{each['apart']:14.1e}{APART:8.0e} {close:5}{here:9.1f}{there:8.1f}"
            f"{each['ratio']:7.2f}{spread:>12}{FASTER:5} {fast}  (TRL with {each['best_rows']} rows at once)"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="of each run (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="default: all")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-preference.json")
    options = parser.parse_args()
    if not TRL.exists():
        sys.exit("TRL's environment is absent; `make bench-peers` creates it")
    before = os.getloadavg()[0]
    found = []
    for kind in options.kinds:
        found.append(measure(kind, options.rounds, options.steps))
        print(told(found[-1:]), file=sys.stderr, flush=True)
    print(told(found))
    print(f"\n{machine()}; {options.rounds} rounds of {options.steps} steps; load average {before:.1f} before, "
          f"{os.getloadavg()[0]:.1f} after; {'; '.join(found[0]['versions'])}")  # fmt: skip
    if options.save:
        now = datetime.datetime.now().astimezone()
        path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-preference.json"
        report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "load_average": before}
        path.write_text(json.dumps({**report, "kinds": found}, indent=1) + "\n")
        print(f"saved {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
