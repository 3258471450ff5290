"""Tensor and context parallelism: collectives with gradients, tokens split over ranks, and matrices split over ranks.

One rule makes the collectives fit together: every rank computes a part of one loss, and the gradient of a tensor that
several have is the sum of their parts. So where a forward pass gathers, its backward pass reduce-scatters, and the
other way round. All tensors are contiguous before they are sent: gloo sends other memory than meant where they are not.

Tokens. From a `Packed` micro-batch that all ranks have, `Division.share` makes this rank's tokens, as a `Packed` of
their own, and says which of the others' tokens they see (`Pieces`). Causal attention costs a token what came before it,
so a rank that had the end of a long answer would work longest. All tokens are cut into twice as many chunks as there
are context ranks, and a rank has one from the front and one from the back (zig-zag; Llama 3, arXiv:2407.21783, section
3.3.2). Sequences that a rank has room for lie whole on one, where that is about even: then none waits for the others'
keys, and attention is that of any packed batch. Tensor ranks cut such a share once more, in order: they have it whole
while they compute with split matrices, and a part of it everywhere else. So each rank has tokens of its own wherever
weights are whole, and the gradients of all ranks are summed, for every weight, with no exception.

Matrices. They are split by the plan of the model's class (`base_model_tp_plan` of transformers' configurations).
Between modules with split matrices every rank has tokens of its own: they are gathered where such a module begins, and
where it ends its result is added up and shared out again (sequence parallelism, arXiv:2205.05198, section 4.2.2; as
many bytes are sent as by adding up alone). So weights that are not split, such as the norms of queries and keys, see of
each rank other tokens or other heads, and their gradients are summed over all ranks by FSDP2 as everywhere else. Adding
gradients up by hooks instead (transformers' `DistributedConfig`) would have to know each of those weights, and would
count the gradients of earlier micro-batches again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from rlinf.data.packing import Packed, sent
from rlinf.runtime.transport.process_groups import all_gather, reduce_scatter


def gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks one behind another, [ranks x rows, ...]; every rank has as many, [rows, ...]."""
    if dist.get_world_size(group) == 1:
        return mine
    return cast(Tensor, _Collective.apply(mine, partial(_gather, group=group), partial(_share_out, group=group)))


