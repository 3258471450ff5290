"""`python -m benchmarks.trainer`: the trainer beside a plain loop, on one core.

Both learn the same batches with the same model, micro-batches of as many tokens, and AdamW, each turn in a process of
its own, A B A B …: ours through the actor and its stream, the plain loop as one writes it by hand: padded
micro-batches, the model's own forward, log-softmax over the logits of response tokens. Shown are medians over the
rounds. Speed is tokens (prompts included) per second of CPU time, since machines are shared; memory is the process's
peak.

    quickstart   0.1 M parameters, 512 samples of about 10 tokens, two epochs
    ragged       1 M parameters, 128 samples of 10 to 160 tokens, one epoch
    vocabulary   1 M parameters and 16,000 tokens in the vocabulary, 64 samples of 10 to 160 tokens

`--trees` compares the trainer with itself: optimizer steps on texts that begin alike, read as a prefix tree and one by
one, in turns. `--model $(python -m benchmarks.smollm2)` does it with a real model.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlinf import ActorSystem, Stream
from rlinf.actors.trainer import Trainer
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.models.language.policy_model import PolicyModel
from rlinf.training.fsdp import Learner
from rlinf.training.policy import algorithm_of, learn_policy

ROOT = Path(__file__).parents[1]
TOKENIZER = {"characters": "0123456789>"}
BUDGET = 2048
BARS = {"speed": 1.0, "memory": 1.3}
"""At least this ratio ours / theirs in speed, at most this in memory."""
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "quickstart": {"model": {**SMALL, "intermediate_size": 192}, "prompts": 64, "lengths": (5, 6, 4, 7), "epochs": 2},
    "ragged": {"model": {**LARGE, "intermediate_size": 512}, "prompts": 16, "lengths": (5, 40, 5, 120), "epochs": 1},
    "vocabulary": {
        "model": {**LARGE, "intermediate_size": 512, "vocab_size": 16_000},
        "prompts": 8,
        "lengths": (5, 40, 5, 120),
        "epochs": 1,
    },
}


def groups(shape: str, step: int) -> list[Group]:
    """A batch of judged samples, 8 to a prompt."""
    rng = np.random.default_rng(step)
    first, (shortest, longest, least, most) = step * SHAPES[shape]["prompts"], SHAPES[shape]["lengths"]
    made = []
    for number in range(SHAPES[shape]["prompts"]):
        prompt = Prompt(first + number, rng.integers(3, 13, rng.integers(shortest, longest)))
        samples = []
        for index in range(8):
            length = int(rng.integers(least, most))
            samples.append(
                Sample(
                    prompt, index, rng.integers(3, 13, length), np.full(length, -2.6, np.float32),
                    np.zeros(length, np.int32), "", False, reward=float(rng.random() < 0.5), outcome="ok",
                )
            )  # fmt: skip
        made.append(Group(prompt, tuple(samples)))
    return made


def tokens(batch: Sequence[Group]) -> int:
    """Tokens of a batch, prompts included."""
    return sum(len(one.prompt.token_ids) + len(one.response_ids) for group in batch for one in group.samples)


def model_of(shape: str) -> dict[str, Any]:
    """The configuration of the shape's model."""
    return {"model_type": "qwen2", "tie_word_embeddings": True, **SHAPES[shape]["model"]}


async def ours(shape: str, steps: int) -> float:
    """CPU seconds of `steps` batches, after one to warm up."""
    async with ActorSystem.local() as system:
        trainer = await system.spawn(
            Trainer, name="trainer", model=model_of(shape), tokenizer=TOKENIZER, lr=1e-4,
            epochs=SHAPES[shape]["epochs"], micro_batch_tokens=BUDGET,
        )  # fmt: skip
        start = 0.0
        for step in range(steps + 1):
            await trainer.train(Stream.of(groups(shape, step)))
            start = time.process_time() if step == 0 else start
        return time.process_time() - start


