"""Which algorithm a configuration means: its recipe, with the parts that were changed and the limits of this run.

In: a `RunConfig`. Out: an `AlgorithmSpec`, and the roles and the flow that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlinf.algos import recipes, spec
from rlinf.algos.parts import Clipped, Correction, Gae, GroupRelative, Rejection
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.embodied import DAGGER, IMITATION, OFF_POLICY, EmbodiedConfig
from rlinf.config.importing import mistake_in, resolve
from rlinf.config.text import RunConfig
from rlinf.data.step import works_ahead

PLACES = (
    "advantage", "loss", "aggregation", "kl", "entropy_bonus", "correction", "rejection", "max_drift", "shaping",
    "truncated", "sampling", "critic",
)  # fmt: skip
"""Keys of `algorithm` that change a part of the recipe."""
_AS_IN_THE_RECIPE: dict[str, Any] = {"entropy_bonus": None, "max_drift": None, "truncated": None}
"""Values that change nothing, where it is not an empty mapping."""

CORRECTION, REJECTION = Correction(cap=5.0), Rejection(floor=0.7, cap=1.43)
"""How asynchronous flows correct for older answers, measured in docs/async.md. The cap is high because what must be
taken back has large weights: tokens that have become likely since they were drawn and turned out bad."""
CORRECTED_FROM = 2
"""Least `staleness.max` with which they do: what is one version old is learned from as well without, or better."""


def algorithm_of(config: RunConfig, parts: Mapping[str, Any] = MappingProxyType({})) -> AlgorithmSpec:
    """The algorithm of a run.

    What a recipe cannot know is filled in unless it was set: the length limit of `shaping` and the constant length of
    `seq-mean-token-sum-norm` are the longest answer of this run, `rollout.max_new_tokens`; the penalty of `shaping`
    begins as far before its limit as in the recipe, relative to it.

    Args:
        config: of the run.
        parts: functions in memory in place of `advantage` or `loss`.

    Raises:
        ValueError: no recipe, part or key of that name (the text gives the nearest), or a bad value.
    """
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    values = {place: getattr(algorithm, place) for place in PLACES}
    changes = {place: value for place, value in values.items() if value != _AS_IN_THE_RECIPE.get(place, {})}
    changes.update(parts)
    chosen = recipes.get(algorithm.name, _whole(algorithm.name, changes, longest), resolve=_found)
    if chosen.shaping is not None and not _sets(changes, "shaping", "longest"):
        cache = chosen.shaping.cache
        if not _sets(changes, "shaping", "cache"):
            cache = max(1, round(longest * chosen.shaping.cache / chosen.shaping.longest))
        chosen = spec.override(chosen, {"shaping": {"longest": longest, "cache": min(cache, longest)}})
    return chosen


def for_older_answers(algorithm: AlgorithmSpec, config: RunConfig) -> AlgorithmSpec:
    """The algorithm as it learns from answers of older weights: with `CORRECTION` and `REJECTION` where answers may be
    more than one version old, and neither the recipe nor the configuration says a word of correction or rejection.
    Losses that weigh by the ratio to what drew the tokens need nothing beside.

    Args:
        algorithm: of the run.
        config: of the run.
    """
    settled = (config.algorithm.correction, config.algorithm.rejection) != ({}, {})
    if settled or config.staleness.max < CORRECTED_FROM or not isinstance(algorithm.loss, Clipped):
        return algorithm
    if algorithm.correction is not None or algorithm.rejection is not None:
        return algorithm
    return replace(algorithm, correction=CORRECTION, rejection=REJECTION)


def default_correction(config: RunConfig, algorithm: AlgorithmSpec | None) -> str | None:
    """That `for_older_answers` had something to add, for people; None if it had not."""
    if algorithm is None or algorithm.correction is not CORRECTION:
        return None
    return (
        f"answers may be {config.staleness.max} versions old, which is corrected for: "
        f"algorithm.correction={{cap: {CORRECTION.cap:g}}} "
        f"algorithm.rejection={{floor: {REJECTION.floor:g}, cap: {REJECTION.cap:g}}}; "
        "algorithm.correction=null leaves both out"
    )


def filled_in_limit(config: RunConfig, algorithm: AlgorithmSpec | None) -> str | None:
    """The penalty for length of a run whose limit nobody has set, for people; None without one."""
    if (
        algorithm is None
        or algorithm.shaping is None
        or _sets({"shaping": config.algorithm.shaping}, "shaping", "longest")
    ):
        return None
    part = algorithm.shaping
    return (
        f"answers of more than {part.longest - part.cache:,} tokens lose reward, up to {part.penalty:g} at "
        f"{part.longest:,}: algorithm.shaping.longest is rollout.max_new_tokens unless it is set. Where right answers "
        "need so many, raise rollout.max_new_tokens"
    )


def acting_flow_of(config: EmbodiedConfig) -> str:
    """Dotted path of the flow of a run in which a policy acts: the one it names, or its algorithm's."""
    usual = {**dict.fromkeys(OFF_POLICY, "rlinf.flows.sac"), IMITATION: "rlinf.flows.imitate.imitation"}
    return config.flow or usual.get(config.algorithm.name, "rlinf.flows.embodied")


