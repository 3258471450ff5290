"""What a back end is asked by trainers, over all ranks of a job: rank 0's answers are written for a test to look at.

Usage: contract.py OUT BEGUN CASE...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import rlinf
from rlinf import endpoint
from rlinf.actors.base.spmd import JointActor
from rlinf.algos.losses import supervised
from rlinf.data.offload import Parking
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.load import build_model
from rlinf.training.backend import ModelSettings, back_end_of
from rlinf.training.text.policy_loss import learn_policy
from rlinf.weights.train_state import STATE, write_checkpoint
from tests.actors import toys
from tests.actors.watched import Precise, precisely
from tests.training.plain_backend import PlainBackEnd

LORA = {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]}
OPTIMIZER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "grad_clip": 0.5}


class PrecisePlain(PlainBackEnd):
    """Computes in float64."""

    @classmethod
    def built(cls, build: Any, made: Any, tokenizer: Any) -> Any:
        return precisely(lambda: build(made, tokenizer))


FSDP, PLAIN = (f"{kind.__module__}.{kind.__qualname__}" for kind in (Precise, PrecisePlain))
CASES: dict[str, dict[str, Any]] = {
    "plain": {"backend": PLAIN},
    "shard": {"backend": FSDP, "sharding": "shard"},
    "replicate": {"backend": FSDP, "sharding": "replicate"},
    "hybrid": {"backend": FSDP, "sharding": "hybrid"},
}


def rows(seed: int = 0) -> list[Row]:
    """Of a batch; `toys.by_a_plain_loop` has its loss."""
    return [
        Row.of(sample, gain)
        for judged in toys.groups(7, seed)
        for sample, gain in zip(judged.scored, toys.advantages(judged), strict=True)
    ]


class Examined(JointActor):
    """Asks a back end."""

    @property
    def machines(self) -> list[str]:
        return ["one" if 2 * rank < self.world_size else "other" for rank in range(self.world_size)]

    async def setup(self, backend: str, sharding: str = "shard") -> None:
        await self._open_mesh()
        self.device = torch.device("cpu")
        self._kind, self._sharding = back_end_of(backend), sharding
        self._tokenizer = load_tokenizer(toys.ALPHABET)

    @endpoint
    async def examine(self, directory: Path, begun: Path | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        back, optimization = await self._made()
        found["shares"] = list(back.data_ranks)
        found["began"] = self._exported(back)
        found["steps"] = [self._step(back, optimization, seed) for seed in (0, 1)]
        found["exported"] = self._exported(back)
        found["rounded"] = {name: tensor.clone() for name, tensor in back.export(torch.bfloat16)}
        await write_checkpoint(directory, back.copies(optimization, 2, {"cursor": 5}, self._tokenizer))
        found["parked"] = self._parked(back, optimization)
        found["returned"] = self._exported(back)
        found["refused"] = self._refused(back, optimization)
        found["unchanged"] = self._exported(back)
        self._step(back, optimization, 2)
        found["continued"] = self._exported(back)
        for name, path in (("resumed", directory), ("taken over", begun)):
            if path is not None:
                other, fresh = await self._made(seed=3)
                restored = other.restore(fresh, path / STATE)
                found[f"{name} as"] = restored.version, restored.extra
                self._step(other, fresh, 2)
                found[name] = self._exported(other)
        found["frozen"] = await self._with_adapters()
        other, _ = await self._made(seed=3)
        found["shapes"] = other.shapes()
        plain = build_model(toys.configuration(), self._tokenizer).double()
        other.take({name: parameter.detach() for name, parameter in plain.named_parameters()})
        found["taken"] = self._exported(other)
        return found if self.rank == 0 else {}

    async def _made(self, **more: Any) -> tuple[Any, Any]:
        model = ModelSettings(toys.configuration(), sharding=self._sharding, logprob_chunk=5, **more)
        back = await self._kind.make(self, model, self._tokenizer)
        optimization = back.optimization(**OPTIMIZER)
        optimization.begin()
        return back, optimization

    def _batches(self, back: Any, of: Sequence[Row]) -> list[Packed]:
        """Our share, in two micro-batches."""
        shares = max(back.data_ranks) + 1
        mine = of[back.data_ranks[self.rank] :: shares]
        return [pack(mine[:3]), pack(mine[3:])]

    def _step(self, back: Any, optimization: Any, seed: int) -> dict[str, float]:
        for batch in self._batches(back, rows(seed)):
            learn_policy(optimization, batch, toys.SPEC)
        gathered, numbers = optimization.step()
        return {**numbers, "tokens": float(gathered.weight), **gathered.values()}

    def _exported(self, back: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in back.export()}

    def _parked(self, back: Any, optimization: Any) -> tuple[int, int]:
        """Bytes that were here, and that were left when all had gone to host memory and back."""
        parking = Parking(lambda: back.held(optimization))
        before = parking.bytes
        parking.park()
        parked = parking.parked
        parking.unpark()
        return before, parked

    def _refused(self, back: Any, optimization: Any) -> str:
        """What is said of a loss that is not finite, in whichever share of the data it came up."""
        batches = self._batches(back, rows(2))
        last = back.data_ranks[self.rank] == max(back.data_ranks)

        def loss(batch: Packed, outputs: Any) -> Any:
            found = supervised(outputs[0], torch.ones_like(outputs[0], dtype=torch.bool))
            return type(found)(found.total * float("nan"), found.weight) if last else found

        optimization.accumulate(batches, loss)
        try:
            optimization.step()
        except FloatingPointError as error:
            return str(error)
        return ""

    async def _with_adapters(self) -> dict[str, Any]:
        """What adapters change: outputs before and after a step, with them and without."""
        back, optimization = await self._made(lora=LORA)
        probe = pack(rows()[:4])
        found = {}
        for when in ("before", "after"):
            for adapters in (True, False):
                found[when, adapters] = back.outputs(probe, adapters=adapters)[0].clone()
            if when == "before":
                self._step(back, optimization, 0)
        found["names"] = list(self._exported(back))
        return found


async def main(system: rlinf.ActorSystem) -> None:
    out, begun, *names = sys.argv[1:]
    results = {}
    for name in names:
        group = await system.spawn(Examined, name=name, **CASES[name])
        directory = Path(out).parent / name
        results[name] = (await group.examine(directory, Path(begun) if begun != "-" else None))[0]
    torch.save(results, out)


if __name__ == "__main__":
    from tests.training.programs import contract  # under its own name, so that what it defines can be sent

    rlinf.run(contract.main)
