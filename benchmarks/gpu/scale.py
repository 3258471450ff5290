"""Input and outcome of a check: a device, shapes of full size or tiny ones, random models made once."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

FULL: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of Qwen2.5, as their config.json on the hub says."""
TINY: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Small shapes that stand for them in a rehearsal."""
REHEARSED = "tests.stand_ins.recorder.Recorder"
"""Recorder of the steps of an engine in a rehearsal."""
COMMON: dict[str, Any] = {
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Findings of a check."""

    passed: bool | None
    """True if its criterion holds; None where there is nothing to compare with."""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """Measurements; names end in their unit."""
    why: str = ""
    """The criterion with the figures in it, or what could not be done; one line."""


class NotRun(Exception):
    """A check cannot be made here; says what is missing."""


@dataclass(frozen=True)
class Scale:
    """Where a check computes and how large."""

    rehearse: bool
    """Tiny shapes on the CPU, for the sake of every line."""
    work: Path
    """A directory that all checks of one call share."""
    limit: float = 60.0
    """Seconds that this check has from now on."""
    so_far: Path | None = None
    """A file for figures that are known before the check ends."""

    @cached_property
    def device(self) -> torch.device:
        """The GPU, or the CPU in a rehearsal."""
        from rlinf.runtime.base.tensors import enter_device

        return torch.device("cpu") if self.rehearse else enter_device()

    @property
    def dtype(self) -> torch.dtype:
        """In which models compute: bfloat16, or float32 in a rehearsal."""
        return torch.float32 if self.rehearse else torch.bfloat16

    def of(self, full: Any, tiny: Any) -> Any:
        """`full`, or `tiny` in a rehearsal."""
        return tiny if self.rehearse else full

    def keep(self, figures: Mapping[str, Any]) -> None:
        """Write down what is known so far, to be told if the check takes too long and is killed."""
        if self.so_far is not None:
            part = self.so_far.with_suffix(".part")
            part.write_text(json.dumps(dict(figures)))
            part.replace(self.so_far)

    def config(self, size: str) -> Any:
        """The transformers configuration of a model of this size, "1.5B" or "7B"."""
        from transformers import Qwen2Config

        return Qwen2Config(**COMMON, **(TINY if self.rehearse else FULL)[size], dtype=self.dtype)

    def model(self, size: str, seed: int = 0) -> Any:
        """A model with random weights on the device, always the same for the same seed."""
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), self.device:
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(self.config(size), dtype=self.dtype).eval()

    def model_dir(self, size: str) -> Path:
        """The model as files, made by the first check that asks."""
        path = self.work / f"model-{size}"
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                made = path.with_name(f"{path.name}.part-{os.getpid()}")
                self.model(size).save_pretrained(made)
                made.rename(path)
        return path
