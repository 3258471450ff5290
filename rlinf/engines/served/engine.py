"""An engine around an inference server: a child process that is driven over HTTP and may die at any moment.

Flows in: requests, of any number of `batches` and `answer` calls at once. Flows out: completions as they end. Who wakes
whom: the scheduler lets a request in as soon as there is room; then it is one task, which asks the server for what is
left of the answer and takes in tokens as they stream; its end wakes its call and makes room for the next. `pause`,
`sleep` and `load` close the gate, end what the server does and wait for the streams' ends; opening the gate wakes the
answers, which go on from their tokens. So does a server that is up again after it died.

All tokens are on this side (`Row`), with the version of the weights that made them. The server streams tokens and is
not believed about the end: this side knows the rules (`Sampling`), and a server that stops early, for an end token of
its own or because it dies, is asked to go on from the tokens that there are. Whatever interrupts an answer (a pause,
other weights, a crash) is handled in one way: it is asked for again, prompt and tokens as the prompt, and the rest as
the answer. The server has read most of it already, unless its weights have changed: then it has forgotten all it has
read (`Server.quiet`), for a token has one version, and pieces that stream while weights change would have two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlinf.data.routes import joined
from rlinf.data.weights import Weights, misfits
from rlinf.engines.base import (
    Completion,
    Engine,
    EngineSetup,
    Finish,
    Hear,
    PartialAnswer,
    Request,
    RequestRefused,
    Scheduler,
    StepStats,
    StopTexts,
    TextScores,
    named,
)
from rlinf.engines.grammars import Form, specials_of
from rlinf.engines.served.server import Ask, Chunk, Http, Lost, ModelFiles, Refused, Server, ServerChild, ServerSettings
from rlinf.models.language.lora import save_scaled
from rlinf.runtime.base.tasks import OwnDirectory, cancel_all, in_thread

logger = logging.getLogger(__name__)
E = TypeVar("E", bound="ServedEngine")

_TRIES = 6
"""Times in a row that an answer is lost without a new token before its call is told; some seconds, by the pauses."""
_PAUSE = 0.05
"""Seconds before the first try after a loss, doubled for each further one: a server's end is noticed within it."""
_DEATHS = 2
"""Times that the server dies over an answer in a row without a new token of it: it may be what the server dies of."""
_RECENT = 10.0
"""Seconds for which tokens prove that a server lives."""
_ASK_AGAIN = 0.25
"""Seconds before an abort is said again, for asks that were on their way when the server heard the first."""
_SEEDS = (1 << 31) - 1
"""Servers take seeds of 32 bits."""


