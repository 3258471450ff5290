"""What a program passes to conversations and sessions, checked: the error names the call."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Awaitable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from rlinf.runtime.base.errors import UserError


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
