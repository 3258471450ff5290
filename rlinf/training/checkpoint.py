"""A trainer's state, from which training goes on bit for bit: copied, written into files, taken over, or moved.

The state is tensors by key (`model.NAME`, `optimizer.NAME.KEY`, `rng.DEVICE.RANK`) and JSON values for the rest. Saving
has two halves: copies in host memory, taken in the compute thread between two steps (`copy_state`), and the writing, in
a thread of its own while training goes on (`write_checkpoint`). What lies in host memory already is copied when the
next step is about to change it, as far as it is not written by then. `load_state` takes a state over, from a directory
or from other hosts. Neither the writing nor the reading communicates, so they cannot come between collectives of
training.

`state/` is a sharded checkpoint in the safetensors layout of torch.distributed.checkpoint: each rank writes the shards
it has, `HuggingFaceStorageReader` and DCP's planner read what the ranks of another run have, however many they are.
Beside them `state.json` holds the rest. There is no pickle in it, and none is read: DCP's own `.metadata` is one, and a
checkpoint is a thing that people download.

`ParkedState` is a role's state in host memory, between the ranks that had it and those that go on with it on other
hosts: a `StateKeeper` on each old rank's host keeps its `StateCopy`, and each new rank reads the pieces that it needs
straight from there: by reference in one process, through shared memory on one machine, by process group or RPC between
machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlinf.config.reading import parse_json
from rlinf.data.safetensors_io import LateCopy, make_room, settle, sync_directory, write_tensors, write_text
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.calls import start_apart
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.optimizer import LOCAL_CHOICES
from rlinf.training.weight_sync import reshard

OptimizerState = dict[nn.Parameter, tuple[str, dict[str, Tensor]]]
"""Per parameter its name and what the optimizer keeps for it."""


def held(module: nn.Module, *optimizers: Optimizer) -> Iterator[Tensor]:
    """The tensors themselves, as they are now: parameters, what gathered of their gradients, buffers, and what the
    optimizers remember. Some may come twice, or share their storage."""
    for parameter in module.parameters():
        yield from _stored({"": parameter}).values()
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and the buffers that belong to a model's weights, under `model.NAME`."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    named = _stored({**dict(model.named_parameters()), **buffers})
    return {f"model.{name}": _flat(tensor) for name, tensor in named.items()}


def _stored(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored tensors, see `four_bits.parts_of`."""
    # trainers of policies import this module, and no language models
    from rlinf.models.language.four_bits import parts_of

    return parts_of(named)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """State of the optimizer for each parameter, under `optimizer.NAME.KEY`.

    Raises:
        ValueError: a parameter that the model has not, or something kept that is no tensor.
    """
    tensors = {}
    for name, parameter in _named(model, optimizer):
        for key, value in kept_by(optimizer, parameter).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as {type(value).__name__}: only tensors can be "
                    "saved"
                )
            tensors[f"optimizer.{name}.{key}"] = _flat(value)
    return tensors


def optimizer_groups(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The optimizer's hyperparameters and which parameters they are for, as JSON values."""
    if optimizer is None:
        return {"groups": [], "scalars": []}
    names = {parameter: name for name, parameter in _named(model, optimizer)}
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "values": {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in LOCAL_CHOICES
            },
        }
        for group in optimizer.param_groups
    ]
    items = (item for parameter in names for item in kept_by(optimizer, parameter).items())
    return {"groups": groups, "scalars": sorted({key for key, value in items if value.dim() == 0})}


def kept_by(optimizer: Any, parameter: nn.Parameter) -> Mapping[str, Any]:
    """State of an optimizer for a parameter; one whose own form is no tensors says how it is saved."""
    if hasattr(optimizer, "as_saved"):
        return optimizer.as_saved(parameter)  # type: ignore[no-any-return]
    return optimizer.state.get(parameter, {})  # type: ignore[no-any-return]