class Row:
    """One request in flight.

    Args:
        request: what is asked.
        reader: finds stop texts; None where there are none.
        banned: tokens that a server is asked never to draw.
        padding: ids that the model has and its tokenizer has not. An answer is cut before one: servers would need a
            bias for hundreds of ids with every request, against what a trained model all but never draws.
        specials: special tokens, by which the form of an answer is written as a grammar.
    """

    def __init__(
        self,
        request: Request,
        reader: StopTexts | None,
        banned: tuple[int, ...] = (),
        padding: frozenset[int] = frozenset(),
        specials: Mapping[str, int] | None = None,
    ) -> None:
        self.request = request
        self.finish: Finish | None = None
        """Why it has ended; None while it goes on."""
        self.handed_over = False
        """Somebody else goes on with it: no completion comes of it here."""
        self.task: asyncio.Task[None] | None = None
        """Has the server answer it."""
        self.scope: asyncio.Timeout | None = None
        """Around the stream that is open for it, if one is."""
        self.lost = self.deaths = 0
        """Streams that were lost, and deaths of the server over it, in a row without a new token."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._routes: list[np.ndarray | None] = []  # as far as each ask told, from the beginning of the text
        self._reader, self._banned, self._padding = reader, banned, padding
        form = request.sampling.form
        self._grammar = Form.of(form).grammar(specials or {}) if form else None
        if (partial := request.partial) is not None:
            self.tokens, self.logprobs = partial.response_ids.tolist(), partial.logprobs.tolist()
            self.versions, self._routes = partial.versions.tolist(), [partial.routes]

    @property
    def over(self) -> bool:
        """Nothing more is wanted of a server."""
        return self.finish is not None or self.handed_over

    def interrupt(self) -> None:
        """Leave the stream that is open for it, at once."""
        if self.scope is not None:
            self.scope.reschedule(asyncio.get_running_loop().time())

    def ask(self, id: str) -> Ask:
        """The next request to the server: for the rest, or, before stop tokens and texts count, for the tokens up to
        there."""
        if self._grammar is not None:  # which a server can only begin: what was interrupted is made again
            self.tokens, self.logprobs, self.versions, self._routes = [], [], [], []
        sampling, answered = self.request.sampling, len(self.tokens)
        free = sampling.min_new_tokens - 1 - answered  # tokens that may be anything
        if free > 0:
            ends: tuple[int, ...] = ()
            count = min(free, sampling.max_new_tokens - answered)
        else:
            ends, count = sampling.stop_ids, sampling.max_new_tokens - answered
        rules = replace(sampling, max_new_tokens=count, min_new_tokens=0, stop_ids=ends, stop_texts=())
        ids, seed = [*self.request.prompt_ids.tolist(), *self.tokens], self.request.seed
        images, adapter = self.request.images, self.request.adapter
        return Ask(id, ids, rules, seed % _SEEDS, seed, answered, images, self._banned, self._grammar, adapter)

    def take(self, chunk: Chunk, version: int) -> int:
        """Append tokens up to where the answer ends; returns how many they were."""
        before = len(self.tokens)
        if chunk.routes is not None:
            self._routes.append(chunk.routes)
        if not all(one is not None and math.isfinite(one) for one in chunk.logprobs):
            raise FloatingPointError(
                f"request {self.request.id}: a log-prob among tokens {before} to {before + len(chunk.tokens) - 1}, "
                f"which weights of version {version} made, is no finite number: these weights are broken"
            )
        for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True):
            if self.over:
                break
            if int(token) in self._padding:
                self._cut(int(token))
                break
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            self.versions.append(version)
            self.finish = self._ended()
        return len(self.tokens) - before

    def _cut(self, token: int) -> None:
        """End before a token that the tokenizer has not."""
        if not self.tokens:
            raise FloatingPointError(
                f"request {self.request.id}: the answer begins with the token id {token}, which the tokenizer has not: "
                "the weights are broken, or another model's"
            )
        self.finish = "length"

    def _ended(self) -> Finish | None:
        sampling = self.request.sampling
        if len(self.tokens) >= sampling.min_new_tokens:
            if self.tokens[-1] in sampling.stop_ids:
                return "stop"
            if self._reader is not None and self._reader.complete(self.tokens, sampling.stop_texts):
                return "text"
        return "length" if len(self.tokens) >= sampling.max_new_tokens else None

    @property
    def partial(self) -> Request:
        """The request with its tokens so far."""
        more = self._joined_routes, self._log_mass
        return replace(self.request, partial=PartialAnswer(*self._arrays, *more) if self.tokens else None)

    @property
    def completion(self) -> Completion:
        """The answer as it ended."""
        assert self.finish is not None
        return Completion(self.request.id, *self._arrays, self.finish, self._joined_routes, self._log_mass)

    @property
    def _log_mass(self) -> np.ndarray | None:
        """Unknown of an answer of a form: servers tell log-probs over the tokens that it allowed, and no others."""
        return None if self._grammar is None else np.full(len(self.tokens), np.inf, np.float32)

    @property
    def _joined_routes(self) -> np.ndarray | None:
        """Experts of what was read so far; what no ask has told of is unknown there."""
        return joined(len(self.request.prompt_ids) + len(self.tokens) - 1, self._routes)

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32), np.array(self.versions, np.int32)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters that a server holds beside its model."""

    version: int
    """Version of these adapters."""
    files: OwnDirectory
    """In peft's format, for this server and the next."""


