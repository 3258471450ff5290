"""Sessions, models and samplers of a service's clients, on the roles of one `rlinf.Session`.

In: calls of the API, read (`app.py`). Out: ids at once, and results as promises. A model is a set of adapters on the
session's base with an optimizer of its own; its requests run in the order of their numbers. A sampler answers by a
saved checkpoint, whose adapters are merged and published to the rollout when it is asked. Who wakes whom: see
`promises.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.agents.llm import RolloutModel
from rlinf.algos.token_losses import TokenLoss
from rlinf.config.text import ServeConfig
from rlinf.data.rng import mix
from rlinf.data.sample import Datum
from rlinf.flows.session import TokenLosses, checked_data
from rlinf.runs.library.session import Session
from rlinf.service.checkpoints import CheckpointPath, Refused, Store, expiry
from rlinf.service.promises import InOrder, Promises, Result, Switching, Work
from rlinf.service.wire import PassRequest, pass_result, sample_result
from rlinf.training.optimizer import Adam

ALPHA = 32
"""Adapters' output is scaled by ALPHA / rank, as the API has it."""
_OPEN_SAMPLERS = 4
"""Checkpoints whose adapters stay in memory, to be published or asked for log-probs again."""
BASE = ""
"""In place of a checkpoint: the base model."""


@dataclass(slots=True)
class Model:
    """A model of a client's."""

    id: str
    adapters: str
    """Name of its adapters in the trainer."""
    about: dict[str, Any]
    """`rank`, `attn`, `mlp`, `seed`, `user_metadata`."""
    order: InOrder = field(default_factory=InOrder)
    spoilt: str | None = None
    """Why the gradients since the last step are not what its client asked for."""
    last_request: float = field(default_factory=time.time)
    """When it was last asked, seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session."""

    id: str
    weights: str
    """Path of a checkpoint, or `BASE`."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Answers that were asked for."""

    prompt: np.ndarray
    count: int
    seed: int | None
    sampling: Mapping[str, Any]
    """For the rollout's `answer`."""
    prompt_logprobs: bool = False
    last: int | None = None
    """So many of the prompt's last tokens get log-probs; None: all but the first."""


