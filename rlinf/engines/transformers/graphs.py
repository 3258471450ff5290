"""Decoding on a GPU: the step is a CUDA graph, and its tokens are read back while the next one runs.

Flows in: texts to read, and which answers have ended. Flows out: logits after the texts, then a token per row and step.
Plain blocking code that wakes nobody, used by the decode batch in the compute thread; `end` may come from the event
loop and touches no tensor.

**Reading.** Texts are read one behind another and without padding, straight into pages. Equal texts come once, and go
to the pages of all answers that begin with them.

**A recording** reads and writes the addresses that it saw, and Python is not asked again: everything that differs from
one step to the next lies in tensors that stay. The rows are uploaded when they change; the tokens of a step are read by
the next one where they are; positions count themselves.

**A step late.** A step is started before the tokens of the one before are known here. So when an answer ends, its row
has one token more under way, which is dropped: the row's slot is -1 by then. Who joins, and where rows lie, changes
only when nothing is under way. What a row computes is still a function of the requests and of steps, never of time.

`rows_for` chooses between this way and that of `batch.py`, by the model, the machine and what the user wants.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.config.importing import mistake_in, resolve
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.batch import BandedRows, DecodeState, PrefillJob, Sampled, Slots
from rlinf.engines.transformers.drafts import Drafts
from rlinf.engines.transformers.model import Block, LeanForward, ModelForward
from rlinf.engines.transformers.paged_attention import (
    PAGE,
    PagedCache,
    paged_attention,
    prompt_attention,
    turn_and_keep,
)
from rlinf.engines.transformers.sampling import Allowed, Rules, choose_allowed
from rlinf.models.language.truth import Results
from rlinf.runtime.base.errors import WrongSetting

_TOKENS = 8192
"""Tokens read at once: enough to keep a GPU busy, and a bound on the memory it takes."""


def runs(jobs: Iterable[PrefillJob]) -> Iterator[list[PrefillJob]]:
    """Which texts to read together, in the order in which they came: at most `_TOKENS` tokens, or a single text."""
    run: list[PrefillJob] = []
    tokens = 0
    for job in jobs:
        if run and tokens + len(job.unread) > _TOKENS:
            yield run
            run, tokens = [], 0
        run.append(job)
        tokens += len(job.unread)
    if run:
        yield run


def read(forward: LeanForward, cache: PagedCache, jobs: Sequence[PrefillJob]) -> Tensor:
    """Read texts into the pages of their answers, which are there.

    Returns:
        Logits after each text, [texts, vocabulary].
    """
    device = forward.device
    unread = np.array([len(job.unread) for job in jobs])
    whole = np.array([len(job.text) for job in jobs])
    query_bounds, key_bounds = (np.concatenate([[0], np.cumsum(lengths)]) for lengths in (unread, whole))

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    ids = on_device(np.concatenate([job.unread for job in jobs]))
    spans = zip(whole - unread, whole, strict=True)
    positions = on_device(np.concatenate([np.arange(first, last) for first, last in spans]))
    source = on_device(_sources(jobs, key_bounds))
    place = on_device(np.concatenate([cache.places(slot, len(one.text)) for one in jobs for slot in one.slots]))
    bounds = on_device(query_bounds.astype(np.int32)), on_device(key_bounds.astype(np.int32))
    longest = [int(unread.max()), int(whole.max())]
    hidden = F.embedding(ids, forward.embedding)
    cos, sin = forward.angles(positions, longest[1])
    for number, block in enumerate(forward.blocks):
        turned, values = block.heads(hidden, cos, sin)
        keys, values = _with_past(jobs, query_bounds, number, turned[:, block.queries :], values)
        for pool, fresh in ((cache.keys[number], keys), (cache.values[number], values)):
            pool.index_copy_(0, place, fresh.index_select(0, source))
        query = turned[:, : block.queries].contiguous()
        attended = prompt_attention(query, keys, values, *bounds, longest, block.window or 0, block.scale)
        hidden = block.finish(hidden, attended.flatten(1))
    return forward.logits(hidden.index_select(0, on_device(query_bounds[1:] - 1)))


def _sources(jobs: Sequence[PrefillJob], key_bounds: np.ndarray) -> np.ndarray:
    """Which of the tokens, those read before included, goes to each place, int64."""
    parts = [
        np.arange(first, first + len(job.text))
        for first, job in zip(key_bounds[:-1].tolist(), jobs, strict=True)
        for _ in job.slots
    ]
    return np.concatenate(parts)


def _with_past(
    jobs: Sequence[PrefillJob], query_bounds: np.ndarray, layer: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values with those that were kept before them, [tokens, key-value heads, head size]."""
    if all(job.cached is None for job in jobs):
        return keys.contiguous(), values.contiguous()
    joined: tuple[list[Tensor], list[Tensor]] = [], []
    for job, first, last in zip(jobs, query_bounds[:-1].tolist(), query_bounds[1:].tolist(), strict=True):
        shared = len(job.text) - len(job.unread)
        for which, fresh in enumerate((keys, values)):
            if job.cached is not None and shared:
                joined[which].append(job.cached.pairs[layer][which][:, :shared].transpose(0, 1))
            joined[which].append(fresh[first:last])
    return torch.cat(joined[0]), torch.cat(joined[1])


