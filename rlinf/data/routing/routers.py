"""The routers of a mixture of experts: what they choose is told, and may be given.

In: a Hugging Face model. Out: which experts each token of its last forward pass went to; or, where routes are given, a
pass in which tokens go to those experts, with the weights that the model's own gate gives them, scaled as it scales
those of its own choice.

Each router's `forward` is wrapped. Inside it, and nowhere else, the one `topk` over all experts is answered with the
experts that were given and the gate's values there; whatever the model does before and after that stays its own, so a
softmax over all experts, over the chosen ones, or a sigmoid with groups are all alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlinf.data.routing.routes import compact_type

_ROUTER = re.compile(r"Top[kK]Router$")
"""How transformers names the classes of modules that give logits, weights and experts of each token."""
_LAYER = re.compile(r"\.(\d+)\.")
"""Where a module's name has the number of its layer."""
_TOPK = (torch.topk, torch.Tensor.topk)


def nowhere(routes: Tensor, count: int) -> Tensor:
    """Routes of so many more tokens of which nobody knows, in the shape and type of others."""
    return routes.new_full((count, *routes.shape[1:]), torch.iinfo(routes.dtype).max)


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """How a micro-batch was routed, at the tokens that predict learned ones."""

    counts: Tensor
    """Tokens that went to each expert, float64 [layers, experts]."""
    chances: Tensor
    """Sum over tokens of the gate's probability of each expert (softmax over all), float64 [layers, experts]."""
    apart: Tensor
    """Whether the gate itself would have chosen another set of experts than was given, bool [layers, learned]."""
    known: Tensor
    """Whether routes were given, bool [learned]."""
    balance: Tensor | None
    """Per token, what the auxiliary loss takes the mean of, differentiable, [learned]; None unless `load` was given."""


