"""Coroutines that say so when they are not awaited, and checks of arguments to conversations and sessions.

A call can be awaited on the event loop that it belongs to or on that of another thread, or waited for with `.result()`
in a thread without one; the coroutine's end wakes the caller, on its own loop. Errors of arguments name the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import weakref
from collections.abc import Awaitable, Coroutine, Generator, Mapping
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from rlinf.config.load import InputError, RunFailure
from rlinf.runtime.base.errors import UserError

T = TypeVar("T")


class NotAwaited(UserError, AttributeError):
    """Raised when an attribute of an answer is read before the answer was awaited."""


class plainly:
    """Mistakes of the program that are raised inside lose their way through ours: the message is what helps."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (UserError, InputError, RunFailure)):
            raise error.with_traceback(None) from error.__cause__


class Awaited(Coroutine[Any, Any, T]):
    """A coroutine whose attributes, before it is awaited, name the `await` that is missing.

    Args:
        coroutine: what to await.
        call: what made it, such as `c.generate(…)`, for errors.
        home: the event loop that it runs on, whichever thread awaits it; None: on the one that awaits it.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], call: str, home: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._coroutine, self._call, self._home = coroutine, call, home

    def result(self, timeout: float | None = None) -> T:
        """Wait for it where nothing can be awaited: in a thread, such as that of a plain `def agent(task, llm)`.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            UserError: this thread has an event loop, which would stand still.
            TimeoutError: it takes longer.
        """
        if running_loop() is not None or self._home is None:
            self._coroutine.close()
            raise UserError(
                f"{self._call}.result(): it would keep the event loop from giving the answer; write "
                f"`await {self._call}`"
            )
        with plainly():
            return asyncio.run_coroutine_threadsafe(self, self._home).result(timeout)

    def _placed(self) -> Coroutine[Any, Any, T]:
        """The coroutine, or from another loop one that waits for it."""
        home = self._home
        if home is not None and running_loop() not in (home, None):
            self._coroutine, self._home = _elsewhere(self._coroutine, home), None
        return self._coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        with plainly():
            return (yield from self._placed().__await__())

    def send(self, value: Any) -> Any:
        with plainly():
            return self._placed().send(value)

    def throw(self, *error: Any) -> Any:
        with plainly():
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_"):  # asyncio and debuggers look at a coroutine's state
            return getattr(self._coroutine, name)
        raise self._not_awaited(name)

    def __iter__(self) -> Any:
        raise self._not_awaited("items")

    def __getitem__(self, key: Any) -> Any:
        raise self._not_awaited("items")

    def _not_awaited(self, name: str) -> NotAwaited:
        how = f"`await {self._call}`"
        if self._home is not None and running_loop() is None:
            how = f"`{self._call}.result()` in a plain function, {how} in an `async def`"
        weakref.finalize(self, self._coroutine.close)  # or else Python warns of it once more, at a line of ours
        return NotAwaited(f"{self._call} was not awaited, so it has no {name} yet: write {how}")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread, if one runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _elsewhere(coroutine: Coroutine[Any, Any, T], home: asyncio.AbstractEventLoop) -> T:
    """Await a coroutine that runs on another thread's event loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, home))


class WrongType(UserError, TypeError):
    """Something of another kind was wanted."""


class WrongValue(UserError, ValueError):
    """Something of the right kind that cannot be."""


_SHOWN = 60
"""Characters of a wrong value that an error shows."""