def plain(shape: str, steps: int) -> float:
    """A plain loop by hand."""
    model = build_model(model_of(shape), load_tokenizer(TOKENIZER)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.99), fused=True)
    start = 0.0
    for step in range(steps + 1):
        batch = groups(shape, step)
        count = sum(len(sample.response_ids) for group in batch for sample in group.samples)
        for _ in range(SHAPES[shape]["epochs"]):
            optimizer.zero_grad()
            for piece in micro_batches(batch):
                (loss_of(model, piece) / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        start = time.process_time() if step == 0 else start
    return time.process_time() - start


def micro_batches(batch: Sequence[Group]) -> Iterator[list[tuple[Sample, float]]]:
    """Samples with advantages, up to the budget at a time."""
    piece: list[tuple[Sample, float]] = []
    held = 0
    for group in batch:
        rewards = np.array(group.rewards)
        gains = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for sample, gain in zip(group.samples, gains, strict=True):
            size = len(sample.prompt.token_ids) + len(sample.response_ids)
            if piece and held + size > BUDGET:
                yield piece
                piece, held = [], 0
            piece.append((sample, float(gain)))
            held += size
    yield piece


def loss_of(model: Any, piece: Sequence[tuple[Sample, float]]) -> torch.Tensor:
    """Sum of the clipped surrogate over a padded micro-batch."""
    longest = max(len(sample.prompt.token_ids) + len(sample.response_ids) for sample, _ in piece)
    ids, mask = torch.zeros(len(piece), longest, dtype=torch.int64), torch.zeros(len(piece), longest - 1)
    old = torch.zeros(len(piece), longest - 1)
    for row, (sample, _) in enumerate(piece):
        start, end = len(sample.prompt.token_ids), len(sample.prompt.token_ids) + len(sample.response_ids)
        ids[row, :end] = torch.from_numpy(np.concatenate([sample.prompt.token_ids, sample.response_ids]))
        mask[row, start - 1 : end - 1] = 1.0
        old[row, start - 1 : end - 1] = torch.from_numpy(sample.logprobs)
    gain = torch.tensor([gain for _, gain in piece])[:, None].expand_as(mask)
    keep = mask.bool()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1][keep]
    logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[:, 1:][keep][:, None])[:, 0]
    ratio = (logprobs - old[keep]).exp()
    return torch.maximum(-gain[keep] * ratio, -gain[keep] * ratio.clamp(0.8, 1.2)).sum()


