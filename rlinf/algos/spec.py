"""An algorithm as data: a name stands for a frozen `AlgorithmSpec`, any field of which can be changed.

    recipes.get("dapo")
    recipes.get("dapo", {"loss.clip_high": 0.3, "kl": {"place": "loss", "beta": 0.01}})
    recipes.get("grpo", {"loss": "sapo", "advantage": my_function})

`recipes` has the named ones, and `apply` turns a spec into advantages and losses. Nothing here reads a file: YAML
arrives as the mapping that it is.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlinf.algos.parts import (
    ADVANTAGES,
    LOSSES,
    Aggregation,
    Clipped,
    Correction,
    Critic,
    Decoupled,
    Distillation,
    DynamicSampling,
    Gae,
    GroupRelative,
    Kl,
    LeaveOneOut,
    Overlong,
    ReinforcePP,
    Rejection,
)
from rlinf.algos.validation import one_of, within

Resolve = Callable[[str], Any]
"""Turns a dotted path into what it names."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """How judged answers become a gradient."""

    name: str
    """Of the recipe it came from."""
    advantage: Callable[..., Any] = GroupRelative()
    """(Answers, penalty of tokens or None, reduce) -> advantages, or (advantages, returns); one of `ADVANTAGES`."""
    loss: Callable[..., Any] = Clipped()
    """(MicroBatch, Aggregation, weights or None) -> LossSum; one of `LOSSES`."""
    aggregation: Aggregation = Aggregation()
    """How losses of tokens become one."""
    kl: Kl | None = None
    """Penalty for leaving a reference policy."""
    entropy_bonus: float = 0.0
    """Weight of the reward for staying undecided, at least 0."""
    correction: Correction | None = None
    """Importance sampling between engine and trainer."""
    rejection: Rejection | None = None
    """Sequences left out whole, by how far engine and trainer are apart over them."""
    max_drift: float | None = None
    """Bad answers that the policy has left further behind are left out, nats per token; None for no bound."""
    shaping: Overlong | None = None
    """Penalty near the length limit."""
    truncated: Literal["keep", "mask"] = "keep"
    """Answers that the length limit cut are learned from like others, or give no gradient."""
    sampling: DynamicSampling | None = None
    """Draw more groups in place of those whose rewards are all equal."""
    critic: Critic | None = None
    """Train a critic beside the policy."""

    def __post_init__(self) -> None:
        where = f"algorithm {self.name!r}"
        one_of(where, "truncated", self.truncated, ("keep", "mask"))
        within(where, "entropy_bonus", self.entropy_bonus, 0.0)
        for place, part in (("advantage", self.advantage), ("loss", self.loss)):
            if not callable(part):
                raise ValueError(f"{where}: {place}={part!r} is not a function")
            _check_call(f"{where}: {place}", part, _CALLED_WITH[place])
        if isinstance(self.advantage, Gae) != (self.critic is not None):
            raise ValueError(f"{where}: advantage 'gae' and `critic` need each other: set both or neither")
        if self.correction is not None and isinstance(self.loss, Decoupled):
            raise ValueError(f"{where}: loss 'decoupled' corrects by itself: leave `correction` out")
        if self.aggregation.how == "seq-mean-token-sum-norm" and self.aggregation.norm_length is None:
            raise ValueError(
                f"{where}: aggregation.norm_length must be set, to the longest response allowed (tokens): it is the "
                "constant that losses of answers are divided by"
            )

    @property
    def needs_whole_batch(self) -> bool:
        """Advantages depend on all answers of the step, so training cannot begin before the last one is judged."""
        whitened = isinstance(self.advantage, Gae) and self.advantage.whiten
        return whitened or getattr(self.advantage, "needs_whole_batch", isinstance(self.advantage, ReinforcePP))

    @property
    def compares_within_groups(self) -> bool:
        """Answers are compared with others to the same prompt, so a single one teaches nothing."""
        baseline = isinstance(self.advantage, ReinforcePP) and self.advantage.baseline
        return baseline or isinstance(self.advantage, GroupRelative | LeaveOneOut) or self.sampling is not None

    @property
    def needs_reference(self) -> bool:
        """Log-probs of a reference policy are needed."""
        return self.kl is not None

    @property
    def needs_teacher(self) -> bool:
        """Log-probs of a teacher are needed."""
        return isinstance(self.advantage, Distillation)

    @property
    def needs_recomputed_logprobs(self) -> bool:
        """The trainer must compute log-probs with the weights just before the update."""
        decoupled = isinstance(self.loss, Decoupled) and self.loss.proximal == "recompute"
        return decoupled or self.correction is not None or self.rejection is not None


_CALLED_WITH = {"advantage": ("answers", "penalty", "reduce"), "loss": ("batch", "aggregation", "weights")}
"""Arguments of the functions at these places, by position."""


def _check_call(where: str, function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """See that a function can be called with these arguments; raises `ValueError` if not."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(
            f"{where}: {getattr(function, '__name__', function)} is an `async def`; a plain `def` is called"
        )
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        name, given = getattr(function, "__name__", type(function).__name__), ", ".join(arguments)
        raise ValueError(f"{where}: {name} is called as {name}({given}), by position, and: {error}") from None


