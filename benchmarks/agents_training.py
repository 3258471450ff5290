"""The calculator agent beside the same task in TRL's tool-calling GRPO: samples per second of whole training steps.

Both start from one model, warmed up by supervision so that two answers of three call the tool, and have its tokenizer,
chat template, problems, group size, optimizer and number of steps, on one thread each. They take turns, one step each;
a round uses one seed for both. The ratio is taken within a round, of the median steps after the warm-up. The package
`verifiers` (0.4.0) makes environments and has no trainer: there is nothing in it to compare with.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.agents_training_ours import FLOW
from benchmarks.contestants import ROOT, TurnFailed
from benchmarks.grpo_contestants import TRL, interpreter, median_step, pinned
from benchmarks.grpo_turns import Command, in_turn
from benchmarks.peers.grpo_job import WORK, Job, Result
from examples.calculator import rows as problems_of
from rlinf.config.text import RunConfig
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.runs.prepare import algorithm_of
from rlinf.runs.rules import load_config

CONFIG = ROOT / "configs" / "agents" / "calculator.yaml"
BAR = 1.5
TRAJECTORY = 24
"""Tokens of a whole trajectory in TRL, the tool's included; ours bounds a turn: with a turn of 10, a call and an answer
are as long. A longer one makes TRL slower, whose batch ends with its longest answer."""
CALLS = 3
"""Calls of the tool at most, as in the example, which ends after four turns."""
ROWS = 128
"""Trajectories to TRL's micro-batch."""


@dataclass(frozen=True)
class Round:
    """One seed."""

    ours: Result
    theirs: Result
    our_work: dict[str, float]
    """Per sample, on average of the run: `tokens` that the model said, `calls` of the tool."""
    their_work: dict[str, float]
    """TRL's work per sample, counted likewise."""

    @property
    def ratio(self) -> float:
        """Ratio of our rate to theirs."""
        return median_step(self.theirs.seconds) / median_step(self.ours.seconds)


def warm_model(config: RunConfig, path: Path) -> None:
    """Make the configuration's model, show it how to call and how to give up, and save it with its tokenizer.

    Plain torch: what both start from must not depend on either.
    """
    tokenizer = load_tokenizer(config.model.tokenizer)
    tokenizer.chat_template = config.data.chat_template
    model = build_model(config.model.config, tokenizer, seed=config.seed).train()
    texts = []
    for number, row in enumerate(problems_of(20_000, seed=3)):
        asked, answer = row["prompt"], row["answer"]
        said = "?" if number % 3 == 0 else f"={asked}{tokenizer.eos_token}{answer}.{answer}"
        texts.append(f"{asked}?{said}{tokenizer.eos_token}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.sft.lr, weight_decay=0.0)
    for step in range(config.sft.steps):
        start = step * config.sft.batch_size % len(texts)
        batch = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts[start : start + config.sft.batch_size]]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
        logits = model(input_ids=ids.clamp_min(0), use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def job_of(config: RunConfig, model: Path, seed: int, steps: int) -> Job:
    """So many of the configuration's steps."""
    algorithm, optimizer, spec = config.algorithm, config.optimizer, algorithm_of(config)
    many: Any = spec
    per = algorithm.prompts_per_step
    drawn = [(row["prompt"], row["answer"]) for row in problems_of(steps * per, seed=100 + seed)]
    return Job(
        model=str(model),
        problems=[drawn[step * per : (step + 1) * per] for step in range(steps)],
        seed=seed,
        group_size=algorithm.group_size,
        epochs=algorithm.epochs,
        max_new_tokens=TRAJECTORY,
        temperature=config.rollout.temperature,
        lr=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        grad_clip=optimizer.grad_clip,
        clip_low=many.loss.clip_low,
        clip_high=many.loss.clip_high,
        advantage_scale=many.advantage.scale,
    )


def training(rounds: int, steps: int) -> list[Round]:
    """Run both.

    Args:
        rounds: seeds, from 0.
        steps: of training, of each; the first five are not counted.

    Raises:
        TurnFailed: one of them failed.
    """
    config = load_config(CONFIG)
    done = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        warm_model(config, place / "model")
        for seed in range(rounds):
            job, path = job_of(config, place / "model", seed, steps), place / f"{seed}.json"
            job.write(path)
            ours, theirs = in_turn([_ours(job, place / f"run-{seed}"), _theirs(path)])
            if isinstance(ours, TurnFailed):
                raise ours
            if isinstance(theirs, TurnFailed):
                raise theirs
            done.append(Round(Result.heard(ours), Result.heard(theirs), _work(ours), _work(theirs)))
    return done


def _ours(job: Job, output: Path) -> Command:
    settings = {
        "model.path": job.model, "sft.steps": 0, "flow": FLOW, "seed": job.seed, "steps": len(job.problems),
        "evaluation.every": 0, "output_dir": output, "metrics.live": "never", "trace": "false",
    }  # fmt: skip
    keys = [f"{key}={value}" for key, value in settings.items()]
    module = [*interpreter(sys.executable, 1), "-m", "benchmarks.agents_training_ours"]
    return Command([*pinned(1), *module, "--config", str(CONFIG), *keys], {})


def _theirs(path: Path) -> Command:
    module = [*interpreter(str(TRL), 1), "-m", "benchmarks.peers.trl_agent"]
    return Command([*pinned(1), *module, str(path), str(ROWS), str(CALLS)], {})


def _work(output: str) -> dict[str, float]:
    line = next(line for line in output.splitlines() if line.startswith(WORK))
    found: dict[str, float] = json.loads(line.removeprefix(WORK))
    return found


def curve(rounds: list[Round], side: str) -> str:
    """Mean reward of the first and of the last five steps, over the rounds."""
    rewards = [getattr(each, side).rewards for each in rounds]
    first, last = (statistics.mean(value for one in rewards for value in one[part]) for part in _ENDS)
    return f"{first:.2f} to {last:.2f}"


_ENDS = (slice(None, 5), slice(-5, None))


def rows(quick: bool) -> list[tuple[str, str, str, bool | None]]:
    """(what, bar, found, met) for the table of `benchmarks.agents`; met is None where a row was not measured."""
    what, bar = "calculator agent, samples/s beside TRL's tool-calling GRPO", f">= {BAR} x"
    verifiers = (
        "the same beside the package verifiers",
        bar,
        "not run: 0.4.0 makes environments, and has no trainer",
        None,
    )
    if not TRL.exists():
        return [(what, bar, "not run: `make bench-peers` makes .venv-trl", None), verifiers]
    found = training(1 if quick else 3, 12 if quick else 20)
    ratios = sorted(each.ratio for each in found)
    samples = load_config(CONFIG).algorithm.prompts_per_step * load_config(CONFIG).algorithm.group_size
    ours, theirs = (
        statistics.median(samples / median_step(getattr(each, side).seconds) for each in found)
        for side in ("ours", "theirs")
    )
    told = [f"{statistics.median(ratios):.2f} x [{ratios[0]:.2f}, {ratios[-1]:.2f}]: {ours:.0f} and {theirs:.0f}/s"]
    for name, kind in (("tokens", "tokens"), ("calls", "tool calls")):
        mine, other = (statistics.mean(work[name] for work in side) for side in _works(found))
        told.append(f"{kind} per sample {mine:.2f} and {other:.2f}")
    told.append(f"reward {curve(found, 'ours')} and {curve(found, 'theirs')}")
    return [(what, bar, "; ".join(told), statistics.median(ratios) >= BAR), verifiers]


def _works(rounds: list[Round]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [each.our_work for each in rounds], [each.their_work for each in rounds]
