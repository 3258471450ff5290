"""Will it fit? Bytes that each role takes on a device, from the model's shape alone.

In: a configuration, the transformers config of its model, and where each role is. Out: a `Footprint` per role, and what
does not fit, with what would help. No weights are read and no device is touched.

Every part is one that must be there, so the sum is a little less than what a run takes, and what does not fit by it
cannot fit at all. Not in it: the contexts, graphs and workspaces of CUDA, the fragmentation of its allocator, copies of
norms and attention in other precisions, LoRA adapters themselves, and what an engine prepares beside its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlinf.config.text import RunConfig
from rlinf.models.policy.base import Policy
from rlinf.placement.seats import TEXT, Placed, place

_BYTES = {"float32": 4, "bfloat16": 2}
GB = 1e9

Seats = Mapping[str, Sequence[frozenset[int]]]
"""Per role the devices of each of its processes."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process of a role takes on its device, bytes."""

    weights: float = 0.0
    """Its share of them, where processes share one model."""
    gradients: float = 0.0
    """The same."""
    optimizer: float = 0.0
    """AdamW's two running means, the same."""
    gathered: float = 0.0
    """Of a shared model, what is whole while it computes: a layer, and what is outside of the layers."""
    activations: float = 0.0
    """Of one micro-batch."""
    cache: float = 0.0
    """Keys and values of the answers that are decoded together."""

    @property
    def active_bytes(self) -> int:
        """While it is loaded, at the peak of its work."""
        return int(sum(getattr(self, part.name) for part in fields(self)))

    @property
    def parked_bytes(self) -> int:
        """While it is parked: nothing of this stays. What a CUDA context and its graphs keep is not known here."""
        return 0


def parameters_of(model_config: Any) -> int:
    """Number of parameters of a model, counted on a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


# Text ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """Numbers of a transformer."""

    parameters: int
    outside: int
    """Parameters of the embeddings, which belong to no layer."""
    layers: int
    hidden: int
    inner: int
    """Of the layer's MLP."""
    vocabulary: int
    queries: int
    """Heads times their size."""
    keys: int
    """The same of keys, and of values."""

    @staticmethod
    def of(model_config: Any) -> _Shape:
        text = model_config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        shared = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return _Shape(
            parameters=parameters_of(model_config),
            outside=text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocabulary=text.vocab_size,
            queries=head * text.num_attention_heads,
            keys=head * shared,
        )

    @property
    def kept(self) -> int:
        """Numbers that a layer keeps of each token for its gradient: input and normed input of attention and MLP, q, k,
        v, what attention says, and gate, up, their activation and product."""
        return 4 * self.hidden + 2 * self.queries + 2 * self.keys + 4 * self.inner

    @property
    def passing(self) -> int:
        """Numbers of each token that are there at once in a layer without gradient: its input, and the MLP's."""
        return 2 * self.hidden + 3 * self.inner

    @property
    def layer(self) -> float:
        """Parameters of one."""
        return (self.parameters - self.outside) / self.layers


def footprints(config: RunConfig, model_config: Any, seats: Seats, roles: Sequence[str] = ()) -> dict[str, Footprint]:
    """What a process of each role takes on its device.

    Args:
        config: of the run.
        model_config: of the model, from transformers, with the vocabulary that it will have.
        seats: where the roles are; of a role whose processes share a model, how many share it.
        roles: that there are besides rollout, judge and trainer; each with a model of the policy's size. The judge
            takes nothing.
    """
    shape, trainer = _Shape.of(model_config), config.trainer
    checkpointed = trainer.gradient_checkpointing
    adapters = config.model.lora.r > 0
    found = {
        "trainer": _learner(config, shape, shape.parameters, len(seats["trainer"]), adapters, checkpointed),
        "rollout": _rollout(config, shape),
    }
    if "critic" in roles:  # it has a number where a policy has a vocabulary
        own = shape.parameters - (shape.outside - shape.vocabulary * shape.hidden)
        found["critic"] = _learner(config, shape, own, len(seats["critic"]), False, checkpointed, head=False)
    for role, settings in (("reference", config.reference), ("teacher", config.teacher)):
        if role in roles:
            width = _BYTES[settings.dtype]
            follows = role == "reference" and config.reference.kind == "ema" and width < 4
            found[role] = Footprint(
                weights=shape.parameters * (width + (4 if follows else 0)),
                activations=trainer.micro_batch_tokens * shape.passing * width + _logits(config, shape),
            )
    return found


def _learner(
    config: RunConfig,
    shape: _Shape,
    parameters: int,
    ranks: int,
    adapters: bool,
    checkpointed: bool,
    head: bool = True,
) -> Footprint:
    """Weights, gradients and AdamW's two means in float32, spread over the ranks; of adapters' all but the weights is
    left out. Activations of a micro-batch of T tokens:

        T (layers x kept) b, or with checkpointing T (layers x hidden + kept) b;  + 2 x logprob_chunk x vocabulary x 4
    """
    width, tokens = _BYTES[config.trainer.dtype], config.trainer.micro_batch_tokens
    share = 4.0 * parameters / ranks
    per_token = shape.layers * shape.hidden + shape.kept if checkpointed else shape.layers * shape.kept
    outside = shape.outside if head else shape.vocabulary * shape.hidden
    return Footprint(
        weights=share,
        gradients=0.0 if adapters else share,
        optimizer=0.0 if adapters else 2 * share,
        gathered=(outside + shape.layer) * width if ranks > 1 or width < 4 else 0.0,
        activations=float(tokens * per_token * width) + (_logits(config, shape) if head else 0.0),
    )


