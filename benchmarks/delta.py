"""`python -m benchmarks.delta`: publishing to another machine what has changed, beside the whole.

A trainer with float32 masters and AdamW on one machine, an engine in bfloat16 on the other: network namespaces at 1
Gbit/s, where that can be had (root, `ip`, `tc`), or else two processes that take each other for other machines. Before
every publish the trainer takes a step on another stretch of text. Then both ways publish the same weights, in turns.

`settled` weights lie anywhere between two numbers of bfloat16, as after long training: noise of half a unit in the last
place is added to the masters. A checkpoint in bfloat16 begins with all of them on those numbers (`as loaded`), from
which small steps need a while to get away: fewer elements change. The model is SmolLM2 if `make smollm2` made it, or a
random one of its size, without noise and with words drawn at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import rlinf
from benchmarks.smollm2 import DIRECTORY
from rlinf import Actor, endpoint
from rlinf.data.differences import Differences
from rlinf.data.weights import Weights
from rlinf.runtime.system import torchrun
from rlinf.training.weight_sync import Receiver, exported, publish
from tests.nodes.network import PORT, Network, Torchrun, why_not

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "docs" / "async.md"
TOKENS = 128
"""Tokens of each step."""
BAR = 10.0
"""Times fewer bytes at 1e-6, from settled weights."""
SIZE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
"""SmolLM2-135M's."""


class Timed(Actor):
    """Tells the processor time of its process."""

    @endpoint
    async def used(self) -> float:
        return time.process_time()


class Trainer(Timed):
    """Takes steps, and publishes."""

    async def setup(self) -> None:
        await self.compute(self._load)

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

        torch.manual_seed(0)
        self.real = (DIRECTORY / "gguf.json").is_file()
        if self.real:
            self.model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
            self.tokens = torch.tensor(AutoTokenizer.from_pretrained(DIRECTORY)(TEXT.read_text())["input_ids"])
        else:
            self.model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZE), dtype=torch.float32)
            self.tokens = torch.randint(SIZE["vocab_size"], (8192,))
        self.loaded = [each.detach().clone() for each in self.model.parameters()]

    @endpoint
    async def start(self, rate: float, settled: bool) -> bool:
        """Begin anew at a learning rate; True for a real model."""
        await self.compute(self._start, settled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        self.noted: dict[str, float] = {}
        self.differences = Differences("trainer[0]", lambda what, bytes: self.noted.update({what: bytes}))
        self.taken, self.before, self.share = 0, None, 0.0
        return self.real

    @torch.no_grad()
    def _start(self, settled: bool) -> None:
        for parameter, loaded in zip(self.model.parameters(), self.loaded, strict=True):
            parameter.copy_(loaded.bfloat16() if self.real else loaded)
            if settled and self.real:
                unit = torch.ldexp(torch.ones(()), torch.frexp(parameter).exponent - 8)
                parameter.add_(unit * (torch.rand_like(parameter) - 0.5))

    @endpoint
    async def step(self) -> None:
        await self.compute(self._step)

    def _step(self) -> None:
        rows = self.tokens[self.taken * TOKENS % (len(self.tokens) - TOKENS) :][None, :TOKENS]
        self.model(input_ids=rows, labels=rows).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1

    @endpoint
    async def weights(self, whole: bool) -> Weights | None:
        differences = None if whole else self.differences
        how: dict[str, Any] = {"dtype": torch.bfloat16, "differences": differences}
        return await publish(self, lambda dtype: exported(self.model, dtype), self.taken, **how)

    @endpoint
    async def changed(self) -> dict[str, float]:
        """Share of elements that differ from those of the last call, and bytes that were sent since."""
        now = [each.detach().bfloat16() for each in self.model.parameters()]
        before, self.before = self.before, now
        same = [] if before is None else [int((a == b).sum()) for a, b in zip(before, now, strict=True)]
        noted, self.noted = self.noted, {}
        return {**noted, "share": 1 - sum(same) / sum(each.numel() for each in now)}


class Engine(Timed, Receiver):
    """Copies what it receives into tensors of its own."""

    async def check_weights(self, weights: Weights) -> None:
        """Anything fits."""

    async def switch_weights(self, weights: Weights) -> None:
        await self.compute(self._switch, weights)

    def _switch(self, weights: Weights) -> None:
        self.own: dict[str, Tensor] = getattr(self, "own", {})
        for name, tensor in weights.named():
            self.own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


async def measure(system: Any) -> None:
    """Print rows as JSON; in a process of a job."""
    options = parsed(sys.argv[1:])
    (trainer,) = await system.spawn(Trainer, hosts=[0], name="trainer")
    engines = await system.spawn(Engine, hosts=[1], name="engines")
    for start in options.starts:
        for rate in options.rates:
            real = await trainer.start(rate, start == "settled")
            await engines.load(trainer.weights(False))
            await trainer.changed()
            for number in range(options.steps):
                await trainer.step()
                row: dict[str, Any] = {"model": "SmolLM2" if real else "random", "start": start, "rate": rate}
                for whole in (True, False) if number % 2 else (False, True):
                    before = await trainer.used() + await engines[0].used()
                    began = time.perf_counter()
                    await engines.load(trainer.weights(whole))
                    way = "whole" if whole else "difference"
                    row[way] = time.perf_counter() - began
                    row[f"{way}_used"] = await trainer.used() + await engines[0].used() - before
                print(json.dumps({**row, **await trainer.changed()}), flush=True)


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4], help="learning rates")
    parser.add_argument("--starts", nargs="+", default=["settled", "as loaded"], choices=["settled", "as loaded"])
    parser.add_argument("--steps", type=int, default=4, help="of each rate and start (default: %(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def on_a_network(words: list[str], folder: Path) -> str:
    """Return what the job prints on two namespaces."""
    with Network() as network:
        for node in network.nodes:
            node.slow_down()
        jobs = []
        for node in network.nodes:
            meet = [f"--node-rank={node.number}", f"--master-addr={network.nodes[0].address}", f"--master-port={PORT}"]
            line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meet]
            line += ["-m", "benchmarks.delta", "--inside", *words]
            jobs.append(Torchrun(node, line, folder / f"{node.number}.log", {}))
        codes = [job.code(1800.0) for job in jobs]
        if any(codes):
            sys.exit(f"ended with {codes}:\n" + "\n".join(job.said[-3000:] for job in jobs))
        return jobs[0].said


