"""A policy with blocks, trained over all ranks of a job: whole, in slices, in bfloat16, with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import rlinf
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.envs.environment import EnvOutput
from rlinf.runtime.actor.actor import endpoint

BLOCKS: dict[str, Any] = {
    "type": "tests.models.policy.authored.AuthoredPolicy", "state_size": 2, "action_size": 1, "chunk": 2, "width": 16,
}  # fmt: skip
SLICED: dict[str, Any] = {"sharding": "shard", "micro_batch": 3, "gradient_checkpointing": True}
SPREAD: dict[str, dict[str, Any]] = {
    "whole": {"sharding": "replicate"},
    "sliced": SLICED,
    "part": {**SLICED, "train": ("body.1.*", "exit.*", "log_std", "critic.*")},
    "adapters": {**SLICED, "lora": {"r": 2, "alpha": 8.0, "target_modules": "auto"}},
    "bfloat16": {**SLICED, "dtype": "bfloat16", "train": ("*", "!body.0.up.*")},
}
LEARNING: dict[str, Any] = {"policy": BLOCKS, "lr": 0.01, "grad_clip": 1e9, "epochs": 1, "minibatch": 64, "seed": 4}


class Sliced(PolicyTrainer):
    """Tells what the optimizer saw at its last step, whole."""

    async def setup(self, **settings: Any) -> None:  # type: ignore[override]
        await super().setup(**settings)
        self.seen: dict[str, Tensor] = {}

        def look(*_: Any) -> None:
            given = {name: each.grad for name, each in self.policy.named_parameters() if each.grad is not None}
            self.seen = {name: _whole(gradient) for name, gradient in given.items()}

        self._learner.optimizer.register_step_pre_hook(look)

    @endpoint(joint=True)
    async def inspect(self) -> tuple[dict[str, Tensor], set[str]]:
        """The gradients, and the names of the parameters that are in slices."""
        return self.seen, {name for name, each in self.policy.named_parameters() if isinstance(each, DTensor)}

    @endpoint(device=True, joint=True)
    async def parked_and_back(self) -> None:
        await self.offload()
        await self.onload()

    @endpoint(device=True, joint=True)
    async def evaluated(self, stored: dict[str, Tensor]) -> Tensor:
        def evaluate() -> Tensor:
            found: Tensor = self.policy(stored).logprobs
            found.sum().backward()
            self.policy.zero_grad()
            return found.detach()

        return await self.compute_spmd(evaluate)


class Deciding(PolicyActor):
    """Hands out what it keeps of a decision."""

    @endpoint
    async def decided(self, output: EnvOutput) -> tuple[dict[str, Tensor], Tensor]:
        await self.act((0, 0), output)
        act = self._histories.pop((0, 0)).acts[-1]
        return act.stored, act.logprobs


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


async def named(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in (await trainer.weights(exact=True)).named()}


async def spread_over(system: rlinf.ActorSystem, trajectories: Any, out: Path, begun: Path | None) -> dict[str, Any]:
    """What becomes of every case.

    Args:
        trajectories: of the untrained policy.
        out: directory for checkpoints.
        begun: that of a run with another number of ranks.
    """
    shown = EnvOutput({"state": torch.linspace(-1, 1, 10).view(5, 2)}, None, None, torch.arange(5), 0)
    results = {}
    for number, (name, case) in enumerate(SPREAD.items()):
        trainer = await system.spawn(Sliced, name=f"spread{number}", **LEARNING, **case)
        found: dict[str, Any] = {"before": await named(trainer), "metrics": await trainer.train(trajectories)}
        found["gradient"], found["slices"] = await trainer.inspect()
        found["after"] = await named(trainer)
        await trainer.parked_and_back()
        found["back"] = await named(trainer)
        dtype = case.get("dtype", "float32")
        decider = (await system.spawn(Deciding, hosts=[0], name=f"acts{number}", policy=BLOCKS, dtype=dtype))[0]
        await decider.load(trainer.weights())
        stored, found["decided"] = await decider.decided(shown)
        found["evaluated"] = await trainer.evaluated(stored)
        await trainer.save(str(out / f"spread{number}"))
        again = await system.spawn(Sliced, name=f"later{number}", **LEARNING, **case)
        await again.restore(str((begun or out) / f"spread{number}"))
        found["restored"] = await named(again)
        await again.train(trajectories)
        found["continued"] = await named(again)
        results[name] = found
    return results
