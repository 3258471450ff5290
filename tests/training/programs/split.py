"""Models split by Megatron-core over all ranks of a job, held against transformers' own: rank 0's answers are written
for a test to look at.

Usage: split.py OUT CASE..., a case being KIND:tensor=2,pipeline=2,..., with +values, +bfloat16 or +checkpointed behind
the kind; or published:...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import rlinf
from rlinf import endpoint
from rlinf.actors.base import SpmdActor
from rlinf.algos.loss_sum import LossSum
from rlinf.algos.losses import supervised
from rlinf.config.learning import LearningSettings, ParallelConfig
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import BUCKET_BYTES
from rlinf.models.language.build import ModelSpec, build_model
from rlinf.models.language.policy_model import without_head
from rlinf.training import weight_sync
from rlinf.training.backend import back_end_of
from rlinf.training.megatron.state import fill
from tests.actors import toys
from tests.training.programs.alive import Alive

PUBLISHED_BUCKET = 60 << 10
"""Bytes; a piece is then 30 rows of a matrix, which is no divisor of anything."""
MORE: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}


def configuration(kind: str, layers: int) -> dict[str, Any]:
    return toys.configuration(kind, num_hidden_layers=layers, **MORE.get(kind, {}))


def perturbed(net: Any) -> Any:
    """With norms and biases that show when they are mixed up."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(net.named_parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return net


def rows() -> list[Row]:
    """Of unequal lengths, some with a prompt in common."""
    return [
        Row.of(sample, gain)
        for judged in toys.groups(7, 0, longest=12)
        for sample, gain in zip(judged.scored, toys.advantages(judged), strict=True)
    ]


def loss(batch: Packed, outputs: Any) -> LossSum:
    """Differentiates log-probs and entropies, or values; every token counts differently."""
    weights = 1.0 + batch.targets % 5 / 4 + batch.advantages
    found = supervised(outputs[0] * weights, torch.ones_like(outputs[0], dtype=torch.bool))
    more = (outputs[1] * weights).sum() * 0.3 if outputs[1].dim() == 1 else 0.0
    return LossSum(found.total + more, found.weight, found.metrics)


