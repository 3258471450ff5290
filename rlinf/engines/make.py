"""Making the engine that a configuration names, `rollout.engine`.

Flows in: a name or dotted path, and what every engine is made from. Flows out: an engine. Nobody waits here but for the
engine's own start.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinf.config.importing import resolve
from rlinf.data.pictures.processor import Pictures
from rlinf.engines import ENGINES
from rlinf.engines.base import Engine, Kv
from rlinf.runtime.base.tasks import InThreads

Compute = Callable[..., Awaitable[Any]]
"""`await compute(fn, *args)` runs blocking work somewhere, one function at a time, and returns its result. Cancelled
while `fn` runs, it ends when `fn` has."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineSetup:
    """What an engine is made from."""

    name: str
    """Whose engine it is, for messages and the names of processes, such as `rollout[0]`."""
    model: str | Mapping[str, Any]
    """A Hugging Face directory (or hub name), or the configuration of a new model."""
    build_model: Callable[[], AbstractContextManager[PreTrainedModel]]
    """Makes that model in this process, on its device, for engines that want it here. Blocking. While its context is
    open, no other model is made in this process: try the model out inside of it."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Decodes answers, for stop texts."""
    pictures: Pictures | None = None
    """Reads those of prompts; None if the model reads text alone."""
    seed: int = 0
    """Of a new model's weights."""
    dtype: torch.dtype = torch.float32
    """In which answers are computed; weights of another type are cast."""
    max_rows: int = 128
    """Answers decoded together, at least 1."""
    max_tokens: int | None = None
    """Tokens of KV cache that answers in flight may come to, together; None for no bound."""
    max_length: int | None = None
    """Tokens, prompt and answer together, for which the model has positions; None for no bound."""
    padding: tuple[int, ...] = ()
    """Ids of the model's head that its tokenizer has not, as vocabularies are padded to round numbers; no answer has
    them."""
    kv: Kv | None = None
    """What becomes of keys and values when weights change in the middle of answers; None: the engine's own choice."""
    routes: bool = False
    """Tell to which experts of a mixture tokens go, where the engine can."""
    directory: str | None = None
    """Of the run, where an engine may keep the output of its server; None keeps it in memory."""
    compute: Compute = field(default_factory=InThreads)
    """Runs blocking work; an actor's own `compute` holds its devices meanwhile, and wakes an engine that sleeps."""
    on_device: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    """`async with on_device():` holds the actor's devices for work that `compute` does not run, such as a request to a
    child process, and has its time counted as the rollout's."""


def lacking(engine: str, args: Mapping[str, Any] | None = None) -> str | None:
    """What an engine of `ENGINES` with these arguments would lack on this machine, and how to get it; None: nothing.

    Engines say so by a function `lacking(args)` beside their `build`; who has none lacks nothing.
    """
    if engine not in ENGINES:
        return None
    check = getattr(importlib.import_module(ENGINES[engine].rpartition(".")[0]), "lacking", None)
    found: str | None = None if check is None else check(dict(args or {}))
    return found


def unable(engine: str, kv: Kv | None) -> str | None:
    """Why an engine of `ENGINES` cannot treat keys and values so when weights change; None: it can, or is another's."""
    if kv is None or engine not in ENGINES:
        return None
    made: type[Engine] = importlib.import_module(ENGINES[engine].rpartition(".")[0]).ENGINE
    return None if kv in made.kv else _other_kv(engine, made.kv)


def _other_kv(engine: str, kinds: Sequence[Kv]) -> str:
    return (
        f"{engine} can only {' or '.join(kinds)} the keys and values of answers in flight; leave the key out for that"
    )


async def make(engine: str, setup: EngineSetup, args: Mapping[str, Any] | None = None) -> Engine:
    """Make an engine.

    Args:
        engine: one of `ENGINES`, or the dotted path of a function `build(setup, **args) -> Engine`, plain or async; a
            class whose constructor takes these is as good.
        setup: what every engine is made from.
        args: further arguments of that function.

    Raises:
        ValueError: the function does not take `args`, or the engine cannot do `setup.kv`.
        TypeError: what it returns is no `Engine`.
    """
    path = ENGINES.get(engine, engine)
    build = resolve(path)
    try:
        inspect.signature(build).bind(setup, **(args or {}))
    except TypeError as error:
        raise ValueError(
            f"rollout.engine_args: {path} does not take {dict(args or {})}: {error}; it is called as "
            f"{path.rpartition('.')[2]}(setup, **rollout.engine_args)"
        ) from None
    made = build(setup, **(args or {}))
    if inspect.isawaitable(made):
        made = await made
    if not isinstance(made, Engine):
        raise TypeError(f"rollout.engine={engine} gave {type(made).__name__}, which is no rlinf.engines.base.Engine")
    if setup.kv is not None and setup.kv not in made.kv:
        await made.close()
        raise ValueError(f"staleness.kv={setup.kv}: {_other_kv(engine, made.kv)}")
    return made
