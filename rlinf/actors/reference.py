"""The reference: log-probs of other policies' tokens under a policy that does not learn.

It takes groups, as a list or as a stream that its ranks share, and gives each back with a log-prob per token in
`per_token`, computed as soon as it comes; those that come meanwhile (`Arrivals`) are computed next, together. It stands
for the policy that a KL penalty holds on to, and for the teacher of a distillation, or one of several (`Blend`). Every
rank has the whole model; its weights are replaced (`load`) or moved towards others (`follow`) on all ranks or on none.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlinf.actors.base import ModelActor, configured
from rlinf.config.learning import ForwardConfig, ReferenceSettings
from rlinf.data.alignment import Translator, carried_over
from rlinf.data.datasets.source import lookup
from rlinf.data.packing import Packed, Row, cut_rows, pack
from rlinf.data.safetensors_io import make_room, write_tensors
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer
from rlinf.data.weights import Weights, misfits
from rlinf.metrics.limits import COMPUTE
from rlinf.models.distillation import HIDDEN, TOP
from rlinf.models.language.build import ONE_AT_A_TIME, ModelSource, build_model, cost_of, pictures_of
from rlinf.models.language.fsdp import dtype_of
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.language.truth import Way
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import lease_here
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.streams.stream import each
from rlinf.training.checkpoint import OpenState, ParkedState, StateCopy, held, write_in_thread
from rlinf.training.weight_sync import DEADLINE, Receiver


class Arrivals:
    """Reads ahead of whoever computes, as far as one micro-batch: what it holds, other ranks cannot take.

    Args:
        groups: a list or a stream of them.
        most: tokens (prompts included) that are held until `take`; the group that exceeds it is held too.
    """

    def __init__(self, groups: Iterable[Group] | AsyncIterable[Group], most: int):
        self._most = most  # tokens
        self._held: list[Group] = []
        self._tokens = 0
        self._come, self._room = asyncio.Event(), asyncio.Event()
        self._reader = asyncio.create_task(self._read(groups))

    async def take(self) -> list[Group]:
        """All that have come, at least one; [] at the end. Raises why there are no more, if the source failed."""
        await self._come.wait()
        if not self._held:
            await self._reader
        groups, self._held, self._tokens = self._held, [], 0
        self._room.set()
        if not self._reader.done():
            self._come.clear()
        return groups

    async def close(self) -> None:
        """Read no more."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        del self._reader  # what cancelled it has a traceback, which holds the source and this

    async def _read(self, groups: Iterable[Group] | AsyncIterable[Group]) -> None:
        # of a stream one item at a time: what iterating it would ask for ahead, other ranks could not begin with
        source = groups if isinstance(groups, AsyncIterator) else each(groups)
        try:
            while (group := await anext(source, None)) is not None:
                self._held.append(group)
                self._tokens += sum(len(group.prompt.token_ids) + len(one.response_ids) for one in group.samples)
                self._come.set()
                if self._tokens >= self._most:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._come.set()


@dataclass(frozen=True, slots=True)
class Blend:
    """One of several teachers, and its part in their mixture."""

    name: str
    """The teacher's."""
    names: tuple[str, ...]
    """All teachers'."""
    share: float
    """The teacher's in the mixture, above 0; all add up to 1."""
    route: str | None = None
    """Column of a prompt's row that names its teacher, which alone is asked then; None asks all."""
    width: int = 0
    """Numbers in a hidden state of the widest teacher; less wide ones have zeros behind theirs."""
    total: str = "teacher_logprobs"
    """Key of `Sample.per_token` with the log-prob of each token under the mixture, log sum_k share_k p_k(token): of the
    teachers that were asked so far."""

    @property
    def number(self) -> int:
        """The teacher's, from 0."""
        return self.names.index(self.name)

    def asks(self, prompt: Prompt) -> bool:
        """Tell whether this teacher is asked about answers to a prompt.

        Raises:
            UserError: the prompt's row names no teacher.
        """
        if self.route is None:
            return True
        named = lookup(prompt.row, self.route)
        if named not in self.names:
            there = ", ".join(self.names)
            raise UserError(
                f"prompt {prompt.id} has {named!r} in column {self.route!r}, which is no teacher; there are {there} "
                "(teacher.route)"
            )
        return bool(named == self.name)

    def added(self, group: Group, column: str) -> Group:
        """The group with what this teacher said, in a column of its own, added to the mixture."""

        def total(sample: Sample) -> np.ndarray:
            own: np.ndarray = sample.per_token[column]
            if self.route is not None:
                return own
            own = own + np.float32(np.log(self.share))
            before = sample.per_token.get(self.total)
            return own if before is None else np.logaddexp(before, own)

        return group.with_column(self.total, [total(sample) for sample in group.samples])


