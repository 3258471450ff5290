"""Memory that a run takes of its devices, and whether it fits: bytes of each role, from the model's shape alone.

In: a configuration, the transformers config of its model, and where each role is. Out: a `Footprint` per role, the
configuration with values in place of what was left to the devices, and problems by key: what does not fit, with what
would help. No weights are read and no device is touched.

There are two sums. `least_bytes` has only what must be there, so what does not fit by it cannot fit at all: runs are
refused by it. `active_bytes` has `spare` besides, on CUDA devices: what a step takes at its peak by what torch's
tracker counts, so that it is a little more than what a run takes. Choices and leases go by it. In neither: the context
of CUDA and the workspaces of its libraries, which are of the process and not of a role: they have the part of a GPU
that roles may not fill (`runs.prepare`).

Of a policy that acts, given on the meta device and as it is made ready to learn: weights, and what training keeps
beside them. Activations are left out, since what a policy keeps of a row is its own affair: what is refused here
cannot fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.learning import ParallelConfig, ReferenceConfig, RewardModelConfig
from rlinf.config.load import Problem
from rlinf.config.text import RunConfig
from rlinf.models.language.arrangement import Sharding, arranged
from rlinf.placement.hardware import cluster_of
from rlinf.placement.seats import Placed
from rlinf.runs.dry_run import transformer
from rlinf.training.megatron.layout import misfits, mistakes

if TYPE_CHECKING:
    from rlinf.models.policy.base import Policy
    from rlinf.training.embodied.ppo import Preparation

_BYTES = {"float32": 4, "bfloat16": 2}
GB = 1e9
_READ_AT_ONCE = 8192
"""Tokens of prompts that the transformers engine reads together."""
_AUTO_FILLS = 0.7
"""Share of a device's memory that a choice of `trainer.sharding: auto` may fill by `footprints` where they are a
lower bound: all but CUDA's."""
_COPIES = {
    "replicate": "has a whole copy in each of {} processes",
    "hybrid": "has a copy on each machine, in slices over {} processes in all",
    "shard": "has one copy in slices over {} processes",
}

Seats = Mapping[str, Sequence[frozenset[int]]]
"""Per role the devices of each of its processes."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one process of a role takes on its device, bytes."""

    weights: float = 0.0
    """Its share of them, where processes share one model."""
    gradients: float = 0.0
    """Gradients of its share of the weights."""
    optimizer: float = 0.0
    """AdamW's two running means, or Muon's one, the same."""
    gathered: float = 0.0
    """While it computes: of a model in slices a layer and all outside of layers; of any other, copies in bfloat16."""
    activations: float = 0.0
    """Activations of one micro-batch."""
    cache: float = 0.0
    """Keys and values of the answers that are decoded together."""
    spare: float = 0.0
    """By how much it may exceed the other parts at its peak, on CUDA; 0 where that is not known. The rollout's has new
    weights beside the old ones, where they come from another GPU."""

    @property
    def active_bytes(self) -> int:
        """While it is loaded, at the peak of its work; on CUDA at most, elsewhere at least."""
        return int(sum(getattr(self, part.name) for part in fields(self)))

    @property
    def least_bytes(self) -> int:
        """Bytes that must be there at the least: `active_bytes` without `spare`."""
        return int(self.active_bytes - self.spare)

    @property
    def parked_bytes(self) -> int:
        """While it is parked: nothing of this stays. What a CUDA context and its graphs keep is not known here."""
        return 0


# Text ----------------------------------------------------------------------------------------------------------------


