"""Draws tokens in vLLM as the `transformers` engine does: token k of an answer by random number k of its seed.

In: the logits of a step, one row per request. Out: logits that leave one token, whose value is its log-prob; vLLM, told
to be greedy and to report processed logits, gives back just these. So an answer depends on its seed alone, not on its
company nor on a server that died half-way, and its log-probs are those under softmax(logits / temperature) also
where top_k, top_p or min_p leave tokens out, which no `logprobs_mode` of vLLM gives.

It is loaded by name into vLLM's processes, which have no rlinf. The two files of rlinf that it shares need numpy and
torch alone, and are loaded by their paths.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


def shared(name: str) -> ModuleType:
    """A module of rlinf by its path, known under its name to those that import it."""
    if name not in sys.modules:
        path = Path(__file__).parents[4].joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


shared("rlinf.data.rng")
sampling: Any = shared("rlinf.engines.transformers.sampling")


class Draw(LogitsProcessor):
    """Chooses the token of every row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._device = device
        self._rows: dict[int, tuple[tuple[int, float, int, float, float], int, list[int]]] = {}
        """For each row: how it draws, tokens that it had before it came here, tokens since."""
        self._rules: Any = None

    def is_argmax_invariant(self) -> bool:
        """It is what greedy sampling chooses from."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to their rows."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, tokens in batch_update.added:
            extra = params.extra_args or {}
            how = (
                extra.get("seed", 0),
                extra.get("temperature", 1.0),
                extra.get("top_k", 0),
                extra.get("top_p", 1.0),
                extra.get("min_p", 0.0),
            )
            self._rows[row] = (how, extra.get("answered", 0), tokens)
        for one, other, direction in batch_update.moved:
            here, there = self._rows.pop(one, None), self._rows.pop(other, None)
            if here is not None:
                self._rows[other] = here
            if there is not None and direction == MoveDirectionality.SWAP:
                self._rows[one] = there
        self._rules = None

    def apply(self, logits: Tensor) -> Tensor:
        """Leave one token of each row, float32 [rows, vocabulary]."""
        if not self._rows:
            return logits  # vLLM tries the sampler out with requests that are none
        rows = [self._rows[row] for row in range(len(logits))]
        if self._rules is None or len(self._rules.seeds) != len(logits):
            self._rules = sampling.Rules.of(np.array([how for how, _, _ in rows], sampling.DRAWS), self._device)
        positions = torch.tensor([before + len(tokens) for _, before, tokens in rows], device=self._device)
        tokens, logprobs = sampling.choose(logits, self._rules, positions)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], logprobs[:, None])