class Service:
    """Everything that clients have.

    Args:
        session: open, with adapters (`model.lora`) that nobody trains.
        config: names and limits.
        root: directory of checkpoints.
    """

    def __init__(self, session: Session, config: ServeConfig, root: Path) -> None:
        self.session, self.config, self.store = session, config, Store(root)
        self.promises = Promises()
        self.sessions: dict[str, list[str]] = {}
        """Models of each session of a client."""
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self._names = itertools.count(1)
        self._published = itertools.count(session.step + 1)
        self._opened: dict[str, str] = {}  # adapters in the trainer, by path of a checkpoint
        self._version = 0
        self._rollout = RolloutModel(lambda: session.rollout)
        self._weights = Switching(self._publish)

    async def close(self) -> None:
        """Give up what is under way."""
        await self.promises.close()
        await self._weights.close()

    # Sessions -----------------------------------------------------------------------------------------------------

    def create_session(self) -> str:
        """Begin a session of a client; its id."""
        id = secrets.token_hex(12)
        self.sessions[id] = []
        return id

    def check_session(self, id: Any) -> str:
        """See that a session is there.

        Raises:
            Refused: it is not.
        """
        if id not in self.sessions:
            raise Refused(f"there is no session {str(id)[:200]!r}", 404)
        return str(id)

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
        if id in self.models:
            return id
        path = None if load is None else CheckpointPath.of(load[0])
        if path is not None:
            saved = self.store.about(path)
            about = {
                **{key: saved[key] for key in ("rank", "attn", "mlp", "seed")},
                "user_metadata": about["user_metadata"],
            }
        targets = _targets(about)
        if not 1 <= about["rank"] <= self.config.max_rank:
            raise Refused(f"lora_config.rank={about['rank']} must be from 1 to {self.config.max_rank}")
        if len(self.models) >= self.config.max_models:
            raise Refused(f"this service has room for {self.config.max_models} models; unload one", 429)
        model = self.models[id] = Model(id, f"m{next(self._names)}", about)
        self.sessions[session].append(id)

        async def make() -> Result:
            trainer = self.session.trainer
            lora = {"r": about["rank"], "alpha": ALPHA, "target_modules": targets}
            try:
                await trainer.open_model(model.adapters, lora, about["seed"])
                if path is not None and load is not None:
                    await trainer.load_model(model.adapters, str(self.store.directory(path)), load[1])
            except BaseException:
                self.models.pop(id, None)
                raise
            answer = {"type": "create_model"} if load is None else {"type": "load_weights", "path": load[0]}
            return {**answer, "model_id": id}

        self.promises.make(id, lambda: model.order.run(0, make))
        return id

    def model(self, id: Any) -> Model:
        """A model of that id.

        Raises:
            Refused: there is none.
        """
        if (model := self.models.get(id)) is None:
            raise Refused(f"there is no model {str(id)[:200]!r}", 404)
        model.last_request = time.time()
        return model

    def submit(self, model: Model, number: int | None, work: Work) -> str:
        """Promise the result of a request to a model; the same number again is the same request.

        Args:
            model: to which.
            number: of the request; None: the next one.
            work: gives its result, when its turn has come.
        """
        number = model.order.last + 1 if number is None else number
        id = f"{model.id}:{number}"
        self.promises.make(id, lambda: model.order.run(number, work))
        return id

    def refuse(self, model: Model, number: int | None, error: Exception) -> None:
        """Let a request that was refused have its turn, so that those behind it do not wait for it; what it would have
        added to the gradient is missing."""

        async def refused() -> Result:
            model.spoilt = str(error)
            raise Refused(str(error))

        self.submit(model, number, refused)

    def forward(self, request: PassRequest) -> str:
        """Compute a sum over tokens, and unless it is forward only add its gradient; id of the promise.

        Raises:
            Refused, ValueError: what is wrong with it.
        """
        model = self.model(request.model_id)
        try:
            loss = TokenLoss.of(request.loss, request.settings)
            for number, datum in enumerate(request.data):
                if unread := sorted(datum.inputs.keys() - {*loss.inputs}):
                    raise Refused(
                        f"datum {number}: {unread[0]} is read by nothing: {loss.name} has {', '.join(loss.inputs)}"
                    )
            data = checked_data(request.data, loss, *self.session.limits)
        except (TypeError, ValueError) as error:
            self.refuse(model, request.seq_id or None, error)
            raise Refused(str(error)) from None

        async def work() -> Result:
            trainer = self.session.trainer
            if request.forward_only:
                logprobs = await trainer.forward(data, model.adapters)
            else:
                try:
                    logprobs = await trainer.forward_backward(data, loss, model.adapters)
                except BaseException as error:
                    model.spoilt = f"a forward_backward before it failed: {error}"
                    raise
            losses = TokenLosses.of(data, loss, logprobs)
            return pass_result(losses.logprobs, {"loss:sum": losses.loss})

        return self.submit(model, request.seq_id or None, work)

    def optim_step(self, model: Model, number: int | None, settings: Mapping[str, Any]) -> str:
        """Take a step; id of the promise.

        Raises:
            Refused: what is wrong with its settings.
        """
        try:
            if unknown := sorted(settings.keys() - {each.name for each in fields(Adam)}):
                raise Refused(f"adam_params: there is no {unknown[0]}")
            adam = Adam(**settings)
        except ValueError as error:
            self.refuse(model, number, error)
            raise Refused(str(error)) from None

        async def work() -> Result:
            spoilt, model.spoilt = model.spoilt, None
            if spoilt is not None:
                await self.session.trainer.forget_gradients(model.adapters)
                raise Refused(f"optim_step: the step was not taken and its gradients are forgotten, since {spoilt}")
            numbers = await self.session.trainer.optim_step(adam, model.adapters)
            return {"type": "optim_step", "metrics": {key: float(value) for key, value in numbers.items()}}

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
        facts["user_metadata"] = how.get("user_metadata")
        optimizer = path.kind == "weights"

        async def work() -> Result:
            async def write(directory: Path) -> None:
                await self.session.trainer.save_model(model.adapters, str(directory), optimizer)

            sampler = how.get("sampler")
            await self.store.write(path, write, facts, over=bool(how.get("overwrite")) or sampler is not None)
            if sampler is None:
                return {"type": "save_weights" if optimizer else "save_weights_for_sampler", "path": str(path)}
            self.samplers[sampler] = Sampler(sampler, str(path))
            return {"type": "save_weights_for_sampler", "path": str(path), "sampling_session_id": sampler}

        return self.submit(model, number, work)

    def load(self, model: Model, number: int | None, path: CheckpointPath, *, optimizer: bool) -> str:
        """Take a checkpoint over; id of the promise.

        Raises:
            Refused: there is none.
        """
        self.store.about(path)

        async def work() -> Result:
            await self.session.trainer.load_model(model.adapters, str(self.store.directory(path)), optimizer)
            model.spoilt = None
            return {"type": "load_weights", "path": str(path), "model_id": model.id}

        return self.submit(model, number, work)

    def unload(self, model: Model) -> str:
        """Forget a model when all its requests are over; id of the promise."""

        async def work() -> Result:
            await self.session.trainer.close_model(model.adapters)
            del self.models[model.id]
            return {"type": "unload_model", "model_id": model.id}

        return self.submit(model, None, work)

    # Answers ------------------------------------------------------------------------------------------------------

    def create_sampler(self, session: str, number: int, path: str | None) -> str:
        """Make a sampling session; its id.

        Raises:
            Refused: there is no such checkpoint.
        """
        id = f"{self.check_session(session)}:sample:{number}"
        if path is not None:
            self.store.about(CheckpointPath.of(path))
        self.samplers.setdefault(id, Sampler(id, path or BASE))
        return id

    def sampler(self, id: Any) -> Sampler:
        """A sampling session of that id.

        Raises:
            Refused: there is none.
        """
        if (sampler := self.samplers.get(id)) is None:
            raise Refused(f"there is no sampling session {str(id)[:200]!r}", 404)
        return sampler

    def sample(self, sampler: Sampler, number: int | None, request: SampleRequest) -> str:
        """Answer; id of the promise."""
        id = f"{sampler.id}:{secrets.token_hex(8) if number is None else number}"
        self.promises.make(id, lambda: self._sample(sampler, request))
        return id

    async def _sample(self, sampler: Sampler, request: SampleRequest) -> Result:
        seed = secrets.randbits(48) if request.seed is None else request.seed
        weights = self._key(sampler.weights)
        async with self._weights.at(weights):
            version = self._version
            answers = await asyncio.gather(
                *(
                    self._rollout.answer(request.prompt, seed=mix(seed, index), **request.sampling)
                    for index in range(request.count)
                )
            )
            prompt = await self._prompt_logprobs(weights, request) if request.prompt_logprobs else None
        if any((each.versions != version).any() for each in answers):
            raise RuntimeError(f"answers of {sampler.id} are not all by version {version} of the weights")
        ended = {"stop": "stop", "text": "stop"}
        return sample_result(
            ((ended.get(each.finish, "length"), each.response_ids, each.logprobs) for each in answers), prompt
        )

    async def _prompt_logprobs(self, weights: str, request: SampleRequest) -> np.ndarray:
        ids = request.prompt
        logprobs = np.full(len(ids), np.nan, np.float32)
        if len(ids) > 1:
            own = (self._opened[weights],) if weights != BASE else ()  # the session's is the base: nobody trains it
            (logprobs[1:],) = await self.session.trainer.forward([Datum(ids[:-1], ids[1:])], *own)
        if request.last is not None:
            logprobs[: len(ids) - request.last] = np.nan
        return logprobs

    def _key(self, weights: str) -> str:
        """Name these weights, with when they were saved: another checkpoint may have taken the path since.

        Raises:
            Refused: there is none of that path any more.
        """
        return BASE if weights == BASE else f"{weights}@{self.store.about(CheckpointPath.of(weights))['time']}"

    async def _publish(self, weights: str) -> None:
        """Have the rollout answer by the weights of a key."""
        trainer, name = self.session.trainer, None
        if weights != BASE:
            name = await self._open(weights)
        self._version = next(self._published)
        await self.session.rollout.load(trainer.model_weights(name, self._version))

    async def _open(self, weights: str) -> str:
        """Name of the adapters of a key in the trainer, where they stay until others are wanted more."""
        if weights in self._opened:
            self._opened[weights] = self._opened.pop(weights)  # the last wanted is the last to be closed
            return self._opened[weights]
        path = CheckpointPath.of(weights.rpartition("@")[0])
        name = f"s{next(self._names)}"
        await self.session.trainer.open_model(name, {"path": str(self.store.directory(path))}, 0)
        self._opened[weights] = name
        while len(self._opened) > _OPEN_SAMPLERS:
            await self.session.trainer.close_model(self._opened.pop(next(iter(self._opened))))
        return name


def _targets(about: Mapping[str, Any]) -> Sequence[str]:
    """Layers that get adapters.

    Raises:
        Refused: none would.
    """
    if about["attn"] and about["mlp"]:
        return ["all-linear"]
    if not (about["attn"] or about["mlp"]):
        raise Refused("lora_config: train_attn or train_mlp must be true; adapters of the unembedding are not served")
    return ["auto"] if about["attn"] else ["all-but-attention"]
