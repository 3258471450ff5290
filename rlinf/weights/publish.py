"""From a trainer's model to `Weights` on its rank 0: gathered, merged, cast and packed.

Flows in: a model, whole or sharded by FSDP2 over the trainer's ranks, with or without adapters. Flows out: its weights
under the names of the plain model, on rank 0; nothing on the others. Every rank takes part, since gathering a sharded
tensor is a collective; no rank holds more than one gathered tensor, except for the buckets themselves on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf.data.weights import BUCKET_BYTES, Allocator, Weights
from rlinf.models.language.lora import merged_named_parameters
from rlinf.runtime.actor.actor import Actor
from rlinf.weights.state_tensors import reshard

Exports = Callable[[torch.dtype | None], Iterator[tuple[str, Tensor]]]
"""Makes a generator of names and whole tensors, cast to a dtype; None leaves them as they are."""


async def publish(
    actor: Actor,
    export: Exports,
    version: int,
    *,
    dtype: torch.dtype | None = None,
    in_host_memory: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> Weights | None:
    """The weights that an actor exports, as a copy that receivers may read while training goes on.

    Called on every rank of the actor's group, in the same order as all else that communicates over the model's mesh; it
    runs in the compute thread. Buckets in CPU memory lie in the host's shared-memory arena, so that they reach other
    processes of the machine without another copy.

    Args:
        actor: the trainer.
        export: makes, given `dtype`, a generator of names and whole tensors, such as `BackEnd.export`; a collective.
        version: counts the batches it has learned from.
        dtype: what floating-point tensors are published as, such as bfloat16 under float32 masters; None: as they are.
        in_host_memory: collect the buckets there, where a whole model may fit that the trainer's device cannot hold
            twice; else on the device where the tensors are.
        bucket_bytes: bound on a bucket, and on the memory needed beside the buckets.

    Returns:
        On rank 0 the weights, on other ranks None.

    Raises:
        ArenaFull: the shared memory's limit is reached.
    """
    empty = actor.empty_shared if in_host_memory else None
    return await actor.compute(
        pack, export, version, lead=actor.rank == 0, dtype=dtype, bucket_bytes=bucket_bytes, empty=empty
    )


def pack(
    export: Exports,
    version: int,
    *,
    lead: bool,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    empty: Allocator | None = None,
) -> Weights | None:
    """What `publish` does, blocking: every rank calls it, and the lead gets the weights.

    Args:
        lead: this rank packs; the others only take part in gathering.
        empty: allocates the buckets; the rest is as for `publish`.
    """
    whole = export(dtype)
    try:
        return Weights.pack(whole, version, bucket_bytes=bucket_bytes, dtype=dtype, empty=empty) if lead else None
    finally:
        for _ in whole:  # the other ranks need this one for the rest, also after an error here
            pass


def exported(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under the names of `merged_named_parameters`; every rank that has slices runs it to its end."""
    reshard(model)
    return gathered(merged_named_parameters(model), dtype=dtype)


def gathered(named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors from sharded ones, in their order.

    Every rank of the mesh must run it to its end.

    One collective at a time: under gloo several at once were seen to corrupt the heap within a thousand (torch 2.13),
    and under NCCL, which queues them on a stream, starting them early would win nothing.

    Args:
        named: names and tensors; those that are not sharded are only cast.
        dtype: floating-point tensors are cast before they are sent, so that fewer bytes are; None: as they are.
    """
    for name, tensor in named:
        yield name, _whole(tensor.detach(), dtype)


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast: Any = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    whole: Tensor = cast.full_tensor() if isinstance(cast, DTensor) else cast
    return whole
