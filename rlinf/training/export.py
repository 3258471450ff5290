"""A trained model for everybody else: a directory as `from_pretrained` wants it, and its adapters as peft wants them.

The trainer's model may be whole or sharded, with or without adapters. Its tensors are copied to host memory first,
merged and under the names of the plain model, which is quick and takes every rank; writing them takes its time, and
rank 0 does it in a thread while the model goes on learning.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from rlinf.data.images import Pictures
from rlinf.data.safetensors_io import LateCopy, explained, make_room, sync_directory, write_tensors, write_text
from rlinf.models.language import lora
from rlinf.training.weight_sync import gathered, reshard

MODEL = "hf"
"""Directory of a checkpoint with the model for everybody else."""

SHARD_BYTES = 5_000_000_000
"""Default size of a weights file: what hubs and file systems take without trouble."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""File names that `from_pretrained` looks for."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelCopy:
    """One version of a model in host memory, ready to be written."""

    skeleton: PreTrainedModel
    """The plain model without its tensors (on the meta device): says how they are written."""
    tensors: Mapping[str, Tensor | LateCopy]
    """Parameters and saved buffers in host memory, by their names in the plain model; tied ones once."""
    tokenizer: PreTrainedTokenizerBase | None
    """Written beside the model."""
    pictures: Pictures | None
    """The model's picture reader, whose preprocessor is written beside the weights; None of a model that reads text
    alone."""
    shard_bytes: int
    """Bound on a weights file."""

    def write(self, directory: Path, stop: threading.Event | None = None) -> None:
        """Write everything and wait until the disk has it.

        Args:
            directory: made if need be.
            stop: when it is set, writing ends with `WritingStopped`.

        Raises:
            OSError: the disk is full, or cannot be written to; the text names the file and the bytes it needs.
        """
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        make_room(directory, size)
        with explained(directory, size):
            self.skeleton.config.save_pretrained(directory)
            if self.skeleton.can_generate():
                self.skeleton.generation_config.save_pretrained(directory)
            if self.skeleton.is_remote_code():
                custom_object_save(self.skeleton, directory, config=cast(Any, self.skeleton.config))
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(directory)
            if self.pictures is not None:
                self.pictures.save(directory)
        tensors = self._as_saved()
        outlines = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
        split = split_torch_state_dict_into_shards(
            outlines, filename_pattern=WEIGHTS.replace(".", "{suffix}."), max_shard_size=self.shard_bytes
        )
        for name, inside in split.filename_to_tensors.items():
            write_tensors(directory / name, {key: tensors[key] for key in inside}, {"format": "pt"}, stop)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_text(directory / INDEX, json.dumps(index, indent=2, sort_keys=True))
        sync_directory(directory)

    def _as_saved(self) -> Mapping[str, Tensor | LateCopy]:
        """The tensors as files have them: of some models, joined or cut otherwise than in memory."""
        late = {name: each for name, each in self.tensors.items() if isinstance(each, LateCopy)}
        outlines = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in late.items()}
        saved: dict[str, Tensor] = revert_weight_conversion(self.skeleton, {**self.tensors, **outlines})  # type: ignore[dict-item]
        late_of = {id(outline): late[name] for name, outline in outlines.items()}
        if late_of.keys() <= {id(each) for each in saved.values()}:  # at most other names
            return {name: late_of.get(id(each), each) for name, each in saved.items()}
        whole = {name: each.whole() for name, each in late.items()}
        return revert_weight_conversion(self.skeleton, {**self.tensors, **whole})  # type: ignore


