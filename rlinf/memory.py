"""Will the model fit? The least that each host's device must hold, from the model's shape alone.

In: a configuration and the transformers config of its model. Out: bytes per role and host. No weights are read and no
device is touched. Activations come on top, so what does not fit here cannot fit at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlinf.config import ROLES, RunConfig, roles_to_hosts

_BYTES = {"float32": 4, "bfloat16": 2}
_ADAM = 4 + 4 + 4 + 4
"""Bytes per trained parameter: weight, gradient and AdamW's two running means, all float32."""
GB = 1e9


def parameters_of(model_config: Any) -> int:
    """Number of parameters of a model, counted on a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def needed(config: RunConfig, model_config: Any, hosts: int, roles: Sequence[str] = ()) -> dict[int, dict[str, float]]:
    """GB that each role needs at least, by host.

    Args:
        config: of the run.
        model_config: of the model, from transformers.
        hosts: number of processes.
        roles: that there are besides rollout, judge and trainer; each with a model of the policy's size.
    """
    parameters = parameters_of(model_config)
    where = roles_to_hosts(config.placement, hosts, (*ROLES, *roles))
    least = {
        "trainer": _trainer(config, parameters) / len(where["trainer"]),
        "rollout": parameters * _BYTES[config.rollout.dtype] + _cache(config, model_config.get_text_config()),
    }
    if "critic" in roles:
        least["critic"] = float(parameters * _ADAM) / len(where["critic"])
    for role, dtype in (("reference", config.reference.dtype), ("teacher", config.teacher.dtype)):
        if role in roles:
            least[role] = float(parameters * _BYTES[dtype])
    by_host: dict[int, dict[str, float]] = {}
    for role, need in least.items():
        for host in where[role]:
            by_host.setdefault(host, {})[role] = need / GB
    return by_host


def complaints(config: RunConfig, model_config: Any, hosts: int, roles: Sequence[str] = ()) -> Iterator[str]:
    """What does not fit into `placement.device_memory_gb`, and what would help; nothing if that is not declared."""
    limit = config.placement.device_memory_gb
    if limit is None:
        return
    for host, there in sorted(needed(config, model_config, hosts, roles).items()):
        if (total := sum(there.values())) > limit:
            parts = " and ".join(f"{need:.1f} GB for the {role}" for role, need in there.items())
            yield (
                f"host {host} needs at least {total:.1f} GB ({parts}), activations not counted; "
                f"{'; '.join(_cures(config, there))}"
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
    if "critic" in roles:
        yield "or name more hosts in placement.critic"
    if "reference" in roles and config.reference.dtype == "float32":
        yield "or reference.dtype=bfloat16"
    if "rollout" in roles and config.rollout.dtype == "float32":
        yield "or rollout.dtype=bfloat16"
    if "rollout" in roles and config.rollout.max_tokens is None:
        yield "or a smaller rollout.max_rows"