_COLUMN_OF = {"top": (TOP,), "hidden": (HIDDEN,)}
"""Columns beside the log-probs, by `ReferenceSettings.distribution`."""
FILE = "reference.safetensors"
"""In the directory that `save` writes."""


class Reference(ModelActor, Receiver):
    """Log-probs by a policy that does not learn."""

    @configured(ReferenceSettings)
    async def setup(
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        settings: ReferenceSettings,
        seed: int = 0,
        blend: Blend | None = None,
    ) -> None:
        """Make the model.

        Args:
            model: a Hugging Face directory, or the configuration of a new model.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`; a new model has its vocabulary.
            settings: how it computes; or any of its keys, such as dtype="bfloat16". With order "prompt" each group is
                computed by itself, since the last bits of a log-prob depend on what is computed beside it; "arrival"
                computes together whatever has come, which is faster where answers are short. With `decay` weights are
                kept in float32 besides those in `dtype`, since bfloat16 rounds small moves away.
            seed: of a new model's weights: with the trainer's, it is the policy that the trainer began with.
            blend: it is one of several teachers.

        Raises:
            ValueError: a model or tokenizer that cannot be made, or a setting out of range.
        """
        self._settings, self._blend = settings, blend
        loaded_tokenizer = await self.compute(load_tokenizer, settings.tokenizer or tokenizer)
        self._translator: Translator | None = None
        if settings.tokenizer is not None:
            if settings.distribution != "none":
                raise ValueError(
                    "a teacher of another tokenizer has no distributions that could be compared: top-k, "
                    "and the whole vocabulary, are for teachers with the policy's tokens"
                )
            self._translator = Translator(await self.compute(load_tokenizer, tokenizer), loaded_tokenizer)
        self.policy = await self.compute(_policy, model, loaded_tokenizer, seed, self.device, settings)
        if settings.distribution == "hidden" and not self.policy.plain_head:
            raise ValueError(
                f"{model} makes its logits by more than one matrix, so its hidden states do not say its distributions: "
                "set top_k of the divergence"
            )
        self._cost = await self.compute(cost_of, model, loaded_tokenizer)
        self._exact: nn.Module = self.policy.model
        """The model whose weights count: the policy's own, or one in float32 of which that is the rounded copy."""
        if settings.decay is not None and settings.dtype != "float32":
            exact: nn.Module = await self.compute(build_model, model, loaded_tokenizer, seed=seed)
            self._exact = exact.requires_grad_(False).to(self.device)
        self.version = 0
        self._as_made = True
        """Its weights are those that anybody would make from the same settings."""

    @endpoint(device=True)
    async def logprobs(self, groups: Iterable[Group] | AsyncIterable[Group]) -> AsyncIterator[Group]:
        """Say how likely every token of these answers is, under softmax(logits / temperature of the sample).

        Args:
            groups: a list or a stream of them. Called on several ranks, they share a stream between them; a list is
                answered by each.

        Yields:
            Every group, with the log-probs (nats) in `per_token[column]`, in order of completion.

        Raises:
            ValueError: a group has an empty prompt.
        """
        arrivals = Arrivals(groups, self._settings.micro_batch_tokens)
        try:
            while batch := await arrivals.take():
                for group in await self.on_model(self._told, batch):
                    yield group
        finally:
            await arrivals.close()

    @torch.no_grad()
    def _told(self, groups: Sequence[Group]) -> list[Group]:
        blend = self._blend
        if blend is None:
            return self._told_of(groups)
        mine = [group for group in groups if blend.asks(group.prompt)]
        others = [group for group in groups if not blend.asks(group.prompt)]
        return [*others, *(blend.added(group, self._settings.column) for group in self._told_of(mine))]

    def _told_of(self, groups: Sequence[Group]) -> list[Group]:
        together = [[group] for group in groups] if self._settings.order == "prompt" or not groups else [groups]
        return [scored for some in together for scored in self._told_together(some)]

    def _told_together(self, groups: Sequence[Group]) -> Iterable[Group]:
        if self._translator is not None:
            return self._translated(groups, self._translator)
        rows = [Row.of(sample) for group in groups for sample in group.samples]
        columns = {name: iter(values) for name, values in self._columns(rows).items()}
        for name, values in columns.items():
            groups = [group.with_column(name, list(islice(values, len(group.samples)))) for group in groups]
        return groups

    def _translated(self, groups: Sequence[Group], translator: Translator) -> Iterable[Group]:
        """Groups with log-probs by a model that has other tokens."""
        samples = [sample for group in groups for sample in group.samples]
        rows = [translator.row(sample) for sample in samples]
        logprobs = self._columns([row for row, _ in rows])[self._settings.column]
        carried = iter(
            carried_over(sample, spans, scores)
            for sample, (_, spans), scores in zip(samples, rows, logprobs, strict=True)
        )
        return [group.with_column(self._settings.column, list(islice(carried, len(group.samples)))) for group in groups]

    def _columns(self, rows: Sequence[Row]) -> dict[str, list[np.ndarray]]:
        """Numbers of each row's learned tokens, by column."""
        start, parts = time.perf_counter(), list[tuple[np.ndarray, ...]]()
        for some in cut_rows(rows, self._settings.micro_batch_tokens, trees=self.policy.packs):
            batch = pack(some)
            parts.append(self._scores(batch.to(self.device)))
            if self._cost is not None:
                flops = self._cost.forward_flops(batch.lengths, len(batch.targets), tokens=len(batch.ids))
                self.note(COMPUTE + self._settings.dtype, bytes=flops)
        self.policy.weigh_compiling(time.perf_counter() - start)
        ends = np.cumsum([row.learned for row in rows], dtype=np.int64)
        names = [self._settings.column, *_COLUMN_OF.get(self._settings.distribution, ())]
        whole = [np.concatenate(column) for column in zip(*parts, strict=True)] or [np.empty(0, np.float32)]
        return {name: np.split(column, ends[:-1]) for name, column in zip(names, whole, strict=False)}

    def _scores(self, batch: Packed) -> tuple[np.ndarray, ...]:
        """Log-probs of a batch, and what the settings ask of whole distributions."""
        how = self._settings
        if how.distribution == "none":
            logprobs, _ = self.policy(batch)
            return (logprobs.cpu().numpy(),)
        top_k = how.top_k if how.distribution == "top" else None
        logprobs, column = self.policy.distributions(batch, top_k)
        if top_k is None:
            number, width = (0, 0) if self._blend is None else (self._blend.number, self._blend.width)
            filling = max(0, width - column.shape[1])
            column = nn.functional.pad(nn.functional.pad(column, (0, filling)), (1, 0), value=float(number))
        return logprobs.cpu().numpy(), column.cpu().numpy()

    @endpoint
    async def computes(self) -> Way:
        """How the model is run."""
        return self.policy.way

    # Weights -----------------------------------------------------------------------------------------------------

    @endpoint(joint=True)
    async def follow(self, weights: Weights, *, deadline: float = DEADLINE) -> int:
        """Move towards other weights, on all ranks or, with an error, on none: own ← decay own + (1 - decay) other.

        The exponential mean of the policies so far. All else is as in `load`.

        Raises:
            ValueError: this reference has no `decay`.
            LoadError: see `load`.
        """
        if self._settings.decay is None:
            raise ValueError(f"{self._cell.name} follows no weights: it was made without decay (reference.kind: ema)")
        return await self.load(_Towards.of(weights), deadline=deadline)

    async def check_weights(self, weights: Weights) -> None:
        self._check({name: tuple(tensor.shape) for name, tensor in weights.named()}, f"version {weights.version}")

    async def switch_weights(self, weights: Weights) -> None:
        share = 1.0
        if isinstance(weights, _Towards):
            assert self._settings.decay is not None
            share = 1.0 - self._settings.decay
        await self.on_model(self._move_towards, dict(weights.named()), share)
        self.version = weights.version

    @endpoint(device=True, joint=True)
    async def export_state(self) -> StateCopy:
        """The weights as they are now, in host memory, if they have ever changed; see `parked_state.park`."""
        weights: dict[str, Tensor] = {}
        if self.rank == 0 and not self._as_made:  # the others have the same
            weights = await self.on_model(_copies, self._exact)
        offsets = {name: (0,) * tensor.dim() for name, tensor in weights.items()}
        return StateCopy(self.rank, json.dumps({"version": self.version}), weights, offsets, {})

    @endpoint(device=True, joint=True)
    async def import_state(self, parked: ParkedState) -> int:
        """Take over what other ranks exported; returns the weights' version.

        Raises:
            ValueError: they do not fit this model.
        """
        if parked.shards[0]:
            await self.on_model(self._take_parked, parked.open())
        self.version = int(parked.about["version"])
        return self.version

    def _take_parked(self, source: OpenState) -> None:
        weights = source.whole("")
        self._check({name: tuple(tensor.shape) for name, tensor in weights.items()}, source.name)
        self._move_towards(weights, 1.0)

    @endpoint(device=True, joint=True)
    async def save(self, path: str | Path) -> str:
        """Write the weights as they are now; they may change again while the file is still being written.

        Args:
            path: a directory, made if need be.

        Returns:
            The path.

        Raises:
            OSError: it cannot be written; the text says what is missing.
        """
        if self.rank == 0:  # the others have the same
            version, weights = self.version, await self.on_model(_copies, self._exact)
            if (lease := lease_here()) is not None:
                lease.give()  # the writing needs no device
            await write_in_thread(partial(_write, Path(path), weights, version))
        return str(path)

    @endpoint(device=True, joint=True)
    async def restore(self, path: str | Path) -> int:
        """Take over weights that `save` wrote; returns their version.

        Args:
            path: as given to `save`; every rank reads it.

        Raises:
            FileNotFoundError: there are none.
            ValueError: they do not fit this model, or are damaged.
        """
        self.version = await self.on_model(self._read, Path(path) / FILE)
        return self.version

    def _read(self, file: Path) -> int:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there: no reference was saved, or its writing was not finished")
        try:
            with safe_open(file, framework="pt") as stored:
                self._check(
                    {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()},  # noqa: SIM118  # it is no mapping
                    str(file),
                )
                self._move_towards({name: stored.get_tensor(name) for name in stored.keys()}, 1.0)  # noqa: SIM118
                return int(stored.metadata()["version"])
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: resume from an earlier checkpoint ({error})") from error

    def _check(self, arrived: Mapping[str, tuple[int, ...]], which: str) -> None:
        """Raise ValueError if weights of these names and shapes are not this model's."""
        own = {name: tuple(parameter.shape) for name, parameter in self._exact.named_parameters()}
        if problems := misfits(own, arrived):
            raise ValueError(f"the weights of {which} do not fit {self._cell.name}: {problems}")

    @torch.no_grad()
    def _move_towards(self, others: Mapping[str, Tensor], share: float) -> None:
        """Go this share of the way to other weights."""
        self._as_made = False
        computing = dict(self.policy.model.named_parameters())
        for name, own in self._exact.named_parameters():
            if share == 1.0:
                own.copy_(others[name])
            else:
                own.lerp_(others[name].to(own), share)
            if computing[name] is not own:
                computing[name].copy_(own)

    def _held(self) -> Iterator[Tensor]:
        yield from held(self.policy)
        yield from held(self._exact)