class Routers:
    """All routers of one model, in order of its layers.

    Args:
        model: changed in place.
        names: of its routers, see `routers_of`.
        compiled: blocks around them may be compiled: what a router does is not, since it changes from pass to pass.
    """

    def __init__(self, model: Any, names: Sequence[str], *, compiled: bool = False):
        modules: list[Any] = [model.get_submodule(name) for name in names]
        self.layers = tuple(_layer(name) for name in names)
        """Number of each router's layer among all layers of the model."""
        self.all_layers = int(model.config.get_text_config().num_hidden_layers)
        """Layers of the model, those without a router among them."""
        self.chosen: list[Tensor | None] = [None] * len(modules)
        """Experts of each token of the last pass, by router, int64 [tokens, experts per token]."""
        self.experts = int(modules[0].weight.shape[0])
        """In each layer."""
        self.top_k = int(modules[0].top_k)
        """Experts of a token."""
        self.understood = True
        """Every router that has run so far chose its experts as this knows how to follow."""
        self.at: Tensor | None = None
        """Tokens that `routed` tells of, int64 [learned]."""
        self._given: Tensor | None = None
        self._load: Tensor | None = None
        self._seen: list[_Seen | None] = [None] * len(modules)
        for number, module in enumerate(modules):
            wrapped = self._wrapped(module.forward, number)
            module.forward = torch.compiler.disable(wrapped) if compiled else wrapped

    def begin(self, routes: Tensor | None = None, at: Tensor | None = None, load: Tensor | None = None) -> None:
        """Say what the next passes are to do, until this is called again.

        Args:
            routes: experts to be taken, [tokens, layers, experts per token], `layers` those with a router or all of the
                model; None lets the gates choose.
            at: tokens that `routed` tells of, int64 [learned]; None for none.
            load: share of tokens of each expert that the auxiliary loss weighs with, [layers, experts].

        Raises:
            ValueError: the routes are of another model.
        """
        if routes is not None and len(self.chosen) < routes.shape[1] == self.all_layers:
            routes = routes[:, list(self.layers)]
        if routes is not None and tuple(routes.shape[1:]) != (len(self.chosen), self.top_k):
            raise ValueError(
                f"routes of {routes.shape[1]} layers and {routes.shape[2]} experts per token do not fit a model of "
                f"{len(self.chosen)} layers with a router and {self.top_k} experts per token: do engine and trainer "
                "have the same model?"
            )
        self._given, self.at, self._load = routes, at, load

    def taken(self) -> Tensor:
        """The experts of the last pass, compact, [tokens, layers, experts per token]."""
        whole = torch.stack([chosen for chosen in self.chosen if chosen is not None], dim=1)
        return whole.to(torch.uint8 if compact_type(self.experts) is np.uint8 else torch.int16)

    def routed(self) -> Routed:
        """How the tokens `at` of the last pass were routed."""
        assert self.at is not None
        nothing = torch.zeros(self.experts, dtype=torch.float64, device=self.at.device)
        none = _Seen(nothing, nothing, torch.zeros_like(self.at, dtype=torch.bool), None)  # of one not understood
        seen = [none if one is None else one for one in self._seen]
        balances = [one.balance for one in seen if one.balance is not None]
        known = torch.zeros_like(self.at, dtype=torch.bool)
        if self._given is not None:
            known = self._known(self._given[:, 0]).index_select(0, self.at)
        return Routed(
            torch.stack([one.counts for one in seen]),
            torch.stack([one.chances for one in seen]),
            torch.stack([one.apart for one in seen]),
            known,
            torch.stack(balances).mean(0) if balances else None,
        )

    def _known(self, given: Tensor) -> Tensor:
        return given[:, 0].long() < self.experts

    def _wrapped(self, inner: Callable[..., Any], number: int) -> Callable[..., Any]:
        @wraps(inner)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            given = None if self._given is None else self._given[:, number]
            choice = _Choice(given, self.experts, self.top_k)
            with choice:
                found = inner(*arguments, **keywords)
            if choice.chosen is None:
                self.understood = False
                return found
            self.chosen[number] = choice.chosen
            if self.at is not None:
                self._seen[number] = self._look(found[0], choice, self.at, number)
            return found

        return forward

    def _look(self, logits: Tensor, choice: _Choice, at: Tensor, number: int) -> _Seen:
        assert choice.own is not None
        assert choice.chosen is not None
        own, chosen = choice.own.index_select(0, at), choice.chosen.index_select(0, at)
        chances = logits.index_select(0, at).float().softmax(-1)
        load = None if self._load is None else self._load[number].to(chances.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        return _Seen(
            counts.double(),
            chances.detach().sum(0, dtype=torch.float64),
            (own.sort(-1).values != chosen.sort(-1).values).any(-1),
            None if load is None else self.experts * (chances @ load),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What one router did; see `Routed`."""

    counts: Tensor
    chances: Tensor
    apart: Tensor
    balance: Tensor | None


class _Choice(TorchFunctionMode):
    """Answers a router's choice of experts, and remembers it."""

    def __init__(self, given: Tensor | None, experts: int, top_k: int):
        super().__init__()
        self.own: Tensor | None = None
        self.chosen: Tensor | None = None
        self._given, self._experts, self._top_k = given, experts, top_k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # groups of experts are chosen by `topk` too, over other shapes
        if func not in _TOPK or tuple(found[1].shape[1:]) != (self._top_k,) or args[0].shape[-1] != self._experts:
            return found
        self.own = self.chosen = found[1]
        if self._given is None:
            return found
        if len(self._given) != len(self.own):
            raise RuntimeError(
                f"routes of {len(self._given)} tokens were given and a router reads {len(self.own)}: this way to "
                "spread a model over processes cannot replay; set trainer.router_replay=false"
            )
        given = self._given.long()
        known = given[:, :1] < self._experts
        self.chosen = torch.where(known, given.clamp(max=self._experts - 1), self.own)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


def routers_of(model: nn.Module) -> list[str]:
    """Names of a model's routers, in order; none where it has none of the kind that `Routers` knows, or several."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if _ROUTER.search(type(module).__name__) and isinstance(getattr(module, "top_k", None), int)
    ]
    shapes = {(module.weight.shape[0], module.top_k) for _, module in found if isinstance(module.weight, Tensor)}
    return [name for name, _ in found] if len(shapes) == 1 else []


def watch(model: nn.Module, *, compiled: bool = False) -> Routers | None:
    """Wrap the routers of a model; None if it has none."""
    names = routers_of(model)
    return Routers(model, names, compiled=compiled) if names else None


def _layer(name: str) -> int:
    found = _LAYER.search(f".{name}.")
    return int(found.group(1)) if found else 0