def copy_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    lead: bool,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    at_hand: Mapping[int, Tensor | LateCopy] | None = None,
    pictures: Pictures | None = None,
    adapter: str | None = lora.POLICY,
) -> ModelCopy | None:
    """Copy a model to host memory. Blocking; every rank calls it, and the lead gets the copy.

    Args:
        model: whole or sharded by FSDP2, with or without adapters.
        tokenizer: to be written beside it.
        lead: this rank will write.
        dtype: what floating-point tensors are written as, such as bfloat16; None: as they are.
        shard_bytes: bound on a weights file.
        at_hand: copies that exist already, by the address of the original's memory.
        pictures: reads those of prompts, whose preprocessor is to be written beside it, too.
        adapter: name of the adapters that are merged; None: none.
    """
    reshard(model)
    available = at_hand or {}
    tensors: dict[str, Tensor | LateCopy] = {}
    for name, tensor in _saved(model, adapter):
        if isinstance(tensor, DTensor):  # cast before it is sent
            ((_, tensor),) = gathered([(name, tensor)], dtype=dtype)
        if lead:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            tensors[name] = _copy(tensor, wanted, available.get(tensor.data_ptr()))
    return ModelCopy(skeleton_of(model, dtype), tensors, tokenizer, pictures, shard_bytes) if lead else None


def _copy(tensor: Tensor, dtype: torch.dtype, twin: Tensor | LateCopy | None) -> Tensor | LateCopy:
    """A copy in host memory: the one that exists already, if that fits."""
    fits = twin is not None and (twin.dtype, twin.shape) == (dtype, tensor.shape)
    if not isinstance(twin, LateCopy):
        return twin if twin is not None and fits else tensor.detach().to("cpu", dtype, copy=True)
    twin.files += fits
    return twin if fits else LateCopy(tensor, dtype)


def _saved(model: PreTrainedModel, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that belong to a model's weights."""
    yield from lora.merged_named_parameters(model, adapter)
    saved = model.state_dict().keys()
    yield from ((lora.plain_name(name), buffer) for name, buffer in model.named_buffers() if name in saved)


def skeleton_of(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model without tensors and adapters, of its own class, which FSDP2 had replaced by one derived of it."""
    bases = (base for base in type(model).__mro__ if issubclass(base, PreTrainedModel))
    cls = next(base for base in bases if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        skeleton = cls(copy.deepcopy(model.config))
    if skeleton.can_generate():
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    cast(torch.nn.Module, skeleton).to(model.dtype if dtype is None else dtype)
    skeleton.config.dtype = str(skeleton.dtype).removeprefix("torch.")
    skeleton.config.architectures = [cls.__name__]
    return skeleton


ADAPTER = "adapter"
"""Directory of a checkpoint with the adapters that learn, where there are any."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterCopy:
    """The adapters of one version in host memory, ready to be written."""

    config: dict[str, Any]
    """Their settings, as JSON values."""
    tensors: dict[str, Tensor]
    """By the names of peft's files."""

    def write(self, directory: Path, stop: threading.Event | None = None) -> None:
        """Write them and wait until the disk has them.

        Args:
            directory: made if need be.
            stop: when it is set, writing ends with `WritingStopped`.

        Raises:
            OSError: the disk is full, or cannot be written to; the text names the file and the bytes it needs.
        """
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        make_room(directory, size)
        with explained(directory, size):
            write_tensors(directory / lora.ADAPTER_WEIGHTS, self.tensors, {"format": "pt"}, stop)
            write_text(directory / lora.ADAPTER_CONFIG, json.dumps(self.config, indent=2, sort_keys=True) + "\n")
        sync_directory(directory)


def copy_adapter(
    model: PreTrainedModel, base: str | None, *, lead: bool, name: str = lora.POLICY
) -> AdapterCopy | None:
    """Copy adapters to host memory. Blocking; every rank calls it, and the lead gets the copy.

    Args:
        model: with adapters, whole or sharded.
        base: where the model under them was loaded from; None for a new one.
        lead: this rank will write.
        name: of the adapters; those that learn unless it is said.
    """
    reshard(model)
    tensors = {
        key: tensor.detach().to("cpu", copy=True) for key, tensor in gathered(lora.saved_names(model, name)) if lead
    }
    return AdapterCopy(lora.adapter_config(model, base, name), tensors) if lead else None