def footprints(
    config: RunConfig,
    model_config: Any,
    seats: Seats,
    roles: Sequence[str] = (),
    slices: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Footprint]:
    """Return the footprint of one process of each role on its device.

    Args:
        config: of the run.
        model_config: of the model, from transformers, with the vocabulary that it will have.
        seats: where the roles are; of a role whose processes share a model, how many share it.
        roles: that there are besides rollout, judge and trainer. A critic's model is taken to be of the policy's size;
            those of the others, where named, are read. The judge takes nothing; users' own roles, their memory_gb.
        slices: by learning role, over how many processes a copy of its model is spread; over all unless it says so.
    """
    config, _ = transformer.by_kind(config)
    shape, cuda = transformer.Shape.of(model_config), transformer.device_kind(config.placement) == "cuda"
    by_role = {
        "trainer": _learner(config, shape, slices.get("trainer", len(seats["trainer"])), config.model.lora.on),
        "rollout": _rollout(config, shape) if config.rollout.own_engine else Footprint(),
    }
    own = getattr(model_config, "dtype", None)
    narrow = config.model.lora.on and config.model.path is not None and config.trainer.dtype == "bfloat16"
    alone = slices.get("trainer", len(seats["trainer"])) == 1 and config.trainer.working_copy is not False
    if narrow and alone and str(own).endswith("bfloat16"):  # a frozen base is kept as it was saved
        by_role["trainer"] = replace(by_role["trainer"], weights=by_role["trainer"].weights / 2, gathered=0.0)
    if config.model.lora.base == "nf4":  # rounded layers have 4.5 bits a weight, and no copy that is computed with
        width, frozen = 2.0 * (config.trainer.dtype == "bfloat16"), by_role["trainer"]
        whole = shape.outside + shape.expert_parameters
        weights = whole * 4.0 + (shape.parameters - whole) * 4.5 / 8
        by_role["trainer"] = replace(frozen, weights=weights, gathered=whole * width)
    if "critic" in roles:
        by_role["critic"] = _learner(config, shape, slices.get("critic", len(seats["critic"])), False, head=False)
    learns, answers = (frozenset[int]().union(*seats.get(role, ())) for role in ("trainer", "rollout"))
    if cuda and not learns & answers:
        by_role["rollout"] = replace(by_role["rollout"], spare=by_role["rollout"].spare + by_role["rollout"].weights)
    for role, settings in config.frozen.items():
        if role in roles and (isinstance(settings, ReferenceConfig) or settings.server.url is None):
            width = _BYTES[settings.dtype]
            follows = role == "reference" and config.reference.kind == "ema" and width < 4
            its = shape if settings.model is None else transformer.saved_shape(settings.model, None)
            tokens, chunk = _micro_batch(config)
            footprint = Footprint(
                weights=its.parameters * (width + (4 if follows else 0)),
                activations=tokens * its.passing * width + _logits(chunk, its),
            )
            most = (tokens * its.passing_bytes(width) + transformer.logit_bytes(its, chunk)) * (
                1 + transformer.ALLOWANCE
            )
            by_role[role] = _with_spare(footprint, most) if cuda else footprint
    if "reward_model" in roles:
        by_role["reward_model"] = _reward_model(config.reward_model)
    own_bytes = {name: float(entry.get("memory_gb", 0)) * GB for name, entry in config.roles.items()}
    return by_role | {name: Footprint(weights=size) for name, size in own_bytes.items() if size}


def _reward_model(settings: RewardModelConfig) -> Footprint:
    """Whole weights and a micro-batch; of a judge that writes, as of a rollout."""
    from transformers import AutoModelForSequenceClassification  # takes half a second, which runs that act do without

    assert settings.path is not None  # of every run that has the role
    width, classifies = _BYTES[settings.dtype], settings.kind == "classifier"
    shape = transformer.saved_shape(settings.path, AutoModelForSequenceClassification if classifies else None)
    weights, rows = float(shape.parameters * width), settings.max_rows
    if classifies or settings.choices:
        return Footprint(weights, activations=float(settings.micro_batch_tokens * shape.passing * width))
    cache = 2.0 * shape.layers * shape.keys * rows * (settings.max_new_tokens + (settings.max_tokens or 0)) * width
    return Footprint(weights, activations=2.0 * rows * shape.vocabulary * 4, cache=cache)


