"""Models split over ranks in every way that the FSDP2 back end has: what they give, and what they learn.

Usage: splits.py OUT SAVED CASE...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import rlinf
from rlinf import endpoint
from rlinf.actors.base import SpmdActor
from rlinf.algos import recipes
from rlinf.config.learning import LearningSettings, ParallelConfig
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language import tensor_parallel
from rlinf.models.language.build import ModelSpec
from rlinf.training.backend import back_end_of
from rlinf.training.checkpoint import STATE, write_checkpoint
from rlinf.training.export import MODEL
from rlinf.training.policy import learn_policy
from rlinf.training.weight_sync import gathered
from tests.actors import toys
from tests.actors.watched import whole

LENGTHS = (9, 1, 23, 4, 14, 6, 2, 11)
"""Tokens of answers, unequal: some ranks have the ends of long ones, and some learn nothing of a micro-batch."""


@dataclass(frozen=True)
class Case:
    """One way to split a model."""

    kind: str = "qwen3"
    parallel: dict[str, int] = field(default_factory=dict)
    sharding: str = "shard"
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings of the model's configuration."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further model settings."""
    recipe: str = "grpo"
    """What is learned by."""

    @property
    def algorithm(self) -> Any:
        """The recipe, with a clip that some ratios reach."""
        return recipes.get(self.recipe, {"loss": {"clip_low": 0.2, "clip_high": 0.28}})


WINDOW = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16,
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [1], "num_hidden_layers": 3,
}  # fmt: skip
CHECKPOINTED = {"gradient_checkpointing": True}
CUT = {"micro_batch_tokens": 4}
"""No rank has room for a whole sequence."""
GEMMA = {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "head_dim": 8}
CASES: dict[str, Case] = {
    "context, windows": Case("qwen2", {"context": 2}, more=WINDOW, settings=CUT),
    "context, whole answers": Case("gemma2", {"context": 2}, more=GEMMA, recipe="gspo"),
    "tensor": Case("qwen2", {"tensor": 2}, settings=CHECKPOINTED),
    "expert": Case("qwen3_moe", {"expert": 2}, more=EXPERTS),
    "expert, Mixtral": Case("mixtral", {"expert": 2}, more={"num_local_experts": 4, "head_dim": 8}),
    "tensor, context, expert": Case(
        "qwen3_moe", {"tensor": 2, "context": 2, "expert": 4}, more=EXPERTS, settings=CHECKPOINTED
    ),
    "context in fours": Case("llama", {"context": 4}, settings=CUT, recipe="gspo"),
    "context in copies": Case("gemma2", {"context": 2}, sharding="replicate", more=GEMMA, settings=CUT),
    "tensor and slices": Case("qwen2", {"tensor": 2}, more=WINDOW),
    "tensor in copies": Case(parallel={"tensor": 2}, sharding="hybrid"),
}
FROM = {"tensor, context, expert": "expert", "tensor and slices": "context, windows"}
"""Of cases that go on from what others saved, with fewer ranks and split otherwise, which these are."""