def turn(who: str, shape: str, steps: int) -> dict[str, float]:
    """In a process of its own: tokens per CPU second, and the process's peak memory in MB."""
    torch.set_num_threads(1)
    seconds = asyncio.run(ours(shape, steps)) if who == "ours" else plain(shape, steps)
    learned = SHAPES[shape]["epochs"] * sum(tokens(groups(shape, step)) for step in range(1, steps + 1))
    return {"speed": learned / seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measure(shape: str, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Turns of both, one after the other."""
    found: dict[str, dict[str, list[float]]] = {who: {"speed": [], "memory": []} for who in ("ours", "plain")}
    for _ in range(rounds):
        for who in found:
            command = [sys.executable, "-m", "benchmarks.trainer", "--turn", who, shape, str(steps)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
            if done.returncode:
                sys.exit(f"the turn of {who} on {shape} failed:\n{done.stderr}")
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                found[who][name].append(value)
    return found


PROMPT, STEP = 160, 32
"""Tokens of the search's problem, and of each step of its branches."""


def search_rows(rng: np.random.Generator, vocabulary: int) -> list[Row]:
    """The 8 answers of a search that forks in two three times; all that follows the problem is learned."""
    texts = [rng.integers(3, vocabulary, PROMPT)]
    for _ in range(3):
        texts = [np.concatenate([text, rng.integers(3, vocabulary, STEP)]) for text in texts for _ in range(2)]
    return [_row(text[:PROMPT], text[PROMPT:], rng) for text in texts]


def turn_rows(rng: np.random.Generator, vocabulary: int) -> list[Row]:
    """Conversations in the form of the calculator agent's, each of 4 to 8 turns that are samples of their own: 6 tokens
    asked, 7 of a call, 5 of its result."""
    rows = []
    for _ in range(8):
        text = rng.integers(3, vocabulary, 6)
        for _ in range(int(rng.integers(4, 9))):
            said = rng.integers(3, vocabulary, 7)
            rows.append(_row(text, said, rng))
            text = np.concatenate([text, said, rng.integers(3, vocabulary, 5)])
    return rows


def _row(prompt: np.ndarray, answer: np.ndarray, rng: np.random.Generator) -> Row:
    return Row(prompt, answer, np.full(len(answer), -3, np.float32), float(rng.normal()))


TREES: dict[str, tuple[Callable[[np.random.Generator, int], list[Row]], float]] = {
    "turns": (turn_rows, 0.6),
    "search": (search_rows, 0.35),
}
"""Rows that begin alike, and the most of the rows' processor time that their tree may take."""


def tree_turns(model: PreTrainedModel, name: str, rounds: int) -> tuple[list[float], str]:
    """Processor seconds of optimizer steps (packing, GRPO's gradient, AdamW) on a tree beside the same rows read one by
    one, taking turns: their ratio in each round, and words on what was read."""
    policy, spec = PolicyModel(model), algorithm_of("grpo")
    learner, found = Learner(policy, LearningSettings(lr=1e-6)), []
    rows = TREES[name][0](np.random.default_rng(0), model.config.vocab_size)
    for number in range(rounds + 1):
        seconds = []
        for shares in (True, False):
            start = time.process_time()
            learn_policy(learner, pack(rows, shares=shares), spec, version=0, compare=False)
            learner.step()
            seconds.append(time.process_time() - start)
        if number:  # the first warms up
            found.append(seconds[0] / seconds[1])
    tree, apart = pack(rows), pack(rows, shares=False)
    return found, f"{len(tree.ids):,} of {len(apart.ids):,} tokens read, {len(tree.targets):,} learned"


def show_trees(rounds: int, directory: str | None) -> None:
    """Print how trees do beside rows, of the model in a directory or of a small one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if directory is None:
        model = build_model(model_of("ragged"), load_tokenizer(TOKENIZER))
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, (_, bar) in TREES.items():
        found, words = tree_turns(model, name, rounds)
        ratio = statistics.median(found)
        print(
            f"{name}: tree / rows {ratio:.2f} [{min(found):.2f}, {max(found):.2f}] of processor time, bar {bar}"
            f"{'' if ratio <= bar else ' LOST'}; {words}"
        )
    print(f"{directory or 'a model of 1 M parameters'}, {rounds} rounds, load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="batches per turn")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-trainer.json")
    parser.add_argument("--turn", nargs=3, metavar=("WHO", "SHAPE", "STEPS"), help=argparse.SUPPRESS)
    parser.add_argument("--trees", action="store_true", help="rows that begin alike: their tree beside one by one")
    parser.add_argument("--model", help="a directory, for --trees; such as `python -m benchmarks.smollm2` prints")
    options = parser.parse_args()
    if options.trees:
        show_trees(options.rounds, options.model)
        return
    if options.turn:
        who, shape, steps = options.turn
        print(json.dumps(turn(who, shape, int(steps))))
        return
    table = Table("shape", "what", "ours", "plain loop", "ratio", "bar", "")
    result: dict[str, Any] = {}
    for shape in options.shapes.split(","):
        result[shape] = found = measure(shape, options.rounds, options.steps)
        for name, unit in (("speed", "tokens/s"), ("memory", "MB")):
            mine, theirs = (statistics.median(found[who][name]) for who in ("ours", "plain"))
            ratio = statistics.median(
                one / other for one, other in zip(found["ours"][name], found["plain"][name], strict=True)
            )
            good = ratio >= BARS[name] if name == "speed" else ratio <= BARS[name]
            sign = "≥" if name == "speed" else "≤"
            table.add_row(
                shape, f"{name}, {unit}", f"{mine:,.0f}", f"{theirs:,.0f}", f"{ratio:.2f}", f"{sign} {BARS[name]}",
                "" if good else "LOST",
            )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"{platform.processor() or platform.machine()}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    if options.save:
        now = datetime.datetime.now().astimezone()
        path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-trainer.json"
        about = {
            "date": now.isoformat(timespec="seconds"),
            "load_average": os.getloadavg()[0],
            "torch": torch.__version__,
        }
        path.write_text(json.dumps({**about, "rounds": options.rounds, "turns": result}, indent=1) + "\n")
        print(f"saved {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