def go_on(optimizer: Any, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
    """Give an optimizer, which may have a form of its own for it, what `kept_by` gave for a parameter."""
    if hasattr(optimizer, "take"):
        optimizer.take(parameter, state)
    else:
        optimizer.state[parameter] = dict(state)


def empty_state(
    model: nn.Module, optimizer: Optimizer | None, stored: Metadata, about: Mapping[str, Any]
) -> OptimizerState:
    """Uninitialised tensors for what a checkpoint has of the optimizer, sharded as the parameters are.

    Args:
        model, optimizer: the ones that will take it over; they stay as they are.
        stored: what the checkpoint's files have.
        about: what `optimizer_groups` gave.
    """
    states: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, kind in stored.state_dict_metadata.items():
        owner, _, key = name.removeprefix("optimizer.").rpartition(".")
        if name.startswith("optimizer.") and isinstance(kind, TensorStorageMetadata):
            states.setdefault(owner, {})[key] = kind
    state: OptimizerState = {}
    on_device = optimizer is not None and any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for name, parameter in _named(model, optimizer):
        like = parameter.detach()
        tensors = {}
        for key, kind in states.get(name, {}).items():
            dtype = kind.properties.dtype
            if kind.size == like.shape and key not in about["scalars"]:
                tensors[key] = torch.empty_like(like, dtype=dtype)
            else:  # a counter: torch keeps it on the CPU unless it computes with it on the device
                tensors[key] = torch.empty(kind.size, dtype=dtype, device=like.device if on_device else "cpu")
        state[parameter] = name, tensors
    return state


def take_over(optimizer: Optimizer | None, state: OptimizerState, about: Mapping[str, Any]) -> None:
    """Have the optimizer go on with a state that `empty_state` made and that has been filled since."""
    if optimizer is None:
        return
    for parameter, (_, tensors) in state.items():
        if tensors:
            scalars = {key: value.reshape(()) for key, value in tensors.items() if key in about["scalars"]}
            go_on(optimizer, parameter, {**tensors, **scalars})
    for group, saved in zip(optimizer.param_groups, about["groups"], strict=True):
        for key, value in saved["values"].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def generators(rank: int, model: nn.Module) -> dict[str, Tensor]:
    """States of torch's random generators of this process, under `rng.DEVICE.RANK`: of the CPU and the model's GPU."""
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    first = next(model.parameters(), None)
    if first is not None and first.is_cuda:
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state(first.device)
    return states


def set_generators(states: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put states back that `generators` gave."""
    for key, state in states.items():
        if key.startswith("rng.cuda."):
            torch.cuda.set_rng_state(state, next(model.parameters()).device)
        else:
            torch.set_rng_state(state)


def own_part(tensor: Tensor, rank: int) -> tuple[Tensor, tuple[int, ...]] | None:
    """The part of a tensor that a rank writes, and where that begins in the whole; None if others write all of it.

    Args:
        tensor: plain ones are equal on all ranks, so rank 0 writes them; of sharded ones each writes its shard, and
            of shards that several ranks have the first.
        rank: of this process.

    Raises:
        ValueError: a tensor that is a sum over ranks.
    """
    if not isinstance(tensor, DTensor):
        return (tensor, (0,) * tensor.dim()) if rank == 0 else None
    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {mesh} is a sum over ranks: reduce it first")
    replicas = [isinstance(placement, Replicate) for placement in tensor.placements]
    local = tensor.to_local()
    if where is None or any(copied and at for copied, at in zip(replicas, where, strict=True)) or not local.numel():
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return local, tuple(chunk.offsets)


def _named(model: nn.Module, optimizer: Optimizer | None) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters, in its order, with the model's names for them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    if strangers := [tuple(parameter.shape) for parameter in ordered if parameter not in names]:
        raise ValueError(
            f"the optimizer has {len(strangers)} parameters that the model has not (shapes {strangers[:3]}): make it "
            "from the model's parameters, after sharding, and save or restore while they are sharded (between steps)"
        )
    return [(names[parameter], parameter) for parameter in ordered]


def _flat(tensor: Tensor) -> Tensor:
    """The tensor, with at least one dimension: DCP cannot read one without."""
    return tensor.detach() if tensor.dim() else tensor.detach().view(1)


STATE = "state"
"""Directory of a checkpoint to go on from."""
ABOUT = "state.json"
FORMAT = 1
"""Version of the format of `state/`; a reader refuses newer ones."""
OFFSETS = "DCP_SHARDING_INFO"
"""Key in a safetensors header under which DCP looks for where in the whole tensor a shard begins."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The values of a checkpoint that are no tensors."""

    version: int
    """The weights' version."""
    extra: dict[str, Any]
    """Values that the caller gave when it saved."""


class Source(Protocol):
    """Source that a state is read from: the files of a checkpoint, or the memory of the hosts that it leaves."""

    name: str
    """For messages."""
    about: Mapping[str, Any]
    """All that is not a tensor; see `StateCopy.about`."""
    stored: Metadata
    """Names, shapes and shards of the tensors."""

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, or this rank's shards of them, by name. Blocking; communicates with no other reader."""


class HostCopy(Protocol):
    """A part of a checkpoint, copied to host memory: it can be written while training goes on."""

    def write(self, directory: Path, stop: threading.Event | None = None, /) -> None:
        """Write it into a directory, which is made if need be, and wait until the disk has it."""


@dataclass(frozen=True, slots=True, eq=False)
class StateCopy:
    """One rank's part of a trainer's state, in host memory, ready to be written."""

    rank: int
    """Which rank's it is."""
    about: str | None
    """JSON of what is not a tensor, on rank 0."""
    shards: Mapping[str, Tensor | LateCopy]
    """In host memory, by key."""
    offsets: dict[str, tuple[int, ...]]
    """Where in its whole tensor each shard begins."""
    copies: Mapping[int, Tensor | LateCopy]
    """The copies again, by the address of the original."""

    def whole(self) -> StateCopy:
        """This part with all copies made, to be sent or kept; `copies` is left out."""
        shards = {key: each.whole() if isinstance(each, LateCopy) else each for key, each in self.shards.items()}
        return replace(self, shards=shards, copies={})

    def write(self, directory: Path, stop: threading.Event | None = None) -> None:
        """Write this rank's files and wait until the disk has them.

        Args:
            directory: made if need be.
            stop: when it is set, writing ends with `WritingStopped`.

        Raises:
            OSError: the disk is full, or cannot be written to; the text names the file and the bytes it needs.
        """
        make_room(directory, sum(shard.nbytes for shard in self.shards.values()))
        where = {key: {"saved_offsets": list(offset)} for key, offset in self.offsets.items()}
        write_tensors(directory / _file_name(self.rank), self.shards, {OFFSETS: json.dumps(where)}, stop)
        if self.about is not None:
            write_text(directory / ABOUT, self.about)
        sync_directory(directory)


def copy_state(
    model: nn.Module,
    optimizer: Optimizer | None,
    schedule: LRScheduler | None,
    version: int,
    *,
    rank: int,
    ranks: int,
    extra: Mapping[str, Any] | None = None,
    first_copy: bool = True,
) -> StateCopy:
    """Copy what this rank holds to host memory, or have it copied when the next step is about to change it. Blocking,
    for the compute thread, between two steps.

    Besides what is named, the state of torch's random generators is saved, of each rank its own.

    Args:
        model: plain, or sharded by FSDP2 over all ranks or some.
        optimizer: any of torch's, over parameters of the model; its state must be tensors.
        schedule: any of torch's whose `state_dict` is plain numbers and lists.
        version: of the weights.
        rank, ranks: which this is, of how many.
        extra: JSON values; rank 0's counts.
        first_copy: this rank has a part of the copy of the model that is written, the only one or the first; the
            ranks of others write the state of their random generators alone.

    Raises:
        ValueError: the optimizer has parameters that the model has not, or there is something that is not JSON.
    """
    reshard(model)
    shards: dict[str, Tensor | LateCopy] = {}
    offsets, copies = {}, {}
    devices: set[torch.device] = set()
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}  # which change without an optimizer
    for key, tensor in {**model_tensors(model), **optimizer_tensors(model, optimizer)}.items():
        mine = own_part(tensor, rank) if first_copy else None
        if mine is not None:
            local, offsets[key] = mine
            late = key not in buffers and local.device.type == "cpu" and local.is_contiguous()
            shards[key] = copies[local.data_ptr()] = LateCopy(local) if late else host_copy(local)
            if local.is_cuda:
                devices.add(local.device)
    for key, state in generators(rank, model).items():
        shards[key], offsets[key] = state, (0,)
    about = told_of(version, ranks, optimizer_groups(model, optimizer), schedule, extra or {}) if rank == 0 else None
    for device in devices:
        torch.cuda.synchronize(device)  # copies from a GPU were only begun
    return StateCopy(rank, about, shards, offsets, copies)


def load_state(
    model: nn.Module,
    optimizer: Optimizer | None,
    schedule: LRScheduler | None,
    source: str | Path | Source,
    *,
    rank: int,
) -> Restored:
    """Take over a state that was saved, by this number of ranks or another. Blocking, for the compute thread.

    Nothing is executed that the files contain. A random generator is restored if a rank of this number saved one.
    Hyperparameters (such as the learning rate) become those of the checkpoint.

    Args:
        model, optimizer, schedule: built as when the state was saved; sharded over any number of ranks.
        source: a checkpoint's `state`, or where else the state is.
        rank: which this is.

    Raises:
        FileNotFoundError: there is no complete state.
        ValueError: it does not fit what is given, is damaged, or was written by a later version. Nothing has changed
            then, except when the damage is in the middle of a file.
    """
    settle()
    reshard(model)
    try:
        state_at: Source = StateFiles(Path(source)) if isinstance(source, str | Path) else source
        about, stored = state_at.about, state_at.stored
        targets = model_tensors(model)
        groups = optimizer_groups(model, optimizer)
        check_fits(state_at.name, stored, targets, groups, about)
        state = empty_state(model, optimizer, stored, about["optimizer"])
        moments = {f"optimizer.{name}.{key}": value for name, values in state.values() for key, value in values.items()}
        random = {key: value for key, value in generators(rank, model).items() if key in stored.state_dict_metadata}
        state_at.fill({**targets, **moments, **random})
    except SafetensorError as error:
        raise ValueError(f"{source} is damaged: resume from an earlier checkpoint ({error})") from error
    take_over(optimizer, state, about["optimizer"])
    set_generators(random, model)
    return restored(about, schedule)


def restored(about: Mapping[str, Any], schedule: LRScheduler | None) -> Restored:
    """The values of a state besides tensors, once they are in place; its schedule goes on in `schedule`."""
    if schedule is not None and about["schedule"] is not None:
        schedule.load_state_dict(about["schedule"])
    return Restored(int(about["version"]), dict(about["extra"]))


def _read_about(directory: Path) -> dict[str, Any]:
    """The content of `state.json`, once all files are known to be there."""
    path = directory / ABOUT
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {ABOUT}: it is no state of a trainer, or was not finished")
    try:
        about: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: resume from an earlier checkpoint ({error})") from error
    if about["format"] > FORMAT:
        raise ValueError(f"{path} is of format {about['format']}, and this version reads up to {FORMAT}: update rlinf")
    written = set(map(_file_name, range(about["ranks"])))
    there = {path.name for path in directory.glob("*.safetensors")}
    if missing := sorted(written - there):
        raise FileNotFoundError(f"{directory} was saved by {about['ranks']} ranks and lacks {', '.join(missing)}")
    if strangers := sorted(there - written):
        raise ValueError(
            f"{directory} was saved by {about['ranks']} ranks, and {', '.join(strangers)} is not of them: remove it"
        )
    return about


def check_fits(
    name: str,
    stored: Metadata,
    targets: Mapping[str, Tensor],
    groups: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """See that a checkpoint fits, before anything changes."""
    there = {key: kind.size for key, kind in stored.state_dict_metadata.items() if key.startswith("model.")}  # type: ignore[union-attr]
    wrong = [f"of {key} it has a part only" for key, kind in stored.state_dict_metadata.items() if _has_holes(kind)]
    wrong += [f"it has no {key}" for key in targets.keys() - there.keys()]
    wrong += [f"the model has no {key}" for key in there.keys() - targets.keys()]
    for key in targets.keys() & there.keys():
        if targets[key].shape != there[key]:
            wrong.append(f"{key} is {list(there[key])} there and {list(targets[key].shape)} here")
    saved = [group["parameters"] for group in about["optimizer"]["groups"]]
    mine = [group["parameters"] for group in groups["groups"]]
    saved_kind, kind = (_kind(each) for each in (about["optimizer"], groups))
    if mine and saved_kind != kind:
        wrong.append(f"its optimizer is {saved_kind} and this one {kind}, which cannot go on with each other's means")
    elif mine and saved != mine:
        sizes = f"{list(map(len, saved))} per group there, {list(map(len, mine))} here"
        wrong.append(f"the optimizers are for different parameters ({sizes})")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"{name} does not fit this model and optimizer: {'; '.join(sorted(wrong)[:5])}{more}. "
            "Resume with the configuration that it was saved with"
        )


def _kind(groups: Mapping[str, Any]) -> str:
    """The kind of an optimizer, as far as another cannot go on with what it keeps."""
    return "muon" if any("momentum" in group["values"] for group in groups["groups"]) else "adamw"


def _has_holes(kind: Any) -> bool:
    """Tell whether shards of a tensor are missing; what they lack would be read as whatever memory held."""
    return sum(prod(chunk.sizes) for chunk in kind.chunks) != prod(kind.size)


class StateFiles:
    """A checkpoint's `state`; a `Source`."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self.about: Mapping[str, Any] = _read_about(directory)
        self._reader = HuggingFaceStorageReader(str(directory))
        self.stored: Metadata = self._reader.read_metadata()

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        self._reader.set_up_storage_reader(self.stored, is_coordinator=True)
        planner = planner_of(self.stored, targets)
        self._reader.read_data(planner.create_local_plan(), planner).wait()


def planner_of(stored: Metadata, targets: Mapping[str, Tensor]) -> DefaultLoadPlanner:
    """A planner of which parts of which shards go where in some tensors."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), stored, is_coordinator=True)
    return planner


def _file_name(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory; from a GPU it is only begun."""
    pinned = tensor.is_cuda
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=pinned)


def told_of(
    version: int,
    ranks: int,
    groups: Mapping[str, Any],
    schedule: LRScheduler | None,
    extra: Mapping[str, Any],
) -> str:
    """The content of `state.json` for a state; one rank writes it.

    Args:
        version, ranks, extra: as for `copy_state`.
        groups: of the optimizer, see `optimizer_groups`.
        schedule: of its learning rate.

    Raises:
        ValueError: something of it is no plain value.
    """
    about = {
        "format": FORMAT,
        "version": version,
        "ranks": ranks,
        "optimizer": groups,
        "schedule": None if schedule is None else schedule.state_dict(),
        "extra": dict(extra),
    }
    try:
        return json.dumps(about, indent=1)
    except TypeError as error:
        raise ValueError(
            f"a checkpoint's optimizer settings, schedule and extra must be numbers, texts, lists and dicts: {error}"
        ) from error


async def write_checkpoint(directory: Path, copies: Mapping[str, HostCopy], *, lead: bool) -> None:
    """Write this rank's part of a checkpoint, in a thread of its own. Cancelled, it stops and leaves what is there.

    Args:
        directory: of the checkpoint.
        copies: what to write, by the directory in the checkpoint.
        lead: this rank waits until the disk has the checkpoint's own directory, too.

    Raises:
        OSError: it cannot be written; the text says what is missing.
    """

    def write(stop: threading.Event) -> None:
        for name, copy in copies.items():
            copy.write(directory / name, stop)
        if lead:
            sync_directory(directory)

    await write_in_thread(write)


async def write_in_thread(write: Callable[[threading.Event], None]) -> None:
    """Run `write` in a thread of its own. Cancelled, tell it to stop, and wait until it has: its files can be removed.

    Args:
        write: called with an event that is set when it is to stop.
    """
    stop = threading.Event()
    job = asyncio.get_running_loop().run_in_executor(None, write, stop)
    try:
        await asyncio.shield(job)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await finish(job)
        job.exception()  # seen: that it was stopped
        raise


READ_BYTES = 256 << 20
"""Bytes that a new rank fetches at a time: beside what it already has, its host needs memory for no more than that."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Place of a kept shard in its whole tensor."""

    offset: tuple[int, ...]
    """The place of its first element."""
    shape: tuple[int, ...]
    """Its own."""
    dtype: torch.dtype
    """Its own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a kept shard."""

    key: str
    """Name of the tensor."""
    offset: tuple[int, ...]
    """The place of its first element in the shard."""
    shape: tuple[int, ...]
    """Its own."""


class StateKeeper(Actor):
    """Keeps what one rank of a role knew, in the memory of its host, after that rank has ended."""

    @endpoint
    async def keep(self, state: StateCopy) -> tuple[str | None, dict[str, Shard]]:
        """Keep a copy; returns its `about` and what is in it."""
        self._shards: Mapping[str, Any] = state.shards
        inside = {
            key: Shard(state.offsets[key], tuple(shard.shape), shard.dtype) for key, shard in state.shards.items()
        }
        return state.about, inside

    @endpoint
    async def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Parts of what is kept; nobody may write to them."""
        pieces_read = []
        for piece in pieces:
            ends = (start + size for start, size in zip(piece.offset, piece.shape, strict=True))
            pieces_read.append(self._shards[piece.key][tuple(map(slice, piece.offset, ends))])
        return pieces_read


@dataclass(frozen=True, slots=True)
class ParkedState:
    """Where the state of a role is while the role is nowhere; its new ranks are sent this, and `open` it."""

    role: str
    """Name of the role that the state belongs to."""
    keepers: ActorGroup
    """One for each old rank, on its host."""
    about: Mapping[str, Any]
    """All that is not a tensor."""
    shards: tuple[Mapping[str, Shard], ...]
    """The shards of each old rank, by key."""

    def open(self) -> OpenState:
        """The state as a `train_state.Source`; to be called on the loop of the host that will read it."""
        return OpenState(self, asyncio.get_running_loop())


async def park(system: ActorSystem, role: str, group: ActorGroup) -> ParkedState:
    """Have the ranks of a role copy what they know to host memory, where it stays until `parked.keepers` are ended.

    Args:
        system: where.
        role: its name.
        group: its ranks, at rest; they have the endpoint `export_state`, and may end as soon as this returns.

    Raises:
        Exception: what `export_state` raised; nothing is kept then.
    """
    keepers = await system.spawn(StateKeeper, name=f"{role}.parked", hosts=group.hosts)
    try:
        copies = group.export_state()
        keys = await keepers.keep.each([copies[rank] for rank in range(len(group))])
    except BaseException:
        await system.kill(keepers)
        raise
    abouts, shards = zip(*keys, strict=True)
    return ParkedState(role, keepers, json.loads(abouts[0]), shards)


class OpenState:
    """A parked state, as a rank of the role's successor reads it; a `train_state.Source`.

    Args:
        parked: where it is.
        loop: of this host.
    """

    def __init__(self, parked: ParkedState, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.about = f"the state of {parked.role}", parked.about
        self._keepers, self._loop = parked.keepers, loop
        self.stored = _metadata(parked.shards)
        self._owners = {(key, s.offset): rank for rank, shards in enumerate(parked.shards) for key, s in shards.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fetch what these tensors need. Blocking, in a compute thread: its loop goes on meanwhile.

        Raises:
            ActorDied: a host that has a part of it is lost.
        """
        planner = planner_of(self.stored, targets)
        for items in self._batches(planner.create_local_plan().items):
            for item, piece in zip(items, self._fetched(items), strict=True):
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)

    def whole(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, without that, in host memory. Blocking, as `fill`."""
        tensors = {
            key: torch.empty(kind.size, dtype=kind.properties.dtype)
            for key, kind in self.stored.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(kind, TensorStorageMetadata)
        }
        self.fill(tensors)
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}

    def _batches(self, items: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
        """Pieces of at most `READ_BYTES` each, unless a single one is larger."""
        batch: list[ReadItem] = []
        size = 0
        for item in items:
            assert item.type == LoadItemType.TENSOR
            kind = self.stored.state_dict_metadata[item.storage_index.fqn]
            nbytes = prod(item.lengths) * kind.properties.dtype.itemsize  # type: ignore[union-attr]
            if batch and size + nbytes > READ_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += nbytes
        if batch:
            yield batch

    def _fetched(self, items: Sequence[ReadItem]) -> list[Tensor]:
        # apart: whoever reads holds its devices, in the middle of a computation, and must not lend them while it waits
        async def fetch() -> list[Tensor]:
            return await start_apart(self._fetch(items), f"reading {self.name}")

        return asyncio.run_coroutine_threadsafe(fetch(), self._loop).result()

    async def _fetch(self, items: Sequence[ReadItem]) -> list[Tensor]:
        wanted: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            index: MetadataIndex = item.storage_index
            assert index.offset is not None
            wanted.setdefault(self._owners[index.fqn, tuple(index.offset)], []).append(place)
        calls = []
        for rank, places in wanted.items():
            pieces = [
                Piece(items[at].storage_index.fqn, tuple(items[at].storage_offsets), tuple(items[at].lengths))
                for at in places
            ]
            calls.append(self._keepers[rank].read(pieces))
        by_place: dict[int, Tensor] = {}
        for places, tensors in zip(wanted.values(), await asyncio.gather(*calls), strict=True):
            by_place.update(zip(places, tensors, strict=True))
        return [by_place[place] for place in range(len(items))]


def _metadata(shards: Iterable[Mapping[str, Shard]]) -> Metadata:
    """Metadata of parked shards for torch's planner."""
    kinds: dict[str, TensorStorageMetadata] = {}
    for key, shard in (item for each in shards for item in each.items()):
        chunk = ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.shape))
        end = [start + size for start, size in zip(shard.offset, shard.shape, strict=True)]
        if (kind := kinds.get(key)) is None:
            kinds[key] = TensorStorageMetadata(TensorProperties(shard.dtype), torch.Size(end), [chunk])
        else:
            kind.chunks.append(chunk)
            kind.size = torch.Size(map(max, kind.size, end))
    return Metadata(dict(kinds))
