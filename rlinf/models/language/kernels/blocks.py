"""A model's blocks checkpointed, and compiled: each by itself, for sequences of any lengths.

In: the blocks. Out: the same modules with a `forward` that keeps its input alone, and that is compiled once and shared
by all blocks of a kind. Checkpointing stands around what is compiled, and the hooks by which FSDP2 gathers weights
around both, so that a rank which could not compile would still take part in every collective. It is not that of
transformers, which stands within `forward` in some releases and around the hooks in others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlinf.models.language import packed_attention
from rlinf.models.language.kernels.compiling import cause_of, first_line
from rlinf.models.language.kernels.varlen import device_at_fault
from rlinf.models.language.packed_attention import ARGUMENT, Rule

_FORMS = 64
"""Compiled forms that a block may have; torch's 8 are too few for with and without gradient, shared prompts, single
tokens, windows and adapters together, and beyond them it goes on uncompiled without a word."""


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> None:
    """Have every block keep its input alone, and compute the rest again for the gradient.

    Nothing in a block may be random: it is computed again without the generators' states of the first time.
    """
    for block in blocks:
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]


def _checkpointed(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*arguments, **keywords)
        # to stop early, the second time, an error is raised out of the block, which no compiled code can be left by
        return checkpoint(
            inner, *arguments, use_reentrant=False, preserve_rng_state=False, early_stop=False, **keywords
        )

    return forward


class CompiledBlocks:
    """The blocks of one model.

    Args:
        blocks: changed in place; off until `on` is set.
        backend: of `torch.compile`.
        checkpointed: `checkpoint_blocks` has been called on them.
    """

    def __init__(self, blocks: Sequence[nn.Module], backend: str = "inductor", *, checkpointed: bool = False):
        self.on = False
        """They are computed as compiled."""
        self.required = False
        """What cannot be compiled is an error; otherwise `refused` has the reason, and they go on uncompiled."""
        self.refused: str | None = None
        """Why they are not compiled."""
        self.graphs = 0
        """Graphs that were compiled so far."""
        self._blocks, self._backend, self._checkpointed = blocks, backend, checkpointed

    def prepare(self) -> None:
        """Give every block its compiled `forward`; what is compiled comes with the first calls."""
        inner = torch._dynamo.lookup_backend(self._backend)
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _FORMS)
        packed_attention.opaque()

        def counted(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return inner(graph, inputs)

        for block in self._blocks:
            eager = getattr(block.forward, "__wrapped__", block.forward) if self._checkpointed else block.forward
            either = self._either(eager, torch.compile(eager, backend=counted, dynamic=True))
            block.forward = _checkpointed(either) if self._checkpointed else either  # type: ignore[method-assign]
        self.on = True

    def _either(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(eager)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            if not self.on:
                return eager(*arguments, **keywords)
            rule, layout = keywords.get("attention_mask"), keywords.get(ARGUMENT)
            if isinstance(rule, Rule) and layout is not None:
                rule.fix(layout.longest)
            try:
                return compiled(*arguments, **keywords)
            except Exception as error:
                if self.required or device_at_fault(cause_of(error)):
                    raise
                self.on, self.refused = False, first_line(error)
                return eager(*arguments, **keywords)

        return forward