def shared_out(addend: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over ranks, [rows, ...]; every rank has an addend of it, [ranks x rows, ...]."""
    if dist.get_world_size(group) == 1:
        return addend
    return cast(Tensor, _Collective.apply(addend, partial(_share_out, group=group), partial(_gather, group=group)))


def exchanged(mine: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each rank its rows (all-to-all); return the rows that came, one rank's behind another's, [sum of received,
    ...].

    Args:
        mine: rows for each rank, one behind another, [sum of sent, ...].
        sent, received: rows for each rank, and of each.
    """
    there = partial(_exchange, sent=sent, received=received, group=group)
    back = partial(_exchange, sent=received, received=sent, group=group)
    return cast(Tensor, _Collective.apply(mine, there, back))


def whole_again(mine: Tensor, own_rows: Tensor, places: Tensor, most: int, group: dist.ProcessGroup) -> Tensor:
    """Rows that are spread over ranks, all of them on each, [all rows, ...].

    Every rank goes on to compute the *same* loss of all of them. So a row's gradient is what one rank finds of it, the
    rank that made it, and nothing is added up.

    Args:
        mine: this rank's, [rows, ...].
        own_rows: which of all rows they are, int64 [rows].
        places: of each of all rows, where it stands when every rank's come one behind another, `most` of each.
        most: rows of the rank that has the most, at least one.
    """
    return cast(Tensor, _WholeAgain.apply(mine, own_rows, places, most, group))


def _gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = mine.new_empty(dist.get_world_size(group) * len(mine), *mine.shape[1:])
    all_gather(whole, mine.contiguous(), group=group)
    return whole


def _share_out(addend: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = addend.new_empty(len(addend) // dist.get_world_size(group), *addend.shape[1:])
    reduce_scatter(share, addend.contiguous(), group=group)
    return share


def _exchange(mine: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    received_rows = mine.new_empty(sum(received), *mine.shape[1:])
    dist.all_to_all_single(received_rows, mine.contiguous(), list(received), list(sent), group=group)
    return received_rows


class _Collective(torch.autograd.Function):
    """A collective, and the one by which gradients come back."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(mine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


class _WholeAgain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, own_rows: Tensor, places: Tensor, most: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(own_rows)
        padded = mine.new_zeros(most, *mine.shape[1:])
        padded[: len(mine)] = mine
        return _gather(padded, group).index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (own_rows,) = ctx.saved_tensors
        return gradients[0].index_select(0, own_rows), None, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of neighbours in one sequence that a context rank computes, each with all that it may see."""

    group: dist.ProcessGroup | None
    """The context ranks, whose keys and values come one behind another; None for one."""
    lengths: tuple[tuple[int, int], ...]
    """Number of tokens of each piece, and the position behind its last."""
    queries: Tensor
    """Where the pieces' tokens stand in this rank's share, int64 [tokens of pieces]."""
    keys: Tensor
    """Where stands what each piece may see, in the shares of all ranks, int64 [tokens seen]."""
    restore: Tensor
    """For each token of the share, its place among the pieces' tokens laid end to end, int64; behind the last for
    padding."""
    query_bounds: Tensor
    """Where each piece begins in `queries`, and the end of the last, int32 [pieces + 1]."""
    key_bounds: Tensor
    """Where each piece begins in `keys`, and the end of the last, int32 [pieces + 1]."""
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    """Masks of long pieces, by the window and the dtype: all layers take their blocks' from the same ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of a micro-batch: its tokens, and what they attend to."""

    batch: Packed
    """Its tokens, and the learned tokens that these predict."""
    positions: Tensor
    """Positions of the tokens that the tensor ranks have together, int64."""
    pieces: Pieces | None
    """The pieces of sequences that this rank computes, and the keys that each may see; None where it has whole ones."""
    texts: Packed
    """Where the sequences lie that its attention is about: in the whole micro-batch for pieces, else in the tokens that
    the tensor ranks have together."""
    tokens: Tensor
    """Which token of the whole micro-batch each of ours is, int64; any one for padding."""
    own_rows: Tensor
    """Which learned tokens of the whole micro-batch ours are, int64."""
    places: Tensor
    """Where each learned token stands when all ranks' come one behind another, int64 [learned]."""
    most: int
    """Learned tokens of the rank that has the most, at least one."""
    group: dist.ProcessGroup
    """The ranks that have a part each."""

    def whole(self, mine: Tensor) -> Tensor:
        """Gather results of learned tokens from all ranks: [learned, ...] on each, from each rank's own, [ours,
        ...]."""
        return whole_again(mine, self.own_rows, self.places, self.most, self.group)


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Ranks that compute a micro-batch together, seen from one of them."""

    together: DeviceMesh
    """All of them, tensor ranks next to each other."""
    context: DeviceMesh | None = None
    """Those that have other shares, in order; None for one share."""
    tensor: DeviceMesh | None = None
    """Those that have other parts of the same share, in order; None for one part."""
    room: int = 0
    """Tokens of whole sequences that a share may have; 0: all sequences are cut."""

    @property
    def lead(self) -> bool:
        """True on the one rank that counts for results which all these ranks compute alike."""
        return self.together.get_local_rank() == 0

    def share(self, batch: Packed) -> Share:
        """This rank's part of a micro-batch, which all of them have on the same device."""
        ranks, parts = self.together.size(), 1 if self.tensor is None else self.tensor.size()
        me = self.together.get_local_rank()
        tokens, shares = len(batch.ids), ranks // parts
        stands = batch.stands if batch.stands is not None else np.arange(sum(batch.lengths))
        predictors = batch.predictors.cpu().numpy()
        apart = shares > 1 and not (batch.parts or batch.tenants)
        runs = whole_runs(batch.lengths, stands, shares, self.room) if apart else None
        lengths: tuple[tuple[int, int], ...] = ()
        arrays, texts = list[np.ndarray](), batch
        if runs is None:
            order = zigzag(tokens, shares, parts)
            stood = np.empty(order.size, np.int64)  # of each token, its place in the shares laid end to end
            stood[order.reshape(-1)] = np.arange(order.size)
            share = order[me // parts]
            owner, within = np.divmod(stood[stands[predictors]], len(share) // parts)
            lengths, arrays = _pieces(batch.lengths, stands, share, stood, tokens)
        else:
            wholes = [_whole(batch.lengths, stands, runs == number, parts) for number in range(shares)]
            share, texts = wholes[me // parts].tokens, wholes[me // parts].of(batch)
            owner, within = _predicting(wholes, np.repeat(runs, batch.lengths)[predictors], predictors, parts)
        part = share.reshape(parts, -1)[me % parts]
        own_rows, places, most = _spread(owner, ranks, me)
        at_hand = [
            np.minimum(part, tokens - 1),
            np.minimum(share, tokens - 1),
            within[own_rows],
            own_rows,
            places,
            *arrays,
        ]
        computed, shared, local, mine, back, *rest = sent(
            [torch.from_numpy(each) for each in at_hand], batch.ids.device
        )
        own = replace(
            batch,
            ids=batch.ids.index_select(0, computed),
            positions=batch.positions.index_select(0, computed),
            places=None,
            stands=None,
            routes=None if batch.routes is None else batch.routes.index_select(0, computed),
            predictors=local,
            targets=batch.targets.index_select(0, mine),
            distinct=None,
            alike=None,
            temperature=None if batch.temperature is None else batch.temperature.index_select(0, mine),
        )
        group = None if self.context is None else self.context.get_group()
        pieces = Pieces(group, lengths, *rest) if runs is None else None
        positions = batch.positions.index_select(0, shared)
        return Share(own, positions, pieces, texts, computed, mine, back, most, self.together.get_group())


def zigzag(tokens: int, shares: int, parts: int) -> np.ndarray:
    """Tokens of each share, int64 [shares, tokens of a share]; numbers from `tokens` on are padding.

    Args:
        tokens: of the micro-batch.
        shares: into which they are split.
        parts: into which every share can be split evenly.
    """
    chunk = -(-tokens // (2 * shares * parts)) * parts
    chunks = np.arange(2 * shares * chunk).reshape(2 * shares, chunk)
    return np.concatenate([chunks[:shares], chunks[: shares - 1 : -1]], axis=1)


_EVEN = 1.3
"""How many times an even share the largest may have for sequences to stay whole: beyond it the others would wait for
almost a third of what they compute. What cutting takes instead has not been measured on a quiet machine."""


def whole_runs(lengths: Sequence[int], stands: np.ndarray, shares: int, room: int) -> np.ndarray | None:
    """The share of each sequence where they stay whole, int64 [sequences]: runs of neighbours, of which the largest is
    as small as it can be. None where one would be larger than `room`, or far from even.

    Args:
        lengths: tokens of each sequence.
        stands: which token stands at each place of the sequences laid end to end.
        shares: how many runs there may be.
        room: most tokens of a run; what its sequences share with each other counts once.
    """
    if max(lengths) > room:
        return None
    every = np.split(stands, np.cumsum(lengths)[:-1])
    again = [0, *(_alike(*pair) for pair in pairwise(every))]
    fresh = sum(lengths) - sum(again)
    least, most = max(*lengths, -(-fresh // shares)), fresh
    while least < most:
        middle = (least + most) // 2
        if _filled(lengths, again, middle)[-1] < shares:
            most = middle
        else:
            least = middle + 1
    even = -(-(int(stands.max()) + 1) // shares)  # of tokens that are read once if sequences are cut
    return None if least > min(room, _EVEN * even) else np.array(_filled(lengths, again, least))


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count


def _filled(lengths: Sequence[int], again: Sequence[int], room: int) -> list[int]:
    """The number of the run of each sequence, where each run is filled as far as there is room."""
    runs, number, load = [], 0, 0
    for length, shared in zip(lengths, again, strict=True):
        more = length - shared if load else length
        if load + more > room:
            number, load, more = number + 1, 0, length
        load += more
        runs.append(number)
    return runs


class _Whole(NamedTuple):
    """A share of whole sequences."""

    tokens: np.ndarray
    """Of the micro-batch, int64, in the order in which its sequences have them; padding is the first one again."""
    lengths: tuple[int, ...]
    """Of its sequences; the last is padding, if there is any."""
    stands: np.ndarray
    """Which of `tokens` stands at each place of its sequences laid end to end, int64."""
    places: np.ndarray
    """For each place of all sequences of the micro-batch the one in `tokens`, int64; anything for those of others."""

    def of(self, batch: Packed) -> Packed:
        """The micro-batch with these sequences alone."""
        shared = len(self.tokens) < len(self.stands)
        return replace(batch, lengths=self.lengths, places=None, stands=self.stands if shared else None)


def _whole(lengths: Sequence[int], stands: np.ndarray, mine: np.ndarray, parts: int) -> _Whole:
    """The share of these sequences, bool [sequences], in a number of tokens that can be split evenly."""
    here = np.repeat(mine, lengths)
    tokens, first, local = np.unique(stands[here], return_index=True, return_inverse=True)
    order = np.argsort(first)  # what a sequence adds must follow what those before it have
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    local = rank[local]
    places = np.zeros(len(stands), np.int64)
    places[here] = local
    padding = max(-len(tokens) % parts, 0 if len(tokens) else parts)
    own = tuple(length for length, is_mine in zip(lengths, mine.tolist(), strict=True) if is_mine)
    return _Whole(
        np.concatenate([tokens[order], np.zeros(padding, np.int64)]),
        (*own, padding) if padding else own,
        np.concatenate([local, len(tokens) + np.arange(padding)]),
        places,
    )


def _predicting(
    wholes: Sequence[_Whole], share: np.ndarray, predictors: np.ndarray, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rank that predicts each learned token, and by which of its tokens, int64 [learned] each.

    Args:
        wholes: all shares.
        share: of each learned token.
        predictors: see `Packed`.
        parts: ranks of a share.
    """
    at = np.stack([each.places[predictors] for each in wholes])[share, np.arange(len(share))]
    sizes = np.array([len(each.tokens) // parts for each in wholes])[share]
    return share * parts + at // sizes, at % sizes


def _spread(owner: np.ndarray, ranks: int, me: int) -> tuple[np.ndarray, np.ndarray, int]:
    """For `Share`: `own_rows`, `places` and `most` of learned tokens, given the rank that has each, int64 [learned]."""
    counts = np.bincount(owner, minlength=ranks)
    most = max(1, int(counts.max()))
    places = np.empty_like(owner)
    for rank in range(ranks):
        places[owner == rank] = rank * most + np.arange(counts[rank])
    return np.flatnonzero(owner == me), places, most


def _pieces(
    lengths: Sequence[int], stands: np.ndarray, share: np.ndarray, stood: np.ndarray, tokens: int
) -> tuple[tuple[tuple[int, int], ...], list[np.ndarray]]:
    """For `Pieces`: `lengths`, and the rest as arrays.

    A token that sequences share sees the same in each, and is computed where it stands first.

    Args:
        lengths: tokens of each sequence.
        stands: which token stands at each place of the sequences laid end to end.
        share: the tokens of this rank's share, int64; from `tokens` on padding.
        stood: of each token, its place in the shares laid end to end, int64.
        tokens: how many there are.
    """
    mine = np.full(tokens, -1)
    real = np.flatnonzero(share < tokens)
    mine[share[real]] = real
    queries: list[np.ndarray] = [np.zeros(0, np.int64)]
    keys = [*queries]
    spans: list[tuple[int, int]] = []
    for sequence in np.split(stands, np.cumsum(lengths)[:-1]):
        here = np.flatnonzero(mine[sequence] >= 0)
        for run in np.split(here, np.flatnonzero(np.diff(here) > 1) + 1) if len(here) else ():
            queries.append(mine[sequence[run]])
            keys.append(stood[sequence[: run[-1] + 1]])
            spans.append((len(run), int(run[-1]) + 1))
            mine[sequence[run]] = -1
    query_rows = np.concatenate(queries)
    restore = np.full(len(share), len(query_rows))
    restore[query_rows] = np.arange(len(query_rows))
    bounds = [np.cumsum([0, *sizes]).astype(np.int32) for sizes in ([n for n, _ in spans], [n for _, n in spans])]
    return tuple(spans), [query_rows, np.concatenate(keys), restore, *bounds]


_COLUMNS, _ROWS = "colwise", "rowwise"
"""Words of the plans for matrices of which each rank makes some outputs, and for those of which each has some
inputs."""
_WHOLE = ("replicated_with_grad_allreduce",)
"""Words of the plans for weights that stay whole."""


class TensorRanks:
    """The tensor ranks of one share of tokens.

    Args:
        mesh: two dimensions: those with the same parts, and these.
    """

    def __init__(self, mesh: DeviceMesh):
        self.alike, self.mesh = halves(mesh)
        self.group = self.mesh.get_group()
        self.packed = True
        """Each rank has tokens of its own between the modules; otherwise all have all of them, which a model's own
        forward needs, and which is for trials without gradient."""

    def enter(self, hidden: Tensor) -> Tensor:
        """All tokens, [..., tokens, width], of what one rank has."""
        if not self.packed:
            return hidden
        rows = gathered(hidden.reshape(-1, hidden.shape[-1]), self.group)
        return rows.view(*hidden.shape[:-2], -1, hidden.shape[-1])

    def leave(self, partial: Tensor) -> Tensor:
        """Sum over ranks of `partial`, an addend for all tokens: this rank's tokens of it where ranks have tokens
        apart, else all of it."""
        if not self.packed:
            whole = partial.detach().contiguous()
            dist.all_reduce(whole, group=self.group)
            return whole
        rows = shared_out(partial.reshape(-1, partial.shape[-1]), self.group)
        return rows.view(*partial.shape[:-2], -1, partial.shape[-1])


def halves(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """The two submeshes that contain this rank, of a mesh of two dimensions: one along each."""
    first, second = mesh.mesh_dim_names or ()
    return mesh[first], mesh[second]


def split_matrices(model: PreTrainedModel, ranks: TensorRanks) -> Iterator[nn.Parameter]:
    """Leave this rank its part of every matrix in the plan; the parameters that were split, as `DTensor`s.

    Args:
        model: changed in place; may be on the meta device.
        ranks: over which they are split.

    Raises:
        ValueError: see `plan_of`, or adapters sit on what is split.
    """
    for parent, children in plan_of(model, ranks.mesh.size()):
        parent.register_forward_pre_hook(partial(_enter, ranks), with_kwargs=True)
        for linear, style in children:
            yield _split(linear, "weight", 0 if style == _COLUMNS else 1, ranks.mesh)
            if style == _COLUMNS and linear.bias is not None:
                yield _split(linear, "bias", 0, ranks.mesh)
            linear.forward = partial(_columns if style == _COLUMNS else partial(_rows, ranks), linear)  # type: ignore[method-assign]


def plan_of(model: PreTrainedModel, parts: int) -> list[tuple[nn.Module, list[tuple[nn.Linear, str]]]]:
    """The modules whose matrices are split, each with them.

    Args:
        model: whose configuration has the plan. Experts are not split by it: they compute a rank's own tokens.
        parts: over how many ranks.

    Raises:
        ValueError: there is no plan, or one that this cannot follow, or some number is no multiple of `parts`.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    setting = f"trainer.parallel.tensor={parts}: {name}"
    styles: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    heads = {key: getattr(config, key, None) or 0 for key in ("num_attention_heads", "num_key_value_heads")}
    uneven = [f"{key} {number}" for key, number in heads.items() if number % parts]
    matrices: dict[str, list[tuple[nn.Linear, str]]] = {}
    for path, module in model.base_model.named_modules():
        style = next((style for key, style in styles.items() if re.fullmatch(_pattern(key), path)), None)
        if style is None or style in _WHOLE or not any(True for _ in module.parameters()) or ".experts" in path:
            continue
        if type(module) is not nn.Linear or style not in (_COLUMNS, _ROWS):
            raise ValueError(
                f"{setting} cannot be split: {path} is a {type(module).__name__} that is to be {style}; adapters and "
                "such plans are for trainer.parallel.context, which splits the tokens instead"
            )
        split = module.out_features if style == _COLUMNS else module.in_features
        uneven += [f"{path.rpartition('.')[2]} of {split}"] if split % parts else []
        matrices.setdefault(path.rpartition(".")[0], []).append((module, style))
    if uneven:
        raise ValueError(f"{setting} cannot be split evenly: {', '.join(dict.fromkeys(uneven))}")
    if not matrices:
        raise ValueError(
            f"{setting} cannot be split: transformers has no plan for it; trainer.parallel.context needs none"
        )
    odd = [path for path, children in matrices.items() if {style for _, style in children} != {_COLUMNS, _ROWS}]
    if odd:
        raise ValueError(f"{setting} cannot be split: of {odd[0]} it is not said how it begins and how it ends")
    return [(model.base_model.get_submodule(path), children) for path, children in matrices.items()]


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\*", r"[^.]+")


def _split(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """Replace a parameter by this rank's part of it, which all ranks have whole."""
    whole: nn.Parameter = getattr(module, name)
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
    setattr(module, name, parameter)
    return parameter


def _enter(ranks: TensorRanks, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if "hidden_states" in named:
        return inputs, {**named, "hidden_states": ranks.enter(named["hidden_states"])}
    return (ranks.enter(inputs[0]), *inputs[1:]), named


def _columns(linear: nn.Linear, hidden: Tensor) -> Tensor:
    return F.linear(hidden, local(linear.weight), None if linear.bias is None else local(linear.bias))


def _rows(ranks: TensorRanks, linear: nn.Linear, hidden: Tensor) -> Tensor:
    output = ranks.leave(F.linear(hidden, local(linear.weight)))
    return output if linear.bias is None else output + linear.bias


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a split parameter, differentiable."""
    part: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part
