"""`python -m benchmarks.dispatch`: what a micro-batch and a decode step ask of the processor beside their products.

Deep narrow models, whose products cost little: 30 layers, about 1,024 tokens, one thread. A micro-batch (forward,
policy gradient, backward) by the trainer's back end of one process, by a plain loop over transformers whose weights are
in that dtype (no autocast), by the same module under FSDP2 on one rank, which it once was in bfloat16, and, forward
alone, by the engine's lean forward. Sequences are of one length, or ragged, which a plain loop pads and ours packs.

Operators are those that reach a device, counted under a dispatch mode as the difference between models of 2 and 4
layers, so that embeddings and head drop out: no views and no allocations; copies are those among them that change dtype
or layout alone. Processor milliseconds are medians of rounds in which contestants take turns. Those of 16 tokens are
what a micro-batch costs whatever is in it: Python, autograd and the dispatcher. Reads of the device are counted on one
that is not there, for every algorithm, by tests/models/language/programs/on_a_device.py.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.checks.parts import TOKENIZER, OneRank, policy_gradient
from rlinf.algos.loss_sum import LossSum
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.transformers.cache import Band
from rlinf.engines.transformers.model import LeanForward, ModelForward, pad_left
from rlinf.models.language.build import ModelSpec, build_model, build_module
from rlinf.models.language.fsdp import Layout
from rlinf.training.fsdp import FsdpBackEnd, Learner

ROOT = Path(__file__).parents[1]
DEVICES = "tests.models.language.programs.on_a_device"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FEW, MORE = 2, 4
"""Layers of two models whose difference is that of so many layers."""
BARS = {"processor time of a micro-batch beside transformers'": 1.3, "operators a layer beyond transformers'": 12.0}
"""At most these, in bfloat16, of sequences of one length."""
KINDS, PHASES = ("operators", "copies"), ("forward", "backward")
COPIES = ("_to_copy", "copy_", "clone", "_foreach_copy_")
CPU = torch.device("cpu")


class Counted(TorchDispatchMode):
    """Counts operators, copies, and those of them that are of weights, by the phase that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.seen = "forward", Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not (function.is_view or name == "_unsafe_view" or "empty" in name or function.namespace == "prim"):
            self.seen[f"{self.phase} operators"] += 1
            self.seen[f"{self.phase} copies"] += name in COPIES
            self.seen[f"{self.phase} weights copied"] += name in COPIES and isinstance(arguments[0], torch.nn.Parameter)
        return function(*arguments, **(keywords or {}))


class Contestant:
    """A way to compute a micro-batch."""

    def __init__(self, run: Callable[[Callable[[], None]], None]):
        self.run = run
        """Takes what is called between the forward and the backward pass."""

    def counted(self) -> Counter[str]:
        """Operators and copies of one micro-batch, after a first one."""
        self.run(_nothing)
        with Counted() as counts:
            self.run(lambda: setattr(counts, "phase", "backward"))
        return counts.seen

    def seconds(self) -> float:
        """Processor seconds of one micro-batch."""
        begin = time.process_time()
        self.run(_nothing)
        return time.process_time() - begin


def _nothing() -> None:
    pass


def source(layers: int, width: int) -> dict[str, Any]:
    """The configuration of a deep narrow model."""
    return {
        "model_type": "qwen2", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "tie_word_embeddings": True,
    }  # fmt: skip


LENGTHS: dict[str, list[tuple[int, int]]] = {
    "one length": [(32, 96)] * 8,
    "ragged": [(8 + 4 * n, 30 + 20 * n) for n in range(8)],
    "16 tokens": [(1, 1)] * 8,
}
"""Tokens of eight prompts and their answers; about 1,024 in all, but for the last."""


def rows(kind: str) -> list[Row]:
    """Sequences of one of `LENGTHS`."""
    rng = np.random.default_rng(0)
    return [
        Row(rng.integers(3, 250, prompt), rng.integers(3, 250, answer), advantage=1.0 if n % 2 else -0.5)
        for n, (prompt, answer) in enumerate(LENGTHS[kind])
    ]


WHO = ("ours", "transformers", "under FSDP2", "lean forward")