def shown(value: Any) -> str:
    """A wrong value, for an error."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def number(value: Any, call: str) -> float:
    """A reward as a float.

    Raises:
        TypeError: no number.
        ValueError: not finite.
    """
    plain = value
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        plain = value.item()  # of numpy and torch
    if not isinstance(plain, Real):
        raise WrongType(f"{call}: the reward {shown(value)} is no number")
    if not math.isfinite(plain):
        raise WrongValue(
            f"{call}: the reward is {float(plain)}; give a finite number, or raise an exception where there is none: "
            "the episode then counts as not drawn"
        )
    return float(plain)


def token_rewards(values: Any, tokens: int, call: str) -> np.ndarray | None:
    """A reward of each token of an answer, float64 [tokens]; None: it is a single number.

    Args:
        values: the reward.
        tokens: of the answer.
        call: for errors.

    Raises:
        TypeError: no numbers.
        ValueError: not one for each token, or not finite.
    """
    shape = getattr(values, "shape", None)
    if not isinstance(values, (list, tuple)) and not shape:
        return None
    try:
        rewards = np.array([*map(float, values)], np.float64)
    except (TypeError, ValueError):
        raise WrongType(f"{call}: the rewards {shown(values)} are no numbers, one for each token") from None
    if len(rewards) != tokens:
        raise WrongValue(
            f"{call}: {len(rewards)} rewards for an answer of {tokens} tokens; give one for each of its ids"
        )
    if not np.isfinite(rewards).all():
        place = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise WrongValue(f"{call}: the reward of token {place} is {rewards[place]}; give finite numbers")
    return rewards


def token_ids(values: Any, vocabulary: int | None, call: str) -> np.ndarray:
    """Token ids, int64 [tokens].

    Args:
        values: whole numbers.
        vocabulary: the model has ids below it; None: nobody knows.
        call: for errors.

    Raises:
        TypeError: something else.
        ValueError: there is none, or one that the model does not have.
    """
    try:
        ids = np.asarray(values)
    except ValueError:
        ids = np.empty(0, object)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise WrongType(f"{call}: {shown(values)} is no sequence of token ids; give whole numbers")
    if not ids.size:
        raise WrongValue(f"{call}: the prompt has no token; give at least one")
    if ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise WrongValue(
            f"{call}: the model has no token {wrong}, its ids are from 0 to {(vocabulary or 0) - 1}: is it encoded by "
            "another tokenizer? session.tokenizer is the model's"
        )
    return ids.astype(np.int64)


def at_least_one(value: Any, name: str, call: str) -> int:
    """A count.

    Raises:
        TypeError: no whole number.
        ValueError: below 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise WrongType(f"{call}: {name}={shown(value)} must be a whole number")
    if value < 1:
        raise WrongValue(f"{call}: {name}={value} must be at least 1")
    return int(value)


def coroutine_function(episode: Any, call: str) -> None:
    """See that an episode can be played.

    Raises:
        TypeError: it is no function of a task, or was called already.
    """
    if isinstance(episode, Awaitable):
        if hasattr(episode, "close"):
            episode.close()
        raise WrongType(f"{call}: the episode was called already; pass the function itself, without ()")
    if not callable(episode):
        raise WrongType(f"{call}: {shown(episode)} is no episode; pass an `async def` function of one task")


class Schemas:
    """JSON schemas of strangers, and texts that shall be of them; kept in a child process, because a pattern, or
    references that double, may take longer than anybody waits."""

    def __init__(self) -> None:
        import jsonschema  # here, so that no call's deadline has to wait for it
        import referencing

        self._jsonschema, self._nothing = jsonschema, referencing.Registry()

    def wrong(self, schema: Mapping[str, Any], text: str | None = None) -> str | None:
        """Why a text is not JSON of a schema, or, without a text, why the schema is none.

        Args:
            schema: it; addresses in its `$ref`s are not asked for anything.
            text: what shall be of it; None looks at the schema alone.

        Returns:
            A sentence; None: nothing is wrong.
        """
        jsonschema = self._jsonschema
        kind = jsonschema.validators.validator_for(schema)
        try:
            if text is None:
                kind.check_schema(schema)
            else:
                kind(schema, registry=self._nothing).validate(json.loads(text))
        except jsonschema.SchemaError as error:
            return str(error.message)
        except jsonschema.ValidationError as error:
            return f"the answer is not of the schema: {error.message}"
        except Exception as error:  # a `$ref` to nothing, a pattern that is none, endless recursion
            return f"the schema cannot be applied: {type(error).__name__}"
        return None
