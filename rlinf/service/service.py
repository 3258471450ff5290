"""Sessions, models and samplers of a service's clients, on the roles of one `rlinf.Session`.

In: calls of the API, read (`app.py`). Out: ids at once, and results as promises. A model is a set of adapters on the
session's base, or all weights once more, with an optimizer of its own; its requests run in the order of their numbers.
A sampler answers by a saved checkpoint (`samplers.py`). Who wakes whom: see `promises.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.algos.token_losses import TokenLoss
from rlinf.config.load import InputError
from rlinf.config.text import ServeConfig
from rlinf.flows.session import TokenLosses, checked_data
from rlinf.runs.library.session import Session
from rlinf.service.checkpoints import OWNER, CheckpointPath, Refused, Store, expiry
from rlinf.service.journal import ANSWERS, SERVICE, Journal, Line, Record, Result, put_directory
from rlinf.service.keys import KEY, Busy, Keys
from rlinf.service.promises import FairTurns, InOrder, Lives, Promises, Work
from rlinf.service.samplers import BASE, SampleRequest, Samplers
from rlinf.service.wire import PassRequest, pass_result
from rlinf.training.optimizer import Adam
from rlinf.training.schedule import TokenPass

logger = logging.getLogger(__name__)
ALPHA = 32
"""Adapters' output is scaled by ALPHA / rank, as the API has it."""
_LONG_LINE = 2**24
"""Bytes of the journal of answers after which those that were fetched are left out of it."""
_SAVED = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""Results' types by the kind of checkpoint that was written."""
_NO_UNEMBED = (
    "the engine cannot have adapters of the output embedding: it holds others alone; or it answers by merged "
    "weights, and the output embedding of this base is its input embedding, too"
)
_QUANTUM = 4096
"""Tokens of each model that learn in a turn with others; more wait until those with fewer have had theirs."""