def contestants(
    layers: int, width: int, dtype: str, batch: Sequence[Row], who: Sequence[str] = WHO
) -> dict[str, Contestant]:
    """Some of `WHO`, on the same rows, each with a model of its own."""
    spec, tokenizer = ModelSpec(source(layers, width), compute=LearningSettings(dtype=dtype)), load_tokenizer(TOKENIZER)
    ranks: Any = OneRank(CPU)

    def plain() -> Any:
        return build_model(spec.source, tokenizer, dtype=DTYPES[dtype])

    def ours() -> Any:
        return asyncio.run(FsdpBackEnd.make(ranks, spec, tokenizer)).optimization(LearningSettings())

    def spread() -> Any:
        layout = Layout(slices=asyncio.run(ranks.mesh_of([0], "alone")))
        return Learner(build_module(spec, tokenizer, layout=layout), LearningSettings(), layout)

    make: dict[str, Callable[[], Callable[[Callable[[], None]], None]]] = {
        "ours": lambda: by_learner(ours(), batch),
        "transformers": lambda: by_a_plain_loop(plain(), batch),
        "under FSDP2": lambda: by_learner(spread(), batch),
        "lean forward": lambda: by_engine(LeanForward(plain().eval(), 0), batch),
    }
    return {name: Contestant(make[name]()) for name in who}


def by_learner(learner: Any, batch: Sequence[Row]) -> Callable[[Callable[[], None]], None]:
    """A micro-batch as a trainer computes it."""

    def run(between: Callable[[], None]) -> None:
        def loss(packed: Packed, outputs: tuple[Tensor, Tensor]) -> LossSum:
            found = policy_gradient(packed, outputs)
            between()
            return found

        learner.accumulate([pack(batch)], loss)

    return run


def by_a_plain_loop(model: Any, batch: Sequence[Row]) -> Callable[[Callable[[], None]], None]:
    """Padded rows, the model's own forward, log-softmax of the logits of answers."""

    def run(between: Callable[[], None]) -> None:
        texts = [np.concatenate([row.prompt_ids, row.response_ids]) for row in batch]
        longest = max(map(len, texts))
        ids, mask, gain = torch.zeros(len(texts), longest, dtype=torch.int64), torch.zeros(len(texts), longest - 1), []
        for number, (row, text) in enumerate(zip(batch, texts, strict=True)):
            ids[number, : len(text)] = torch.from_numpy(text)
            mask[number, len(row.prompt_ids) - 1 : len(text) - 1] = 1.0
            gain.append(float(row.advantage))
        keep = mask.bool()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1][keep]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[:, 1:][keep][:, None])[:, 0]
        total = -(torch.tensor(gain)[:, None].expand_as(mask)[keep] * logprobs).sum()
        between()
        total.backward()  # type: ignore[no-untyped-call]

    return run


def by_engine(forward: ModelForward, batch: Sequence[Row]) -> Callable[[Callable[[], None]], None]:
    """The engine reads the texts; it never learns."""
    texts = sorted((np.concatenate([row.prompt_ids, row.response_ids]) for row in batch), key=len, reverse=True)

    @torch.inference_mode()
    def run(between: Callable[[], None]) -> None:
        forward.read(*pad_left(texts, CPU))
        between()

    return run


def by_steps(forward: ModelForward, batch: Sequence[Row]) -> Callable[[Callable[[], None]], None]:
    """One decode step of all rows; reading their prompts is done before."""
    with torch.inference_mode():
        every = np.arange(len(batch))
        texts = [np.resize(row.prompt_ids, 32) for row in batch]
        _, layers = forward.read(*pad_left(texts, CPU))
        band = Band(layers, 10_000)
        band.place(every, np.full(len(batch), 32), layers, torch.arange(len(batch)))

    @torch.inference_mode()
    def run(between: Callable[[], None]) -> None:
        band.reserve()
        position = torch.full((len(batch),), band.filled, dtype=torch.int64)
        forward.step(torch.full((len(batch),), 7, dtype=torch.int64), position, [band])
        band.advance()

    return run


def steppers(layers: int, width: int, dtype: str, batch: Sequence[Row]) -> dict[str, Contestant]:
    """A decode step by the engine's lean forward, and by the model's own."""
    made = [build_model(source(layers, width), load_tokenizer(TOKENIZER), dtype=DTYPES[dtype]).eval() for _ in range(2)]
    kinds = {"lean forward": LeanForward(made[0], 0), "transformers": ModelForward(made[1], 0)}
    return {name: Contestant(by_steps(forward, batch)) for name, forward in kinds.items()}


