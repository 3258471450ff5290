"""A trainer over all ranks of a job: what it learned is written for a test to look at."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rlinf
from rlinf import Stream, endpoint
from rlinf.actors.trainer import Trainer
from rlinf.algos import recipes
from rlinf.algos.algorithms import AlgorithmSpec
from rlinf.data.sample import Example, Group
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from tests.actors import toys
from tests.actors.watched import Watched


class Apprentice(Watched, Trainer):
    """A trainer that is watched, and learns by many algorithms."""

    @endpoint(device=True, joint=True)
    async def become(self, algorithm: AlgorithmSpec, minibatches: int = 1, others: dict | None = None) -> None:
        """Learn by another algorithm from now on, as if for the first time."""
        self._spec, self._adapters = algorithm, others or {}
        self._settings = replace(self._settings, minibatches=minibatches)
        self.version = 0
        self.seen.clear()

    @endpoint(device=True, gang=True)
    async def say(self, groups: Any) -> AsyncIterator[Group]:
        """Our log-probs."""
        async for group in self._annotated(groups, ("proximal_logprobs",)):
            yield group

    @endpoint(joint=True)
    async def batch(self) -> list[Group]:
        """The last one."""
        return list(self._batch[0]) if self._batch is not None else []

    def _inspect(self) -> dict[str, Any]:
        return {**super()._inspect(), "packs": self._back.module.packs}


EXPERTS = toys.configuration("qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"model": toys.configuration("qwen2"), "epochs": 2, "micro_batch_tokens": 30},
    "checkpointing": {"model": toys.configuration("qwen2"), "gradient_checkpointing": True},
    "bfloat16": {"model": toys.configuration("qwen2"), "dtype": "bfloat16"},
    "lora": {
        "model": toys.configuration("qwen2"),
        "lora": {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]},
    },
    "copies": {"model": toys.configuration("qwen2"), "sharding": "replicate"},
    "minibatches": {"model": toys.configuration("qwen2"), "minibatches": 2, "epochs": 2},
    "free copies corrected": {
        "model": toys.configuration("qwen2"),
        "sharding": "replicate",
        "order": "free",
        "algorithm": "grpo_tis",
        "staleness": 3,
    },
    "own reference": {
        "model": toys.configuration("qwen2"),
        "lora": {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]},
        "algorithm": {"name": "deepseek_grpo", "overrides": {"kl.beta": 0.5}},
        "reference": "adapters_off",
    },
    "padded": {"model": toys.configuration("bloom")},
    "experts": {"model": EXPERTS, "router_aux_loss": 0.5},
    "experts in free copies": {"model": EXPERTS, "router_aux_loss": 0.5, "sharding": "replicate", "order": "free"},
}


async def main(system: rlinf.ActorSystem) -> None:
    out, saved, begun, *names = sys.argv[1:]
    cases = {**CASES, "saved": {"model": saved}}
    results = {}
    for name in names:
        settings = {
            "tokenizer": toys.ALPHABET, "lr": 0.01, "grad_clip": 1e9, "micro_batch_tokens": 60,
            "logprob_chunk": 5, "algorithm": toys.SPEC, "precise": "bfloat16" not in name, **cases[name],
        }  # fmt: skip
        trainer = await system.spawn(Apprentice, name=name, **settings)
        batch = toys.routed(toys.groups(7)) if "experts" in name else toys.groups(7)
        metrics = await trainer.train(Stream.of([batch[i] for i in (2, 0, 1, 5, 6, 3, 4)]))
        results[name] = {"metrics": metrics, **await trainer.inspect(), "samples": await trainer.samples(3)}
        weights = await trainer.weights()
        results[name]["published"] = {name: tensor.clone() for name, tensor in weights.named()}
        results[name]["version"] = weights.version
        examples = [Example(s.prompt.token_ids, s.response_ids) for g in batch for s in g.samples]
        results[name]["sft"] = await trainer.sft([examples[:9], examples[9:10]])
        results[name]["after"] = await trainer.inspect()
    results |= await by_algorithm(system)
    results |= await with_adapters(system)
    results |= await resumed(system, Path(out).parent / "checkpoint", begun)
    torch.save(results, out)


ALGORITHMS = (
    *("grpo", "reinforce_pp_baseline", "gspo", "dapo", "cispo", "opd"),
    *("kl in the reward", "corrected kl", "entropy", "masked", "rejection"),
)
"""One of each way in which tokens, answers and the whole batch depend on each other; `training/test_learner.py` has all
that there are."""
STILL: dict[str, Any] = {
    "model": toys.configuration(), "tokenizer": toys.ALPHABET, "lr": 0.0, "grad_clip": 1e9, "micro_batch_tokens": 60,
    "precise": True,
}  # fmt: skip
"""Gradients are looked at, and weights stay."""


async def by_algorithm(system: rlinf.ActorSystem) -> dict[str, Any]:
    """The gradient of every algorithm; and what those that ask for log-probs before the update are told."""
    trainer = await system.spawn(Apprentice, name="algorithms", **STILL)
    batch, found = toys.conversations(toys.told(toys.groups(7))), {}
    for name in ALGORITHMS:
        await trainer.become(toys.ALGORITHMS[name])
        metrics = await trainer.train(Stream.of(batch[::-1]))
        found[name] = {"gradient": (await trainer.inspect())["gradients"][0], "metrics": metrics}
    said, proximal = await before_the_update(trainer, batch)
    free = await system.spawn(Apprentice, name="freely", **STILL, sharding="replicate", order="free")
    freely = await before_the_update(free, batch)
    return {
        "said": said,
        "algorithms": found,
        "proximal": proximal,
        "said freely": freely[0],
        "proximal freely": freely[1],
    }


async def before_the_update(trainer: Any, batch: list[Group]) -> tuple[list[Group], dict[str, Any]]:
    """Groups with log-probs; and a batch that was learned in minibatches with those, whatever its engine had said."""
    wrong = [Group(g.prompt, tuple(replace(s, logprobs=s.logprobs - 5.0) for s in g.samples)) for g in batch]
    await trainer.become(toys.ALGORITHMS["grpo_tis"], 3)
    metrics = await trainer.train(Stream.of(wrong))
    said = [group async for group in trainer.say(Stream.of(batch[::-1]))]
    return said, {"groups": await trainer.batch(), "metrics": metrics}


async def with_adapters(system: rlinf.ActorSystem) -> dict[str, Any]:
    """Gradients of adapters towards a reference: the model without them, or a role that says the same."""
    lora = {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    trainer = await system.spawn(Apprentice, name="adapters", **{**STILL, "lr": 0.05}, lora=lora)
    batch = toys.told(toys.groups(7))
    for _ in range(2):
        await trainer.train(batch)  # so that they have an effect
    found = {}
    plain = build_model(STILL["model"], load_tokenizer(STILL["tokenizer"]))
    said = [group.with_column("ref_logprobs", toys.logprobs_of(plain, group)) for group in batch]
    await trainer.save(Path(sys.argv[1]).parent / "adapted")
    for place in ("loss", "reward"):
        algorithm = recipes.get("grpo", {"kl": {"place": place, "beta": 0.5}})
        for off, groups in ((True, batch), (False, said)):
            for minibatches in (1, 2):
                await trainer.restore(Path(sys.argv[1]).parent / "adapted")
                await trainer.become(algorithm, minibatches, {"ref_logprobs": None} if off else None)
                await trainer.train(Stream.of(groups))
                found[place, minibatches, off] = (await trainer.inspect())["gradients"][0]
    return {"adapters": found}


async def resumed(system: rlinf.ActorSystem, checkpoint: Path, begun: str) -> dict[str, Any]:
    """What a second batch makes of a trainer that goes on, and of one that resumes what another job has saved."""
    settings = {"model": toys.configuration(), "tokenizer": toys.ALPHABET, "lr": 0.01, "micro_batch_tokens": 30}
    settings |= {"precise": True}
    first, second = toys.groups(7), toys.groups(7, seed=1)
    trainer = await system.spawn(Apprentice, name="continued", **settings)
    await trainer.train(first)
    await trainer.save(checkpoint)
    await trainer.train(second)
    results = {"continued": await trainer.inspect()}
    if begun:
        other = await system.spawn(Apprentice, name="resumed", seed=5, **settings)
        version = await other.restore(begun)
        await other.train(second)
        results["resumed"] = {**await other.inspect(), "version": version}
    return results


if __name__ == "__main__":
    rlinf.run(main)
