"""`python -m benchmarks.backends`: Megatron-core beside FSDP2 on one process, and how long a pipeline's stages idle.

    whole    the same tiny model and micro-batches under both back ends, in one process, A B A B …: CPU seconds of an
             optimizer step, medians
    bubble   two stages that train by their real schedule and messages, each with a clock to which a forward or backward
             pass adds a modelled time, and a message the time at which it was sent: the share of the time in which a
             stage idles, beside (p - 1) / (m + p - 1)
    learn    the quickstart by GRPO and PPO with two processes per copy, tensor by tensor or stage by stage: accuracy
    sixteen  all five keys at once on 16 processes: largest differences from transformers' own log-probs and gradients

The first two are measured without arguments; name others to have them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import rlinf
from rlinf import ActorSystem, endpoint
from rlinf.actors.base import SpmdActor
from rlinf.algos.losses import supervised
from rlinf.config.learning import LearningSettings, ParallelConfig
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec
from rlinf.training.backend import back_end_of
from rlinf.training.megatron.layers import Stage
from rlinf.training.megatron.schedule import Pipeline

ROOT = Path(__file__).parents[1]
TOKENIZER = {"characters": "0123456789>"}
BARS = {"whole": 1.15, "bubble": 0.05}
"""At most this many times FSDP's step; at most this far from the formula, relative to it."""
MODEL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "tie_word_embeddings": True,
}  # fmt: skip
"""The quickstart's."""
FORWARD, BACKWARD, MICRO_BATCHES = 1.0, 2.0, (4, 8, 16)


def batches(count: int, samples: int = 128) -> list[Packed]:
    """Micro-batches of samples with 5 tokens of prompt and as many of answer."""
    ids = np.random.default_rng(0).integers(2, 12, (count, samples, 10))
    return [pack([Row(row[:5], row[5:]) for row in rows]) for rows in ids]


def loss(batch: Packed, outputs: Any) -> Any:
    return supervised(outputs[0], batch.mask)


class Timed(SpmdActor):
    """Times back ends."""

    async def setup(self) -> None:
        await self._open_mesh()
        self.device = torch.device("cpu")
        self._tokenizer = load_tokenizer(TOKENIZER)

    async def _made(self, backend: str, split: dict[str, int]) -> Any:
        model = {**MODEL, "num_hidden_layers": max(2, *split.values())} if split else MODEL
        spec = ModelSpec(model, compute=LearningSettings(parallel=ParallelConfig(**split)))
        return await back_end_of(backend).make(self, spec, self._tokenizer)

    @endpoint
    async def whole(self, rounds: int) -> dict[str, list[float]]:
        """CPU seconds of each optimizer step, by back end."""
        learners = {
            name: (await self._made(name, {})).optimization(LearningSettings(lr=1e-4)) for name in ("fsdp", "megatron")
        }
        return await self.compute(self._steps, learners, rounds)

    def _steps(self, learners: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in learners}
        given = batches(8)
        for number in range(rounds + 3):
            for name, learner in learners.items():
                begun = time.process_time()
                learner.begin()
                learner.accumulate(given, loss)
                learner.step()
                if number >= 3:  # what is made by the first steps is not counted
                    found[name].append(time.process_time() - begun)
        return found

    @endpoint
    async def bubble(self, count: int) -> float:
        """Modelled seconds that a round of micro-batches takes."""
        CLOCK[0] = 0.0
        back = await self._made("megatron", {"pipeline": 2})
        return await self.compute(self._round, back, count)

    def _round(self, back: Any, count: int) -> float:
        from rlinf.training.megatron import schedule

        pipeline: Pipeline = back._pipeline
        for stage in pipeline.stages:
            _slow(stage)
        given = batches(count, samples=1)  # whose own computing counts for little beside the modelled times

        def ended(number: int, found: Tensor) -> Tensor:
            return loss(given[number], (found[:, 0], found[:, 1])).total

        with mock.patch.object(schedule, "Exchange", _timed(schedule.Exchange)):
            pipeline.run(given, ended, learns=True)
        return CLOCK[0]


CLOCK = [0.0]
"""Seconds of this stage's modelled time."""


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        CLOCK[0] += FORWARD
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        CLOCK[0] += BACKWARD
        return gradients[0]


def _slow(stage: Stage) -> None:
    inner = stage.forward
    stage.forward = lambda *given: _Passes.apply(inner(*given))  # type: ignore[method-assign]