class Recording(Protocol):
    """Work that can be done again."""

    @property
    def output(self) -> Tensor:
        """The tensor that the work returned; it holds what the newest replay computed until anything else is
        replayed."""
        ...

    def replay(self) -> None:
        """Do it again, on what its tensors hold now."""
        ...


class Recorder(Protocol):
    """Makes recordings, of which no two run at the same time."""

    def record(self, name: Hashable, work: Callable[[], Tensor]) -> Recording:
        """Record some work.

        Args:
            name: of the kind of work.
            work: runs no operation that waits for the device, and returns a tensor. It is done once before, so its own
                effects must not matter.
        """
        ...

    def clear(self) -> None:
        """Give back the memory of all recordings, which are not used again."""
        ...


class _CudaRecording:
    """A CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor):
        self.output = output
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


_ONE_AT_A_TIME = threading.Lock()
"""Torch records one graph at a time in a process: it waits for the device before, which a recording cannot bear."""


@contextmanager
def _own_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The thread's stream, on which it is again afterwards: where a recording fails, torch stays on that one's."""
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(current):
        yield current


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory, all on one stream: the allocator gives what one recording no
    longer uses to another of the same stream alone, and cuBLAS keeps a workspace for each stream.

    Args:
        device: on which.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def record(self, name: Hashable, work: Callable[[], Tensor]) -> Recording:
        with _ONE_AT_A_TIME, torch.cuda.device(self._device), _own_stream(self._device) as current:
            stream = self._stream = self._stream or torch.cuda.Stream(self._device)
            stream.wait_stream(current)
            # Compiles kernels, and makes this thread's cuBLAS handle and its workspace, which must not happen in a
            # recording. Before each: another thread has another handle, and other numbers have other kernels.
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads of this process do meanwhile, such as a trainer, is none of its business
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = work()
            current.wait_stream(stream)
        return _CudaRecording(graph, output)

    def clear(self) -> None:
        self._pool = None


class ReadBack:
    """A copy of a tensor that is on its way to the host.

    Args:
        source: copied as it is once all work asked for so far is done.
    """

    def __init__(self, source: Tensor):
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._host.copy_(source, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(source.device))

    def wait(self) -> np.ndarray:
        """Wait for it; returns the copy."""
        if self._event is not None:
            self._event.synchronize()
        values: np.ndarray = self._host.numpy()
        return values


