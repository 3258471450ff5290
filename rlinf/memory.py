"""Will the model fit? The least that each host's device must hold, from the model's shape alone.

In: a configuration and the transformers config of its model. Out: bytes per role and host. No weights are read and no
device is touched. Activations come on top, so what does not fit here cannot fit at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlinf.config import RunConfig, roles_to_hosts

_BYTES = {"float32": 4, "bfloat16": 2}
_ADAM = 4 + 4 + 4 + 4
"""Bytes per trained parameter: weight, gradient and AdamW's two running means, all float32."""
GB = 1e9


def parameters_of(model_config: Any) -> int:
    """Number of parameters of a model, counted on a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def needed(config: RunConfig, model_config: Any, hosts: int) -> dict[int, dict[str, float]]:
    """GB that each role needs at least, by host.

    Args:
        config: of the run.
        model_config: of the model, from transformers.
        hosts: number of processes.
    """
    parameters = parameters_of(model_config)
    where = roles_to_hosts(config.placement, hosts)
    least = {
        "trainer": _trainer(config, parameters) / len(where["trainer"]),
        "rollout": parameters * _BYTES[config.rollout.dtype] + _cache(config, model_config.get_text_config()),
    }
    by_host: dict[int, dict[str, float]] = {}
    for role, need in least.items():
        for host in where[role]:
            by_host.setdefault(host, {})[role] = need / GB
    return by_host


def complaints(config: RunConfig, model_config: Any, hosts: int) -> Iterator[str]:
    """What does not fit into `placement.device_memory_gb`, and what would help; nothing if that is not declared."""
    limit = config.placement.device_memory_gb
    if limit is None:
        return
    for host, roles in sorted(needed(config, model_config, hosts).items()):
        if (total := sum(roles.values())) > limit:
            parts = " and ".join(f"{need:.1f} GB for the {role}" for role, need in roles.items())
            yield (
                f"host {host} needs at least {total:.1f} GB ({parts}), activations not counted; "
                f"{'; '.join(_cures(config, roles))}"
            )


def _trainer(config: RunConfig, parameters: int) -> float:
    return float(parameters * (_ADAM if config.model.lora.r == 0 else 4))


def _cache(config: RunConfig, text: Any) -> float:
    """Bytes of the keys and values of the answers that are decoded together."""
    rollout = config.rollout
    tokens = rollout.max_tokens or rollout.max_rows * (rollout.max_new_tokens + (config.data.max_prompt_tokens or 0))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return float(2 * text.num_hidden_layers * heads * head * tokens * _BYTES[rollout.dtype])


def _cures(config: RunConfig, roles: dict[str, float]) -> Iterator[str]:
    if "trainer" in roles:
        yield "name more hosts in placement.trainer, which share its state"
        if config.model.lora.r == 0:
            yield "or train adapters only (model.lora.r=16)"
    if len(roles) > 1:
        yield "or give each role hosts of its own"
    if "rollout" in roles and config.rollout.dtype == "float32":
        yield "or rollout.dtype=bfloat16"
    if "rollout" in roles and config.rollout.max_tokens is None:
        yield "or a smaller rollout.max_rows"
