"""Making the value model that a critic learns with, whole on one rank or spread over many.

In: the same `Build` as a policy's. Out: a `ValueModel` on its device with its weights in it: the layers as they are in
the saved or new policy, read slice by slice where they are spread, and a head that says 0.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from rlinf.models.language.build import Build, empty_model, fill, saved_files
from rlinf.models.language.fsdp import shard
from rlinf.models.language.load import ONE_AT_A_TIME, build_model
from rlinf.models.language.value_model import ValueModel


def build_values(build: Build, tokenizer: PreTrainedTokenizerBase) -> ValueModel:
    """Make the value model; a collective where it is spread.

    Raises:
        ValueError: the model cannot be made.
    """
    with ONE_AT_A_TIME:
        return _built(build, tokenizer)


def _built(build: Build, tokenizer: PreTrainedTokenizerBase) -> ValueModel:
    if build.device.type == "cuda":
        torch.cuda.set_device(build.device)  # of this thread, in which all else is computed
    files = saved_files(build.source) if build.mesh is not None else None
    model = empty_model(str(build.source), files) if files is not None else None
    from_files = model is not None
    if model is None:
        model = build_model(build.source, tokenizer, seed=build.seed)
    values = ValueModel(model, gradient_checkpointing=build.gradient_checkpointing)
    if not from_files:
        values.to(build.device)
    if build.mesh is not None:
        values.shard_head(build.mesh)
        shard(values, build.mesh, build.dtype)
    if from_files and files is not None:
        values.to_empty(device=build.device)
        fill(values.model, files)
        values.start_head()
    values.settle()
    return values
