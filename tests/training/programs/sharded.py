"""A model sharded over real processes: published to receivers; saved and restored, or moved, on other numbers of ranks.

Usage: sharded.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import rlinf
from rlinf import endpoint
from rlinf.actors.base import BaseTrainer
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import Weights
from rlinf.models.language.build import build_model
from rlinf.models.language.lora import add_adapters, start_adapters
from rlinf.training.checkpoint import Restored, Source, park
from rlinf.training.export import copy_model
from rlinf.training.weight_sync import Receiver, exported, publish

TINY = {
    "model_type": "qwen2", "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5,
    "num_key_value_heads": 1, "intermediate_size": 35, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes that neither 2 nor 3 ranks divide."""


class Learner(BaseTrainer):
    """A model over the group's hosts."""

    async def setup(self, seed: int = 0, lora: bool = False, plain: bool = False) -> None:
        self.tokenizer = load_tokenizer({"characters": "0123456789>"})
        self.model = build_model(TINY, self.tokenizer, seed=seed)
        if lora:
            add_adapters(self.model, {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]})
            with torch.no_grad():
                for parameter, value in start_adapters(self.model, seed):
                    parameter.copy_(value)
        if not plain:
            mesh = await self.system.collectives.mesh(self._cell.name.partition("[")[0], self.group.hosts)
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self._own(self.model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0 / (1 + done)))

    @endpoint
    async def learn(self, steps: int, noisy: bool = True) -> None:
        await self.compute(self._learn, steps, noisy)

    def _learn(self, steps: int, noisy: bool) -> None:
        for _ in range(steps):
            batch = torch.randint(0, 10, (2, 6), generator=torch.Generator().manual_seed(self.version))
            noise = torch.rand(()) if noisy else 0.0  # from the generator that a checkpoint holds
            (self.model(input_ids=batch, labels=batch).loss * (1 + noise)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.version += 1

    @endpoint
    async def look(self) -> None:
        """A forward alone, after which FSDP2 leaves the root's parameters whole."""
        with torch.no_grad():
            await self.compute(lambda: self.model(input_ids=torch.zeros(1, 3, dtype=torch.long)))

    @endpoint
    async def seed(self, seed: int) -> None:
        torch.manual_seed(seed + self.rank)

    @endpoint(joint=True)
    async def weights(  # type: ignore[override]
        self, dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 20
    ) -> Weights | None:
        return await publish(self, partial(exported, self.model), self.version, dtype=dtype, bucket_bytes=bucket_bytes)

    @endpoint
    async def whole(self) -> dict[str, torch.Tensor]:
        """Every parameter and what the optimizer keeps for it, as one process would have it."""
        return await self.compute(self._whole)

    def _whole(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            for key, value in {"value": parameter.detach(), **self.optimizer.state.get(parameter, {})}.items():
                found[f"{name} {key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        return found

    def _copies(self, directory: Path) -> dict[str, Any]:
        whole = copy_model(self.trained, self.tokenizer, lead=self.rank == 0)
        return {**super()._copies(directory), **({} if whole is None else {"hf": whole})}

    def _extra(self) -> dict[str, Any]:
        return {"cursor": 5}

    def _take(self, source: Path | Source) -> Restored:
        found = super()._take(source)
        assert found.extra == {"cursor": 5}
        return found


class Toy(Receiver):
    """Keeps what it is sent."""

    async def check_weights(self, weights: Weights) -> None:
        pass

    async def switch_weights(self, weights: Weights) -> None:
        self.weights = weights

    @endpoint
    async def have(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self.weights.version, dict(self.weights.named())


async def published(system) -> None:
    """Weights of a sharded model arrive on every host as one process would have them."""
    toys = await system.spawn(Toy, hosts=[0, 1, 2], name="toys")
    learner = await system.spawn(Learner, hosts=[0, 1, 2], name="learner", seed=1)
    alone = await system.spawn(Learner, hosts=[1], name="alone", seed=1, plain=True)
    want = {name.removesuffix(" value"): value for name, value in (await alone.whole())[0].items()}
    for look in (False, True):
        if look:
            await learner.look()
        assert await toys.load(learner.weights()) == 0
        for version, named in await toys.have():
            assert version == 0
            assert list(named) == list(want)
            for name, tensor in named.items():
                assert torch.equal(tensor, want[name]), name
    await learner.learn(1)
    assert await toys.load(learner.weights(torch.bfloat16, 3000)) == 1
    full = (await learner.whole())[0]
    for _, named in await toys.have():
        for name, tensor in named.items():
            assert torch.equal(tensor, full[f"{name} value"].bfloat16()), name
    assert len((await learner.weights(None, 3000)).buckets) > 3
    adapted = await system.spawn(Learner, hosts=[0, 2], name="adapted", seed=1, lora=True)
    await toys.load(adapted.weights())
    for _, named in await toys.have():
        assert named.keys() == want.keys()
        assert all(torch.allclose(named[name], want[name], atol=1e-6) for name in want)


async def restored(system, directory: Path) -> None:
    """Saved by 1, 2 or 3 ranks, restored by 1, 2 or 3: the same bits; and on the same number the same future."""
    hosts = {ranks: list(range(ranks)) for ranks in (1, 2, 3)}
    for saved, here in ((2, 3), (3, 1), (3, 3)):
        name = f"{saved} to {here}"
        before = await system.spawn(Learner, hosts=hosts[saved], name=f"before {name}", seed=1)
        await before.seed(5)
        await before.learn(2)
        await before.look()
        path = directory / name
        await before.save(path)
        want = (await before.whole())[0]
        assert json.loads((path / "hf" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
        exported = load_file(path / "hf" / "model.safetensors")
        assert exported.keys() == {key.partition(" ")[0] for key in want}
        assert not [key for key, tensor in exported.items() if not torch.equal(tensor, want[f"{key} value"])]
        await before.learn(2, saved == here)
        future = (await before.whole())[0]
        after = await system.spawn(Learner, hosts=hosts[here], name=f"after {name}", seed=2)
        if here == 3:
            await after.learn(1)  # its state is replaced, not added to
        assert await after.restore(path) == 2
        found = (await after.whole())[0]
        assert found.keys() == want.keys()
        assert not [key for key in want if not torch.equal(found[key], want[key])], name
        await after.learn(2, saved == here)
        found = (await after.whole())[0]
        if saved == here:
            assert not [key for key in future if not torch.equal(found[key], future[key])], name
        else:  # gradients are added up in another order
            torch.testing.assert_close(found, future, atol=1e-4, rtol=1e-3)


async def moved(system) -> None:
    """Moved through memory from 1, 2 or 3 ranks to 1, 2 or 3, on other hosts: the same bits."""
    for number, (old, new) in enumerate((([0], [1, 2]), ([1, 2], [0]), ([2, 1, 0], [0, 1, 2]))):
        before = await system.spawn(Learner, hosts=old, name=f"leaving {number}", seed=1)
        await before.seed(5)
        await before.learn(2)
        await before.look()
        parked = await park(system, f"learner {number}", before)
        want = (await before.whole())[0]
        await before.learn(2, len(old) == len(new))
        future = (await before.whole())[0]
        await system.kill(before)
        after = await system.spawn(Learner, hosts=new, name=f"arriving {number}", seed=2)
        assert await after.import_state(parked) == 2
        await system.kill(parked.keepers)
        found = (await after.whole())[0]
        assert found.keys() == want.keys()
        assert not [key for key in want if not torch.equal(found[key], want[key])], (old, new)
        await after.learn(2, len(old) == len(new))
        found = (await after.whole())[0]
        if len(old) == len(new):
            assert not [key for key in future if not torch.equal(found[key], future[key])], (old, new)
        else:  # gradients are added up in another order
            torch.testing.assert_close(found, future, atol=1e-4, rtol=1e-3)
        await system.kill(after)


async def main(system) -> None:
    await published(system)
    await moved(system)
    await restored(system, Path(sys.argv[1]))
    print("all as expected")


if __name__ == "__main__":
    from tests.training.programs import sharded  # under its own name, so that what it defines can be sent

    rlinf.run(sharded.main)
    sys.exit(0)