def upload(target: Tensor, values: np.ndarray) -> None:
    """Copy an array into a tensor that stays where it is, without waiting for the device."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if target.is_cuda:  # page-locked memory of torch's own store, which keeps it until it has been read
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    target.copy_(host, non_blocking=True)


class Step:
    """The rows of a step on the device.

    Args:
        forward: the model.
        cache: of keys and values.
        rows: there may be.
    """

    def __init__(self, forward: LeanForward, cache: PagedCache, rows: int):
        self._forward, self._cache = forward, cache

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=forward.device)

        self.alive = numbers(rows)
        """1 for a row that counts, 0 for one that has ended or never was, int64 [rows]."""
        self.table = numbers(rows, cache.width, dtype=torch.int32)
        """Pages of each row, int32 [rows, width]."""
        self.sampled_tokens = numbers(3, rows, dtype=torch.int32)
        """Results of the step: tokens, and the bits of their log-probs and log masses in float32, int32 [3, rows]."""
        self._ids, self._positions, self._answered = numbers(rows), numbers(rows), numbers(rows)
        self._rules = Rules(
            seeds=numbers(rows),
            temperatures=numbers(rows, 1, dtype=torch.float32),
            greedy=numbers(rows, dtype=torch.bool),
            top_k=numbers(rows, 1),
            top_p=numbers(rows, 1, dtype=torch.float32),
            min_p=numbers(rows, 1, dtype=torch.float32),
        )

    def lay_out(
        self, ids: np.ndarray, positions: np.ndarray, answered: np.ndarray, alive: np.ndarray, draws: np.ndarray
    ) -> None:
        """Put rows here, from the first on, each [rows]: the token that each reads next, its position in its text,
        which token of its answer it draws next, whether it counts, and how it draws (`DRAWS`)."""
        count, rules = len(ids), self._rules
        for target, values in (
            (self._ids, ids),
            (self._positions, positions),
            (self._answered, answered),
            (self.alive, alive.astype(np.int64)),
            (rules.seeds, draws["seed"]),
            (rules.temperatures, np.where(draws["temperature"] == 0, np.float32(1), draws["temperature"])[:, None]),
            (rules.greedy, draws["temperature"] == 0),
            (rules.top_k, draws["top_k"][:, None]),
            (rules.top_p, draws["top_p"][:, None]),
            (rules.min_p, draws["min_p"][:, None]),
        ):
            assert target is not None
            upload(target[:count], values)

    def model(self, rows: int) -> Callable[[], Tensor]:
        """The model's part of a step of so many rows; gives logits, [rows, vocabulary]."""

        def work() -> Tensor:
            forward, cache = self._forward, self._cache
            alive, table = self.alive[:rows], self.table[:rows]
            positions = self._positions[:rows] * alive  # that of a row that has ended may have no page
            page = table.gather(1, (positions // cache.page)[:, None]).squeeze(1)
            place = (page * cache.page + positions % cache.page) * alive  # who has ended writes where nobody reads
            lengths = (positions + 1) * alive
            hidden = F.embedding(self._ids[:rows], forward.embedding)
            cos, sin = forward.angles(positions, 0)
            for number, block in enumerate(forward.blocks):
                hidden = self._layer(block, number, hidden, cos, sin, table, place, lengths)
            return forward.logits(hidden)

        return work

    def _layer(
        self,
        block: Block,
        number: int,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        table: Tensor,
        place: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        cache = self._cache
        pool = cache.keys[number], cache.values[number]
        query = turn_and_keep(*block.unturned(hidden), cos, sin, place, *pool, block.queries)
        attended = paged_attention(query, *pool, table, lengths, cache.page, block.window or 0, block.scale)
        return block.finish(hidden, attended.flatten(1))

    def draw(self, logits: Tensor, kind: Rules, allowed: Allowed | None = None) -> Tensor:
        """Draw from logits, [rows, vocabulary], and count; returns `told`.

        Args:
            logits: of the first rows.
            kind: rules of which those that are None concern no row.
            allowed: tokens that some rows may draw alone.
        """
        rows, own = len(logits), self._rules

        def some(part: Tensor | None, wanted: Tensor | None) -> Tensor | None:
            return None if wanted is None or part is None else part[:rows]

        rules = Rules(
            seeds=own.seeds[:rows],
            temperatures=some(own.temperatures, kind.temperatures),
            greedy=some(own.greedy, kind.greedy),
            top_k=some(own.top_k, kind.top_k),
            top_p=some(own.top_p, kind.top_p),
            min_p=some(own.min_p, kind.min_p),
        )
        padding = self._forward.padding
        tokens, logprobs, log_mass = choose_allowed(
            logits, rules, self._answered[:rows], allowed, blocks=True, padding=padding
        )
        alive = self.alive[:rows]
        self._ids[:rows].copy_(tokens)
        self._positions[:rows].add_(alive)
        self._answered[:rows].add_(alive)
        self.sampled_tokens[0, :rows].copy_(tokens)
        self.sampled_tokens[1, :rows].copy_(logprobs.contiguous().view(torch.int32))
        if log_mass is not None:
            self.sampled_tokens[2, :rows].copy_(log_mass.view(torch.int32))
        return self.sampled_tokens


def from_device(sampled_tokens: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, int64 [rows], their log-probs and log masses, float32 [rows] each, of what a step told."""
    logprobs, log_mass = sampled_tokens[1:, :rows].copy().view(np.float32)
    return sampled_tokens[0, :rows].astype(np.int64), logprobs, log_mass


_AHEAD = 16
"""Steps for which rows get pages ahead, so that the table is uploaded once in so many steps."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A step that was started and not told."""

    slots: np.ndarray
    """Slots of its rows, -1 for those that have ended since, int64 [rows]."""
    sampled_tokens: ReadBack
    """Tokens that it drew."""
    version: int
    """Version of the weights that it reads."""
    formed: bool
    """Answers of it have a form."""


class GraphedRows:
    """The rows of a decode batch, in graphs; see `decode_batch.Rows` for what the methods do.

    Args:
        forward: the model.
        recorder: makes the graphs.
        max_rows: answers in flight at a time.
        page: tokens of a page of keys and values.
        max_tokens: of keys and values that answers in flight may come to; None for no bound.
    """

    drafts: Drafts | None = None  # a recording is of one token a row

    def __init__(
        self,
        forward: LeanForward,
        recorder: Recorder,
        max_rows: int,
        page: int = PAGE,
        max_tokens: int | None = None,
    ):
        self._forward, self._recorder = forward, recorder
        self._sizes = row_sizes(max_rows)
        block = forward.blocks[0]
        shape = len(forward.blocks), block.keys, block.head
        self.cache = PagedCache(*shape, max_rows, forward.dtype, forward.device, page, max_tokens)
        """Keys and values."""
        self._step: Step | None = None
        self._recordings: dict[tuple[int, ...], Recording] = {}
        self._addresses: tuple[int, ...] = ()
        self._members: list[int] = []  # slots in the order of their rows, of answers that have been read
        self._rows = np.empty(0, dtype=np.int64)  # slot of each row, -1 for ballast
        self._tokens = np.zeros(max_rows + 1, dtype=np.int64)  # that each slot has in the cache once all steps are done
        self._kind: Rules | None = None
        self._formed = False  # rows have forms, so that what follows a token is known once it is here
        self._stale = True  # rows have come, or where something lies has changed
        self._ended = False  # rows have ended, and the device does not know
        self._under_way: _UnderWay | None = None

    @property
    def width(self) -> int:
        return len(self._rows)

    def read(self, jobs: Iterable[PrefillJob], records: Slots) -> Iterator[tuple[np.ndarray, Tensor, int]]:
        self._stale = True
        for run in runs(jobs):
            which = np.array([slot for job in run for slot in job.slots], dtype=np.int64)
            lengths = np.array([len(job.text) for job in run for _ in job.slots], dtype=np.int64)
            self._have_room(lengths, which)
            self._tokens[which] = lengths
            self._members += which.tolist()
            logits = read(self._forward, self.cache, run)
            source = torch.tensor([number for number, job in enumerate(run) for _ in job.slots])
            yield which, logits.index_select(0, source.to(logits.device)), sum(len(job.unread) for job in run)

    def joined(self) -> None:
        """Nothing to do: the next step lays the rows out."""

    def step(self, records: Slots) -> list[Sampled]:
        if self._changes():
            if (before := self.settle()) is not None:
                return [before]
            self._lay_out(records)
        assert self._step is not None
        assert self._kind is not None
        self._tell_device()
        recording = self._recordings[self._key(len(self._rows))]
        recording.replay()
        if self._outside:
            allowed = records.allowed(self._rows, self._forward.device)  # while the device computes
            self._step.draw(recording.output, self._kind, allowed)
        read_back = ReadBack(self._step.sampled_tokens)
        started = _UnderWay(self._rows.copy(), read_back, self._forward.version, self._formed)
        self._tokens[self._rows] += 1
        self._tokens[-1] = 0  # of ballast
        if self._formed:
            return [_sampled(started)]
        before, self._under_way = self.settle(), started
        return [] if before is None else [before]

    def settle(self) -> Sampled | None:
        before, self._under_way = self._under_way, None
        return None if before is None else _sampled(before)

    def end(self, slots: np.ndarray) -> None:
        self.cache.release(slots)
        ended_slots = set(slots.tolist())
        self._members = [slot for slot in self._members if slot not in ended_slots]
        for rows in (self._rows, *(() if self._under_way is None else (self._under_way.slots,))):
            rows[np.isin(rows, slots)] = -1
        self._ended = True

    def cached(self, slot: int, tokens: int) -> Sequence[tuple[Tensor, Tensor]]:
        return self.cache.copies(slot, tokens)

    def forget(self) -> None:
        self._under_way = None  # of rows that nobody asks for; what it writes lies before all that is asked from now on
        self.cache.clear()
        self._members, self._rows = [], np.empty(0, dtype=np.int64)
        self._stale = True

    def park(self) -> None:
        self.forget()
        self.cache.drop()
        self._step = None
        self._forget_recordings()

    def _changes(self) -> bool:
        """True if rows have to be laid out anew before the next step: they have come or moved, or fewer rows do."""
        if self._stale or self._size() < len(self._rows):
            return True
        slots = self._rows[self._rows >= 0]
        return not self.cache.fits(self._tokens[slots] + 1, slots)

    def _size(self) -> int:
        return next(size for size in self._sizes if size >= len(self._members))

    def _lay_out(self, records: Slots) -> None:
        """Give every answer a row, in memory for some steps ahead, with a recording of so many rows."""
        members = np.array(self._members, dtype=np.int64)
        self._have_room(self._tokens[members] + _AHEAD, members)
        step = self._step = self._step or Step(self._forward, self.cache, self._sizes[-1])
        size = self._size()
        self._rows = np.full(size, -1, dtype=np.int64)
        self._rows[: len(members)] = members
        rows = self._rows
        kind = self._kind = Rules.of(records.draws[rows], self._forward.device)
        self._formed = not records.constraints.keys().isdisjoint(self._members)
        self._forward.reach(self.cache.width * self.cache.page)
        if (addresses := self._forward.addresses()) != self._addresses:
            self._forget_recordings()
            self._addresses = addresses
        if (key := self._key(size)) not in self._recordings:
            step.alive.zero_()  # a recording is tried out, on rows that nobody has
            model = step.model(size)
            work = model if self._outside else lambda: step.draw(model(), kind)
            self._recordings[key] = self._recorder.record(key, work)
        answered = records.lengths[rows]
        step.lay_out(records.last[rows], self._tokens[rows], answered, rows >= 0, records.draws[rows])
        upload(step.table[:size], self.cache.table[rows])
        self._stale = self._ended = False

    def _tell_device(self) -> None:
        """Upload who has ended, and new pages."""
        assert self._step is not None
        rows = self._rows
        slots = rows[rows >= 0]
        if self._ended:
            upload(self._step.alive[: len(rows)], (rows >= 0).astype(np.int64))
            self._ended = False
        if ((self._tokens[slots] + 1) > self.cache.owned[slots] * self.cache.page).any():
            ahead = self._tokens[slots] + _AHEAD
            self.cache.extend(ahead if self.cache.fits(ahead, slots) else self._tokens[slots] + 1, slots)
            upload(self._step.table[: len(rows)], self.cache.table[rows])

    def _have_room(self, tokens: np.ndarray, slots: np.ndarray) -> None:
        if self.cache.extend(tokens, slots):
            self._step = None
            self._forget_recordings()

    def _forget_recordings(self) -> None:
        self._recordings.clear()
        self._recorder.clear()

    @property
    def _outside(self) -> bool:
        """Tokens are drawn after the recording and not in it."""
        return self._formed or (self._kind is not None and self._kind.top_k is not None)

    def _key(self, rows: int) -> tuple[int, ...]:
        kind = self._kind
        assert kind is not None
        return rows, kind.temperatures is not None, kind.greedy is not None, self._outside


def _sampled(step: _UnderWay) -> Sampled:
    tokens, logprobs, log_mass = from_device(step.sampled_tokens.wait(), len(step.slots))
    return Sampled(step.slots, tokens, logprobs, log_mass if step.formed else None, step.version)


def row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which steps are recorded, the last of them at least `max_rows`: 8, 16, 32, 48, 64, 96, ..."""
    sizes = [8, 16, 32]
    while sizes[-1] < max_rows:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + (power // 2))
    return sizes[: next(number for number, size in enumerate(sizes) if size >= max_rows) + 1]


_TEXTS, _STEPS = 8, 24
"""Made-up texts by which recorded steps are tried, and steps: enough numbers for one in a hundred to be no accident."""
Graphs = str | Literal[False]
"""Recording of steps as CUDA graphs: `auto`, where that is possible; `off`, never, which YAML reads as False; or the
dotted path of a `Recorder` that stands in for them on a CPU."""
_REHEARSED_PAGE = 16
"""Tokens of a page where a recorder of one's own records: a few rows then have several."""


def unknown(graphs: Any) -> str | None:
    """Why this is no value of `Graphs`; None if it is one."""
    if graphs in ("auto", "off", False):
        return None
    if not isinstance(graphs, str) or "." not in graphs:
        return f"graphs={graphs!r} must be auto, off, or the dotted path of a recorder"
    return None if (mistake := mistake_in(graphs)) is None else f"graphs={graphs}: {mistake}"


def rows_for(
    forward: ModelForward, max_rows: int, graphs: Graphs = "auto", max_tokens: int | None = None
) -> tuple[DecodeState, str]:
    """The rows of a decode batch, and which they are.

    Args:
        forward: the model.
        max_rows: answers in flight at a time.
        graphs: what the user wants.
        max_tokens: of keys and values that answers in flight may come to; None for no bound.

    Raises:
        ValueError: `graphs` is none of its values, or a recorder of one's own cannot record the model.
    """
    if (problem := unknown(graphs)) is not None:
        raise WrongSetting(f"rollout.engine_args: {problem}")
    if graphs and "." in graphs:
        if not isinstance(forward, LeanForward) or forward.device.type != "cpu":
            raise WrongSetting(f"rollout.engine_args: graphs={graphs} needs a Llama-like model on the CPU")
        name = "recorded steps, rehearsed on the CPU"
        return _graphed(forward, resolve(graphs)(), max_rows, _REHEARSED_PAGE, max_tokens, name)
    if graphs in ("off", False) or forward.device.type != "cuda":
        return BandedRows(forward), f"step by step on {forward.device.type}"
    if not isinstance(forward, LeanForward):
        return BandedRows(forward), f"step by step: {forward.slower}"
    if importlib.util.find_spec("triton") is None:
        return BandedRows(forward), "step by step: Triton, whose kernels recorded steps need, is not installed"
    recorder = CudaRecorder(forward.device)
    return _graphed(forward, recorder, max_rows, PAGE, max_tokens, "recorded steps (CUDA graphs)")


def _graphed(
    forward: LeanForward, recorder: Recorder, max_rows: int, page: int, max_tokens: int | None, name: str
) -> tuple[DecodeState, str]:
    if (why := unlike_whole(forward, GraphedRows(forward, recorder, _TEXTS, page))) is not None:
        return BandedRows(forward), f"step by step: recorded steps are not taken, {why}"
    return GraphedRows(forward, recorder, max_rows, page, max_tokens), name


@torch.inference_mode()
def unlike_whole(forward: LeanForward, rows: GraphedRows) -> str | None:
    """How far off the log-probs of recorded steps are beside what `Truth` allows; None if they are not. The rows are
    empty again afterwards."""
    texts = [(np.arange(60 - 3 * n) * 7919 + 31 * n) % forward.vocabulary for n in range(_TEXTS)]
    records = Slots(len(texts), None)
    slots = records.open([Request(n, text[:-1], Sampling(_STEPS + 1), seed=n) for n, text in enumerate(texts)])
    records.lengths[slots], records.last[slots] = 1, [text[-1] for text in texts]
    jobs = [PrefillJob(text[:-1], text[:-1], [slot], None) for slot, text in zip(slots.tolist(), texts, strict=True)]
    for _ in rows.read(jobs, records):
        pass
    tokens, logprobs = np.empty((2, len(texts), _STEPS))
    for number in range(_STEPS):
        while (sampled := next(iter(rows.step(records)), None) or rows.settle()) is None:
            pass
        order = np.argsort(sampled.slots)[np.argsort(np.argsort(slots))]
        tokens[:, number], logprobs[:, number] = sampled.tokens[order], sampled.logprobs[order]
        records.lengths[sampled.slots] += 1
        records.last[sampled.slots] = sampled.tokens
    rows.park()
    answers = tokens.astype(np.int64)
    whole = [np.concatenate(both) for both in zip(texts, answers, strict=True)]
    at = torch.from_numpy(answers)[..., None]
    truth = forward.truth(lambda: forward.whole(whole, _STEPS)[:, :-1].cpu().gather(2, at).squeeze(2))
    return truth.refuses(Results(torch.from_numpy(logprobs)))
