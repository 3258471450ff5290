"""Low-rank adapters: put into a model by peft, and folded back into plain weights for everybody else.

In: a Hugging Face model and three numbers. Out: the same model with small trainable matrices beside frozen ones; and,
on publishing, names and tensors as the model had them before, the adapters added in. Who only reads weights, as engines
and checkpoints do, never hears of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_KEYS = {"r", "alpha", "target_modules"}
_WRAPPED = ".base_layer"
"""What peft puts into the name of a weight that has an adapter."""


def add_adapters(model: PreTrainedModel, lora: Mapping[str, Any]) -> None:
    """Freeze a model and give it adapters: W x becomes W x + (alpha / r) B A x (LoRA, arXiv:2106.09685, eq. 3).

    Args:
        model: changed in place; it may be on the meta device. The adapters' values are `start_adapters`' business.
        lora: `r` (rank), `alpha`, and `target_modules`: names of modules such as ["q_proj", "v_proj"], or "all-linear".

    Raises:
        ValueError: keys are missing or unknown, no module has such a name, or peft is not installed.
    """
    if set(lora) != _KEYS:
        raise ValueError(f"lora: needs exactly the keys {sorted(_KEYS)}, got {sorted(lora)}")
    try:
        from peft import LoraConfig, inject_adapter_in_model  # takes seconds to import, and few runs need it
    except ModuleNotFoundError:
        raise ValueError("lora: peft is not installed; pip install 'rlinf[lora]'") from None
    targets = lora["target_modules"]
    config = LoraConfig(
        r=int(lora["r"]),
        lora_alpha=lora["alpha"],
        target_modules=targets if isinstance(targets, str) else list(targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, model)


def start_adapters(model: nn.Module, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The values with which adapters start, whole, for every adapter parameter: A random, B zero, so W is unchanged.

    A is drawn uniformly from ±sqrt(3 / fan-in), as `nn.Linear` draws its weights; one generator in the order of the
    parameters, so that every rank draws the same.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        value = torch.zeros(tuple(parameter.shape), dtype=parameter.dtype)
        if "lora_A" in name:
            bound = math.sqrt(3.0 / parameter.shape[-1])
            value.uniform_(-bound, bound, generator=generator)
        elif "lora_embedding_B" in name:  # there A is the zero one
            value.normal_(generator=generator)
        yield parameter, value


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(_WRAPPED, "")


def merged_named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as the plain Hugging Face model has them, adapters added in; tied weights once.

    A model without adapters gives its own `named_parameters()`. Of a model that is spread over ranks, plain weights
    come as the `DTensor`s they are and merged ones whole, so all ranks must go through this together.

    Args:
        model: the Hugging Face model, spread or not, with adapters or without.

    Yields:
        Name without wrappers, and a tensor that must not be changed; merged weights are made one at a time.
    """
    deltas = {
        f"{path}{_WRAPPED}.weight": module
        for path, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        if name in deltas:
            yield plain_name(name), _merged(parameter, deltas[name])
        else:
            yield plain_name(name), parameter


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    total = _whole(weight).clone()
    for adapter in layer.active_adapters:
        total += _whole(layer.get_delta_weight(adapter)).to(total.dtype)
    return total


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
