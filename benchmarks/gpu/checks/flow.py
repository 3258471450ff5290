"""Does a whole step hold together: roles that take turns on one device, and a checkpoint to go on from?"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks.device import COUNTS, peak_begun, peak_bytes
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.checks.parts import uncompiled
from benchmarks.gpu.checks.ranks import spans
from benchmarks.gpu.checks.roles import asked, judged, spawn_rollout, spawn_trainer
from benchmarks.gpu.scale import FULL, Outcome, Scale
from rlinf.actors.judge import Judge
from rlinf.config.text import RunConfig
from rlinf.data.step import Step
from rlinf.flows.grpo import grpo
from rlinf.rewards.base import trusted
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.checkpoint import StateCopy

STEPS = 3
COLLOCATED = (
    Bound("metrics_not_finite", most=0),
    Bound("versions", equals="1 2 3"),
    Bound("parked", least=STEPS),
    Bound("peak_over_declared", most=1.0, needs=COUNTS),
)
RESTORED = (
    Bound("tensors", least=1),
    Bound("tensors_that_changed", most=0),
    Bound("version", equals=1),
    Bound("next_loss_difference", most=1e-5),
)


@trusted
def parity(response_ids: list[int], **row: Any) -> float:
    """The share of even tokens: random models have answers of different worth, too."""
    return sum(token % 2 == 0 for token in response_ids) / len(response_ids)


def collocated(scale: Scale) -> Outcome:
    """Three steps of GRPO whose trainer and rollout do not fit together: each is parked while the other works."""
    return judge(scale, asyncio.run(_collocated(scale)), COLLOCATED)


async def _collocated(scale: Scale) -> dict[str, float | int | str]:
    taken = _declared(scale)
    room = max(taken.values())
    group_size, count = 4, scale.of(16, 2)
    versions, lost = [], 0
    peak_begun(scale.device)
    async with ActorSystem.local(device_memory={0: room}) as system:
        place = {"devices": [0]}
        rollout = await spawn_rollout(system, scale, **place, resident_bytes=taken["rollout"])
        trainer = await spawn_trainer(
            system, scale, **place, resident_bytes=taken["trainer"], gradient_checkpointing=True
        )
        judge_role = await system.spawn(Judge, hosts=[0], name="judge", reward=parity)
        for index in range(STEPS):
            step = Step(index, asked(scale, count, first=1000 + index * count), group_size)
            metrics = await grpo(step, rollout, judge_role, trainer)
            lost += sum(not math.isfinite(value) for value in metrics.values())
            versions.append(await rollout[0].version())
        trace = scale.work / "collocated.json"
        await system.trace(trace)
    moves = [event for event in spans(trace, "move") if "offload" in event["name"]]
    return {
        "metrics_not_finite": lost,
        "versions": " ".join(map(str, versions)),
        "parked": len(moves),
        "declared_gb": room / 1e9,
        "peak_over_declared": peak_bytes(scale.device) / room,
        "parking_s": sum(event["dur"] for event in moves) / 1e6,
    }


def _declared(scale: Scale) -> dict[str, int]:
    """Bytes of each role, as a run would declare them."""
    config = RunConfig()
    config.trainer.dtype = config.rollout.dtype = "float32" if scale.rehearse else "bfloat16"
    config.trainer.micro_batch_tokens, config.trainer.gradient_checkpointing = scale.of(8192, 512), True
    config.rollout.max_rows, config.rollout.max_new_tokens = scale.of(64, 8), scale.of(128, 8)
    config.data.max_prompt_tokens = scale.of(72, 36)
    from rlinf.runs.dry_run.footprint import footprints  # wants omegaconf, which other checks here do without

    seats = {role: [frozenset({0})] for role in ("trainer", "rollout")}
    return {role: found.active_bytes for role, found in footprints(config, scale.config("1.5B"), seats).items()}


def checkpoint(scale: Scale) -> Outcome:
    """A trainer after one step is saved and goes on; another one, with other weights, goes on from there."""
    uncompiled(scale)
    return judge(scale, asyncio.run(_checkpoint(scale)), RESTORED)


async def _checkpoint(scale: Scale) -> dict[str, float | int]:
    shape = scale.config("1.5B").to_dict() if scale.rehearse else {**FULL["1.5B"], "num_hidden_layers": 4}
    model = {"model_type": "qwen2", **{name: shape[name] for name in FULL["1.5B"]}}  # 5 GB of state, not 19
    directory = scale.work / "checkpoint"
    async with ActorSystem.local() as system:
        first = await spawn_trainer(system, scale, model=model)
        await first.train(judged(scale, 0))
        saved = await _state(first)
        await first.save(directory)
        expected = await first.train(judged(scale, 1))
        await system.kill(first)
        second = await spawn_trainer(system, scale, model=model, seed=7)
        version = await second.restore(directory)
        restored = await _state(second)
        found = await second.train(judged(scale, 1))
    return {
        "tensors": len(saved.shards),
        "tensors_that_changed": sum(
            name not in restored.shards or not torch.equal(tensor, restored.shards[name])
            for name, tensor in saved.shards.items()
        ),
        "version": version,
        "next_loss_difference": abs(found["loss"] - expected["loss"]),
        "next_grad_norm_difference": abs(found["grad_norm"] - expected["grad_norm"]),
        "bytes": _size(directory),
    }


async def _state(trainer: Any) -> StateCopy:
    found: StateCopy = await trainer[0].export_state()
    return found


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