def _logits(config: RunConfig, shape: _Shape) -> float:
    """Those of a chunk in float32, and as much again for what is made of them."""
    return 2.0 * min(config.trainer.logprob_chunk, config.trainer.micro_batch_tokens) * shape.vocabulary * 4


def _rollout(config: RunConfig, shape: _Shape) -> Footprint:
    """Whole weights; keys and values, 2 x layers x keys for each token; logits in float32 of the rows decoded together,
    twice, since they are sampled from."""
    rollout, width = config.rollout, _BYTES[config.rollout.dtype]
    tokens = rollout.max_tokens or rollout.max_rows * (rollout.max_new_tokens + (config.data.max_prompt_tokens or 0))
    return Footprint(
        weights=float(shape.parameters * width),
        activations=2.0 * rollout.max_rows * shape.vocabulary * 4,
        cache=2.0 * shape.layers * shape.keys * tokens * width,
    )


# What does not fit ---------------------------------------------------------------------------------------------------


def complaints(config: RunConfig, model_config: Any, hosts: int | Placed, roles: Sequence[str] = ()) -> Iterator[str]:
    """What does not fit into the devices' memory, and what would help; nothing where that is not known.

    Roles that take turns on a device need not fit side by side: the largest must, beside the others parked. (Processes
    of one role are at work together.)

    Args:
        config: of the run.
        model_config: see `footprints`.
        hosts: where roles are; or the number of processes, to be placed as `config.placement` says.
        roles: see `footprints`.
    """
    kinds = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer", *roles)]
    placed = place(config.placement, kinds, hosts) if isinstance(hosts, int) else hosts
    if placed.memory is None:
        return
    seats = {role: seat.devices for role, seat in placed.seats.items()}
    found = footprints(config, model_config, seats, roles)
    said: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for device in sorted({device for own in seats.values() for devices in own for device in devices}):
        there = {role: sum(device in devices for devices in seats[role]) for role in found}
        active = {role: count * found[role].active_bytes for role, count in there.items() if count}
        parked = {role: there[role] * found[role].parked_bytes for role in active}
        together = [{**parked, role: bytes_} for role, bytes_ in active.items()] if placed.turns else [active]
        for need in together:
            if sum(need.values()) > placed.memory:
                said.setdefault(tuple((role, taken) for role, taken in need.items() if taken), []).append(device)
    for needed, devices in said.items():
        parts = " and ".join(f"{taken / GB:.3g} GB for the {role}" for role, taken in needed)
        hosts_need = f"host {devices[0]} needs" if len(devices) == 1 else f"hosts {', '.join(map(str, devices))} need"
        yield (
            f"{hosts_need} at least {sum(taken for _, taken in needed) / GB:.3g} GB ({parts}) of "
            f"{placed.memory / GB:.3g}; {'; or '.join(_cures(config, [role for role, _ in needed], placed.turns))}"
        )


def _cures(config: RunConfig, roles: Sequence[str], turns: bool) -> Iterator[str]:
    if "trainer" in roles:
        yield "name more hosts in placement.trainer, which share its state"
        if config.model.lora.r == 0:
            yield "train adapters only (model.lora.r=16)"
    if "critic" in roles:
        yield "name more hosts in placement.critic, which share its state"
    if not turns and len(roles) > 1:
        yield "give each role hosts of its own"
    if {"trainer", "critic"} & {*roles}:
        if not config.trainer.gradient_checkpointing:
            yield "trainer.gradient_checkpointing=true"
        yield "a smaller trainer.micro_batch_tokens"
    if "reference" in roles and config.reference.dtype == "float32":
        yield "reference.dtype=bfloat16"
    if "teacher" in roles and config.teacher.dtype == "float32":
        yield "teacher.dtype=bfloat16"
    if "rollout" in roles and config.rollout.dtype == "float32":
        yield "rollout.dtype=bfloat16"
    if "rollout" in roles:
        yield "a smaller rollout." + ("max_rows" if config.rollout.max_tokens is None else "max_tokens")


# Policies that act ---------------------------------------------------------------------------------------------------


def control_footprints(policy: Policy, *, targets: bool = False) -> dict[str, Footprint]:
    """What a process of each role takes that has a policy of its own: weights, and what training keeps beside them.

    Activations are left out: what a policy keeps of a row is its own affair.

    Args:
        policy: any with the right shapes; on the meta device it costs nothing.
        targets: the trainer keeps a second copy of the critics (soft actor-critic).
    """
    tensors = [*policy.parameters(), *policy.buffers()]
    weights = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    learned = 4.0 * sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    copied = 4.0 * sum(parameter.numel() for parameter in policy.of_critic()) if targets else 0.0
    return {
        "policy": Footprint(weights=weights),
        "trainer": Footprint(weights=weights + copied, gradients=learned, optimizer=2 * learned),
    }
