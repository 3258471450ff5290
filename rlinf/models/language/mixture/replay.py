"""Router replay: a policy computes on the experts that the engine chose for each token.

In: packed micro-batches with routes. Out: the model's routers told so before each pass, and after it how tokens were
routed (`Routed`). With the experts held, the ratio of new to old probabilities says what the weights have changed and
not which experts a rounding error has swapped: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training
and Inference Routers", arXiv:2510.11370, eq. 6 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf.data.packing import Packed, Row
from rlinf.data.routing.routers import Routed, nowhere, watch
from rlinf.data.routing.routes import load_of
from rlinf.models.language.parallel.tokens import Share

Replay = Literal["auto", True, False]
"""See `TrainerConfig.router_replay`."""
Found = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Routed]
"""Two numbers of each learned token, [learned] each; then how tokens were routed, where that is watched."""


class Mixture:
    """The experts of a policy, as far as somebody wants to know of them.

    Args:
        model: the Hugging Face model; its routers are watched from now on.
        wanted: whether tokens are to go where batches say; None: nobody asks, nothing is watched.
        compiled: its blocks may be compiled.
    """

    def __init__(self, model: nn.Module, wanted: Replay | None, *, compiled: bool = False):
        self.routers = None if wanted is None else watch(model, compiled=compiled)
        """None: nothing is watched."""
        self.replays = self.routers is not None and wanted is not False
        """Tokens go to the experts that a batch names."""
        self._name, self._must = type(model).__name__, wanted is True

    def begin(self, batch: Packed, at: Tensor, rectangle: tuple[Tensor, int] | None = None) -> None:
        """A pass over a micro-batch begins.

        Args:
            batch: what is computed.
            at: where in what the model reads learned tokens are predicted, int64 [learned].
            rectangle: where sequences are padded: where each place of the sequences laid end to end is in the
                rectangle, flattened, and how many places that has.
        """
        if self.routers is not None:
            routes = batch.routes if self.replays else None
            if routes is not None and rectangle is not None:
                routes = _padded(routes, batch, *rectangle)
            self.routers.begin(routes, at, batch.expert_load)

    def told(self, found: tuple[Tensor, Tensor], batch: Packed, share: Share | None) -> Found:
        """What the pass gave, and how its tokens were routed, where that is watched.

        Args:
            found: of all learned tokens.
            batch: the whole micro-batch.
            share: this rank's part of it, None for all: then ranks tell each other of theirs.
        """
        if self.routers is None:
            return found
        routed = self.routers.routed()
        return (*found, routed if share is None else _whole(routed, share))

    def load_of(self, rows: Sequence[Row]) -> np.ndarray:
        """Which share of all choices each expert has in the rows of an optimizer step, float32 [layers, experts].

        Raises:
            ValueError: rows do not say where their tokens went.
        """
        assert self.routers is not None
        told = [routes for row in rows if (routes := row.learned_routes) is not None]
        if (found := load_of(told, self.routers.layers, self.routers.experts)) is None:
            raise ValueError(
                "algorithm.router_aux_loss balances experts by what the engine chose, and samples do not tell that: "
                "take an engine that does, or set it to 0"
            )
        return found

    def settle(self, compute: Callable[[Packed], Any], probe: Packed, agreed: Callable[[bool], bool]) -> str | None:
        """See whether tokens go where they are told to; on all ranks together.

        Args:
            compute: runs the model over a micro-batch.
            probe: one of made-up sequences.
            agreed: whether something holds on every rank.

        Returns:
            Why routes are not replayed though that would be wanted.

        Raises:
            ValueError: they must be.
        """
        if self.routers is None:
            if self._must:
                raise ValueError(_must(f"{self._name} has no experts, or of a kind whose choice is not known"))
            return None
        followed = agreed(self._follows(self.routers, compute, probe))
        if not agreed(self.routers.understood):
            self.routers = None
        if followed or not self.replays:
            return None
        self.replays, why = False, f"tokens of {self._name} do not go to the experts that are given"
        if self._must:
            raise ValueError(_must(why))
        return f"no router replay: {why}"

    @torch.no_grad()
    def _follows(self, routers: Any, compute: Callable[[Packed], Any], probe: Packed) -> bool:
        device, layers = probe.ids.device, len(routers.layers)
        tokens = torch.arange(len(probe.ids), device=device)[:, None, None]
        made = tokens + torch.arange(layers * routers.top_k, device=device).view(layers, -1)
        asked = self.replays
        self.replays = True
        try:
            found = compute(probe.routed(made % routers.experts))[2]
        finally:
            self.replays = asked
        wanted = made.index_select(0, probe.predicting()) % routers.experts
        counts = torch.nn.functional.one_hot(wanted, routers.experts).sum((0, 2))
        return routers.understood and torch.equal(found.counts, counts.double())


def _whole(routed: Routed, share: Share) -> Routed:
    """How all learned tokens were routed, from what each rank says of its own."""
    counts, chances = (part.clone() for part in (routed.counts, routed.chances))
    dist.all_reduce(counts, group=share.group)
    dist.all_reduce(chances, group=share.group)
    said = share.whole(torch.cat([routed.apart, routed.known[None]]).t().float()) > 0.5
    balance = None if routed.balance is None else share.whole(routed.balance)
    return Routed(counts, chances, said[:, :-1].t(), said[:, -1], balance)


def _must(why: str) -> str:
    return f"trainer.router_replay=true: {why}; auto trains without"


def _padded(routes: Tensor, batch: Packed, places: Tensor, size: int) -> Tensor:
    """Routes of `batch.ids` as those of a rectangle of so many places, unknown in the padding."""
    whole = nowhere(routes, size)
    whole[places] = routes if batch.places is None else routes.index_select(0, batch.places)
    return whole