def _learner(config: RunConfig, shape: transformer.Shape, ranks: int, adapters: bool, head: bool = True) -> Footprint:
    """Weights, gradients and the optimizer's means (AdamW's two in float32 or 8 bits, one where Muon learns), spread
    over the ranks; of adapters' all but the weights is left out. Activations of a micro-batch of T tokens, at least:

        T (layers x kept) b + L, or with checkpointing T (layers x hidden) b + max(T (kept - hidden) b, L)

    with L = 2 x logprob_chunk x vocabulary x 4, since layers are computed again when the logits are gone; and at most,
    on CUDA, see `peak_bytes`, or what publishing takes between steps, if that is more: without the buckets, which lie
    on the device only where they fit (`weight_sync.has_room`). A critic, without `head`, is not published and has
    a number where a policy has a vocabulary.
    """
    checkpointed, parallel = config.trainer.gradient_checkpointing is True, config.trainer.parallel
    width, (whole, _) = _BYTES[config.trainer.dtype], _micro_batch(config)
    tokens = transformer.tokens_of(whole, parallel)
    chunk = min(config.trainer.logprob_chunk, tokens)
    in_flight = shape.layers  # of a pipeline, the first stage has as many micro-batches under way as there are stages
    if transformer.splits_whole(config.trainer):
        shape, ranks = transformer.part_of(shape, parallel), 1
        chunk = min(config.trainer.logprob_chunk, -(-whole // parallel.context))  # its head has a context's tokens
    outside = shape.outside if head else shape.head
    share = 4.0 * (shape.parameters - shape.outside + outside) / ranks
    means = {"adamw": 2 * share, "adamw_8bit": share / 2, "muon": share + 4.0 * outside / ranks}[config.optimizer.kind]
    if ranks > 1 and parallel != ParallelConfig():
        shape = transformer.gathered_of(shape, parallel)
        outside = shape.outside if head else shape.head
    shape = replace(shape, parameters=int(in_flight * shape.layer) + shape.outside, layers=in_flight)
    logits, token = _logits(chunk, shape) if head else 0.0, float(tokens * width)
    activations = token * shape.layers * shape.activations + logits
    if checkpointed:
        activations = token * shape.layers * shape.hidden + max(token * (shape.activations - shape.hidden), logits)
    casts = width < 4 and config.trainer.working_copy is False and not transformer.splits_whole(config.trainer)
    spread = ranks > 1 or casts
    footprint = Footprint(
        weights=share,
        gradients=0.0 if adapters else share,
        optimizer=0.0 if adapters else means,
        gathered=(outside + shape.layer) * width if spread else share / 4 * width * (width < 4),
        activations=activations,
    )
    if transformer.device_kind(config.placement) != "cuda":
        return footprint
    from rlinf.training.weight_sync import publishing_bytes  # what trains takes seconds to import

    how = transformer.Training(width, tokens, chunk, checkpointed, spread, learns_weights=not adapters, head=head)
    most, publishing = (
        transformer.peak_bytes(shape, how),
        publishing_bytes(0, on_device=False, ranks=ranks) if head else 0.0,
    )
    if adapters:  # at rank r, on all linear layers, with gradients and means; the largest is merged to be published
        wide = 6 * shape.hidden + 2 * shape.queries + 3 * shape.inner
        lora = 16.0 * config.model.lora.r * shape.layers * wide / ranks
        merged = 2 * 4.0 * shape.hidden * max(shape.inner, shape.queries) / ranks
        most, publishing = most + lora, publishing + lora + merged
    return _with_spare(footprint, max(most, publishing) + footprint.gathered * (not spread))


def _with_spare(footprint: Footprint, most: float) -> Footprint:
    """With what a step takes at most beside weights, gradients, optimizer and cache, bytes."""
    return replace(footprint, spare=max(0.0, most - footprint.gathered - footprint.activations))


def _micro_batch(config: RunConfig) -> tuple[int, int]:
    """All its tokens, and how many of them have logits at a time where one process computes them."""
    tokens = config.trainer.micro_batch_tokens
    assert tokens is not None  # `by_kind` sees to it
    return tokens, min(config.trainer.logprob_chunk, tokens)


def _logits(chunk: int, shape: transformer.Shape) -> float:
    """Those of so many tokens in float32, and as much again for what is made of them."""
    return 2.0 * chunk * shape.vocabulary * 4


def _rollout(config: RunConfig, shape: transformer.Shape) -> Footprint:
    """Whole weights, of which those that are rounded take a byte; keys and values, 2 x layers x keys for each token;
    logits in float32 of the rows decoded together, twice, since they are sampled from. Of an engine that splits its
    model over devices, the share of one of them."""
    rollout, width, split = (
        config.rollout,
        _BYTES[config.rollout.dtype],
        transformer.engine_split(config.rollout.engine_args),
    )
    tokens = rollout.max_tokens or rollout.max_rows * (rollout.max_new_tokens + (config.data.max_prompt_tokens or 0))
    embedding = shape.vocabulary * shape.hidden
    rounded = shape.parameters - shape.outside + embedding * (1 + width)
    footprint = Footprint(
        weights=float(shape.parameters * width if rollout.weights != "int8" else rounded) / split,
        activations=2.0 * rollout.max_rows * shape.vocabulary * 4 / split,
        cache=2.0 * shape.layers * shape.keys * tokens * width / split,
    )
    if transformer.device_kind(config.placement) != "cuda":
        return footprint
    reading = min(_READ_AT_ONCE, tokens) * shape.passing_bytes(width) / split
    return replace(footprint, spare=reading + transformer.ALLOWANCE * (footprint.activations + footprint.cache))


# What does not fit ---------------------------------------------------------------------------------------------------


def complaints(
    config: RunConfig,
    model_config: Any,
    placed: Placed,
    roles: Sequence[str] = (),
    slices: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield sentences on what does not fit into the devices' memory, and what would help; none where that is not known.

    Roles that take turns on a device need not fit side by side: the largest must, beside the others parked. (Processes
    of one role are at work together.)

    Args:
        config: of the run.
        model_config: see `footprints`.
        placed: where the roles are.
        roles, slices: see `footprints`.
    """
    if placed.memory is None:
        return
    config, _ = transformer.by_kind(config)
    hosts_by_need: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for device, need in _needs(config, model_config, placed, roles, slices, least=True):
        memory = placed.memory_on(device)
        if memory is not None and sum(need.values()) > memory:
            hosts_by_need.setdefault(tuple(need.items()), []).append(device)
    for needed, devices in hosts_by_need.items():
        parts = " and ".join(f"{size / GB:.3g} GB for the {role}" for role, size in needed)
        hosts_need = f"host {devices[0]} needs" if len(devices) == 1 else f"hosts {', '.join(map(str, devices))} need"
        cures = "; or ".join(_cures(config, [role for role, _ in needed], placed.turns))
        yield (
            f"{hosts_need} at least {sum(size for _, size in needed) / GB:.3g} GB ({parts}) of "
            f"{(placed.memory_on(devices[0]) or 0) / GB:.3g}; {cures}"
        )


def _needs(
    config: RunConfig,
    model_config: Any,
    placed: Placed,
    roles: Sequence[str],
    slices: Mapping[str, int],
    *,
    least: bool = False,
) -> Iterator[tuple[int, dict[str, int]]]:
    """Devices, with the bytes of the roles that are on one of them at the same time; as often as roles take turns."""
    seats = {role: seat.devices for role, seat in placed.seats.items()}
    footprint_by_role = footprints(config, model_config, seats, roles, slices)
    for device in sorted({device for own in seats.values() for devices in own for device in devices}):
        there = {role: sum(device in devices for devices in seats[role]) for role in footprint_by_role if role in seats}
        sizes = {role: each.least_bytes if least else each.active_bytes for role, each in footprint_by_role.items()}
        active = {role: count * sizes[role] for role, count in there.items() if count}
        parked = {role: there[role] * footprint_by_role[role].parked_bytes for role in active}
        for need in [{**parked, role: size} for role, size in active.items()] if placed.turns else [active]:
            yield device, {role: size for role, size in need.items() if size}


def _cures(config: RunConfig, roles: Sequence[str], turns: bool) -> Iterator[str]:
    if "trainer" in roles:
        if config.trainer.sharding in ("replicate", "hybrid"):
            yield "trainer.sharding=shard, which spreads its state over all its processes"
        yield "name more hosts in placement.trainer, which share its state"
        if not config.model.lora.on:
            yield "train adapters only (model.lora.r=16)"
    if "critic" in roles:
        yield "name more hosts in placement.critic, which share its state"
    if not turns and len(roles) > 1:
        yield "give each role hosts of its own"
    if {"trainer", "critic"} & {*roles}:
        if config.trainer.gradient_checkpointing is not True:
            yield "trainer.gradient_checkpointing=true"
        if config.trainer.working_copy is True and config.trainer.dtype == "bfloat16":
            yield "trainer.working_copy=false"
        yield "a smaller trainer.micro_batch_tokens"
    if "reference" in roles and config.reference.dtype == "float32":
        yield "reference.dtype=bfloat16"
    if "teacher" in roles and config.teacher.dtype == "float32":
        yield "teacher.dtype=bfloat16"
    if "reward_model" in roles and config.reward_model.dtype == "float32":
        yield "reward_model.dtype=bfloat16"
    if "rollout" in roles and config.rollout.dtype == "float32":
        yield "rollout.dtype=bfloat16"
    if "rollout" in roles:
        yield "a smaller rollout." + ("max_rows" if config.rollout.max_tokens is None else "max_tokens")
    for role in config.roles:
        if role in roles:
            yield f"other hosts or devices for roles.{role}, or a smaller memory_gb if it holds less"


# How learning roles lie on their processes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """How the models that learn lie on the processes of their roles."""

    sharding: Sharding
    """Sharding as it was configured, or chosen."""
    slices: Mapping[str, int]
    """By role, over how many processes a copy is spread."""
    words: str | None
    """Sentence about it for people; None where each role has one process."""


def spread_of(config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str] = ()) -> Spread:
    """How trainer and critic lie on their processes.

    As `trainer.sharding` says; "auto" takes the first of replicate, hybrid and shard that fits into the devices'
    memory; where `footprints` are a lower bound, into `_AUTO_FILLS` of it, since what they leave out needs room too.

    Args:
        config: of the run.
        model_config: see `footprints`.
        placed: where the roles are.
        roles: see `footprints`.

    Raises:
        ValueError: "hybrid" on machines that have unequal numbers of a role's processes.
    """
    nodes = cluster_of(config.placement, placed.devices).nodes
    machine = {device.number: number for number, node in enumerate(nodes) for device in node.devices}
    learning = [role for role in ("trainer", "critic") if role == "trainer" or role in roles]
    machines = {role: [machine[host] for host in placed.seats[role].hosts] for role in learning}

    parallel = config.trainer.parallel if config.trainer.backend == "fsdp" else ParallelConfig()

    def slices(sharding: Sharding) -> dict[str, int]:
        return {role: len(arranged(sharding, where, parallel).copies[0]) for role, where in machines.items()}

    def fits(sharding: Sharding) -> bool:
        try:
            spread = slices(sharding)
        except ValueError:
            return False
        return _learners_fit(config, model_config, placed, roles, spread)

    if config.trainer.backend == "megatron":
        parallel = config.trainer.parallel
        split = ", ".join(f"{name} {size}" for name, size in vars(parallel).items() if size > 1) or "whole copies"
        parts = dict.fromkeys(learning, parallel.tensor * parallel.pipeline)
        return Spread("replicate", parts, f"Megatron-core: {split}")
    wanted = config.trainer.sharding
    order: tuple[Sharding, ...] = ("replicate", "hybrid")
    way: Sharding = next((one for one in order if fits(one)), "shard") if wanted == "auto" else wanted
    spread = slices(way)
    words = [f"{role} {_COPIES[way].format(count)}" for role, where in machines.items() if (count := len(where)) > 1]
    room = placed.room("trainer")
    limit = "no limit of memory" if room is None else f"{room / GB:.3g} GB of memory"
    why = f", which auto chose by {limit}" if wanted == "auto" else ""
    return Spread(way, spread, f"sharding {way}{why}: {', '.join(words)}" if words else None)


def _learners_fit(
    config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str], slices: Mapping[str, int]
) -> bool:
    if placed.memory is None:
        return True
    fills = 1.0 if transformer.device_kind(config.placement) == "cuda" else _AUTO_FILLS
    needs = _needs(config, model_config, placed, roles, slices)
    return all(
        sum(need.values()) <= fills * room
        for device, need in needs
        if need.keys() & slices.keys() and (room := placed.memory_on(device)) is not None
    )


MOST_BYTES = 10_000 * GB
"""Bytes that no process takes: ten times the memory of the largest machines."""
MOST_PARTS = 640
"""Layers, experts or heads that a model may have, a little more than any there is. Each layer is built: a thousand were
measured to take half a minute on a busy machine, and a number with zeros too many would take hours."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run's configuration fitted to its devices, and the memory that its roles take of them."""

    config: RunConfig
    """Configuration of the run, with a value in place of what was left to the devices."""
    memory_by_role: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """See `RunPlan`."""
    became: tuple[str, ...] = ()
    """Lines about what was left to the devices."""
    warnings: tuple[str, ...] = ()
    """Lines about roles that may run out of memory, and about the precision that a CPU was found to want."""


def fit(
    config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str], flow: Any = None
) -> tuple[Fitted, list[Problem]]:
    """Decide what is left to the devices, count what roles take of them, and say what does not fit.

    Args:
        config: of the run.
        model_config: of its model, from transformers.
        placed: where the roles are.
        roles: that there are besides rollout, judge and trainer.
        flow: of the run; None: none that is known.
    """
    kind, memory = transformer.device_kind(config.placement), placed.room("trainer")
    config, precision = transformer.rollout_precision(config, model_config, placed, flow)
    config, became = transformer.by_kind(config)

    def learns(changed: RunConfig) -> bool:
        spread = spread_of(changed, model_config, placed, roles).slices
        return _learners_fit(changed, model_config, placed, roles, spread)

    try:
        config, why = transformer.checkpointing(config, memory, learns)
        config, cast = transformer.working_copy(config, learns)
        slices = spread_of(config, model_config, placed, roles).slices
    except ValueError as error:
        return Fitted(config), [Problem("configuration", "trainer.sharding", config.trainer.sharding, str(error))]
    there = {"trainer", "teachers", *placed.seats}
    became = [each for each in became if each.partition(".")[0] in there]
    lines = [f"{', '.join(became)}: {kind} devices{_assumed(config)}"] if became else []
    if why:
        lines.append(f"trainer.gradient_checkpointing={str(config.trainer.gradient_checkpointing).lower()}: {why}")
    lines += [cast] if cast else []
    footprint_by_role = footprints(
        config, model_config, {role: seat.devices for role, seat in placed.seats.items()}, roles, slices
    )
    problems = [
        *oversized(config, footprint_by_role),
        *too_long(config, model_config),
        *unsplit(config, model_config, placed, roles),
    ]
    problems += [
        Problem("configuration", "placement.device_memory_gb", config.placement.device_memory_gb, complaint)
        for complaint in complaints(config, model_config, placed, roles, slices)
    ]
    # what is refused is refused by the least; a lease of more than a device has would never be given
    memory_by_role = {
        role: (
            each.active_bytes if (room := placed.room(role)) is None else min(each.active_bytes, room),
            each.parked_bytes,
        )
        for role, each in footprint_by_role.items()
        if role in placed.seats
    }
    precisions = (precision, transformer.unequal_precision(config)) if "rollout" in placed.seats else ()
    warnings = (*filter(None, precisions), *_tight(footprint_by_role, placed))
    return Fitted(config, memory_by_role, tuple(lines), warnings), problems


def _tight(footprint_by_role: Mapping[str, Footprint], placed: Placed) -> Iterator[str]:
    for role, each in footprint_by_role.items():
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
        "trainer.working_copy": (config.trainer.working_copy is False, "always keeps its weights in bfloat16 too"),
        "trainer.compile": (config.trainer.compile is True, "compiles nothing"),
        "trainer.attention": (config.trainer.attention not in ("auto", "packed"), "packs, by torch's attention"),
    }
    for key, (present, why) in refused.items():
        if present:
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            value = getattr(value, "settings", value)  # of adapters, what was asked for
            yield Problem("configuration", key, value, f"trainer.backend=megatron {why}; leave it out, or take fsdp")


def oversized(config: RunConfig, footprints: Mapping[str, Footprint]) -> Iterator[Problem]:
    """Yield problems of settings for which no machine has enough memory, wherever the run is to be.

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
    from rlinf.models.language.sources import context_length  # transformers comes with it

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


_STATE = 3
"""Numbers of float32 beside each that learns: its gradient, and AdamW's two running means."""


def control_footprints(
    policy: Policy, how: Preparation | None = None, *, ranks: int = 1, targets: bool = False
) -> dict[str, Footprint]:
    """Return the footprint of one process of each role that has a policy of its own.

    Args:
        policy: any with the right shapes; on the meta device it costs nothing. With adapters it is changed.
        how: it is made ready to learn; None: as it is, in float32.
        ranks: of the trainer.
        targets: the trainer keeps a second copy of the critics (soft actor-critic).

    Raises:
        ValueError: it cannot be made ready so.
    """
    from rlinf.training.embodied.ppo import Preparation, choose, plain  # which runs on text do without

    how = Preparation() if how is None else how
    dtype = how.computes_in
    buffers = float(sum(buffer.numel() * buffer.element_size() for buffer in policy.buffers()))
    named = list(policy.named_parameters())
    acting = sum(each.numel() * policy.kept_in(name, dtype).itemsize for name, each in named)
    copied = 4.0 * sum(parameter.numel() for parameter in policy.of_critic()) if targets else 0.0
    slices = ranks if how.slices(policy, ranks) else 1
    blocks = policy.blocks()
    choose(policy, how)
    weights = learned = 0.0
    for name, parameter in policy.named_parameters():
        whole = dtype != how.kept_in(policy, name) and policy.kept_in(plain(name), dtype) != dtype
        share = parameter.numel() / (1 if whole else slices)
        weights += share * how.kept_in(policy, name).itemsize
        learned += share * 4.0 if parameter.requires_grad else 0.0
    gathered = 0.0
    if slices > 1:
        inside = [sum(each.numel() for each in block.parameters()) for block in blocks]
        outside = sum(each.numel() for each in policy.parameters()) - sum(inside)
        gathered = float(dtype.itemsize * (outside + 2 * max(inside, default=0)))  # a block, and the one that comes
    trainer = Footprint(
        weights=weights + buffers + copied, gradients=learned, optimizer=(_STATE - 1) * learned, gathered=gathered
    )
    return {"policy": Footprint(weights=acting + buffers), "trainer": trainer}


def unfit(config: EmbodiedConfig, placed: Placed, footprints: Mapping[str, Footprint]) -> Iterator[Problem]:
    """Yield problems of roles that do not fit into a device's memory, even if they take turns on it.

    Args:
        config: of the run.
        placed: where the roles are, and how much memory each device has.
        footprints: of the roles.
    """
    for role, footprint in footprints.items():
        memory = placed.room(role)
        if memory is None or footprint.active_bytes <= memory:
            continue
        advice = (
            f"{role} takes at least {footprint.active_bytes / GB:,.1f} GB of a device of {memory / GB:,.1f} GB: "
            + ", or ".join(_control_cures(config, role))
        )
        yield Problem(
            "configuration", "policy.path" if config.policy.path else "policy.settings", _named(config), advice
        )


def _named(config: EmbodiedConfig) -> str:
    return config.policy.path or str(config.policy.type or "mlp")


def _control_cures(config: EmbodiedConfig, role: str) -> Iterator[str]:
    policy = config.policy
    if policy.dtype == "float32":
        yield "policy.dtype=bfloat16"
    if role == "trainer":
        if policy.sharding == "replicate":
            yield "policy.sharding=shard"
        yield "name more hosts in placement.trainer, which share its state"
        if not policy.lora.on:
            yield "train adapters only (policy.lora.r=32) or less of it (policy.train)"
    else:
        yield "take devices with more memory"