def on_this_machine(words: list[str]) -> str:
    """Return what the job prints on two processes that take each other for other machines."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line += ["-m", "benchmarks.delta", "--inside", *words]
    more = {"OMP_NUM_THREADS": "1", "RLINF_BENCH_APART": "1"}
    return subprocess.run(
        line, env={**os.environ, **more}, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def main() -> None:
    options = parsed(sys.argv[1:])
    if options.inside:
        if "RLINF_BENCH_APART" in os.environ:
            here = torchrun.here
            torchrun.here = lambda number, **more: dataclasses.replace(here(number, **more), machine=f"m{number}")
        from benchmarks import delta  # under its own name, so that what it defines can be sent

        rlinf.run(delta.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        reason = why_not()
        output = on_this_machine(sys.argv[1:]) if reason else on_a_network(sys.argv[1:], Path(folder))
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"model"')]
    print(f"{rows[0]['model']}, bfloat16, {options.steps} steps each; ", end="")
    print(
        f"one machine, so that seconds are without a network: {reason}" if reason else "1 Gbit/s between two namespaces"
    )
    for start in options.starts:
        for rate in options.rates:
            show(start, rate, [row for row in rows if (row["start"], row["rate"]) == (start, rate)])
    print(f"load average {os.getloadavg()[0]:.1f} after")


def show(start: str, rate: float, rows: list[dict[str, Any]]) -> None:
    """Print medians, and ranges of seconds."""
    sent, whole = (median(row[f"weights/{name}"] for row in rows) for name in ("link_bytes", "link_whole_bytes"))
    seconds = {way: [row[way] for row in rows] for way in ("whole", "difference")}
    used = {way: median(row[f"{way}_used"] for row in rows) for way in seconds}
    spread = {
        way: f"{median(each):.2f} s ({min(each):.2f} to {max(each):.2f}, {used[way]:.2f} of processors)"
        for way, each in seconds.items()
    }
    bar = ""
    if start == "settled" and rate == 1e-6:
        bar = f"  bar >= {BAR:.0f} x: " + ("met" if whole / sent >= BAR else "lost")
    print(
        f"lr {rate:g}, {start}: {median(row['share'] for row in rows):.2%} of elements changed; {sent / 1e6:.2f} of "
        f"{whole / 1e6:.0f} MB, {whole / sent:.1f} x fewer; {spread['difference']} beside {spread['whole']}{bar}"
    )


if __name__ == "__main__":
    main()
