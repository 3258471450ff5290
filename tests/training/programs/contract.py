"""What a back end is asked by trainers, over all ranks of a job: rank 0's answers are written for a test to look at.

Usage: contract.py OUT BEGUN CASE...
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rlinf
from rlinf import endpoint
from rlinf.actors.base import SpmdActor
from rlinf.algos.losses import supervised
from rlinf.config.learning import LearningSettings, ParallelConfig
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec, build_model
from rlinf.models.language.lora import POLICY
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.offload import Parking
from rlinf.training.backend import back_end_of
from rlinf.training.checkpoint import STATE, StateCopy, write_checkpoint
from rlinf.training.fsdp import Learner
from rlinf.training.megatron.backend import MegatronBackEnd
from rlinf.training.optimizer import Kind
from rlinf.training.policy import learn_policy
from rlinf.training.weight_sync import gathered
from tests.actors import toys
from tests.actors.watched import Precise, in_double, precisely
from tests.training.plain_backend import PlainBackEnd

LORA = {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]}
OPTIMIZER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "grad_clip": 0.5}


class PrecisePlain(PlainBackEnd):
    """Computes in float64."""

    @classmethod
    def build(cls, *given: Any) -> Any:
        return precisely(partial(super().build, *given))


class PreciseMegatron(MegatronBackEnd):
    """Computes in float64."""

    @classmethod
    def build(cls, *given: Any) -> Any:
        made = super().build(*given)
        for stage in made.module.double():
            stage.config.pipeline_dtype = torch.float64
        return made


FSDP, PLAIN, MEGATRON = (f"{kind.__module__}.{kind.__qualname__}" for kind in (Precise, PrecisePlain, PreciseMegatron))
CASES: dict[str, dict[str, Any]] = {
    "plain": {"backend": PLAIN},
    "shard": {"backend": FSDP, "sharding": "shard"},
    "replicate": {"backend": FSDP, "sharding": "replicate"},
    "hybrid": {"backend": FSDP, "sharding": "hybrid"},
    "megatron": {"backend": MEGATRON},
    "tensor": {"backend": MEGATRON, "split": {"tensor": 2}},
    "pipeline": {"backend": MEGATRON, "split": {"pipeline": 2}},
    **{f"muon {how}": {"backend": FSDP, "sharding": how, "kind": "muon"} for how in ("shard", "replicate", "hybrid")},
}
SPLIT = ("tensor", "pipeline")
"""Cases in which the ranks are parts of one model."""


def rows(seed: int = 0) -> list[Row]:
    """Of a batch; `toys.by_a_plain_loop` has its loss."""
    return [
        Row.of(sample, gain)
        for judged in toys.groups(7, seed)
        for sample, gain in zip(judged.scored, toys.advantages(judged), strict=True)
    ]


def alone(kind: Kind, seed: int = 0) -> tuple[Any, Learner]:
    """A model that one rank has, in float64, and what it learns by."""
    net = in_double(build_model(toys.configuration(), load_tokenizer(toys.ALPHABET), seed=seed).eval())
    return net, Learner(PolicyModel(net), LearningSettings(kind=kind, **OPTIMIZER))


def one_step(learner: Learner, seed: int) -> dict[str, float]:
    """A step on the batch of a seed, in two micro-batches; what it says."""
    for some in (rows(seed)[:3], rows(seed)[3:]):
        learn_policy(learner, pack(some), toys.SPEC)
    return learner.step()[1]


def copied(net: Any) -> dict[str, torch.Tensor]:
    """Weights as they are now."""
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def far(found: Any, expected: Any, began: Any) -> float:
    """How far weights are from those expected, in shares of what these learned; of the matrix that is furthest."""
    return max(
        float((found[name] - tensor).norm() / (tensor - began[name]).norm()) for name, tensor in expected.items()
    )


class Examined(SpmdActor):
    """Asks a back end."""

    @property
    def machines(self) -> list[str]:
        return ["one" if 2 * rank < self.world_size else "other" for rank in range(self.world_size)]

    async def setup(
        self, backend: str, sharding: str = "shard", split: Mapping[str, int] | None = None, kind: Kind = "adamw"
    ) -> None:
        await self._open_mesh()
        self._optimizer = LearningSettings(kind=kind, **OPTIMIZER)
        self.device = torch.device("cpu")
        self._kind, self._sharding = back_end_of(backend), sharding
        self._parallel = ParallelConfig(**(split or {}))
        self._tokenizer = load_tokenizer(toys.ALPHABET)

    @endpoint
    async def learn(self, directory: Path) -> None:
        """Two steps, saved."""
        self._back, self._optimization = await self._made()
        self._found = await self.compute(self._learned)
        copies = await self.compute(self._back.copies, self._optimization, 2, {"cursor": 5}, self._tokenizer)
        alone = await self.compute(self._back.state, self._optimization, 2, {"cursor": 5})
        written = copies[STATE]
        assert isinstance(written, StateCopy)
        self._found["handed over"] = (alone.about, alone.offsets) == (written.about, written.offsets) and all(
            torch.equal(alone.whole().shards[key], shard) for key, shard in written.whole().shards.items()
        )
        await write_checkpoint(directory, copies, lead=self.rank == 0)

    @endpoint
    async def go_on(self, directory: Path, begun: Path | None) -> dict[str, Any]:
        """All else, once every rank has saved: rank 0's answers."""
        found = self._found | await self.compute(self._went_on)
        for name, path in (("resumed", directory), ("taken over", begun)):
            if path is not None:
                found |= await self.compute(self._resumed, *await self._made(seed=3), name, path)
        found["frozen"] = {}
        if self._kind is not PreciseMegatron and self._optimizer.kind != "muon":  # which refuse them
            found["frozen"] = await self.compute(self._with_adapters, *await self._made(lora=LORA))
        found |= await self.compute(self._overwritten, (await self._made(seed=3))[0])
        return found if self.rank == 0 else {}

    def _learned(self) -> dict[str, Any]:
        back, optimization = self._back, self._optimization
        return {
            "shares": list(back.data_ranks),
            "began": self._exported(back),
            "steps": [self._step(back, optimization, seed) for seed in (0, 1)],
            "exported": self._exported(back),
            "rounded": self._exported(back, torch.bfloat16),
        }

    def _went_on(self) -> dict[str, Any]:
        back, optimization = self._back, self._optimization
        found: dict[str, Any] = {"parked": self._parked(back, optimization)}
        found["returned"] = self._exported(back)
        found["refused"] = self._refused(back, optimization)
        found["unchanged"] = self._exported(back)
        self._step(back, optimization, 2)
        return {**found, "continued": self._exported(back)}

    def _resumed(self, back: Any, optimization: Any, name: str, path: Path) -> dict[str, Any]:
        restored = back.restore(optimization, path / STATE)
        self._step(back, optimization, 2)
        return {f"{name} as": (restored.version, restored.extra), name: self._exported(back)}

    def _overwritten(self, back: Any) -> dict[str, Any]:
        plain = build_model(toys.configuration(), self._tokenizer).double()
        back.take({name: parameter.detach() for name, parameter in plain.named_parameters()})
        return {"shapes": back.shapes(), "taken": self._exported(back)}

    async def _made(self, **more: Any) -> tuple[Any, Any]:
        compute = LearningSettings(sharding=self._sharding, logprob_chunk=5, parallel=self._parallel)
        model = ModelSpec(toys.configuration(), compute=compute, **more)
        back = await self._kind.make(self, model, self._tokenizer)
        optimization = back.optimization(self._optimizer)
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

    def _exported(self, back: Any, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in gathered(back.export(dtype), dtype=dtype)}

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

    def _with_adapters(self, back: Any, optimization: Any) -> dict[Any, Any]:
        """What adapters change: outputs before and after a step, with them and without."""
        probe = pack(rows()[:4])
        found: dict[Any, Any] = {}
        for when in ("before", "after"):
            for adapters in (True, False):
                found[when, adapters] = back.outputs(probe, adapter=POLICY if adapters else None)[0].clone()
            if when == "before":
                self._step(back, optimization, 0)
        return {**found, "names": list(self._exported(back))}


async def main(system: rlinf.ActorSystem) -> None:
    out, begun, *names = sys.argv[1:]
    results = {}
    for name in names:
        group = await system.spawn(Examined, name=name, **CASES[name])
        directory = Path(out).parent / name
        before = None if begun == "-" else Path(begun)
        if name.startswith("muon"):  # which takes over from Muon alone, of this job or the one before
            there = [Path(out).parent / "muon shard", Path(begun).parent / "muon replicate"]
            before = next((each for each in there if each.is_dir()), None)
        await group.learn(directory)
        results[name] = (await group.go_on(directory, before))[0]
    torch.save(results, out)


if __name__ == "__main__":
    from tests.training.programs import contract  # under its own name, so that what it defines can be sent

    rlinf.run(contract.main)