def per_layer(make: Callable[..., dict[str, Contestant]], dtype: str, batch: Sequence[Row]) -> dict[str, Any]:
    """Operators and copies of a layer, by contestant and phase; the width does not change them."""
    few, more = (
        {name: one.counted() for name, one in make(layers, 16, dtype, batch).items()} for layers in (FEW, MORE)
    )
    return {
        name: {kind: (counts[kind] - few[name][kind]) / (MORE - FEW) for kind in counts}
        for name, counts in more.items()
    }


def timed(found: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    """Milliseconds of the processor by contestant, and the ratio to transformers'."""
    for one in found.values():
        one.run(_nothing)
    turns: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, one in found.items():
            turns[name].append(1e3 * one.seconds())
    result: dict[str, Any] = {}
    for name in found:
        middle = statistics.median(turns[name])
        ratios = [mine / theirs for mine, theirs in zip(turns[name], turns["transformers"], strict=True)]
        result[name] = {"ms": middle, "ratio": statistics.median(ratios), "turns": turns[name]}
    return result


def reads() -> int:
    """Values that a micro-batch of any algorithm reads from its device, at most."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", DEVICES], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        sys.exit(f"{DEVICES} failed:\n{done.stderr}")
    return max(int(json.loads(line)[1]) for line in done.stdout.splitlines())


def counts_shown(title: str, found: dict[str, Any]) -> Table:
    """A table of `per_layer`."""
    table = Table("dtype", "by", *(f"{phase} {kind}" for phase in PHASES for kind in KINDS), title=title)
    for dtype, by in found.items():
        for name, counts in by.items():
            cells = [counts.get(f"{phase} {kind}", 0.0) for phase in PHASES for kind in KINDS]
            table.add_row(dtype, name, *(f"{cell:g}" for cell in cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--widths", default="16,64")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-dispatch.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 140)
    batches = {kind: rows(kind) for kind in LENGTHS}
    result: dict[str, Any] = {"layers": {}, "steps": {}, "micro_batches": []}
    for kind, batch in list(batches.items())[:2]:
        result["layers"][kind] = {dtype: per_layer(contestants, dtype, batch) for dtype in DTYPES}
        console.print(counts_shown(f"a layer of a micro-batch, sequences of {kind}", result["layers"][kind]))
    result["steps"] = {dtype: per_layer(steppers, dtype, batches["one length"]) for dtype in DTYPES}
    console.print(counts_shown("a layer of a decode step of 8 rows", result["steps"]))
    table = Table("what", "width", "dtype", "by", "ms", "beside transformers")
    for width in map(int, options.widths.split(",")):
        for dtype in DTYPES:
            made = {kind: contestants(options.layers, width, dtype, batch) for kind, batch in batches.items()}
            made["decode step"] = steppers(options.layers, width, dtype, batches["one length"])
            for kind, found in made.items():
                for name, one in timed(found, options.rounds).items():
                    result["micro_batches"].append({"kind": kind, "width": width, "dtype": dtype, "by": name, **one})
                    cells = f"{one['ms']:.1f}", f"{one['ratio']:.2f}"
                    table.add_row(kind, str(width), dtype, name, *cells)
    console.print(table)
    result["reads"] = reads()
    for line in verdicts(result):
        console.print(line)
    if options.save:
        _save(result, options.rounds)


def verdicts(result: dict[str, Any]) -> list[str]:
    """Say which bars are met."""
    half = result["layers"]["one length"]["bfloat16"]
    sums = {name: sum(half[name][f"{phase} operators"] for phase in PHASES) for name in ("ours", "transformers")}
    worst = max(
        one["ratio"] for one in result["micro_batches"]
        if (one["kind"], one["dtype"], one["by"]) == ("one length", "bfloat16", "ours")
    )  # fmt: skip
    figures = dict(zip(BARS, (worst, sums["ours"] - sums["transformers"]), strict=True))
    lines = [f"{name}: {found:.2f} (at most {BARS[name]:g}){'' if found <= BARS[name] else ': LOST'}"
             for name, found in figures.items()]  # fmt: skip
    return [
        *lines,
        f"values read from the device in a micro-batch: {result['reads']} (0){': LOST' * bool(result['reads'])}",
    ]


def _save(result: dict[str, Any], rounds: int) -> None:
    now = datetime.datetime.now().astimezone()
    about = {"date": now.isoformat(timespec="seconds"), "machine": platform.machine(), "load": os.getloadavg()[0]}
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-dispatch.json"
    path.write_text(json.dumps({**about, "torch": torch.__version__, "rounds": rounds, **result}, indent=1) + "\n")
    print(f"saved {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