class _Towards(Weights):
    """Weights to move towards; a rank must not take them for the same ones that are to be loaded."""

    __slots__ = ()

    @staticmethod
    def of(weights: Weights) -> _Towards:
        buckets, now = weights.buckets, weights.version_now
        return _Towards(weights.version, weights.layout, buckets, weights.checksums, version_now=now)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.version, (*self.checksums, -1)


def _policy(
    model: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    device: torch.device,
    settings: ForwardConfig,
) -> PolicyModel:
    """The model with weights that need no gradient, on its device."""
    dtype = dtype_of(settings.dtype)
    with ONE_AT_A_TIME:
        model_built = build_model(model, tokenizer, seed=seed, dtype=dtype)
        ways: dict[str, Any] = {"attention": settings.attention, "compiled": settings.compile}
        ways["pictures"] = pictures_of(model, tokenizer)
        policy = PolicyModel(model_built, chunk=settings.logprob_chunk, **ways)
        policy.computes_in = dtype
        policy.requires_grad_(False).to(device)
        policy.settle()
    return policy


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}


def _write(directory: Path, weights: Mapping[str, Tensor], version: int, stop: threading.Event) -> None:
    make_room(directory, sum(tensor.nbytes for tensor in weights.values()))
    write_tensors(directory / FILE, weights, {"version": str(version)}, stop)
