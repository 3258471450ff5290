"""Models split by Megatron-core over all ranks of a job, held against transformers' own: rank 0's answers are written
for a test to look at.

Usage: split.py OUT CASE..., a case being KIND:tensor=2,pipeline=2,... or KIND+values:...
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import rlinf
from rlinf import endpoint
from rlinf.actors.base.spmd import JointActor
from rlinf.algos.losses import supervised
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.config.learning import ParallelConfig
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.load import build_model
from rlinf.models.language.value_model import without_head
from rlinf.training.backend import ModelSettings, back_end_of
from rlinf.training.megatron.pieces import fill
from tests.actors import toys

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


class Split(JointActor):
    """Asks a split model, and a whole one."""

    async def setup(self) -> None:
        await self._open_mesh()
        self.device = torch.device("cpu")
        self._tokenizer = load_tokenizer(toys.ALPHABET)

    @endpoint
    async def compare(self, kind: str, split: dict[str, int], head: str = "logprobs") -> dict[str, Any]:
        """Largest differences of outputs and of gradients on this rank."""
        layers = max(2, split.get("pipeline", 1) * split.get("interleave", 1))
        source = configuration(kind, layers)
        back: Any = await back_end_of("megatron").make(
            self, ModelSettings(source, head=head, parallel=ParallelConfig(**split), logprob_chunk=7), self._tokenizer
        )
        net = build_model(source, self._tokenizer).eval()
        if head == "values":
            without_head(net)
            net.add_module("score", torch.nn.Linear(net.config.hidden_size, 1))
            for parameter in net.score.parameters():
                torch.nn.init.zeros_(parameter)
        net = perturbed(net)
        return await self.compute(self._compared, back, net, head)

    def _compared(self, back: Any, net: Any, head: str) -> dict[str, Any]:
        given = {name: parameter.detach() for name, parameter in net.named_parameters()}
        back.take(given)
        fill([piece for piece in back._pieces if piece.name.startswith("score.")], given)
        shares = max(back.data_ranks) + 1
        mine = rows()[back.data_ranks[self.rank] :: shares]
        batches = [pack(mine[start::6]) for start in range(6)]
        settings = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "grad_clip": 0.5}
        learner = back.optimization(**settings)
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
        learner.accumulate(batches, loss, entropy_slope=True)
        gathered, numbers = learner.step()
        every = pack(rows())
        whole = loss(every, plain(net, every, head))
        (whole.total / whole.weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        wanted = {name: parameter.grad for name, parameter in net.named_parameters()}
        worst = max(
            ((seen[key] - wanted[piece.name][at]).abs().max().item(), key) for key, at, piece in self._mine(back)
        )
        return {
            "outputs": off,
            "gradient": worst,
            "largest": max(float(grad.abs().max()) for grad in wanted.values()),
            "norm": abs(numbers["grad_norm"] - float(norm)) / float(norm),
            "loss": abs(numbers["loss"] - whole.average()),
            "tokens": (float(gathered.weight), float(whole.weight)),
        }

    def _mine(self, back: Any) -> Any:
        for piece in back._pieces:
            yield (
                piece.name + str(piece.offset),
                tuple(slice(a, a + b) for a, b in zip(piece.offset, piece.shape, strict=True)),
                piece,
            )

    def _gradients(self, back: Any) -> dict[str, torch.Tensor]:
        return {name: piece.of(piece.parameter.grad).clone() for name, _, piece in self._mine(back)}


def plain(net: Any, batch: Packed, head: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, or values, by the model's own forward, one sequence after the other."""
    ids = batch.ids if batch.places is None else batch.ids[batch.places]
    if head == "values":
        parts = [net.base_model(part[None]).last_hidden_state[0] for part in ids.split(batch.lengths)]
        hidden = torch.cat(parts)[batch.kept]
        return net.score(hidden)[:, 0], hidden
    logits = torch.cat([net(part[None]).logits[0] for part in ids.split(batch.lengths)])[batch.kept]
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
        kind, _, head = model.partition("+")
        split = {name: int(size) for name, size in (each.split("=") for each in given.split(",") if each)}
        results[case] = await group.compare(kind, split, head or "logprobs")  # of every rank
    torch.save(results, out)


if __name__ == "__main__":
    from tests.training.programs import split  # under its own name, so that what it defines can be sent

    rlinf.run(split.main)
