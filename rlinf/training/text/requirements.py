"""What an algorithm asks to know of tokens, and who says it: other roles, or the trainer itself, and when.

In: an `AlgorithmSpec`. Out: names of columns. Those of other roles are keys of `Sample.per_token`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.algos import recipes
from rlinf.algos.parts import LOSSES, Decoupled, GroupRelative, LeaveOneOut
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.importing import resolve
from rlinf.data.sample import Sample

Algorithm = str | Mapping[str, Any] | AlgorithmSpec
"""A recipe's name; `{"name": "dapo", "overrides": {"loss.clip_high": 0.3}}`; or a spec."""

REFERENCE, TEACHER, VALUES = "ref_logprobs", "teacher_logprobs", "values"
"""Said by a reference policy, a teacher, a critic."""
PROXIMAL = "proximal_logprobs"
"""Log-probs under the weights just before the update."""
VERSIONS = "versions"
"""Version of the weights that made each token; a field of the sample."""

_CURES = {
    REFERENCE: "let a reference policy say them (`reference.logprobs` between judge and trainer) or, with LoRA, give "
    "the trainer reference='adapters_off'",
    TEACHER: "let a teacher say them (`teacher.logprobs` between judge and trainer)",
    VALUES: "let a critic say them (`critic.values` between judge and trainer)",
    PROXIMAL: "the trainer computes them itself",
}


def algorithm_of(algorithm: Algorithm) -> AlgorithmSpec:
    """The spec that a setting means.

    Raises:
        ValueError: no recipe, part or key of that name (the text gives the nearest), or a bad value.
    """
    if isinstance(algorithm, AlgorithmSpec):
        return algorithm
    if isinstance(algorithm, str):
        return recipes.get(algorithm, resolve=resolve)
    unknown = sorted(set(algorithm) - {"name", "overrides"})
    if unknown or "name" not in algorithm:
        raise ValueError(f"algorithm: a mapping has the keys name and overrides, not {sorted(algorithm)}")
    return recipes.get(algorithm["name"], algorithm.get("overrides"), resolve=resolve)


def asked_first(spec: AlgorithmSpec, *, minibatches: int, adapters_off: bool) -> tuple[str, ...]:
    """Columns that the trainer computes for the whole batch before it learns from any of it.

    Args:
        spec: the algorithm.
        minibatches: optimizer steps in each epoch. With one, what the loss asks for is found in the first pass itself,
            where the weights are still those before the update.
        adapters_off: the trainer is its own reference.
    """
    several = minibatches > 1
    reference = adapters_off and spec.kl is not None and (several or spec.kl.place == "reward")
    return ((PROXIMAL,) if spec.needs_recomputed_logprobs and several else ()) + ((REFERENCE,) if reference else ())


def asked_beside(spec: AlgorithmSpec, *, minibatches: int, adapters_off: bool) -> frozenset[str]:
    """Columns that the trainer finds out in the first pass."""
    own = {PROXIMAL} if spec.needs_recomputed_logprobs else set()
    own |= {REFERENCE} if adapters_off and spec.kl is not None else set()
    return frozenset(own) - set(asked_first(spec, minibatches=minibatches, adapters_off=adapters_off))


def columns_of(spec: AlgorithmSpec) -> set[str]:
    """Columns that the loss asks for. A loss that is not ours may ask for versions."""
    interpolates = isinstance(spec.loss, Decoupled) and spec.loss.proximal == "interpolate"
    found = {VERSIONS} if interpolates or type(spec.loss) not in LOSSES.values() else set()
    found |= {REFERENCE} if spec.kl is not None and spec.kl.place == "loss" else set()
    return found | ({PROXIMAL} if spec.needs_recomputed_logprobs else set())


def asks_rewards_alone(spec: AlgorithmSpec) -> bool:
    """The advantages depend on nothing that is said of tokens."""
    return isinstance(spec.advantage, GroupRelative | LeaveOneOut) and (spec.kl is None or spec.kl.place == "loss")


def check_told(spec: AlgorithmSpec, samples: Sequence[Sample], later: frozenset[str]) -> None:
    """Check that samples carry what the algorithm asks for.

    Args:
        spec: the algorithm.
        samples: to be learned from.
        later: columns that are found out later.

    Raises:
        ValueError: one does not; the text says who is to say it.
    """
    needed = {
        REFERENCE: spec.needs_reference,
        TEACHER: spec.needs_teacher,
        VALUES: spec.critic is not None,
        PROXIMAL: spec.needs_recomputed_logprobs,
    }
    for name in [name for name, need in needed.items() if need and name not in later]:
        for sample in samples:
            if name not in sample.per_token:
                raise ValueError(
                    f"train: algorithm {spec.name!r} needs {name} of every token, and sample {sample.index} of prompt "
                    f"{sample.prompt.id} has none: {_CURES[name]}"
                )