_PARTS: dict[str, Any] = {
    "aggregation": Aggregation,
    "kl": Kl,
    "correction": Correction,
    "rejection": Rejection,
    "shaping": Overlong,
    "sampling": DynamicSampling,
    "critic": Critic,
}
"""Places that one kind of part can stand at."""

_CHOICES: dict[str, dict[str, Any]] = {"advantage": dict(ADVANTAGES), "loss": dict(LOSSES)}
"""Places that one of several can stand at, by name."""


def override(spec: AlgorithmSpec, changes: Mapping[str, Any], *, resolve: Resolve | None = None) -> AlgorithmSpec:
    """A spec with some fields changed.

    Args:
        spec: what to start from; not changed.
        changes: by place. A mapping changes the keys it names: `{"loss": {"clip_high": 0.3}}`, the same as
            `{"loss.clip_high": 0.3}`. A name takes another part with its defaults: `{"loss": "sapo"}`; a mapping with
            `name` takes one with these values: `{"loss": {"name": "sapo", "tau_neg": 1.1}}`. None leaves an optional
            part out. A part or a function stands for itself, and a dotted path for what `resolve` says.
        resolve: turns a dotted path into the function it names.

    Raises:
        ValueError: no place, key or choice of that name (the text gives the nearest), or a bad value.
    """
    where = f"algorithm {spec.name!r}"
    places = [field.name for field in dataclasses.fields(spec) if field.name != "name"]
    changed: dict[str, Any] = {}
    for place, change in _nested(changes).items():
        one_of(where, "key", place, places)
        old = changed.get(place, getattr(spec, place))
        if place in _CHOICES:
            changed[place] = _chosen(f"{where}: {place}", old, change, _CHOICES[place], resolve)
        elif place in _PARTS:
            changed[place] = _part(f"{where}: {place}", old, change, _PARTS[place], optional=place != "aggregation")
        else:
            changed[place] = _value(where, place, change, typing.get_type_hints(AlgorithmSpec)[place])
    return dataclasses.replace(spec, **changed)


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings, merged with those that are nested already."""
    nested: dict[str, Any] = {}
    for key, value in changes.items():
        place, _, inner = key.partition(".")
        if inner:
            held = nested.setdefault(place, {})
            if not isinstance(held, dict):
                raise ValueError(f"{key} and {place} are both given: write one of them")
            held[inner] = value
        elif isinstance(value, Mapping) and isinstance(nested.get(place, {}), dict):
            nested[place] = {**nested.get(place, {}), **value}
        elif place in nested:
            raise ValueError(f"{place} is given twice: write it once")
        else:
            nested[place] = value
    return nested


def _chosen(where: str, old: Any, change: Any, choices: dict[str, Any], resolve: Resolve | None) -> Any:
    """One of several parts, or a user's own."""
    if isinstance(change, Mapping):
        values = dict(change)
        kind = values.pop("name", None)
        if kind is None:
            return _filled(where, old, values)
        return _filled(where, _chosen(where, old, kind, choices, resolve), values)
    if isinstance(change, str):
        if "." in change and resolve is not None:
            found = resolve(change)
            return found() if isinstance(found, type) else found
        one_of(where, "name", change, choices)
        return choices[change]()
    return change() if isinstance(change, type) else change


def _part(where: str, old: Any, change: Any, kind: Any, *, optional: bool) -> Any:
    """A part that may be left out."""
    if isinstance(change, Mapping):
        return _filled(where, kind() if old is None else old, dict(change))
    if isinstance(change, kind) or (change is None and optional):
        return change
    raise ValueError(
        f"{where} must be a mapping of {[field.name for field in dataclasses.fields(kind)]}"
        + (" or null" if optional else "")
        + f", not {change!r}"
    )


def _filled(where: str, part: Any, values: dict[str, Any]) -> Any:
    """A part with some of its fields changed."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        if not values:
            return part
        raise ValueError(f"{where} is a function, {part!r}, without fields to set: {sorted(values)}")
    hints = typing.get_type_hints(type(part))
    names = [field.name for field in dataclasses.fields(part)]
    for key in values:
        one_of(f"{where} ({type(part).__name__})", "key", key, names)
    checked = {key: _value(where, key, value, hints[key]) for key, value in values.items()}
    return dataclasses.replace(part, **checked)


def _value(where: str, key: str, value: Any, hint: Any) -> Any:
    """A plain value of the type that the field has; whole numbers stand for floats."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for kind in kinds:
        if value is None and kind is type(None):
            return None
        if typing.get_origin(kind) is Literal:
            one_of(where, key, value, typing.get_args(kind))
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (bool, int, str) and type(value) is kind:
            return value
    names = " or ".join("null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise ValueError(f"{where}: {key}={value!r} must be {names}")
