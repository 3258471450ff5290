"""Sums, gradients and metrics of every loss in every variant, as they were when derivatives were written by hand.

    python -m tests.algos.golden

wrote `golden.npz`, in float64, with the inputs that it was computed from; `losses/test_golden.py` holds today's losses
to it. It is written anew only when a loss is to change.
"""

import itertools
from pathlib import Path

import numpy as np
import torch

from rlinf.algos import critic_losses, losses, recipes
from rlinf.algos.algorithms import loss_of, value_loss_of
from rlinf.algos.loss_sum import MicroBatch
from tests.algos.cases import AGGREGATIONS, CLIP

FILE = Path(__file__).parent / "golden.npz"
LEAVES = ("new", "entropy", "critics", "log_alpha")
"""Inputs whose gradients are held."""


def inputs():
    """Arrays of one batch in numbers that float32 has: five answers of up to seven tokens, one without any."""
    rng = np.random.default_rng(20)
    old = -3 * rng.random((5, 7))

    def near(spread):
        return old + spread * rng.normal(size=old.shape)

    mask = rng.random(old.shape) < 0.75
    mask[3] = False
    arrays = {
        "new": near(0.6),
        "old": old,
        "behavior": near(0.4),
        "proximal": near(0.2),
        "reference": near(1.0),
        "entropy": 2 * rng.random(old.shape),
        "critics": rng.normal(size=(2, *old.shape)),
        "advantages": np.array([1.5, -0.7, 0.0, 1.0, -1.2]),
        "weights": rng.choice([0.5, 1.0, 2.0], 5),
        "log_alpha": np.array(-0.4),
    }
    arrays = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    return arrays | {"mask": mask, "versions": rng.integers(1, 5, old.shape)}


def layouts(arrays, dtype):
    """The batch as rows with garbage where nothing counts, packed with an advantage per token, and with weights."""
    mask = torch.tensor(arrays["mask"])
    garbage = torch.tensor([np.nan, np.inf, -np.inf, 1e30] * 9)[:35].view(5, 7)
    rows = {name: torch.tensor(x) for name, x in arrays.items()}
    rows = {name: x.to(dtype) if x.is_floating_point() else x for name, x in rows.items()}
    for name, x in rows.items():
        if x.is_floating_point() and x.shape[-2:] == mask.shape:
            rows[name] = torch.where(mask, x, garbage.to(dtype))
    flat = {name: x.flatten(-2) for name, x in rows.items() if x.ndim > 1}
    rising = rows["advantages"][:, None] * torch.linspace(0.5, 1.5, 7, dtype=dtype)
    ids = torch.arange(5)[:, None].expand(5, 7)
    for name, layout in {
        "rows": rows,
        "packed": {**rows, **flat, "advantages": rising.flatten(), "sequences": ids.flatten()},
        "weighted": {**rows, "mask": mask * rows["weights"][:, None]},
    }.items():
        leaves = {leaf: layout[leaf].clone().requires_grad_() for leaf in LEAVES}
        yield name, {"sequences": None, **layout, **leaves}


def _three(b):
    return b["new"], b["old"], b["advantages"], b["mask"]


def _apart(b):
    return b["old"], b["behavior"], b["mask"]


def _decoupled(b, **options):
    return losses.decoupled(b["new"], b["proximal"], b["behavior"], b["advantages"], b["mask"], **CLIP, **options)


def _weighed(b, weights, **options):
    return losses.policy(*_three(b), **CLIP, weights=weights[0], **options).watching(weights[1])


def _corrected(b, a, **options):
    return _weighed(b, losses.weights(*_apart(b), **options, sequences=b["sequences"]), **a)


