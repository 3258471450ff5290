"""Mixtures of experts: load and balance metrics, router replay, expert parallelism, and reading experts from files.

Metrics tell how evenly tokens are spread over experts, and whether engine and trainer choose the same ones; they are
sums until the batch is whole. An auxiliary loss balances against a batch's shares.

Each router's `forward` is wrapped, to record its choices and to answer them. Inside it, and nowhere else, the one
`topk` over all experts is answered with the experts of given routes and the gate's values there; whatever the model
does before and after that stays its own, so a softmax over all experts, over the chosen ones, or a sigmoid with groups
are all alike.

Router replay: a policy computes on the experts that the engine chose for each token. The routes of a packed micro-batch
go to the routers before each pass, and `Routed` has how tokens were routed. With the experts held fixed, the ratio of
new to old probabilities says what the weights have changed and not which experts a rounding error has swapped: Ma et
al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370, eq. 6 to 8.

Expert parallelism: each rank has some experts of every layer, where a model of transformers stacks them in one tensor
per matrix. Every choice of a token is sent to the rank that has the chosen expert and comes back as that expert's
output; how much a choice weighs never leaves the token's rank. Ranks may have unequal numbers of tokens.

`StackedExperts` reads experts from files that have each matrix by itself as models have them: stacked, gate and up
joined. It can be sliced like a slice of a file, so that a rank reads its own experts and no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlinf.algos.loss_sum import Metric, MetricGroup, mean_of, same_shape
from rlinf.data.packing import Packed, Row
from rlinf.data.routes import compact_type, load_of
from rlinf.models.language.tensor_parallel import Share, exchanged, local
from rlinf.runtime.base.errors import WrongSetting


def load(counts: Tensor, chances: Tensor) -> dict[str, Metric]:
    """Metrics of how evenly tokens are spread over experts.

    Args:
        counts: choices that each expert got, [layers, experts].
        chances: sum over tokens of the gate's probability of each expert, same shape.

    Returns:
        Metrics, exact for the whole batch however it was cut: `moe/load_max`, the largest expert's share over the mean
        share, of the layer where that is largest; `moe/dead_experts`, how many experts of all layers got nothing;
        `moe/aux_loss`, the auxiliary loss before its coefficient, mean over layers of N sum_i f_i P_i (Fedus et al.,
        "Switch Transformers", arXiv:2101.03961, eq. 4 to 6), with f_i the share of choices and P_i the mean
        probability of expert i: 1 where all is even, N / experts per token where all tokens go to the same.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("load", "counts", counts, chances=chances)
    return {"moe": MetricGroup(torch.stack([counts.detach().double(), chances.detach().double()]), _of_load)}


def _of_load(sums: Tensor) -> dict[str, float]:
    shares, chances = sums / sums.sum(-1, keepdim=True).clamp(min=1e-300)
    experts = shares.shape[-1]
    return {
        "moe/load_max": float(shares.max() * experts),
        "moe/dead_experts": float((shares == 0).sum()),
        "moe/aux_loss": float((shares * chances).sum(-1).mean() * experts),
    }