@dataclass(slots=True)
class Model:
    """A model of a client's."""

    id: str
    adapters: str
    """Name of its adapters in the trainer."""
    about: dict[str, Any]
    """`rank` (0: all weights), `attn`, `mlp`, `unembed` (since there are any of it), `seed`, `user_metadata`."""
    load: tuple[str, bool] | None = None
    """Path of the checkpoint that it began with, and whether with its optimizer."""
    order: InOrder = field(default_factory=InOrder)
    open: bool = False
    """Its adapters are in the trainer."""
    saved: int | None = None
    """Number of the request after which its state was saved last."""
    seconds: float = 0.0
    """Work since then, which a restart would do again."""
    stepped: bool = False
    """Its weights are others than then."""
    gathered: bool = False
    """Gradients wait for a step."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever uses its adapters."""
    last_turn: int = 0
    """The larger, the later it had its last turn."""
    used: Counter[str] = field(default_factory=Counter)
    """See `Service.usage`."""
    spoilt: str | None = None
    """Why the gradients since the last step are not what its client asked for."""
    missed: int | None = None
    """Number of the request that was last said to be missing."""
    last_request: float = field(default_factory=time.time)
    """When it was last asked, seconds since 1970."""

    @property
    def line(self) -> str:
        """Its line in the journal."""
        return self.id.replace(":", "-")

    @property
    def whole(self) -> bool:
        """It learns all weights."""
        return not self.about["rank"]

    def number(self, wish: int | None) -> int:
        """Number of a request: as its client has it, or the next one."""
        return self.order.last + 1 if wish is None else wish


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session."""

    id: str
    weights: str
    """Path of a checkpoint, or `BASE`."""


class Service:
    """Everything that clients have.

    Args:
        session: open, with adapters (`model.lora`) that nobody trains.
        config: names and limits.
        root: directory of checkpoints and of the journal.
        keys: of its clients.
        unembeds: models may have adapters of the output embedding; otherwise those that ask for them have none.
    """

    def __init__(self, session: Session, config: ServeConfig, root: Path, keys: Keys, *, unembeds: bool = True) -> None:
        self.session, self.config, self.store = session, config, Store(root / "checkpoints")
        self._unembeds = unembeds
        self.keys = keys
        self.owners: dict[str, str] = {}
        """Names of the keys with which sessions were made."""
        self._answers, self._unloaded = Counter[str](), Counter[str]()  # what answers and former models took
        self._took: dict[str, dict[str, int]] = {}  # of requests whose results are about to be noted
        self._moments = itertools.count(1)
        self.journal = Journal(root / "journal")
        self.promises = Promises(self._note)
        self.sessions: dict[str, list[str]] = {}
        """Models of each session of a client."""
        self._finished: set[str] = set()
        self._silent: set[str] = set()  # of these, those that ended because their clients were
        self._lives = Lives(self._lapse, config.session_seconds)
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self._names = itertools.count(1)
        self._entries = asyncio.Lock(), asyncio.Lock()  # of adapters, and of whole models, into the trainer
        self._left = asyncio.Event()  # somebody there has had a turn
        self._waiting: dict[str, str] = {}  # why models do not come in, by their ids
        self._samplers = Samplers(session, self.store)
        self._passes: FairTurns[TokenPass, list[np.ndarray]] = FairTurns(
            lambda passes: session.trainer.token_passes(passes), _QUANTUM
        )

    async def close(self) -> None:
        """Give up what is under way; what was promised is done after the next start."""
        self._lives.close()
        await self.promises.close()
        await self._passes.close()
        await self._samplers.close()
        await self.journal.close()

    # The journal --------------------------------------------------------------------------------------------------

    def _note(self, id: str, result: Result, again: bool) -> None:
        """Put a result into the journal. Answers wait for it unless it would be computed again to the same end."""
        wait = isinstance(result, dict) and result.get("type") != "optim_step"
        model = self.models.get(id.rpartition(":")[0])
        self.keys.end(id)
        used = self._took.pop(id, {})
        if again:
            used = {}
        if ":sample:" not in id:
            if model is not None:
                model.used.update(used)
            self.journal.result(SERVICE if model is None else model.line, id, result, wait=wait, used=used)
            return
        self._answers.update(used)
        self.journal.result(ANSWERS, id, result, wait=wait, used=used)
        if self.journal.sizes[ANSWERS] > _LONG_LINE:
            unfetched = {**self.promises.unfetched(":sample:"), id: result}
            totals = Record({"used": dict(self._answers)})
            self.journal.begin(ANSWERS, self.journal.numbers[ANSWERS] + 1, [totals], unfetched)

    def restore_answers(self, line: Line) -> None:
        """Have results of answers, and what they took."""
        self.promises.restore(line.results, ())
        for used in line.used:
            self._answers.update(used)

    def usage(self) -> dict[str, dict[str, int]]:
        """Count what each key took that may be seen: `tokens` of forward passes, of which `learned` ones, `steps`, and
        for answers tokens of `prompts` and `sampled` ones."""
        total = self._answers + self._unloaded
        for model in self.models.values():
            total.update(self._taken(model))
        rows: dict[str, dict[str, int]] = {}
        for name, count in sorted(total.items()):
            what, _, owner = name.partition(" ")
            if KEY.get() in (None, owner):
                rows.setdefault(owner, {})[what] = count
        return rows

    def _taken(self, model: Model) -> dict[str, int]:
        return {f"{what} {self.owner(model.id)}": count for what, count in model.used.items()}

    def owner(self, id: str) -> str | None:
        """Name of the key of a session, and of what is its: models, samplers and promises; None: there is no such."""
        return self.owners.get(id.partition(":")[0])

    def visible(self, id: str) -> bool:
        """Is this of a session that was made with the key that is shown?"""
        return KEY.get() in (None, self.owner(id))

    def checkpoint(self, path: CheckpointPath) -> dict[str, Any]:
        """Facts of a checkpoint that may be seen.

        Raises:
            Refused: there is none.
        """
        about = self.store.about(path)
        if KEY.get() not in (None, about.get("owner", OWNER)):
            raise Refused(f"there is no checkpoint {path}", 404)
        return about

    def restore(self, line: Line, base: str) -> None:
        """Have the sessions, models and samplers that there were; nothing of them is computed yet.

        Args:
            line: the service's; it begins anew with what is still there.
            base: what the base model is made of.

        Raises:
            InputError: they are of another base model.
        """
        for record in line.records:
            if record.facts.get("base", base) != base:
                raise InputError(
                    f"serve: models of this directory are of another base model ({record.facts['base'][:300]}); "
                    "take another name or output_dir, or the model and seed that they were made with"
                )
        absent = {id for id, result in line.results.items() if isinstance(result, dict) and "error" in result}
        absent |= {each.facts["model"] for each in line.records if each.facts["call"] == "unload_model"}
        for used in line.used:
            self._unloaded.update(used)
        live = [each for each in line.records if not absent & {each.facts.get("id"), each.facts.get("model")}]
        for record in live:
            facts = record.facts
            match facts["call"]:
                case "create_session":
                    self.sessions[facts["session"]] = []
                    self.owners[facts["session"]] = facts.get("owner", OWNER)
                case "finish_session":
                    self._finished.add(facts["session"])
                    if facts.get("silent"):
                        self._forget(facts["session"])
                case "create_model":
                    self._add(facts["id"], facts["about"], facts["load"] and tuple(facts["load"]))
                case "create_sampler":
                    self.samplers[facts["sampler"]] = Sampler(facts["sampler"], facts["weights"])
        for session, models in self.sessions.items():
            if session not in self._silent or self.models.keys() & models:  # those that were about to be unloaded
                self._lives.begin(session)
        self.promises.restore(line.results, ())
        for id, model in self.models.items():
            if id in self.promises:
                model.order = InOrder(1)
            else:
                self._make(model)
        records = [each for each in live if "id" not in each.facts or each.facts["id"] in line.results]
        first = Record({"call": "base", "base": base, "used": dict(self._unloaded)})
        records = [first, *(each for each in records if each.facts["call"] != "base")]
        results = {id: result for id, result in line.results.items() if id in self.models}
        self.journal.begin(SERVICE, line.number + 1, records, results)

    def restore_model(self, model: Model, line: Line) -> None:
        """Have a model where its last saved state is, and its results.

        Args:
            model: as `restore` made it.
            line: its own, whose requests are to be run again.
        """
        self.promises.restore(line.results, {each.facts["id"] for each in line.records if "id" in each.facts})
        for used in line.used:
            model.used.update(used)
        if any(each.facts.get("saved") for each in line.records):
            model.saved = line.number
            if model.id in self.promises and self.promises.over(model.id):
                model.order = InOrder(line.number + 1)

    async def _present(self, model: Model) -> None:
        """Have a model's adapters in the trainer, as its last saved state or its beginning has them."""
        model.last_turn = next(self._moments)
        if not model.open:
            async with self._entries[model.whole]:  # one after the other, so that each sees whom others let in
                await self._make_room(model)
                await self._open(model)

    async def _open(self, model: Model) -> None:
        trainer, about = self.session.trainer, model.about
        lora = None
        if not model.whole:
            lora = {"r": about["rank"], "alpha": ALPHA, "target_modules": _targets(about)}
        await trainer.open_model(model.adapters, lora, about["seed"])
        try:
            if model.saved is not None:
                await trainer.load_model(model.adapters, str(self.journal.state(model.line, model.saved)))
            elif model.load is not None:
                directory = self.store.directory(CheckpointPath.of(model.load[0]))
                await trainer.load_model(model.adapters, str(directory), model.load[1])
        except BaseException:  # whatever came, cancelled too: nobody shall find adapters that are not the model's
            await trainer.close_model(model.adapters)
            raise
        model.open = True

    async def _make_room(self, model: Model) -> None:
        """Have models of its kind that nobody asks for wait on the disk, the one first that was asked for longest ago.
        Where gradients wait for a step in all of them, one of all weights waits; adapters, which are small, come in."""
        room = self.config.max_whole if model.whole else self.config.max_open
        while True:
            there = [each for each in self.models.values() if each.open and each.whole == model.whole]
            held = [each for each in there if each.gathered or each.spoilt is not None]
            idle = [each for each in there if each not in held and not each.lock.locked()]
            if len(there) < room or not (idle or model.whole):
                return
            if idle:
                await self._park(min(idle, key=lambda each: each.last_turn))
                continue
            why = f"gradients of {held[0].id} wait for its optim_step" if held else "they are computing"
            self._waiting[model.id] = f"serve.max_whole={room} models of all weights are in memory, and {why}"
            if held:
                logger.warning("requests of %s wait: %s", model.id, self._waiting[model.id])
            self._left.clear()
            try:
                await self._left.wait()
            finally:
                del self._waiting[model.id]

    async def _park(self, model: Model) -> None:
        async with model.lock:
            if model.stepped:
                await self._save_state(model, model.order.over, {})
            model.open = False
            await self.session.trainer.close_model(model.adapters)

    @asynccontextmanager
    async def _using(self, model: Model) -> AsyncIterator[None]:
        """The model is in the trainer, and whoever enters has it alone; afterwards others may want its room."""
        try:
            async with model.lock:
                await self._present(model)
                yield
        finally:
            self._left.set()

    async def _save_state(self, model: Model, number: int, results: Mapping[str, Result]) -> None:
        """Save a model's state, from which a restart goes on.

        Args:
            model: without gathered gradients.
            number: of the request that it is after.
            results: of that one, by its id.
        """
        if model.saved == number:
            return
        directory = self.journal.state(model.line, number)
        partial = directory.with_name(f".{directory.name}")
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        await self.session.trainer.save_model(model.adapters, str(partial))
        await asyncio.to_thread(put_directory, partial, directory)
        for id, result in results.items():
            self.journal.result(model.line, id, result, wait=False)
            if self.promises.before(id) is None:
                model.used.update(self._took.pop(id, {}))
        results = {**self.promises.unfetched(f"{model.id}:"), **results}
        self.journal.begin(model.line, number, [Record({"saved": True, "used": dict(model.used)})], results)
        model.saved, model.seconds, model.stepped = number, 0.0, False

    # Sessions -----------------------------------------------------------------------------------------------------

    def create_session(self) -> str:
        """Begin a session of a client; its id."""
        id = secrets.token_hex(12)
        self.sessions[id], self.owners[id] = [], KEY.get() or OWNER
        self._lives.begin(id)
        self.journal.put(SERVICE, {"call": "create_session", "session": id, "owner": self.owners[id]})
        return id

    def check_session(self, id: Any, *, finished: bool = False) -> str:
        """See that a session is there, and goes on unless it may be `finished`.

        Raises:
            Refused: it is not.
        """
        if not isinstance(id, str) or id not in self.sessions or not self.visible(id):
            raise Refused(f"there is no session {str(id)[:200]!r}", 404)
        if id in self._finished and not finished:
            raise Refused(f"session {id} has finished{self._why(id)}", 410)
        self.sign(id)
        return id

    def sign(self, id: str) -> None:
        """Note that the client of a session, or of what is its, still asks for it."""
        self._lives.sign(id.partition(":")[0])

    def _why(self, id: str) -> str:
        """Why there is no such session, or nothing of it, any more; empty where its client knows."""
        silent = id.partition(":")[0] in self._silent
        return ": its client was silent for longer than serve.session_seconds" if silent else ""

    def _lapse(self, id: str) -> None:
        """End a session whose client is gone."""
        models = [self.models[each] for each in self.sessions[id] if each in self.models]
        logger.warning(
            "session %s ends with %d models: nothing came from its client for serve.session_seconds=%g",
            *(id, len(models), self.config.session_seconds),
        )
        for model in models:
            for number in range(max(1, model.order.over + 1), model.order.last + 1):
                if f"{model.id}:{number}" not in self.promises:  # what did not come will not, and others wait for it
                    self.refuse(model, number, Refused(f"session {id} has finished"), spoils=False)
            number = model.number(None)
            promise = self.unload(model, number)
            again = {"call": "unload_model", "seq_id": number, "body": {"model_id": model.id, "seq_id": number}}
            self.keep_request(model, promise, again)
        self._finished.add(id)
        self._forget(id)
        self.journal.put(SERVICE, {"call": "finish_session", "session": id, "silent": True})

    def _forget(self, id: str) -> None:
        """Have no samplers of a session whose client was silent."""
        self._silent.add(id)
        self.samplers = {name: each for name, each in self.samplers.items() if not name.startswith(f"{id}:")}

    def finish(self, id: str) -> list[Model]:
        """End a session: nothing more is begun in it; its models, which are to be unloaded.

        Raises:
            Refused: there is none.
        """
        if id in self._finished:
            return []
        self.check_session(id)
        self._finished.add(id)
        self.journal.put(SERVICE, {"call": "finish_session", "session": id})
        return [self.models[each] for each in self.sessions[id] if each in self.models]

    def check_base(self, name: Any) -> None:
        """See that a base model is the one that is served.

        Raises:
            Refused: it is not.
        """
        if name != self.config.model_name:
            raise Refused(f"there is no base model {str(name)[:200]!r}: this service has {self.config.model_name}", 404)

    # Models -------------------------------------------------------------------------------------------------------

    def create_model(
        self, session: str, number: int, about: dict[str, Any], load: tuple[str, bool] | None = None
    ) -> str:
        """Make a model; its id, under which the request is promised, too.

        Args:
            session: the client's.
            number: of the model within it.
            about: see `Model`; of a checkpoint, its own stand in its place.
            load: path of a checkpoint to begin with, and whether with its optimizer.

        Raises:
            Refused: something that cannot be.
        """
        id = f"{self.check_session(session)}:train:{number}"
        if id in self.models or id in self.promises:
            return id
        path = None if load is None else CheckpointPath.of(load[0])
        if path is not None:
            saved = self.checkpoint(path)
            about = {
                **{key: saved[key] for key in ("rank", "attn", "mlp", "seed")},
                "unembed": saved.get("unembed", False),
                "user_metadata": about["user_metadata"],
            }
        if about["rank"] == 0:
            if not self.config.max_whole:
                raise Refused(
                    "lora_config.rank=0, or no lora_config, asks for all weights, and this service trains adapters "
                    "alone (serve.max_whole=0)"
                )
        else:
            about = self._of_adapters(about, new=path is None)
        if len(self.models) >= self.config.max_models:
            raise Busy(f"this service has room for {self.config.max_models} models; unload one")
        model = self._add(id, about, load)
        self.journal.request(SERVICE, id, {"call": "create_model", "about": about, "load": load})
        self._make(model)
        return id

    def _of_adapters(self, about: dict[str, Any], *, new: bool) -> dict[str, Any]:
        """Facts by which a model of adapters is made; `new`, not from a checkpoint.

        Raises:
            Refused: something that cannot be.
        """
        if about["unembed"] and not self._unembeds:
            if not new or not (about["attn"] or about["mlp"]):
                raise Refused(f"lora_config.train_unembed: {_NO_UNEMBED}")
            about = {**about, "unembed": False}  # clients ask for it unless told otherwise; `weights_info` tells
        _targets(about)
        if not 1 <= about["rank"] <= self.config.max_rank:
            raise Refused(f"lora_config.rank={about['rank']} must be from 1 to {self.config.max_rank}")
        return about

    def _add(self, id: str, about: dict[str, Any], load: tuple[str, bool] | None) -> Model:
        model = self.models[id] = Model(id, f"m{next(self._names)}", about, load)
        self.sessions[id.partition(":")[0]].append(id)
        return model

    def _make(self, model: Model) -> None:
        async def make() -> Result:
            answer: Result = {"type": "create_model", "model_id": model.id}
            try:
                async with self._using(model):
                    pass
                if model.load is not None:
                    answer = {"type": "load_weights", "path": model.load[0], "model_id": model.id}
                    await self._save_state(model, 0, {})  # its checkpoint may be deleted
            except Exception:  # whatever it is: there is no such model, and its client is told
                self.models.pop(model.id, None)
                self.journal.end(model.line)
                raise
            return answer

        self.promises.make(model.id, lambda: model.order.run(0, make))

    def model(self, id: Any) -> Model:
        """A model of that id.

        Raises:
            Refused: there is none.
        """
        if (model := self.models.get(id)) is None or not self.visible(model.id):
            raise Refused(f"there is no model {str(id)[:200]!r}{self._why(str(id))}", 404)
        model.last_request = time.time()
        self.sign(model.id)
        return model

    def submit(
        self,
        model: Model,
        number: int | None,
        work: Work,
        *,
        tokens: int | None = 0,
        once: bool = False,
        computes: bool = True,
    ) -> str:
        """Promise the result of a request to a model; the same number again is the same request.

        Args:
            model: to which.
            number: of the request; None: the next one.
            work: gives its result, when its turn has come.
            tokens: of it; None: it is not counted for its key.
            once: it is not run again after a restart, if it had a result.
            computes: the model has to be in the trainer for it.

        Raises:
            Busy: its key has as many as it may have.
        """
        number = model.number(number)
        id = f"{model.id}:{number}"

        async def turn() -> Result:
            if once and (result := self.promises.before(id)) is not None:
                return result
            self.model(model.id)  # it may have been unloaded
            async with self._using(model) if computes else model.lock:
                began = time.monotonic()
                try:
                    return await work()
                finally:
                    model.seconds += time.monotonic() - began

        if tokens is not None:
            self._admit(id, tokens, last=number > model.order.last)
        model.order.promise(number)
        self.promises.make(id, lambda: model.order.run(number, turn))
        return id

    def _admit(self, id: str, tokens: int, *, last: bool = True) -> None:
        """Count a request for its key, unless it is there already.

        Args:
            id: of its promise.
            tokens: of it.
            last: nothing waits for it.

        Raises:
            Busy: its key has as many as it may have.
        """
        if id in self.promises:
            return
        owner = self.owners[id.partition(":")[0]]
        if last and KEY.get() is not None:  # what was promised before a restart, and what others wait for, has room
            self.keys.admit(owner, tokens)
        self.keys.begin(id, owner, tokens)

    def _fail_again(self, model: Model, number: int) -> None:
        """Let a request fail that failed before a restart: it may have been the machine's fault, and its client knows.

        Raises:
            Refused: it did.
        """
        before = self.promises.before(f"{model.id}:{number}")
        if isinstance(before, dict) and "error" in before:
            raise Refused(before["error"])

    def waits(self, id: str) -> str | None:
        """Why a request waits for other models, or for one that did not come; None where it does not."""
        if (why := self._waiting.get(id) or self._waiting.get(id.rpartition(":")[0])) is not None:
            return why
        if (number := self.missing(id)) is not None:
            return f"request {number} of this model, after which this one runs, did not come"
        return None

    def missing(self, id: str) -> int | None:
        """Number of a request that did not come, for which this one and all others of its model wait."""
        if (model := self.models.get(id.rpartition(":")[0])) is None or (number := model.order.missing) is None:
            return None
        if model.missed != number:  # said once: clients themselves say it after a quarter of an hour
            model.missed = number
            logger.warning("requests of %s wait for its request %d, which did not come", model.id, number)
        return number

    def refuse(self, model: Model, number: int | None, error: Exception, *, spoils: bool) -> None:
        """Let a request that was refused have its turn, so that those behind it do not wait for it.

        Args:
            model, number: as of `submit`.
            error: why it was refused.
            spoils: what it would have added to the gradient is missing.
        """
        number = model.number(number)

        async def refused() -> Result:
            if spoils:
                model.spoilt = str(error)
            raise Refused(str(error))

        id = self.submit(model, number, refused, tokens=None, computes=False)
        self.keep_request(model, id, {"call": "refuse", "seq_id": number, "error": str(error), "spoils": spoils})

    def keep_request(self, model: Model, id: str, facts: Mapping[str, Any], body: bytes = b"") -> None:
        """Have a promised request run after a restart, too.

        Args:
            model: to which.
            id: of the promise.
            facts, body: what is read then.
        """
        if not self.promises.over(id):
            self.journal.request(model.line, id, facts, body)

    def forward(self, model: Model, number: int | None, request: PassRequest) -> str:
        """Compute a sum over tokens, and unless it is forward only add its gradient; id of the promise.

        Raises:
            Refused, ValueError: what is wrong with it.
        """
        loss = TokenLoss.of(request.loss, request.settings)
        for place, datum in enumerate(request.data):
            if unread := sorted(datum.inputs.keys() - {*loss.inputs}):
                there = ", ".join(loss.inputs)
                raise Refused(f"datum {place}: {unread[0]} is read by nothing: {loss.name} has {there}")
        data = checked_data(request.data, loss, *self.session.limits)
        number, tokens = model.number(number), sum(len(datum.tokens) for datum in data)

        async def work() -> Result:
            mine = TokenPass(data, None if request.forward_only else loss, model.adapters)
            try:
                if not request.forward_only:
                    self._fail_again(model, number)
                logprobs = await self._passes.run(mine, tokens)
            except BaseException as error:  # cancelled, too: the gradient is not what was asked for
                if not request.forward_only:
                    model.spoilt = f"a forward_backward before it failed: {error}"
                raise
            model.gathered = model.gathered or not request.forward_only
            self._took[f"{model.id}:{number}"] = {"tokens": tokens, "learned": 0 if request.forward_only else tokens}
            losses = TokenLosses.of(data, loss, logprobs)
            return pass_result(losses.logprobs, {"loss:sum": losses.loss}, request.widths)

        return self.submit(model, number, work, tokens=tokens)

    def optim_step(self, model: Model, number: int | None, settings: Mapping[str, Any]) -> str:
        """Take a step; id of the promise.

        Raises:
            Refused, ValueError: what is wrong with its settings.
        """
        if unknown := sorted(settings.keys() - {each.name for each in fields(Adam)}):
            raise Refused(f"adam_params: there is no {unknown[0]}")
        adam, number = Adam(**settings), model.number(number)

        async def work() -> Result:
            spoilt, model.spoilt, model.gathered = model.spoilt, None, False
            if spoilt is not None:
                await self.session.trainer.forget_gradients(model.adapters)
                raise Refused(f"optim_step: the step was not taken and its gradients are forgotten, since {spoilt}")
            try:
                self._fail_again(model, number)
            except Refused:
                await self.session.trainer.forget_gradients(model.adapters)
                raise
            numbers = await self.session.trainer.optim_step(adam, model.adapters)
            model.stepped = True
            self._took[f"{model.id}:{number}"] = {"steps": 1}
            result: Result = {"type": "optim_step", "metrics": {key: float(value) for key, value in numbers.items()}}
            if model.seconds >= self.config.replay_seconds:
                try:
                    await self._save_state(model, number, {f"{model.id}:{number}": result})
                except OSError:  # the step is taken, and the journal has all that leads to it
                    logger.exception("the state of %s could not be saved after request %d", model.id, number)
            return result

        return self.submit(model, number, work)

    def save(self, model: Model, number: int | None, path: CheckpointPath, how: Mapping[str, Any]) -> str:
        """Write a checkpoint; id of the promise.

        Args:
            model, number: as of `submit`.
            path: its name.
            how: `ttl_seconds`, `user_metadata`, `overwrite`; for a sampler without a name, `sampler`: its id.

        Raises:
            Refused: an expiry that cannot be.
        """
        facts = {**model.about, "base_model": self.config.model_name, "expires": expiry(how.get("ttl_seconds"))}
        number = model.number(number)
        facts |= {
            "run_metadata": facts["user_metadata"],
            "user_metadata": how.get("user_metadata"),
            "request": f"{model.id}:{number}",
            "owner": self.owner(model.id),
        }
        optimizer = path.kind == "weights"

        async def work() -> Result:
            async def write(directory: Path) -> None:
                await self.session.trainer.save_model(model.adapters, str(directory), optimizer)

            sampler = how.get("sampler")
            await self.store.write(path, write, facts, over=bool(how.get("overwrite")) or sampler is not None)
            if sampler is None:
                return {"type": _SAVED[path.kind], "path": str(path)}
            self._add_sampler(sampler, str(path))
            return {"type": "save_weights_for_sampler", "path": str(path), "sampling_session_id": sampler}

        return self.submit(model, number, work, once=True)

    async def copy(self, session: str, number: int, source: CheckpointPath, ttl: Any) -> CheckpointPath:
        """Write a checkpoint once more, as of a run of a client's session; its path.

        Raises:
            Refused: there is no such checkpoint or session, the number is in use, or an expiry that cannot be.
        """
        run = f"{self.check_session(session)}:train:{number}"
        if run in self.models:
            raise Refused(f"model_seq_id={number} is in use")
        target = CheckpointPath(run, source.kind, source.name)
        self.checkpoint(source)
        await self.store.copy(source, target, expiry(ttl), self.owners[session])
        return target

    def load(self, model: Model, number: int | None, path: CheckpointPath, *, optimizer: bool) -> str:
        """Take a checkpoint over; id of the promise. One of the model's own may still be about to be saved.

        Raises:
            Refused: there is none.
        """
        if path.run != model.id:
            self.checkpoint(path)
        number = model.number(number)

        async def work() -> Result:
            self._fail_again(model, number)
            self.store.about(path)
            await self.session.trainer.load_model(model.adapters, str(self.store.directory(path)), optimizer)
            model.spoilt, model.gathered, model.stepped = None, False, True
            result: Result = {"type": "load_weights", "path": str(path), "model_id": model.id}
            await self._save_state(model, number, {f"{model.id}:{number}": result})  # the checkpoint may be deleted
            return result

        return self.submit(model, number, work)

    def unload(self, model: Model, number: int | None) -> str:
        """Forget a model when all its requests are over; id of the promise."""
        number = model.number(number)

        async def work() -> Result:
            if model.open:
                await self.session.trainer.close_model(model.adapters)
            del self.models[model.id]
            self._left.set()
            result: Result = {"type": "unload_model", "model_id": model.id}
            used = self._taken(model)
            self._unloaded.update(used)
            self.journal.put(SERVICE, {"call": "unload_model", "model": model.id, "used": used})
            self.journal.result(SERVICE, f"{model.id}:{number}", result, wait=True)
            self.journal.end(model.line)
            return result

        return self.submit(model, number, work, computes=False)

    # Answers ------------------------------------------------------------------------------------------------------

    def create_sampler(self, session: str, number: int, path: str | None) -> str:
        """Make a sampling session; its id.

        Raises:
            Refused: there is no such checkpoint.
        """
        id = f"{self.check_session(session)}:sample:{number}"
        if path is not None:
            self.checkpoint(CheckpointPath.of(path))
        if id not in self.samplers:
            self._add_sampler(id, path or BASE)
        return id

    def _add_sampler(self, id: str, weights: str) -> None:
        self.samplers[id] = Sampler(id, weights)
        self.journal.put(SERVICE, {"call": "create_sampler", "sampler": id, "weights": weights})

    def sampler(self, id: Any) -> Sampler:
        """A sampling session of that id.

        Raises:
            Refused: there is none.
        """
        if (sampler := self.samplers.get(id)) is None or not self.visible(sampler.id):
            raise Refused(f"there is no sampling session {str(id)[:200]!r}{self._why(str(id))}", 404)
        self.sign(sampler.id)
        return sampler

    def sample(self, sampler: Sampler, number: int | None, request: SampleRequest) -> str:
        """Answer; id of the promise."""
        owner = self.owner(sampler.id)
        id = f"{sampler.id}:{secrets.randbits(48) if number is None else number}"
        self._admit(id, len(request.prompt) + request.count * request.sampling["max_new_tokens"])

        async def work() -> Result:
            result, sampled = await self._samplers.answer(sampler.weights, request)
            self._took[id] = {f"prompts {owner}": len(request.prompt), f"sampled {owner}": sampled}
            return result

        self.promises.make(id, work)
        return id


def _targets(about: Mapping[str, Any]) -> Sequence[str]:
    """Layers that get adapters.

    Raises:
        Refused: none would.
    """
    kinds = {(True, True): ["all-linear"], (True, False): ["auto"], (False, True): ["all-but-attention"]}
    targets = [*kinds.get((about["attn"], about["mlp"]), []), *(["unembed"] if about.get("unembed") else [])]
    if not targets:
        raise Refused("lora_config: one of train_attn, train_mlp and train_unembed must be true")
    return targets