class Split(SpmdActor):
    """Asks a split model, and a whole one."""

    async def setup(self) -> None:
        await self._open_mesh()
        self.device = torch.device("cpu")
        self._tokenizer = load_tokenizer(toys.ALPHABET)
        self._by_fsdp: dict[tuple[str, int], float] = {}

    @endpoint
    async def compare(self, kind: str, split: dict[str, int], *how: str) -> dict[str, Any]:
        """Largest differences of outputs and of gradients on this rank."""
        head, dtype = "values" if "values" in how else "logprobs", "bfloat16" if "bfloat16" in how else "float32"
        layers = max(2, split.get("pipeline", 1) * split.get("interleave", 1))
        source = configuration(kind, layers)
        back: Any = await back_end_of("megatron").make(
            self,
            ModelSpec(
                source,
                head,
                compute=LearningSettings(
                    parallel=ParallelConfig(**split),
                    logprob_chunk=7,
                    dtype=dtype,
                    gradient_checkpointing="checkpointed" in how,
                ),
            ),
            self._tokenizer,
        )
        net = build_model(source, self._tokenizer).eval()
        if head == "values":
            without_head(net)
            net.add_module("score", torch.nn.Linear(net.config.hidden_size, 1))
            for parameter in net.score.parameters():
                torch.nn.init.zeros_(parameter)
        net = perturbed(net)
        found: dict[str, Any] = await self.compute(self._compared, back, net, head)
        if dtype == "bfloat16" and kind in ("qwen2", "qwen3") and head == "logprobs":
            if (kind, layers) not in self._by_fsdp:
                spec = ModelSpec(source, compute=LearningSettings(dtype=dtype))
                fsdp = await back_end_of("fsdp").make(self, spec, self._tokenizer)
                self._by_fsdp[kind, layers] = await self.compute(self._loss, fsdp, net)
            found["FSDP's loss"] = self._by_fsdp[kind, layers]
        return found

    @endpoint
    async def published(self, split: dict[str, int]) -> dict[str, Any]:
        """The most bytes that were alive at once while weights were packed, beside those that were there before and the
        buckets; and whether the weights are the model's."""
        source = toys.configuration("qwen2", hidden_size=128, intermediate_size=192)
        spec = ModelSpec(source, compute=LearningSettings(parallel=ParallelConfig(**split)))
        back: Any = await back_end_of("megatron").make(self, spec, self._tokenizer)
        return await self.compute(self._packed, back, build_model(source, self._tokenizer))

    def _packed(self, back: Any, net: Any) -> dict[str, Any]:
        piece = PUBLISHED_BUCKET * weight_sync.PIECE_BYTES // BUCKET_BYTES
        alive = Alive(back.held())
        with mock.patch.object(weight_sync, "PIECE_BYTES", piece), alive:
            packed = weight_sync.pack(
                back.export, 1, lead=self.rank == 0, dtype=torch.bfloat16, bucket_bytes=PUBLISHED_BUCKET,
                empty=alive.empty,
            )  # fmt: skip
        equal = packed is None
        if packed is not None:
            given = {name: tensor.bfloat16() for name, tensor in net.named_parameters()}
            told = dict(packed.named())
            equal = told.keys() == given.keys() and all(torch.equal(told[name], given[name]) for name in given)
            assert len(packed.buckets) > 3
        return {"most": alive.most, "equal": equal}

    def _loss(self, back: Any, net: Any) -> float:
        """Of a step on all rows, of which this rank has its share."""
        back.take({name: parameter.detach() for name, parameter in net.named_parameters()})
        learner = back.optimization(LearningSettings(lr=0.01))
        learner.begin()
        learner.accumulate(self._batches(back), loss, entropy_slope=True)
        return float(learner.step()[1]["loss"])

    def _batches(self, back: Any) -> list[Packed]:
        mine = rows()[back.data_ranks[self.rank] :: max(back.data_ranks) + 1]
        return [pack(mine[start::6]) for start in range(6)]

    def _compared(self, back: Any, net: Any, head: str) -> dict[str, Any]:
        given = {name: parameter.detach() for name, parameter in net.named_parameters()}
        back.take(given)
        fill([piece for piece in back._split.pieces if piece.name.startswith("score.")], given)
        settings = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "grad_clip": 0.5}
        learner = back.optimization(LearningSettings(**settings))
        probe = pack(rows()[:7])
        found = back.outputs(probe)[0]
        with torch.no_grad():
            expected = plain(net, probe, head)[0]
        off = float((found - expected).abs().max())
        learner.begin()
        seen: dict[str, torch.Tensor] = {}

        def look(optimizer: Any, *_: Any) -> None:
            seen.update(self._gradients(back))

        learner.optimizer.register_step_pre_hook(look)
        with sending(back) as sent:
            learner.accumulate(self._batches(back), loss, entropy_slope=True)
            gathered, numbers = learner.step()
        moved = float((back.outputs(probe)[0] - found).abs().max())
        back.take(given)
        every = pack(rows())
        whole = loss(every, plain(net, every, head))
        (whole.total / whole.weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        wanted = {name: parameter.grad for name, parameter in net.named_parameters()}
        worst = max(
            ((seen[key] - wanted[piece.name][at]).abs().max().item(), key) for key, at, piece in self._mine(back)
        )
        means = [each for kept in learner.optimizer.state.values() for each in kept.values()]
        pairs = [(seen[key].double(), wanted[piece.name][at].double()) for key, at, piece in self._mine(back)]
        return {
            "cosine": [float(sum((a * b).sum() for a, b in part)) for part in _cosine_of(pairs)],
            "dtypes": {each.dtype for each in (*seen.values(), *means, *back.module.parameters())},
            "sent": sent,
            "moved": moved,
            "returned": head == "values" or torch.equal(back.outputs(probe)[0], found),
            "size": float(expected.abs().max()),
            "own loss": numbers["loss"],
            "outputs": off,
            "gradient": worst,
            "largest": max(float(grad.abs().max()) for grad in wanted.values()),
            "norm": abs(numbers["grad_norm"] - float(norm)) / float(norm),
            "loss": abs(numbers["loss"] - whole.average()),
            "tokens": (float(gathered.weight), float(whole.weight)),
        }

    def _mine(self, back: Any) -> Any:
        for piece in back._split.pieces:
            yield (
                piece.name + str(piece.offset),
                tuple(slice(a, a + b) for a, b in zip(piece.offset, piece.shape, strict=True)),
                piece,
            )

    def _gradients(self, back: Any) -> dict[str, torch.Tensor]:
        return {name: piece.of(piece.parameter.grad).clone() for name, _, piece in self._mine(back)}


def _cosine_of(pairs: Any) -> Any:
    """Pairs whose products add up to what a cosine is made of."""
    return pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs]


@contextmanager
def sending(back: Any) -> Iterator[set[torch.dtype]]:
    """The dtypes of the tensors that stages send each other meanwhile."""
    sent: set[torch.dtype] = set()
    if back._pipeline.depth == 1:
        yield sent
        return
    from rlinf.training.megatron.schedule import Exchange

    inner = Exchange._sent

    def seen(self: Any, asked: Any, out: Any, into: Any) -> None:
        sent.update(each.dtype for each in out if each is not None and each.is_floating_point())
        inner(self, asked, out, into)

    with mock.patch.object(Exchange, "_sent", seen):
        yield sent


def plain(net: Any, batch: Packed, head: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, or values, by the model's own forward, one sequence after the other."""
    ids = batch.ids if batch.places is None else batch.ids[batch.places]
    if head == "values":
        parts = [net.base_model(part[None]).last_hidden_state[0] for part in ids.split(batch.lengths)]
        hidden = torch.cat(parts)[batch.predictors]
        return net.score(hidden)[:, 0], hidden
    logits = torch.cat([net(part[None]).logits[0] for part in ids.split(batch.lengths)])[batch.predictors]
    if batch.temperature is not None:
        logits = logits / batch.temperature[:, None]
    every = torch.log_softmax(logits, dim=-1)
    return every.gather(1, batch.targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


async def main(system: rlinf.ActorSystem) -> None:
    out, *cases = sys.argv[1:]
    results = {}
    group = await system.spawn(Split, name="split")
    for case in cases:
        model, _, given = case.partition(":")
        kind, *how = model.split("+")
        split = {name: int(size) for name, size in (each.split("=") for each in given.split(",") if each)}
        asked = group.published(split) if kind == "published" else group.compare(kind, split, *how)
        results[case] = await asked  # of every rank
    torch.save(results, out)


if __name__ == "__main__":
    from tests.training.programs import split  # under its own name, so that what it defines can be sent

    rlinf.run(split.main)