def _timed(kind: Any) -> Any:
    """The exchange of stages, of which each message says when it was sent and is received no earlier."""

    class Timed(kind):  # type: ignore[misc]
        def _sent(self, asked: Any, out: Any, into: Any) -> None:
            super()._sent(asked, out, into)
            if any(each is not None and each.dtype == torch.int64 for each in (*out, *into)):
                return  # shapes, which go before
            told = [None if each is None else torch.tensor([CLOCK[0]]) for each in out]
            heard = [None if each is None else torch.zeros(1) for each in into]
            super()._sent(asked, told, heard)
            CLOCK[0] = max([CLOCK[0], *(float(each) for each in heard if each is not None)])

    return Timed


def _write(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found))


async def _main(system: ActorSystem) -> None:
    out, what, *rest = sys.argv[1:]
    group = await system.spawn(Timed, name="timed")
    if what == "whole":
        (found,) = await group.whole(int(rest[0]))
    else:
        found = {int(count): max(await group.bubble(int(count))) for count in rest}
    _write(Path(out), found)


def _ran(processes: int, *arguments: str) -> Any:
    """Findings of this program with so many processes."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        start = [sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*start, str(Path(__file__)), str(out), *arguments]
        subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True)
        return json.loads(out.read_text())


def whole(rounds: int) -> dict[str, Any]:
    found = {name: statistics.median(seconds) for name, seconds in _ran(1, "whole", str(rounds)).items()}
    return {**found, "ratio": found["megatron"] / found["fsdp"], "bar": BARS["whole"]}


def bubble() -> list[dict[str, float]]:
    rows = []
    for count, seconds in _ran(2, "bubble", *map(str, MICRO_BATCHES)).items():
        busy, wanted = int(count) * (FORWARD + BACKWARD), 1 / (int(count) + 1)
        idle = 1 - busy / seconds
        rows.append({"micro_batches": int(count), "idle": idle, "formula": wanted, "off": idle / wanted - 1})
    return rows


def learn(steps: int) -> list[dict[str, Any]]:
    rows = []
    for recipe in ("grpo_clip_higher", "ppo"):
        for key in ("tensor", "pipeline"):
            with tempfile.TemporaryDirectory() as directory:
                command = [
                    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "launch.py",
                    "--config", "configs/quickstart.yaml", f"steps={steps}", f"algorithm.name={recipe}",
                    "trainer.backend=megatron", f"trainer.parallel.{key}=2", f"output_dir={directory}", "name=run",
                ]  # fmt: skip
                if recipe == "ppo":
                    command.append("placement.critic=0-1")
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True)
                lines = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").open()]
                accuracy = [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]
                rows.append({"recipe": recipe, "split": key, "before": accuracy[0], "after": accuracy[-1]})
    return rows


def sixteen() -> Any:
    case = "qwen3_moe:tensor=2,pipeline=2,interleave=2,context=2,expert=2"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.pt"
        program = "tests/training/programs/split.py"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=16", "--standalone", program, str(out),
            case,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True)
        ranks = torch.load(out, weights_only=False)[case]
    return {
        "case": case,
        "log_probs": max(rank["outputs"] for rank in ranks),
        "gradients": max(rank["gradient"][0] for rank in ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["whole", "bubble"], choices=["whole", "bubble", "learn", "sixteen"])
    parser.add_argument("--rounds", type=int, default=40, help="optimizer steps of each back end")
    parser.add_argument("--steps", type=int, default=100, help="of each run that learns")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-backends.json")
    asked = parser.parse_args()
    measure = {
        "whole": lambda: whole(asked.rounds),
        "bubble": bubble,
        "learn": lambda: learn(asked.steps),
        "sixteen": sixteen,
    }
    now = datetime.datetime.now(datetime.UTC)
    found: dict[str, Any] = {}
    for what in asked.what:
        found[what] = measure[what]()
        print(what, json.dumps(found[what], indent=1), flush=True)
    if asked.save:
        path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-backends.json"
        about = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "cores": os.cpu_count(), "machine": platform.machine()}
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **about, "torch": torch.__version__, **found}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2] in ("whole", "bubble") and sys.argv[1].endswith(".json"):
        from benchmarks import backends  # under its own name, so that what it defines can be sent

        rlinf.run(backends._main)
    else:
        main()
