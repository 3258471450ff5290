"""A trainer's state, from which training goes on bit for bit: copied, written into files, taken over.

Flows in: a model, its optimizer and schedule. Flows out: a directory `state/`, and the same model, optimizer and
schedule on another day; or, through memory (`parked_state.py`), on other hosts. Saving has two halves: copies in host
memory, made in the compute thread between two steps, and the writing, in a thread of its own while training goes on.
Neither the writing nor the reading communicates, so they cannot come between collectives of the training.

`state/` is a sharded checkpoint in the safetensors layout of torch.distributed.checkpoint: each rank writes the shards
it has, `HuggingFaceStorageReader` and DCP's planner read what the ranks of another run have, however many they are.
Beside them `state.json` holds the rest. There is no pickle in it, and none is read: DCP's own `.metadata` is one, and a
checkpoint is a thing that people download.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlinf.config.reading import parse_json
from rlinf.data.safetensors_io import make_room, sync_directory, write_tensors, write_text
from rlinf.runtime.base.tasks import finish
from rlinf.weights.state_tensors import (
    empty_state,
    generators,
    model_tensors,
    optimizer_groups,
    optimizer_tensors,
    own_part,
    reshard,
    set_generators,
    take_over,
)

STATE = "state"
"""Directory of a checkpoint to go on from."""
ABOUT = "state.json"
FORMAT = 1
"""Of `state/`; a reader refuses what is newer."""
OFFSETS = "DCP_SHARDING_INFO"
"""Key in a safetensors header under which DCP looks for where in the whole tensor a shard begins."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says beside tensors."""

    version: int
    """Of the weights."""
    extra: dict[str, Any]
    """What the caller gave when it saved."""


class Source(Protocol):
    """Where a state is read from: the files of a checkpoint, or the memory of the hosts that it leaves."""

    name: str
    """For messages."""
    about: Mapping[str, Any]
    """What is not a tensor; see `StateCopy.about`."""
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
    """What one rank holds of a trainer's state, in host memory, ready to be written."""

    rank: int
    """Which rank's it is."""
    about: str | None
    """JSON of what is not a tensor, on rank 0."""
    shards: dict[str, Tensor]
    """In host memory, by key."""
    offsets: dict[str, tuple[int, ...]]
    """Where in its whole tensor each shard begins."""
    copies: dict[int, Tensor]
    """The copies again, by the address of the original."""

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
    """Copy what this rank holds to host memory. Blocking, for the compute thread, between two steps.

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
    shards, offsets, copies = {}, {}, {}
    devices: set[torch.device] = set()
    for key, tensor in {**model_tensors(model), **optimizer_tensors(model, optimizer)}.items():
        mine = own_part(tensor, rank) if first_copy else None
        if mine is not None:
            local, offsets[key] = mine
            shards[key] = copies[local.data_ptr()] = host_copy(local)
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
    reshard(model)
    try:
        state_at: Source = StateFiles(Path(source)) if isinstance(source, str | Path) else source
        about, stored = state_at.about, state_at.stored
        targets = model_tensors(model)
        groups = optimizer_groups(model, optimizer)
        check_fits(state_at.name, stored, targets, groups, about)
        state = empty_state(model, optimizer, stored, about["optimizer"])
        kept = {f"optimizer.{name}.{key}": value for name, values in state.values() for key, value in values.items()}
        random = {key: value for key, value in generators(rank, model).items() if key in stored.state_dict_metadata}
        state_at.fill({**targets, **kept, **random})
    except SafetensorError as error:
        raise ValueError(f"{source} is damaged: resume from an earlier checkpoint ({error})") from error
    take_over(optimizer, state, about["optimizer"])
    set_generators(random, model)
    return restored(about, schedule)


def restored(about: Mapping[str, Any], schedule: LRScheduler | None) -> Restored:
    """What a state tells besides tensors, once they are in place; its schedule goes on in `schedule`."""
    if schedule is not None and about["schedule"] is not None:
        schedule.load_state_dict(about["schedule"])
    return Restored(int(about["version"]), dict(about["extra"]))


def _read_about(directory: Path) -> dict[str, Any]:
    """What `state.json` says, once all files are known to be there."""
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
    if mine and saved != mine:
        sizes = f"{list(map(len, saved))} per group there, {list(map(len, mine))} here"
        wrong.append(f"the optimizers are for different parameters ({sizes})")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"{name} does not fit this model and optimizer: {'; '.join(sorted(wrong)[:5])}{more}. "
            "Resume with the configuration that it was saved with"
        )


def _has_holes(kind: Any) -> bool:
    """Whether the shards of a tensor are not all there; what they lack would be read as whatever memory held."""
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
    """What finds out which parts of which shards go where in some tensors."""
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
    """What `state.json` says of a state; one rank writes it.

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