def drift(apart: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Metrics of how often the trainer's gates would have chosen other experts than the engine's did.

    Args:
        apart: whether the sets of experts differ, bool [layers, tokens].
        mask: which tokens count, bool [tokens].

    Returns:
        Metric `moe/route_drift`, the share of pairs of a token and a layer; nothing where no token counts.
    """
    share = mean_of(apart.double(), mask.expand_as(apart))
    return {"moe/route_drift": MetricGroup(torch.stack([share.total, share.weight]), _of_drift)}


def _of_drift(sums: Tensor) -> dict[str, float]:
    total, weight = sums.tolist()
    return {"moe/route_drift": total / weight} if weight else {}


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
    """Routing of a micro-batch at the tokens that predict learned ones."""

    counts: Tensor
    """Tokens that went to each expert, float64 [layers, experts]."""
    chances: Tensor
    """Sum over tokens of the gate's probability of each expert (softmax over all), float64 [layers, experts]."""
    route_drift: Tensor
    """True where the gate itself would have chosen another set of experts than the routes gave, bool [layers,
    learned]."""
    has_route: Tensor
    """True where a token had a route, bool [learned]."""
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
        whole = torch.stack([experts for experts in self.chosen if experts is not None], dim=1)
        return whole.to(torch.uint8 if compact_type(self.experts) is np.uint8 else torch.int16)

    def routed(self) -> Routed:
        """Routing of the tokens `at` of the last pass."""
        assert self.at is not None
        nothing = torch.zeros(self.experts, dtype=torch.float64, device=self.at.device)
        none = _Seen(nothing, nothing, torch.zeros_like(self.at, dtype=torch.bool), None)  # of one not understood
        statistics = [none if one is None else one for one in self._seen]
        balances = [one.balance for one in statistics if one.balance is not None]
        has_route = torch.zeros_like(self.at, dtype=torch.bool)
        if self._given is not None:
            has_route = self._known(self._given[:, 0]).index_select(0, self.at)
        return Routed(
            torch.stack([one.counts for one in statistics]),
            torch.stack([one.chances for one in statistics]),
            torch.stack([one.route_drift for one in statistics]),
            has_route,
            torch.stack(balances).mean(0) if balances else None,
        )

    def _known(self, routes: Tensor) -> Tensor:
        return routes[:, 0].long() < self.experts

    def _wrapped(self, inner: Callable[..., Any], number: int) -> Callable[..., Any]:
        @wraps(inner)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            routes = None if self._given is None else self._given[:, number]
            choice = _Choice(routes, self.experts, self.top_k)
            with choice:
                output = inner(*arguments, **keywords)
            if choice.chosen is None:
                self.understood = False
                return output
            self.chosen[number] = choice.chosen
            if self.at is not None:
                self._seen[number] = self._look(output[0], choice, self.at, number)
            return output

        return forward

    def _look(self, logits: Tensor, choice: _Choice, at: Tensor, number: int) -> _Seen:
        assert choice.own is not None
        assert choice.chosen is not None
        own, experts = choice.own.index_select(0, at), choice.chosen.index_select(0, at)
        chances = logits.index_select(0, at).float().softmax(-1)
        load = None if self._load is None else self._load[number].to(chances.dtype)
        counts = torch.bincount(experts.flatten(), minlength=self.experts)
        return _Seen(
            counts.double(),
            chances.detach().sum(0, dtype=torch.float64),
            (own.sort(-1).values != experts.sort(-1).values).any(-1),
            None if load is None else self.experts * (chances @ load),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Statistics of one router in one pass; see `Routed`."""

    counts: Tensor
    chances: Tensor
    route_drift: Tensor
    balance: Tensor | None


class _Choice(TorchFunctionMode):
    """Answers a router's choice of experts, and remembers it."""

    def __init__(self, routes: Tensor | None, experts: int, top_k: int):
        super().__init__()
        self.own: Tensor | None = None
        self.chosen: Tensor | None = None
        self._given, self._experts, self._top_k = routes, experts, top_k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # groups of experts are chosen by `topk` too, over other shapes
        if func not in _TOPK or tuple(result[1].shape[1:]) != (self._top_k,) or args[0].shape[-1] != self._experts:
            return result
        self.own = self.chosen = result[1]
        if self._given is None:
            return result
        if len(self._given) != len(self.own):
            raise RuntimeError(
                f"routes of {len(self._given)} tokens were given and a router reads {len(self.own)}: this way to "
                "spread a model over processes cannot replay; set trainer.router_replay=false"
            )
        routes = self._given.long()
        valid = routes[:, :1] < self._experts
        self.chosen = torch.where(valid, routes.clamp(max=self._experts - 1), self.own)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


def routers_of(model: nn.Module) -> list[str]:
    """Names of a model's routers, in order; none where it has none of the kind that `Routers` knows, or several."""
    routers = [
        (name, module)
        for name, module in model.named_modules()
        if _ROUTER.search(type(module).__name__) and isinstance(getattr(module, "top_k", None), int)
    ]
    shapes = {(module.weight.shape[0], module.top_k) for _, module in routers if isinstance(module.weight, Tensor)}
    return [name for name, _ in routers] if len(shapes) == 1 else []


def watch(model: nn.Module, *, compiled: bool = False) -> Routers | None:
    """Wrap the routers of a model; None if it has none."""
    names = routers_of(model)
    return Routers(model, names, compiled=compiled) if names else None


def _layer(name: str) -> int:
    match = _LAYER.search(f".{name}.")
    return int(match.group(1)) if match else 0


Replay = Literal["auto", True, False]
"""See `TrainerConfig.router_replay`."""
ModelOutputs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Routed]
"""Two numbers of each learned token, [learned] each; then how tokens were routed, where that is watched."""


class Mixture:
    """The experts of a policy whose routers are watched.

    Args:
        routers: of the model.
        name: of the model's class.
        wanted: tokens are to go where batches say; with True they must.
    """

    def __init__(self, routers: Routers, name: str, wanted: Replay):
        self.routers = routers
        self.replays = wanted is not False
        """Tokens go to the experts that a batch names."""
        self._name, self._must = name, wanted is True

    @staticmethod
    def of(model: nn.Module, wanted: Replay | None, *, compiled: bool = False) -> Mixture | None:
        """The experts of a Hugging Face model, watched from now on; None where it has none, or nobody asks.

        Args:
            model: changed in place.
            wanted: see `Mixture`; None: nobody asks.
            compiled: its blocks may be compiled.

        Raises:
            ValueError: tokens must go where batches say, and it has no experts.
        """
        routers = None if wanted is None else watch(model, compiled=compiled)
        if routers is not None and wanted is not None:
            return Mixture(routers, type(model).__name__, wanted)
        if wanted is True:
            raise ValueError(_must(f"{type(model).__name__} has no experts, or of a kind whose choice is not known"))
        return None

    def begin(self, batch: Packed, at: Tensor, rectangle: tuple[Tensor, int] | None = None) -> None:
        """A pass over a micro-batch begins.

        Args:
            batch: what is computed.
            at: where in what the model reads learned tokens are predicted, int64 [learned].
            rectangle: where sequences are padded: where each place of the sequences laid end to end is in the
                rectangle, flattened, and how many places that has.
        """
        routes = batch.routes if self.replays else None
        if routes is not None and rectangle is not None:
            routes = _padded(routes, batch, *rectangle)
        self.routers.begin(routes, at, batch.expert_load)

    def routed(self, share: Share | None) -> Routed:
        """How the tokens of the pass were routed.

        Args:
            share: this rank's part of the micro-batch, None for all: then ranks tell each other of theirs.
        """
        routed = self.routers.routed()
        return routed if share is None else _whole(routed, share)

    def load_of(self, rows: Sequence[Row]) -> np.ndarray:
        """Share of all choices that each expert has in the rows of an optimizer step, float32 [layers, experts].

        Raises:
            ValueError: rows do not say where their tokens went.
        """
        routes_of_rows = [routes for row in rows if (routes := row.learned_routes) is not None]
        if (load := load_of(routes_of_rows, self.routers.layers, self.routers.experts)) is None:
            raise WrongSetting(
                "algorithm.router_aux_loss balances experts by what the engine chose, and samples do not tell that: "
                "take an engine that does, or set it to 0"
            )
        return load

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
        followed = agreed(self._follows(compute, probe))
        self.routers.understood = agreed(self.routers.understood)
        if followed or not self.replays:
            return None
        self.replays, why = False, f"tokens of {self._name} do not go to the experts that are given"
        if self._must:
            raise ValueError(_must(why))
        return f"no router replay: {why}"

    @torch.no_grad()
    def _follows(self, compute: Callable[[Packed], Any], probe: Packed) -> bool:
        routers = self.routers
        device, layers = probe.ids.device, len(routers.layers)
        tokens = torch.arange(len(probe.ids), device=device)[:, None, None]
        routes = tokens + torch.arange(layers * routers.top_k, device=device).view(layers, -1)
        replays = self.replays
        self.replays = True
        try:
            routed = compute(probe.routed(routes % routers.experts))[2]
        finally:
            self.replays = replays
        wanted = routes.index_select(0, probe.predicting()) % routers.experts
        counts = torch.nn.functional.one_hot(wanted, routers.experts).sum((0, 2))
        return routers.understood and torch.equal(routed.counts, counts.double())


def _whole(routed: Routed, share: Share) -> Routed:
    """Routing of all learned tokens, from each rank's part of it."""
    counts, chances = (part.clone() for part in (routed.counts, routed.chances))
    dist.all_reduce(counts, group=share.group)
    dist.all_reduce(chances, group=share.group)
    flags = share.whole(torch.cat([routed.route_drift, routed.has_route[None]]).t().float()) > 0.5
    balance = None if routed.balance is None else share.whole(routed.balance)
    return Routed(counts, chances, flags[:, :-1].t(), flags[:, -1], balance)


def _must(why: str) -> str:
    return f"trainer.router_replay=true: {why}; auto trains without"


def _padded(routes: Tensor, batch: Packed, places: Tensor, size: int) -> Tensor:
    """Routes of `batch.ids` as those of a rectangle of so many places, unknown in the padding."""
    whole = nowhere(routes, size)
    whole[places] = routes if batch.places is None else routes.index_select(0, batch.places)
    return whole


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Experts as a function: from rows [rows, width], the experts of each row, int64 [rows, chosen], and how much each
weighs, their output [rows, width]."""


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> Iterator[nn.Parameter]:
    """Leave this rank its experts; the parameters that were split, as `DTensor`s.

    Args:
        model: changed in place; may be on the meta device.
        mesh: the ranks over which they are split.

    Raises:
        ValueError: the model has no experts that can be split, or a number of them that is no multiple of the ranks'.
    """
    for experts in experts_of(model, mesh.size()):
        for name, whole in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
            setattr(experts, name, parameter)
            yield parameter
        experts.num_experts = int(experts.num_experts) // mesh.size()  # type: ignore[arg-type, assignment]
        experts.forward = partial(_sent_around, experts, experts.forward, mesh.get_group())


def experts_of(model: PreTrainedModel, parts: int) -> list[nn.Module]:
    """The modules that hold the experts of a layer each.

    Raises:
        ValueError: there is none, or their number cannot be split so.
    """
    stacks = [module for module in model.modules() if _stacked(module)]
    key = f"trainer.parallel.expert={parts}: {type(model).__name__}"
    if not stacks:
        raise ValueError(f"{key} has no experts that transformers stacks in one tensor")
    numbers = {int(module.num_experts) for module in stacks}  # type: ignore[arg-type]
    if uneven := sorted(number for number in numbers if number % parts):
        raise ValueError(f"{key} has {uneven[0]} experts, which is no multiple of {parts}")
    return stacks


def _stacked(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    number = getattr(module, "num_experts", None)
    return any(each.dim() == 3 for each in own) and all(each.shape[0] == number for each in own)


def _sent_around(
    module: nn.Module, inner: Experts, group: dist.ProcessGroup, hidden: Tensor, choice: Tensor, weights: Tensor
) -> Tensor:
    """Output of `inner`, computed with the experts of all ranks; arguments as for `Experts`."""
    ranks, here = dist.get_world_size(group), int(module.num_experts)  # type: ignore[arg-type]
    flat = choice.reshape(-1)
    order = flat.argsort(stable=True)
    leaving = torch.bincount(flat, minlength=ranks * here)  # choices of each expert
    coming = torch.empty_like(leaving)  # of each rank, choices of each expert here
    dist.all_to_all_single(coming, leaving, group=group)
    sent, received = leaving.view(ranks, here).sum(1).tolist(), coming.view(ranks, here).sum(1).tolist()
    rows = exchanged(hidden.index_select(0, order // choice.shape[1]), sent, received, group)
    expert = torch.arange(here, device=flat.device).repeat(ranks).repeat_interleave(coming)
    if not len(rows):  # a row that nobody gets back, since every rank's experts must have a gradient
        rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
    with _parts_alone(module):
        outputs = inner(rows, expert[:, None], weights.new_ones(len(rows), 1))
    back = exchanged(outputs[: sum(received)], received, sent, group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    mine = back.index_select(0, place).view(*choice.shape, -1) * weights[..., None]
    return mine.sum(dim=1).to(hidden.dtype)


@contextmanager
def _parts_alone(module: nn.Module) -> Iterator[None]:
    """Have a module compute with what this rank has of its split parameters, as plain tensors."""
    split = dict(module._parameters)
    try:
        module._parameters.update({name: local(each) for name, each in split.items() if each is not None})  # type: ignore[misc]
        yield
    finally:
        module._parameters.update(split)


_JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked tensors of a module of experts, and the matrices of an expert that are in them, one below the other."""


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One stacked tensor, [experts, rows, columns]."""

    members: tuple[tuple[str, ...], ...]
    """Names in the files of each expert's matrices."""
    files: Mapping[str, Path]
    """The safetensors file of each tensor."""

    @staticmethod
    def of(name: str, files: Mapping[str, Path]) -> StackedExperts | None:
        """Return the stacked tensor that a model calls `name`, if tensors of the files make it up; else None."""
        module, _, own = name.rpartition(".")
        members: list[tuple[str, ...]] = []
        while own in _JOINED and module.endswith(".experts"):
            names = tuple(f"{module}.{len(members)}.{matrix}.weight" for matrix in _JOINED[own])
            if not all(each in files for each in names):
                break
            members.append(names)
        return StackedExperts(tuple(members), files) if members else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole stacked tensor."""
        shapes = [self._look(name, lambda file, name: file.get_slice(name).get_shape()) for name in self.members[0]]
        return len(self.members), sum(rows for rows, _ in shapes), shapes[0][1]

    def __getitem__(self, part: Any) -> Tensor:
        """Some experts, of them some rows, of these some columns: three slices; `...` for all."""
        which, rows, columns = (slice(None),) * 3 if part is ... else part
        indices = range(len(self.members))[which]
        return torch.stack([self._expert(number)[rows, columns] for number in indices])

    def _expert(self, number: int) -> Tensor:
        return torch.cat([self._look(name, lambda file, name: file.get_tensor(name)) for name in self.members[number]])

    def _look(self, name: str, getter: Callable[[Any, str], Any]) -> Any:
        with safe_open(self.files[name], framework="pt") as file:
            return getter(file, name)