def _variants():
    """Every loss in every variant: (batch, aggregation) -> LossSum."""
    yield "policy", lambda b, a: losses.policy(*_three(b), **CLIP, **a)
    yield "policy entropy", lambda b, a: losses.policy(*_three(b), **CLIP, entropy=b["entropy"], **a)
    yield "policy dual", lambda b, a: losses.policy(*_three(b), **CLIP, dual_clip=1.3, **a)
    yield "policy sequence", lambda b, a: losses.policy(*_three(b), clip_low=0.1, clip_high=0.1, ratio="sequence", **a)
    levels, outsides = ("token", "sequence", "geometric"), ("truncate", "mask")
    for level, outside in itertools.product(levels, outsides):
        bounds = {"level": level, "outside": outside, "cap": 1.2, "floor": 0.8}
        yield f"policy corrected {level} {outside}", lambda b, a, o=bounds: _corrected(b, a, **o)
    for least in (0.0, 0.5):
        bounds = {"floor": 0.9, "cap": 1.1, "least": least}
        yield (
            f"policy rejected {least}",
            lambda b, a, o=bounds: _weighed(b, losses.rejected(*_apart(b), **o, sequences=b["sequences"]), **a),
        )
    yield (
        "policy drifted",
        lambda b, a: _weighed(b, losses.drifted(*_three(b), most=0.1, sequences=b["sequences"]), **a),
    )
    for outside, dual in itertools.product(outsides, (None, 1.3)):
        options = {"outside": outside, "dual_clip": dual, "cap": 1.2}
        yield f"decoupled {outside} {dual}", lambda b, a, o=options: _decoupled(b, **o, entropy=b["entropy"], **a)
    yield "cispo", lambda b, a: losses.cispo(*_three(b), entropy=b["entropy"], **a)
    yield "cispo both sides", lambda b, a: losses.cispo(*_three(b), clip_low=0.3, clip_high=0.4, **a)
    yield "aipo", lambda b, a: losses.aipo(*_three(b), cap=1.2, entropy=b["entropy"], **a)
    yield "aipo bounds", lambda b, a: losses.aipo(*_three(b), cap=1.2, mask_low=0.1, mask_high=0.05, drift=0.05, **a)
    yield "sapo", lambda b, a: losses.sapo(*_three(b), entropy=b["entropy"], **a)
    for kind, cut in (*((kind, 10.0) for kind in losses.KINDS), ("k3", 0.5), ("k3", None)):
        options = {"kind": kind, "cut": cut}
        yield f"kl {kind} {cut}", lambda b, a, o=options: losses.kl(b["new"], b["reference"], b["mask"], **o, **a)
        yield (
            f"kl {kind} {cut} corrected",
            lambda b, a, o=options: losses.kl(b["new"], b["reference"], b["mask"], **o, old_logprobs=b["old"], **a),
        )
    yield "supervised", lambda b, a: losses.supervised(b["new"], b["mask"], **a)
    yield "entropy bonus", lambda b, a: losses.entropy_bonus(b["entropy"], b["mask"], **a)
    for error, clip in itertools.product(losses.ERRORS, (0.3, None)):
        options = {"error": error, "clip": clip, "delta": 0.5}
        yield (
            f"value {error} {clip}",
            lambda b, a, o=options: losses.value(b["new"], b["old"], b["behavior"], b["mask"], **o, **a),
        )
    ages = {"current": 4, "oldest": 2}
    yield (
        "by age",
        lambda b, a: losses.supervised(b["new"], b["mask"], **a).watching(
            losses.by_age(b["new"], b["behavior"], b["versions"], b["mask"], **ages)
        ),
    )
    yield (
        "mismatch",
        lambda b, a: losses.supervised(b["new"], b["mask"], **a).watching(
            losses.mismatch(b["new"], b["behavior"], b["mask"])
        ),
    )
    yield (
        "critics",
        lambda b, a: critic_losses.critics(b["critics"].flatten(1), b["old"].flatten(), b["mask"].flatten()),
    )
    yield "actor", lambda b, a: critic_losses.actor(b["new"], b["critics"][0], b["mask"], alpha=0.3)
    yield (
        "temperature",
        lambda b, a: critic_losses.temperature(b["log_alpha"], b["old"], b["mask"], target_entropy=-2.0),
    )
    yield "expectile", lambda b, a: critic_losses.expectile(b["new"], b["old"], b["mask"], tau=0.8)
    yield "weighted likelihood", lambda b, a: critic_losses.weighted_likelihood(b["new"], b["old"], b["mask"], beta=3.0)
    for name in recipes.NAMES:
        yield f"recipe {name}", lambda b, a, name=name: _of_recipe(recipes.get(name), b)
    everything = {"kl": {"beta": 0.2}, "entropy_bonus": 0.1, "max_drift": 0.1, "rejection": {"floor": 0.9, "cap": 1.1}}
    yield "recipe with everything", lambda b, a: _of_recipe(recipes.get("grpo_tis", everything), b)
    yield (
        "critic of ppo",
        lambda b, a: value_loss_of(recipes.get("ppo"), b["new"], b["old"], b["behavior"], b["mask"], b["sequences"]),
    )


def _of_recipe(spec, b):
    return loss_of(
        spec,
        MicroBatch(
            b["new"],
            b["mask"],
            old_logprobs=b["old"],
            advantages=b["advantages"],
            sequences=b["sequences"],
            entropy=b["entropy"],
            ref_logprobs=b["reference"],
            behavior_logprobs=b["behavior"],
            proximal_logprobs=b["proximal"],
            versions=b["versions"],
            version=3,
        ),
    )


VARIANTS = dict(_variants())


def results(name, arrays, dtype):
    """Sum, weight, gradients and metrics of a variant in all layouts, each under one of the aggregations."""
    number = list(VARIANTS).index(name)
    for shift, (layout, b) in enumerate(layouts(arrays, dtype)):
        aggregation = AGGREGATIONS[(number + shift) % len(AGGREGATIONS)] | {"sequences": b["sequences"]}
        loss = VARIANTS[name](b, aggregation)
        values = {"total": loss.total, "weight": loss.weight, **loss.values()}
        gradients = torch.autograd.grad(loss.total, [b[leaf] for leaf in LEAVES], allow_unused=True)
        values |= {f"d {leaf}": x for leaf, x in zip(LEAVES, gradients, strict=True) if x is not None}
        for key, x in values.items():
            yield f"{layout}/{key}", np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, np.float64)


def held():
    """Inputs by their names, and numbers by variant and name."""
    with np.load(FILE) as file:
        arrays = {name.removeprefix("input/"): file[name] for name in file if name.startswith("input/")}
        numbers = np.split(file["numbers"], np.cumsum(file["sizes"])[:-1])
        return arrays, dict(zip(str(file["names"]).splitlines(), numbers, strict=True))


def main():
    arrays, numbers = inputs(), {}
    for name in VARIANTS:
        numbers |= {f"{name}: {key}": x.reshape(-1) for key, x in results(name, arrays, torch.float64)}
    np.savez_compressed(
        FILE,
        names="\n".join(numbers),
        sizes=[len(x) for x in numbers.values()],
        numbers=np.concatenate(list(numbers.values())),
        **{f"input/{name}": x for name, x in arrays.items()},
    )


if __name__ == "__main__":
    main()
