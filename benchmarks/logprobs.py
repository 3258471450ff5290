"""`python -m benchmarks.logprobs`: log-probs from hidden states, by the chunked head and by log-softmax of everything.

Both give log-prob and entropy of each token under a large vocabulary, and the gradients of hidden states and embedding
by the summed log-probs. The plain way holds logits [tokens, vocabulary] of the whole batch; the head of the trainer
(`rlinf.models.language.policy_model`) holds those of a chunk of tokens and makes them again for the gradient.
Contestants take turns,
each turn in a process of its own, one thread. Shown are medians over the rounds: CPU time of the thread, and by how
much the process's peak memory (VmHWM, begun anew once the inputs exist) exceeds what it held before. Both are given the
same numbers, and their gradients are compared once per shape.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlinf.models.language.policy_model import logprobs_of_logits, token_logprobs

SHAPES = ((8192, 4096, 256), (2048, 32768, 256), (8192, 32768, 256))
"""Tokens, vocabulary, width."""
CHUNKS = (128, 1024)
PLAIN = 0
"""Stands for no chunk: everything at once."""
STATUS = Path("/proc/self/status")


def inputs(tokens: int, vocabulary: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, embedding and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(vocabulary, width) * width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,))


def passes(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Forward and backward pass; log-probs and entropies."""
    if chunk == PLAIN:
        found = logprobs_of_logits(hidden @ weight.t(), targets, None)
    else:
        found = token_logprobs(hidden, weight, None, targets, None, chunk=chunk)
    found[0].sum().backward()  # type: ignore[no-untyped-call]
    return found


def kilobytes(field: str) -> int:
    """A number of /proc/self/status, such as VmHWM, the peak of resident memory."""
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no {field}: this benchmark needs Linux")
    return int(found[1])


def turn(tokens: int, vocabulary: int, width: int, chunk: int) -> dict[str, float]:
    """Seconds of thread time, and MiB on top of the inputs."""
    torch.set_num_threads(1)
    passes(*inputs(8, 16, width), chunk)  # loads what a first call loads
    given = inputs(tokens, vocabulary, width)
    Path("/proc/self/clear_refs").write_text("5")  # begins VmHWM anew
    before = kilobytes("VmRSS")
    start = time.thread_time()
    passes(*given, chunk)
    seconds = time.thread_time() - start
    return {"seconds": seconds, "mebibytes": (kilobytes("VmHWM") - before) / 1024}


def in_a_process(shape: tuple[int, int, int], chunk: int) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.logprobs", "--turn", *map(str, (*shape, chunk))]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def largest_difference(shape: tuple[int, int, int], chunk: int) -> float:
    """Largest difference of log-probs, entropies and both gradients, relative to the largest number of each."""
    found = []
    for way in (PLAIN, chunk):
        hidden, weight, targets = inputs(*shape)
        values = passes(hidden, weight, targets, way)
        found.append((*(x.detach() for x in values), hidden.grad, weight.grad))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))


def compare(shape: tuple[int, int, int], rounds: int) -> Table:
    ways = (PLAIN, *CHUNKS)
    turns: dict[int, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            turns[way].append(in_a_process(shape, way))
    tokens, vocabulary, width = shape
    table = Table(
        title=f"{tokens} tokens x {vocabulary} vocabulary x width {width}, float32, torch {torch.__version__}"
    )
    for column in ("both passes", "s", "x plain", "MiB", "x plain"):
        table.add_column(column, justify="left" if column == "both passes" else "right")
    medians = {
        way: tuple(statistics.median(one[what] for one in turns[way]) for what in ("seconds", "mebibytes"))
        for way in ways
    }
    for way, (seconds, mebibytes) in medians.items():
        table.add_row(
            "log-softmax of everything" if way == PLAIN else f"head, chunks of {way}",
            f"{seconds:.2f}",
            f"{seconds / medians[PLAIN][0]:.2f}",
            f"{mebibytes:.0f}",
            f"{mebibytes / medians[PLAIN][1]:.3f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", type=int, nargs=4, metavar=("TOKENS", "VOCABULARY", "WIDTH", "CHUNK"))
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(turn(*arguments.turn)))
        return
    torch.set_num_threads(1)
    print(f"largest relative difference: {largest_difference((512, 4096, 256), CHUNKS[0]):.1e}")
    for shape in SHAPES:
        Console().print(compare(shape, arguments.rounds))


if __name__ == "__main__":
    main()