def control_algorithm_of(config: EmbodiedConfig) -> AlgorithmSpec | None:
    """The algorithm of a run in which a policy acts; None if it learns from single transitions or from an expert.

    Raises:
        ValueError: no recipe, part or key of that name (the text gives the nearest), or a bad value.
    """
    algorithm = config.algorithm
    if algorithm.name in (*OFF_POLICY, DAGGER, IMITATION):
        return None
    places = ("advantage", "loss", "aggregation", "entropy_bonus", "critic")
    values = {place: getattr(algorithm, place) for place in places}
    changes = {place: value for place, value in values.items() if value != _AS_IN_THE_RECIPE.get(place, {})}
    return recipes.get(algorithm.name, changes, resolve=_found, acting=True)


def mistakes_acting(config: EmbodiedConfig, algorithm: AlgorithmSpec | None) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) for what the algorithm of a run that acts cannot do, or makes nothing of.

    Args:
        config: of the run.
        algorithm: None for sac and its like, dagger and imitation.
    """
    wanted = config.algorithm
    if algorithm is not None and isinstance(algorithm.advantage, GroupRelative) and not config.env.fresh:
        advice = f"{algorithm.name} compares episodes that begin alike with the step: set env.fresh=true"
        yield "env.fresh", "false", advice
    if algorithm is None:
        return  # `embodied.keys` says which keys its like reads
    if wanted.reward_scaling and not isinstance(algorithm.advantage, Gae):
        yield "algorithm.reward_scaling", True, f"{wanted.name} has no values whose scale would matter: remove it"
    for name in ("filter_returns", "filter_success"):
        if (bounds := getattr(wanted, name)) is None:
            continue
        if not isinstance(algorithm.advantage, GroupRelative):
            yield f"algorithm.{name}", bounds, f"{wanted.name} has no groups to choose from: take grpo, or remove it"
        elif bounds[0] > bounds[1]:
            yield f"algorithm.{name}", bounds, "the first bound is the lower one"
    if wanted.entropy_schedule != "constant" and not algorithm.entropy_bonus:
        advice = "there is no entropy bonus that could fall: set algorithm.entropy_bonus, or remove it"
        yield "algorithm.entropy_schedule", wanted.entropy_schedule, advice


def roles_of(config: RunConfig, algorithm: AlgorithmSpec) -> list[str]:
    """The roles that a run needs besides rollout, judge and trainer."""
    wanted = {
        "reward_model": config.reward_model.path is not None,
        "critic": algorithm.critic is not None,
        "reference": algorithm.needs_reference and config.reference.inside is None,
        "teacher": algorithm.needs_teacher and config.teacher.adapter is None and not config.teachers,
        **dict.fromkeys(config.named_teachers, algorithm.needs_teacher),
    }
    return [role for role, needed in wanted.items() if needed]


def flow_of(algorithm: AlgorithmSpec, *, with_agent: bool) -> str:
    """The flow of an algorithm, where a configuration names none; that of agents where one works on the tasks."""
    if with_agent:
        return "rlinf.flows.agentic"
    return "rlinf.flows.grpo" if algorithm.critic is None else "rlinf.flows.ppo"


def _whole(name: str, changes: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The changes, with the constant length that an aggregation needs at once."""
    whole = dict(changes)
    recipe = recipes.RECIPES.get(name)
    aggregation = whole.get("aggregation", {})
    how = aggregation.get("how", recipe.aggregation.how if recipe is not None else None)
    if how == "seq-mean-token-sum-norm" and "norm_length" not in aggregation:
        whole["aggregation"] = {**aggregation, "norm_length": longest}
    elif recipe is not None and recipe.aggregation.norm_length is not None and how != recipe.aggregation.how:
        whole["aggregation"] = {"norm_length": None, **aggregation}
    return whole


def _sets(changes: Mapping[str, Any], place: str, key: str) -> bool:
    value = changes.get(place)
    return isinstance(value, Mapping) and key in value


def _found(path: str) -> Any:
    if (mistake := mistake_in(path)) is not None:
        raise ValueError(f"{path}: {mistake}")
    return resolve(path)


def mistakes_ahead(config: RunConfig, flow: Any) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) for what a flow that works ahead, or one that does not, makes nothing of.

    Args:
        config: right by itself.
        flow: one step.
    """
    stale, rollout, plain = config.staleness, config.rollout, RunConfig()
    if works_ahead(flow):
        if rollout.rescale:
            advice = "the flow works ahead, so that answers never come to an end: leave it out"
            yield "rollout.rescale", True, advice
        most = stale.max * config.algorithm.prompts_per_step
        if rollout.extra is not None and rollout.extra > most:
            yield "rollout.extra", rollout.extra, f"more than staleness.max batches, {most}, never helps: at most that"
        return
    given = {f"staleness.{key}": (getattr(stale, key), getattr(plain.staleness, key)) for key in ("max", "mode", "kv")}
    own = {
        f"rollout.{key}": (getattr(rollout, key), getattr(plain.rollout, key)) for key in ("carry", "extra", "groups")
    }
    for key, (value, default) in {**given, **own}.items():
        if value != default:
            name = getattr(flow, "__qualname__", flow)
            advice = f"the flow {name} begins nothing early: take rlinf.flows.grpo_async or its like, or leave it out"
            yield key, value, advice