class ServedEngine(Engine):
    """An `Engine` around a server; `start` it before use.

    Args:
        setup: what every engine is made from.
        files: the model's, deleted at the end if they were made for this.
        deadline: seconds for a change of weights, for going to sleep and for waking, each; then the server counts as
            hung and is restarted.
    """

    hands_over = sleeps = through_host = streams = scores = True

    def __init__(self, setup: EngineSetup, files: ModelFiles, *, deadline: float = 300.0) -> None:
        self.max_rows, self.max_tokens, self.max_length = setup.max_rows, setup.max_tokens, setup.max_length
        self.vocabulary = files.vocabulary
        self.reads_text = setup.tokenizer is not None
        self.stats = StepStats()
        self._name, self._on_device = setup.name, setup.on_device
        self._banned = () if setup.pictures is None else setup.pictures.banned
        self._padding = frozenset(setup.padding)
        self._reader, self._specials = StopTexts.of(setup.tokenizer), specials_of(setup.tokenizer)
        self._files, self._deadline = files, deadline
        self._scheduler = Scheduler(setup.max_rows, setup.max_tokens, self.check_request, self._admit)
        self._rows: dict[Request, Row] = {}
        self._listeners: dict[Request, Hear] = {}
        self._streams: dict[str, Row] = {}  # asks that are open at the server
        self._names = (f"{secrets.token_hex(6)}-{number:012d}" for number in itertools.count())
        self._weights: Weights | None = None
        self._adapters: dict[str, Adapters] = {}
        self._paused = self._asleep = False
        self._reading = 0  # calls of the server's `score` that are under way
        self._changing = asyncio.Lock()  # one change of the server's state at a time
        self._changed = asyncio.Event()  # the gate was opened, or a stream ended
        self._unwanted: list[str] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._version = 0
        self._last = 0.0  # when tokens came last, or the first was asked for, by the loop's clock

    async def start(self, child: ServerChild) -> None:
        """Start the server. Raises `ChildDied` if it does not come up.

        Args:
            child: its process, then to be found under that name; made with `prepare` and `busy` of this engine.
        """
        self.child = child
        self.seeded, self.routes, self.forms = child.server.seeded, child.server.routes, child.server.forms
        self.reads_images = bool(self._banned) and child.server.reads_images
        await child.start()

    @property
    def version(self) -> int:
        return self._version

    @property
    def adapters(self) -> Mapping[str, int] | None:  # type: ignore[override]  # read here, never set
        if self.child.server.adapters is None:
            return None
        return {name: each.version for name, each in self._adapters.items()}

    @property
    def unembeds(self) -> bool:  # type: ignore[override]  # read here, never set
        return self.child.server.adapters is not None and self.child.server.adapters.unembeds

    # Answering ---------------------------------------------------------------------------------------------------

    def batches(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[list[Completion], None]:
        return self._scheduler.batches(requests, self._advance, self._drop)

    async def answer(self, request: Request, hear: Hear | None = None) -> Completion:
        if hear is not None and not request.sampling.form:  # of which what was heard may be made again
            self._listeners[request] = hear  # before it enters: there may be room for it at once
        try:
            return await self._scheduler.answer(self._scheduler.enter(request), self._advance, self._drop)
        finally:
            self._listeners.pop(request, None)

    async def _advance(self) -> bool:
        return False  # tasks do the work

    async def _drop(self, requests: Sequence[Request]) -> None:
        rows = [self._rows.pop(request) for request in requests if request in self._rows]
        await cancel_all([row.task for row in rows if row.task is not None])

    def _admit(self) -> None:
        """Have a task answer each request for which there is room."""
        for request in self._scheduler.take_next():
            row = self._rows[request] = Row(request, self._reader, self._banned, self._padding, self._specials)
            context = self._scheduler.owners[request].context_of(request).copy()
            row.task = asyncio.create_task(
                self._answer(row), name=f"answer {request.id} of {self._name}", context=context
            )

    async def _answer(self, row: Row) -> None:
        failure: Exception | None = None
        try:
            await self._complete(row)
        except Exception as error:
            failure = error
        finally:
            self._rows.pop(row.request, None)
            call = self._scheduler.left(row.request)
            if call is not None and failure is not None:
                call.failed(row.request, failure)
            elif call is not None and row.finish is not None and not row.handed_over:
                call.ended(row.request, row.completion)
            self._scheduler.wake()

    async def _complete(self, row: Row) -> None:
        """Have the server answer until the answer has ended."""
        try:
            while not row.over:
                if self._paused or self._changing.locked():
                    await self._change()
                    continue
                async with self._on_device():  # who shares its devices is woken by asking for them
                    await self.child.up()
                    if self._asleep:
                        await self._change()
                    if not (self._asleep or self._paused or self._changing.locked() or row.over):
                        await self._try(row)
        except Refused as error:
            raise RequestRefused(f"request {row.request.id}: {error}") from error
        except Exception as error:
            error.add_note(f"the engine was answering {named([row.request])}")
            raise

    async def _try(self, row: Row) -> None:
        """Ask once; after a failure, wait until it can be tried again, or raise `Lost` where it was tried enough."""
        before, restarts = len(row.tokens), self.child.child.restarts
        try:
            await self._stream(row)
        except Lost as error:
            row.lost = row.lost + 1 if len(row.tokens) == before else 1
            if row.lost >= _TRIES:
                raise
            await self.child.after(error, _PAUSE * 2**row.lost)
            row.deaths = 0 if len(row.tokens) > before else row.deaths + self.child.child.restarts - restarts
            if row.deaths >= _DEATHS:
                raise
        else:
            if len(row.tokens) > before or row.over or self._paused or self._changing.locked():
                row.lost = 0
                return
            row.lost += 1
            if row.lost >= _TRIES:
                raise Lost(f"{self.child.server.kind} ended the answer {row.lost} times without a token")

    async def _stream(self, row: Row) -> None:
        """One ask, from its beginning to its end, whatever ends it."""
        ask = row.ask(next(self._names))
        version = self._version if ask.adapter is None else self._adapters[ask.adapter].version
        if not self._streams:
            self._last = asyncio.get_running_loop().time()
        self._streams[ask.id] = row
        ended = False
        try:
            async with asyncio.timeout(None) as row.scope:
                async with contextlib.aclosing(self.child.server.generate(self.child.http, ask)) as chunks:
                    async for chunk in chunks:
                        self._count(new := row.take(chunk, version))
                        self._tell(row, new)
                        if row.finish == "text":  # which the server does not know of
                            break
                    else:
                        ended = True
        except TimeoutError:  # `Row.interrupt`
            pass
        except Lost:
            ended = True
            raise
        finally:
            row.scope = None
            del self._streams[ask.id]
            if not ended:  # the server goes on with it
                self._sweep(ask.id)
            self._wake()

    def _tell(self, row: Row, new: int) -> None:
        """Tell a listener the newest tokens, but for the one that ended the answer."""
        hear = self._listeners.get(row.request)
        if hear is not None and (tokens := row.tokens[len(row.tokens) - new : -1 if row.finish else None]):
            hear(tokens)

    def _count(self, tokens: int) -> None:
        """Note how fast tokens come: so many steps of all rows as each has got tokens on average."""
        now, rows = asyncio.get_running_loop().time(), len(self._streams)
        if tokens:
            steps = tokens / rows
            self.stats = self.stats.stepped(rows, (now - self._last) / steps, steps)
        self._last = now

    async def score(self, texts: Sequence[np.ndarray], top: int = 0) -> list[TextScores]:
        for ids in texts:
            # a server reads no text that leaves no room for an answer
            if self.max_length is not None and len(ids) >= self.max_length:
                raise RequestRefused(
                    f"a text of {len(ids)} tokens is to be scored, and {type(self).__name__} takes "
                    f"{self.max_length - 1}"
                )
            self._check_ids("a text that is to be scored", ids)
        none = np.empty(0, np.float32), np.empty(0, np.int64)
        empty = TextScores(*none, none[1].reshape(0, top), none[0].reshape(0, top))
        longer = [ids for ids in texts if len(ids) > 1]
        scores = iter(await self._scored(longer, top) if longer else ())
        return [next(scores) if len(ids) > 1 else empty for ids in texts]

    async def _scored(self, texts: Sequence[np.ndarray], top: int) -> list[TextScores]:
        """Ask the server for scores, again where it failed."""
        lost = 0
        while True:
            if self._paused or self._changing.locked():
                await self._change()
                continue
            async with self._on_device():  # as in `_complete`
                await self.child.up()
                if self._asleep:
                    await self._change()
                if self._asleep or self._paused or self._changing.locked():
                    continue
                self._reading += 1
                try:
                    return await self.child.server.score(self.child.http, texts, top)
                except Refused as error:
                    raise RequestRefused(f"a text that is to be scored: {error}") from error
                except Lost as error:
                    failure = error
                finally:
                    self._reading -= 1
                    self._wake()
                lost += 1
                if lost >= _TRIES:
                    raise failure
                await self.child.after(failure, _PAUSE * 2**lost)

    # Ending and handing over -------------------------------------------------------------------------------------

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        wanted = None if ids is None else set(ids)
        self._scheduler.abort(wanted)
        for row in [row for row in self._rows.values() if wanted is None or row.request.id in wanted]:
            row.finish = row.finish or "abort"
            row.interrupt()
        self._wake()

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids) - self._scheduler.callers.ids
        waiting = self._scheduler.withdraw(wanted)
        rows = [row for row in self._rows.values() if row.request.id in wanted and not row.over]
        for row in rows:
            row.handed_over = True
            row.interrupt()
        self._wake()
        return [*waiting, *(row.partial for row in rows)]

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids)
        rows = [row for row in self._rows.values() if row.request.id in wanted and not row.over]
        return [*self._scheduler.waiting(wanted), *(row.partial for row in rows)]

    # The gate ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._scheduler.wake()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()

    @contextlib.asynccontextmanager
    async def _standstill(self, adapter: str | None = None) -> AsyncIterator[None]:
        """In it the server is up, and does nothing but what is asked of it here; with a name of adapters, nothing by
        those, while answers by others that it has begun go on."""
        async with self._changing:
            try:
                await self._end_streams(adapter)
                await self.child.up()
                yield
            finally:
                asyncio.get_running_loop().call_soon(self._wake)  # when the lock is open

    async def _end_streams(self, adapter: str | None = None) -> None:
        """Have the server end all asks, or those by adapters of a name, and wait until their streams have ended; the
        rows keep their tokens."""
        loop = asyncio.get_running_loop()
        while adapter is None and self._reading:  # which ends by itself, by a deadline
            await self._change()
        until = loop.time() + self._deadline
        while streams := self._open_streams(adapter):
            with contextlib.suppress(Lost, Refused):  # a server that dies ends its streams, too
                await self.child.server.abort(self.child.http, None if adapter is None else streams)
            again = min(loop.time() + _ASK_AGAIN, until)
            while (streams := self._open_streams(adapter)) and loop.time() < again:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(again):
                        await self._change()
            if streams and loop.time() >= until:
                await self.child.restart()

    def _open_streams(self, adapter: str | None) -> list[str]:
        """Asks that are open at the server: all, or those by adapters of a name."""
        return [id for id, row in self._streams.items() if adapter in (None, row.request.adapter)]

    def _sweep(self, id: str) -> None:
        """Have the server told that nobody wants an ask any more: by one task, for all that come up meanwhile."""
        self._unwanted.append(id)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._tell_unwanted(), name=f"unwanted answers of {self._name}")

    async def _tell_unwanted(self) -> None:
        try:
            while self._unwanted:
                ids, self._unwanted = self._unwanted, []
                with contextlib.suppress(Lost, Refused):
                    await self.child.server.abort(self.child.http, ids)
        finally:
            self._sweeper = None

    async def pause(self) -> None:
        self._paused = True
        await self._end_streams()

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    # Weights and memory ------------------------------------------------------------------------------------------

    async def check(self, weights: Weights) -> None:
        if weights.adapter is not None:
            if self.child.server.adapters is None:
                raise ValueError(
                    f"adapters {weights.adapter}: {self._name} holds none beside its model: set "
                    "rollout.engine_args.adapter_rank to their highest rank"
                )
            self.child.server.adapters.check(weights, self._files.shapes)
        elif problems := misfits(self._files.shapes, weights.shapes):
            raise ValueError(f"weights of version {weights.version} do not fit {self._name}: {problems}")

    async def load(self, weights: Weights) -> None:
        await self.check(weights)
        if weights.adapter is not None:
            await self._load_adapters(weights, weights.adapter)
            return
        async with self._standstill():
            before, weights = self._weights, self._files.as_saved(weights)
            self._weights = weights  # what a server that dies now is started again with
            if not self._asleep:
                try:
                    await self._altered(lambda: self.child.server.update(self.child.http, weights))
                except Refused:
                    self._weights = before
                    await self.child.restart()  # part of them may be in use
                    raise
            self._version = weights.version

    async def _load_adapters(self, weights: Weights, name: str) -> None:
        """Hold adapters; what is being answered by others of their name goes on with these."""
        files = OwnDirectory("adapters")
        try:
            await in_thread(lambda: save_scaled(files.path, weights.named()))
            async with self._standstill(name):
                await self._load_files(name, files.path)
                before, self._adapters[name] = self._adapters.get(name), Adapters(weights.version, files)
        except BaseException:
            files.remove()
            raise
        if before is not None:
            before.files.remove()

    async def _load_files(self, name: str, directory: Path) -> None:
        """Have the server hold adapters; one that dies or hangs over them is asked a second time when it has been
        started again with those that were there."""
        assert self.child.server.adapters is not None
        for last in (False, True):
            try:
                async with asyncio.timeout(self._deadline):
                    return await self.child.server.adapters.load(self.child.http, name, directory)
            except (Lost, TimeoutError) as error:
                logger.warning("%s: its server is started again, over adapters %s: %s", self._name, name, error)
                await self.child.restart()
                if last:
                    raise

    async def unload(self, adapter: str) -> None:
        async with self._standstill(adapter):
            waits = any(one.adapter == adapter for call in self._scheduler.calls for one in call.waiting)
            if waits or adapter not in self._adapters or any(one.adapter == adapter for one in self._rows):
                raise ValueError(f"adapters {adapter} are not here, or somebody is answered by them")
            place = self.child.server.adapters
            assert place is not None
            self._adapters.pop(adapter).files.remove()
            await self._altered(lambda: place.unload(self.child.http, adapter), quiet=False)

    async def sleep(self) -> None:
        if not self._asleep:
            self._asleep = True
            async with self._standstill():
                await self._altered(lambda: self.child.server.release(self.child.http))

    async def wake(self) -> None:
        if self._asleep:
            async with self._standstill():
                self._asleep = False
                await self._altered(lambda: self.child.server.regain(self.child.http, self._weights))

    async def _altered(self, alter: Callable[[], Awaitable[None]], *, quiet: bool = True) -> None:
        """Change the server's state. If it dies over that, or is not done by the deadline, it is started again, and
        `prepare` brings it to the state that is meant."""
        try:
            async with asyncio.timeout(self._deadline):
                if quiet:
                    await self.child.server.quiet(self.child.http)
                await alter()
        except (Lost, TimeoutError) as error:
            what = str(error) or f"it was not done after {self._deadline:g} s"
            logger.warning("%s: its server is started again: %s", self._name, what)
            await self.child.restart()

    async def prepare(self, http: Http) -> None:
        """Bring a server that was just started to the state of the one before it."""
        if self._weights is not None:
            await self.child.server.update(http, self._weights)
        if (place := self.child.server.adapters) is not None:
            for name, each in self._adapters.items():
                await place.load(http, name, each.files.path)
        if self._asleep:
            await self.child.server.release(http)

    def busy(self) -> bool:
        """The server was just heard of, sleeps or is being changed, and need not be asked whether it lives."""
        recent = self._streams and asyncio.get_running_loop().time() - self._last < _RECENT
        return bool(recent) or self._asleep or self._changing.locked()

    async def close(self) -> None:
        if self._sweeper is not None:
            await cancel_all([self._sweeper])
        await self.child.stop()
        self._files.remove()
        for each in self._adapters.values():
            each.files.remove()


async def start_server(
    kind: type[E], server: Server, setup: EngineSetup, files: ModelFiles, settings: ServerSettings
) -> E:
    """Start a server, and make the engine around it.

    Args:
        kind: class of the engine.
        server: to be started.
        setup: what every engine is made from.
        files: the model's; deleted if the server does not come up, where they were made for it.
        settings: how the server is kept.

    Raises:
        ChildDied: the server did not come up; with the last lines of its output.
    """
    engine = kind(setup, files, deadline=settings.deadline)
    log = None if setup.directory is None else Path(setup.directory) / f"{server.kind.lower()}-{setup.name}.log"
    child = ServerChild(
        server,
        files.directory,
        f"{server.kind} of {setup.name}",
        engine.prepare,
        engine.busy,
        settings,
        log=log,
    )
    try:
        await engine.start(child)
    except BaseException:
        files.remove()
        raise
    return engine
