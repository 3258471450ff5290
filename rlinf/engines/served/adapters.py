"""Adapters that a server holds beside its model, by names of their own there.

Flows in: adapters as peft writes them, in a directory. Flows out: the server's two calls, to hold them and to hold them
no more, which `Calls` has of each kind of server. Nobody waits here but for their replies.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf.data.weights import Weights
from rlinf.engines.served.server import Http
from rlinf.models.language.lora import ranks_of

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers of a block, by the ends of their names, that get adapters."""
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens.weight"
"""The output embedding, and the tensor that it is where a model has one for both."""


@dataclass(frozen=True, slots=True)
class Calls:
    """How a kind of server is told of adapters, and which it takes."""

    kind: str
    """Name of the server in messages."""
    hold: Callable[[Http, str, Path], Awaitable[None]]
    """Have it hold those in a directory by a name that is new to it."""
    drop: Callable[[Http, str], Awaitable[None]]
    """Have it hold those of a name no more."""
    together: tuple[frozenset[str], ...] = ()
    """Layers that it computes as one, so that all of them or none have adapters."""


class NamedAdapters:
    """The adapters of one server; a `ServerAdapters`.

    Each gets a name of its own there whenever it comes: what the server has read is kept by that, so nothing that other
    adapters of the name read is used again.

    Args:
        rank: highest that the server was started for.
        calls: to it.
    """

    def __init__(self, rank: int, calls: Calls) -> None:
        self.rank, self.unembeds = rank, False
        self.names: dict[str, str] = {}
        """Names there, by ours."""
        self._calls = calls
        self._numbers = itertools.count(1)

    def check(self, weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See `ServerAdapters`."""
        kind, matrices = self._calls.kind, {name: shape for name, shape in shapes.items() if len(shape) == 2}
        layers = {name.removesuffix(".weight"): shape for name, shape in matrices.items()}
        takes = {name: shape for name, shape in layers.items() if name.split(".")[-1] in LAYERS}
        if self.unembeds and (head := layers.get(_HEAD, matrices.get(_EMBEDDING))) is not None:
            takes[_HEAD] = head
        ranks = ranks_of(weights, takes)
        if len({*ranks.values()}) != 1 or max(ranks.values()) > self.rank:
            raise ValueError(
                f"adapters {weights.adapter}: {kind} takes those of one rank, here up to {self.rank}, and these have "
                f"{sorted({*ranks.values()})}: set rollout.engine_args.adapter_rank"
            )
        for layer in ranks:
            block, _, last = layer.rpartition(".")
            for group in (each for each in self._calls.together if last in each):
                if lacking := sorted(each for each in group if f"{block}.{each}" not in ranks):
                    raise ValueError(
                        f"adapters {weights.adapter}: {layer} has one and {block}.{lacking[0]} has none, which {kind} "
                        f"computes as one layer: give {', '.join(sorted(group))} adapters together"
                    )

    async def load(self, http: Http, adapter: str, directory: Path) -> None:
        """See `ServerAdapters`."""
        name = f"{adapter}-{next(self._numbers)}"
        await self._calls.hold(http, name, directory)
        before, self.names[adapter] = self.names.get(adapter), name
        if before is not None:
            await self._calls.drop(http, before)

    async def unload(self, http: Http, adapter: str) -> None:
        """See `ServerAdapters`."""
        if (name := self.names.pop(adapter, None)) is not None:
            await self._calls.drop(http, name)
