"""Does a run fit its devices: their kind, their memory, the model's positions? And what it takes of them.

In: a configuration, the model's, and where its roles are. Out: what roles hold, the configuration with what was left to
the devices, and problems by key. The bytes are `footprint`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.config.loading import Problem
from rlinf.config.text import RunConfig
from rlinf.job.checks.by_kind import by_kind, checkpointing, device_kind
from rlinf.job.checks.footprint import GB, Footprint, complaints, footprints, learners_fit, spread_of
from rlinf.models.language.generation import context_length
from rlinf.placement.seats import Placed
from rlinf.training.megatron.families import mistakes
from rlinf.training.megatron.layout import misfits

MOST_BYTES = 10_000 * GB
"""Bytes that no process takes: ten times the memory of the largest machines."""
MOST_PARTS = 640
"""Layers, experts or heads that a model may have, a little more than any there is. Each layer is built: a thousand were
measured to take half a minute on a busy machine, and a number with zeros too many would take hours."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a run takes of its devices."""

    config: RunConfig
    """Of the run, with a value in place of what was left to the devices."""
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """See `Prepared`."""
    became: tuple[str, ...] = ()
    """Lines about what was left to the devices."""
    warnings: tuple[str, ...] = ()
    """Lines about roles that may run out of memory."""


def fit(config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str]) -> tuple[Fitted, list[Problem]]:
    """Decide what is left to the devices, count what roles take of them, and say what does not fit.

    Args:
        config: of the run.
        model_config: of its model, from transformers.
        placed: where the roles are.
        roles: that there are besides rollout, judge and trainer.
    """
    kind, memory = device_kind(config.placement), placed.room("trainer")
    config, became = by_kind(config)

    def learns(changed: RunConfig) -> bool:
        return learners_fit(changed, model_config, placed, roles)

    try:
        config, why = checkpointing(config, memory, learns)
        slices = spread_of(config, model_config, placed, roles).slices
    except ValueError as error:
        return Fitted(config), [Problem("configuration", "trainer.sharding", config.trainer.sharding, str(error))]
    there = {"trainer", "teachers", *placed.seats}
    became = [each for each in became if each.partition(".")[0] in there]
    lines = [f"{', '.join(became)}: {kind} devices{_assumed(config)}"] if became else []
    if why:
        lines.append(f"trainer.gradient_checkpointing={str(config.trainer.gradient_checkpointing).lower()}: {why}")
    found = footprints(config, model_config, {role: seat.devices for role, seat in placed.seats.items()}, roles, slices)
    problems = [
        *oversized(config, found),
        *too_long(config, model_config),
        *unsplit(config, model_config, placed, roles),
    ]
    problems += [
        Problem("configuration", "placement.device_memory_gb", config.placement.device_memory_gb, complaint)
        for complaint in complaints(config, model_config, placed, roles, slices)
    ]
    # what is refused is refused by the least; a lease of more than a device has would never be given
    held = {
        role: (
            each.active_bytes if (room := placed.room(role)) is None else min(each.active_bytes, room),
            each.parked_bytes,
        )
        for role, each in found.items()
        if role in placed.seats
    }
    return Fitted(config, held, tuple(lines), tuple(_tight(found, placed))), problems


def _tight(found: Mapping[str, Footprint], placed: Placed) -> Iterator[str]:
    for role, each in found.items():
        memory = placed.room(role) if role in placed.seats else placed.memory
        if memory is not None and each.spare and each.active_bytes > memory:
            key = "rollout.max_tokens" if role == "rollout" else "trainer.micro_batch_tokens"
            most = each.active_bytes / GB
            yield (
                f"the {role} may take {most:.3g} GB at its peak, of {memory / GB:.3g}: it may run out "
                f"of memory; a smaller {key} gives it room"
            )


def _assumed(config: RunConfig) -> str:
    return "" if config.placement.device_kind == "auto" else ", as placement.device_kind says"


def unsplit(config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str]) -> Iterator[Problem]:
    """Why Megatron-core cannot split the model as `trainer.parallel` says, all at once; nothing under other back ends.

    Args:
        config: of the run.
        model_config, placed, roles: see `fit`.
    """
    if config.trainer.backend != "megatron":
        return
    wrong = mistakes(model_config, config.trainer.parallel)
    for role in ("trainer", "critic"):
        if role == "trainer" or role in roles:
            hosts = len(placed.seats[role].hosts)
            wrong += [f"{role} on {hosts} processes: {each}" for each in misfits(config.trainer.parallel, hosts)]
    split = {name: size for name, size in vars(config.trainer.parallel).items() if size > 1}
    if wrong:
        yield Problem("configuration", "trainer.parallel", split, "; ".join(wrong))
    refused = {
        "model.lora": (bool(config.model.lora.r or config.model.lora.path), "trains all weights, and has no adapters"),
        "model.freeze": (bool(config.model.freeze), "trains all weights"),
        "trainer.sharding": (config.trainer.sharding != "auto", "splits models by trainer.parallel"),
        "trainer.compile": (config.trainer.compile is True, "compiles nothing"),
        "trainer.attention": (config.trainer.attention not in ("auto", "packed"), "packs, by torch's attention"),
    }
    for key, (given, why) in refused.items():
        if given:
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            value = getattr(value, "settings", value)  # of adapters, what was asked for
            yield Problem("configuration", key, value, f"trainer.backend=megatron {why}; leave it out, or take fsdp")


def oversized(config: RunConfig, footprints: Mapping[str, Footprint]) -> Iterator[Problem]:
    """What no machine has memory for, wherever the run is to be.

    Args:
        config: of the run.
        footprints: by role.
    """
    rollout = config.rollout
    model: tuple[str, Any] = ("model.config", config.model.config)
    if config.model.path is not None:
        model = "model.path", config.model.path
    for role, footprint in footprints.items():
        if footprint.weights > MOST_BYTES:
            what = f"the weights of the {role}"
            if role in config.roles:
                model, what = (f"roles.{role}.memory_gb", config.roles[role]["memory_gb"]), f"the {role}"
            yield too_much(*model, footprint.weights, what)
            return
    cache, logits = footprints["rollout"].cache, footprints["rollout"].activations
    if cache + logits <= MOST_BYTES:
        return
    if rollout.max_tokens is not None and cache > logits:
        key = "max_tokens"
    else:
        key = "max_new_tokens" if cache > logits and rollout.max_new_tokens > rollout.max_rows else "max_rows"
    yield too_much(f"rollout.{key}", getattr(rollout, key), cache + logits, "the answers that are decoded together")


def too_much(key: str, value: Any, needed: float, what: str, where: str = "each device") -> Problem:
    """A problem of a key whose value asks for more memory than there is: `needed` bytes for `what`."""
    advice = f"{what} would take at least {needed / GB:,.0f} GB on {where}; take less"
    return Problem("configuration", key, value, advice)


def too_long(config: RunConfig, model_config: Any) -> Iterator[Problem]:
    """Answers for which the model has no positions left behind a prompt of one token.

    Args:
        config: of the run.
        model_config: of the model, from transformers.
    """
    context = context_length(model_config)
    for key, answer in (
        ("rollout.max_new_tokens", config.rollout.max_new_tokens),
        ("evaluation.max_new_tokens", config.evaluation.max_new_tokens),
    ):
        if context is not None and answer is not None and answer >= context:
            advice = (
                f"the model has positions for {context:,} tokens, prompt and answer together: too few for an answer of "
                f"{answer:,}; take less"
            )
            yield Problem("configuration", key, answer, advice)
