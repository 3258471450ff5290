"""Which numbers per token (columns) an algorithm needs, and who computes them: other roles, or the trainer and when.

In: an `AlgorithmSpec`. Out: names of columns. Those of other roles are keys of `Sample.per_token`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.algos import recipes
from rlinf.algos.parts import LOSSES, Decoupled, GroupRelative, LeaveOneOut
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.importing import resolve
from rlinf.data.sample import REWARDS, Sample

Algorithm = str | Mapping[str, Any] | AlgorithmSpec
"""A recipe's name; `{"name": "dapo", "overrides": {"loss.clip_high": 0.3}}`; or a spec."""

REFERENCE, TEACHER, VALUES = "ref_logprobs", "teacher_logprobs", "values"
"""Computed by a reference policy, a teacher, a critic."""
ADAPTERS_OFF = "adapters_off"
"""In place of a directory of adapters: the model without any."""
PROXIMAL = "proximal_logprobs"
"""Log-probs under the weights just before the update."""
VERSIONS = "versions"
"""Version of the weights that made each token; a field of the sample."""

_SOURCES = {
    REFERENCE: "reference.logprobs",
    TEACHER: "teacher.logprobs",
    VALUES: "critic.values",
    PROXIMAL: "the trainer's own pass over the batch",
}
"""What fills each column."""


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """Columns that a trainer computes itself, and when."""

    whole_batch: tuple[str, ...] = ()
    """In a forward pass over the whole batch, before anything is learned from any of it."""
    first_pass: frozenset[str] = frozenset()
    """In the first pass of each micro-batch, whose weights are those before the update."""


def algorithm_of(algorithm: Algorithm, *, acting: bool = False) -> AlgorithmSpec:
    """The spec that a setting means; where policies act, recipes have other defaults.

    Raises:
        ValueError: no recipe, part or key of that name (the text gives the nearest), or a bad value.
    """
    if isinstance(algorithm, AlgorithmSpec):
        return algorithm
    if isinstance(algorithm, str):
        return recipes.get(algorithm, resolve=resolve, acting=acting)
    unknown = sorted(set(algorithm) - {"name", "overrides"})
    if unknown or "name" not in algorithm:
        raise ValueError(f"algorithm: a mapping has the keys name and overrides, not {sorted(algorithm)}")
    return recipes.get(algorithm["name"], algorithm.get("overrides"), resolve=resolve)


def own_columns(spec: AlgorithmSpec, *, minibatches: int, own: Collection[str] = ()) -> OwnColumns:
    """The columns that a trainer computes itself.

    Args:
        spec: the algorithm.
        minibatches: optimizer steps in each epoch. After the first of several, the weights are no longer those before
            the update, so what must be said by those is computed for the whole batch at once.
        own: those of other policies that it computes by other adapters of its model: `REFERENCE`, `TEACHER`.
    """
    proximal = {PROXIMAL} if spec.needs_recomputed_logprobs else set()
    reference = {REFERENCE} & {*own} if spec.kl is not None else set()
    teacher = {TEACHER} & {*own} if spec.needs_teacher else set()
    if minibatches > 1:
        return OwnColumns(whole_batch=(*proximal, *reference, *teacher))
    if spec.kl is not None and spec.kl.place == "reward":  # an advantage asks for it, not the loss
        return OwnColumns((*reference, *teacher), frozenset(proximal))
    return OwnColumns(tuple(teacher), frozenset(proximal | reference))


def columns_of(spec: AlgorithmSpec) -> set[str]:
    """Columns that the loss asks for. A loss that is not ours may ask for versions."""
    interpolates = isinstance(spec.loss, Decoupled) and spec.loss.proximal == "interpolate"
    found = {VERSIONS} if interpolates or type(spec.loss) not in LOSSES.values() else set()
    found |= {REFERENCE} if spec.kl is not None and spec.kl.place == "loss" else set()
    return found | ({PROXIMAL} if spec.needs_recomputed_logprobs else set())


def asks_rewards_alone(spec: AlgorithmSpec) -> bool:
    """The advantages depend on no column."""
    return isinstance(spec.advantage, GroupRelative | LeaveOneOut) and (spec.kl is None or spec.kl.place == "loss")


def needed_of_policy(spec: AlgorithmSpec) -> set[str]:
    """Columns that a policy's advantages and loss ask for, whoever computes them."""
    needed = {
        REFERENCE: spec.needs_reference,
        TEACHER: spec.needs_teacher,
        VALUES: spec.critic is not None,
        PROXIMAL: spec.needs_recomputed_logprobs,
    }
    return {name for name, need in needed.items() if need}


def needed_of_critic(spec: AlgorithmSpec) -> set[str]:
    """Columns that a critic's returns ask for."""
    return {VALUES, REFERENCE} if spec.kl is not None and spec.kl.place == "reward" else {VALUES}


def check_told(where: str, spec: AlgorithmSpec, samples: Sequence[Sample], needed: set[str]) -> None:
    """Check that samples carry the columns that are needed.

    Args:
        where: endpoint that learns, for errors: "train" or "critic.train".
        spec: the algorithm.
        samples: to be learned from.
        needed: columns.

    Raises:
        ValueError: a sample lacks one, and the text says which call fills it; or it has one that nothing reads.
    """
    known = needed.union(_SOURCES, [REWARDS])
    for sample in samples:
        if not known.issuperset(name.partition("/")[0] for name in sample.per_token):  # of each of several teachers
            raise ValueError(f"{where}: {_unread(sample, known)}")
    for name in sorted(needed):
        for sample in samples:
            if name in sample.per_token:
                continue
            cure = f"put {_SOURCES[name]} between judge.score and {where}"
            if name == REFERENCE:
                cure += (
                    " or, with LoRA, give the trainer reference='adapters_off'"
                    if where == "train"
                    else " (a trainer's own reference, adapters_off, is not enough: the critic needs its log-probs too)"
                )
            raise ValueError(
                f"{where}: algorithm {spec.name!r} needs {name} of every token, and sample {sample.index} of prompt "
                f"{sample.prompt.id} has none: {cure}"
            )


def _unread(sample: Sample, known: set[str]) -> str:
    """What to say of a sample with a column that no algorithm reads."""
    name = min(name for name in sample.per_token if name.partition("/")[0] not in known)
    cure = (
        "set Sample.loss_mask, a field of its own"
        if name == "loss_mask"
        else "leave it out, or keep it beside the samples until the batch is learned from"
    )
    return (
        f"sample {sample.index} of prompt {sample.prompt.id} has per_token[{name!r}], which is read by nothing: the "
        f"keys that are read are {', '.join(sorted(known))}; {cure}"
    )
