"""What keys become that are left to the kind of devices: precision, tokens of a micro-batch, checkpointing.

In: a configuration, and what its devices are or are said to be. Out: the same configuration with a value in place of
every `auto`, and lines that say which and why. It is done here and nowhere else: roles are given values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from rlinf.config.loading import InputError
from rlinf.config.placement import PlacementConfig
from rlinf.config.text import RunConfig

Kind = Literal["cpu", "cuda"]
_DTYPES: dict[Kind, str] = {"cpu": "float32", "cuda": "bfloat16"}
_TOKENS: dict[Kind, int] = {"cpu": 2048, "cuda": 16_384}
"""Of a micro-batch. A GPU is busy with as many: products of fewer rows wait for the weights to be read."""


def device_kind(wanted: PlacementConfig) -> Kind:
    """What the run's devices are: as `placement.device_kind` says, or as this machine's."""
    if wanted.device_kind != "auto":
        return wanted.device_kind
    return "cuda" if torch.cuda.is_available() else "cpu"


def elsewhere(wanted: PlacementConfig) -> bool:
    """Whether `placement.device_kind` names other devices than this machine's, where only a dry run comes of it."""
    return wanted.device_kind not in ("auto", "cuda" if torch.cuda.is_available() else "cpu")


def refuse_other_kind(wanted: PlacementConfig) -> None:
    """See that a run that starts has the devices that its configuration names.

    Raises:
        InputError: it names others than this machine's.
    """
    if elsewhere(wanted):
        advice = "this machine has no GPU that torch can use; it is for --dry-run alone, so leave it at auto in a run"
        if torch.cuda.is_available():
            advice = (
                "this process uses GPUs already; start the run in another, or one with CUDA_VISIBLE_DEVICES= (none)"
            )
        raise InputError(f"placement.device_kind = {wanted.device_kind}: {advice}")


def by_kind(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """A configuration with what follows from the kind of its devices; of one that has it nothing changes.

    Returns:
        The configuration, and `key=value` of all that was left to the kind.
    """
    kind, became = device_kind(config.placement), []

    def dtype(key: str, given: str) -> Any:
        if given == "auto":
            became.append(f"{key}={_DTYPES[kind]}")
        return _DTYPES[kind] if given == "auto" else given

    trainer = replace(config.trainer, dtype=dtype("trainer.dtype", config.trainer.dtype))
    if trainer.micro_batch_tokens is None:
        trainer = replace(trainer, micro_batch_tokens=_TOKENS[kind])
        became.append(f"trainer.micro_batch_tokens={_TOKENS[kind]}")
    changed: dict[str, Any] = {
        name: replace(section, dtype=dtype(f"{name}.dtype", section.dtype))
        for name in ("rollout", "reference", "teacher")
        for section in (getattr(config, name),)
    }
    changed["teachers"] = {
        name: {**entry, "dtype": dtype(f"teachers.{name}.dtype", str(entry.get("dtype", "auto")))}
        for name, entry in config.teachers.items()
    }
    return replace(config, trainer=trainer, **changed), became


def checkpointing(config: RunConfig, memory: int | None, fits: Callable[[RunConfig], bool]) -> tuple[RunConfig, str]:
    """A configuration with `trainer.gradient_checkpointing` as true or false.

    Args:
        config: with what follows from the kind of devices.
        memory: bytes of each device; None where that is not known.
        fits: whether learning roles fit into the devices, by the estimate, with such a configuration.

    Returns:
        The configuration, and why it became what it is; empty where it was given.
    """
    if config.trainer.gradient_checkpointing != "auto":
        return config, ""

    def where(on: bool) -> RunConfig:
        return replace(config, trainer=replace(config.trainer, gradient_checkpointing=on))

    if device_kind(config.placement) == "cpu":
        return where(False), "as on every CPU"
    if memory is None:
        return where(True), "the devices' memory is not known; set placement.device_memory_gb"
    on = not fits(where(False))
    return where(on), f"{memory / 1e9:.3g} GB a device " + ("would not do without" if on else "are enough without")