def batch() -> list[Row]:
    """Answers to three prompts, of which some are read once."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, toys.VOCABULARY, size) for size in (5, 1, 8)]
    return [
        Row(
            prompts[number % 3 if number < 6 else 2],
            rng.integers(0, toys.VOCABULARY, size),
            (-2.5 + 0.3 * rng.normal(size=size)).astype(np.float32),
            float(rng.normal()),
            temperature=0.8,
        )
        for number, size in enumerate(LENGTHS)
    ]


def micro_batches(share: int, shares: int) -> list[Packed]:
    """Two of a share of the data; the second may be empty."""
    mine = batch()[share::shares]
    return [pack(mine[:5]), pack(mine[5:])]


class Split(SpmdActor):
    """Asks a back end whose models are split."""

    @property
    def machines(self) -> list[str]:
        return ["one" if 2 * rank < self.world_size else "other" for rank in range(self.world_size)]

    async def setup(self) -> None:
        await self._open_mesh()
        self.device = torch.device("cpu")
        self._tokenizer = load_tokenizer(toys.ALPHABET)

    async def _made(self, case: Case, seed: int = 0, source: str | None = None) -> tuple[Any, Any]:
        model = ModelSpec(
            toys.configuration(case.kind, **case.more) if source is None else source,
            seed=seed,
            compute=LearningSettings(
                sharding=case.sharding,
                parallel=ParallelConfig(**case.parallel),
                logprob_chunk=5,
                **case.settings,
            ),
        )
        back = await back_end_of("tests.actors.watched.Precise").make(self, model, self._tokenizer)
        optimization = back.optimization(
            LearningSettings(lr=0.01, betas=(0.9, 0.999), weight_decay=0.1, grad_clip=0.05)
        )
        optimization.begin()
        return back, optimization

    @endpoint
    async def examine(self, name: str, directory: Path, begun: Path | None) -> dict[str, Any]:
        """One case: what it gives, what it learns and saves, and a step from what others saved."""
        self._algorithm = CASES[name].algorithm
        back, optimization = await self._made(CASES[name])
        with mock.patch.object(tensor_parallel, "whole_runs", self._watched(tensor_parallel.whole_runs)):
            found = await self.compute(self._learned, back, optimization)
        copies = await self.compute(back.copies, optimization, 2, {}, self._tokenizer)
        await write_checkpoint(directory / name, copies, lead=self.rank == 0)
        if begun is not None:
            back, optimization = await self._made(CASES[name], seed=3)
            found["continued"] = await self.compute(self._continued, back, optimization, begun)
            with mock.patch.object(AutoModelForCausalLM, "from_pretrained", None):  # which would load it whole
                back, _ = await self._made(CASES[name], source=str(begun / MODEL))
            found["read"] = await self.compute(self._exported, back)
        return found if self.rank == 0 else {}

    def _watched(self, whole_runs: Any) -> Any:
        """It, noting whether sequences stay whole."""

        def runs(*arguments: Any) -> Any:
            given = whole_runs(*arguments)
            self._wholes.add(given is not None)
            return given

        self._wholes = set[bool]()
        return runs

    def _continued(self, back: Any, optimization: Any, directory: Path) -> dict[str, torch.Tensor]:
        back.restore(optimization, directory / STATE)
        self._step(back, optimization)
        return self._exported(back)

    def _exported(self, back: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in gathered(back.export())}

    def _step(self, back: Any, optimization: Any) -> dict[str, float]:
        shares = max(back.data_ranks) + 1
        for mine in micro_batches(back.data_ranks[self.rank], shares):
            learn_policy(optimization, mine, self._algorithm)
        gathered_sums, numbers = optimization.step()
        return {**numbers, "weight": float(gathered_sums.weight)}

    def _learned(self, back: Any, optimization: Any) -> dict[str, Any]:
        gradients: dict[str, torch.Tensor] = {}
        names = {id(parameter): name for name, parameter in back.model.named_parameters()}

        def look(optimizer: Any, *_: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                gradients.setdefault(names[id(parameter)], whole(parameter.grad))

        handle = optimization.optimizer.register_step_pre_hook(look)
        began = self._exported(back)
        outputs = [each.clone() for each in back.outputs(pack(batch()))]
        steps = [self._step(back, optimization)]
        handle.remove()
        steps.append(self._step(back, optimization))
        return {
            "began": began,
            "outputs": outputs,
            "gradients": gradients,
            "steps": steps,
            "exported": self._exported(back),
            "shares": list(back.data_ranks),
            "wholes": self._wholes,
        }


async def main(system: rlinf.ActorSystem) -> None:
    out, saved, *names = sys.argv[1:]
    results: dict[str, Any] = {}
    for name in names:
        group = await system.spawn(Split, name=name)
        begun = Path(saved) / FROM[name] if saved != "-" and name in FROM else None
        results[name] = (await group.examine(name, Path(out).parent, begun))[0]
    torch.save(results, out)


if __name__ == "__main__":
    from tests.training.programs import splits  # under its own name, so that what it defines can be sent

    rlinf.run(splits.main)
