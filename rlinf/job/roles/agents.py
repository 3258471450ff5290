"""The agent that a configuration names, what its model can read, and what the session knows in which it works.

In: a configuration and its flow. Out: `async def agent(task, llm)` with its arguments bound, and mistakes by key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from types import CodeType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlinf.agents.agent import Agent, LastingAgent, lasts
from rlinf.agents.chat import ChatFormat
from rlinf.agents.tools.calls import FORMATS, CallFormat
from rlinf.config.importing import mistake_in, resolve
from rlinf.config.loading import ConfigError, Problem
from rlinf.config.text import RunConfig
from rlinf.flows.parts.answering import Running
from rlinf.job.checks.naming import RAISED
from rlinf.models.language.generation import context_length
from rlinf.runtime.base.errors import UserError

Mistake = tuple[str, Any, str]
"""Key, value and advice."""


def _is_format(path: str) -> bool:
    """The dotted path names a format of calls, a class or an object."""
    if mistake_in(path):
        return False
    try:
        found = resolve(path)
    except RAISED:
        return False
    return isinstance(found, CallFormat) or (isinstance(found, type) and issubclass(found, CallFormat))


def configured_agent(config: RunConfig, flow: Any, passed: Agent | None = None) -> tuple[Agent | None, list[Mistake]]:
    """What works on a task.

    Args:
        config: right by itself.
        flow: one step.
        passed: an agent that was passed instead of being named.

    Returns:
        The agent with its arguments, None where there is none; and what is wrong.
    """
    wanted = config.agent
    key, shown = ("agent", passed) if passed is not None else ("agent.function", wanted.function)
    mistakes: list[Mistake] = []
    if wanted.call_format is not None and wanted.call_format not in FORMATS and not _is_format(wanted.call_format):
        advice = f"take one of {', '.join(sorted(FORMATS))}, the dotted path of a CallFormat, or null"
        mistakes.append(("agent.call_format", wanted.call_format, advice))
    if shown is None:
        if wanted.args:
            mistakes.append(("agent.args", dict(wanted.args), "there is no agent.function to give them to"))
        return None, mistakes
    if "session" not in inspect.signature(flow).parameters:
        advice = f"the flow {config.flow} takes no session, so no agent works in it: leave `flow` out"
        mistakes.append((key, shown, advice))
    function: Any = passed
    if passed is None:
        try:
            function = resolve(str(wanted.function))
        except RAISED as error:
            advice = f"importing it failed: {type(error).__name__}: {error}"
            return None, [*mistakes, (key, shown, advice)]
    if not callable(function) and not lasts(function):
        return None, [
            *mistakes,
            (key, shown, "this is no `async def agent(task, llm)`, and no plain function of these"),
        ]
    agent, wrong = _bound(function, wanted.args)
    if wrong:
        at, value = ("agent.args", dict(wanted.args)) if wanted.args else (key, shown)
        mistakes.append((at, value, wrong))
    return agent, mistakes


_OPENED_BY = (
    "what is opened once for all episodes is an async context manager: a function with @asynccontextmanager, or a "
    "class with `async def __aenter__` and `async def __aexit__`"
)


def _bound(function: Any, given: Mapping[str, Any]) -> tuple[Agent, str]:
    """An agent with its arguments, and what is wrong with them; "" where nothing is."""
    if not lasts(function) or _opens_otherwise(function):
        wrong = _unfit(function, (None, None), given, "agent(task, llm, **agent.args)")
        made = functools.partial(function, **given) if given else function
        return made, _OPENED_BY if _opens_otherwise(function) else wrong
    if not inspect.isroutine(function) and not inspect.isclass(function):
        wrong = "the agent is made already: give these to it where it is made" if given else ""
        return LastingAgent(function), wrong
    wrong = _unfit(function, (), given, f"{function.__name__}(**agent.args)")
    if inspect.isclass(function) and not hasattr(function, "__aenter__"):
        called = next((vars(each)["__call__"] for each in function.__mro__ if "__call__" in vars(each)), None)
        wrong = wrong or _unfit(called, (None, None, None), {}, f"{function.__name__}(…)(task, llm)")
    return LastingAgent(function, given), wrong


def _opens_otherwise(function: Any) -> bool:
    """A context that blocks, or an async generator that no decorator has made a context."""
    kind = function if inspect.isclass(function) else type(function)
    blocks = hasattr(kind, "__enter__") and not hasattr(kind, "__aenter__")
    return blocks or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(inspect.unwrap(function))


def _unfit(function: Any, positional: tuple[Any, ...], given: Mapping[str, Any], call: str) -> str:
    """Why a function cannot be called with these arguments; "" where it can."""
    try:
        inspect.signature(function).bind(*positional, **given)
    except TypeError as error:
        return f"it is called as {call}: {error}"
    except ValueError:
        return ""  # built in, and silent about what it takes
    return ""


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def check_tools_shown(config: RunConfig, tokenizer: PreTrainedTokenizerBase, agent: Agent | None) -> None:
    """See that the model reads what tools say, if its agent offers it tools: many templates print nothing of the role
    `tool`.

    Args:
        config: of the run.
        tokenizer: the model's.
        agent: what works on a task.

    Raises:
        ConfigError: the chat template leaves tools, or what they say, out.
    """
    if agent is None or not _offers_tools(agent):
        return
    asked = [{"role": "user", "content": "a"}]
    chat = ChatFormat(tokenizer, config.data.chat_args)
    try:
        chat.opening(asked)
    except UserError:
        return  # it wants other messages than these, and whoever sends some hears of it
    try:
        chat.with_arguments(tools=[_PROBE_TOOL]).opening(asked)
    except UserError as error:
        advice = f"the agent offers the model tools (tools=…), and {error}"
        raise ConfigError([Problem("configuration", "data.chat_template", MISSING, advice)]) from None


def _offers_tools(agent: Any) -> bool:
    """Some call in an agent's own code has a keyword `tools`."""
    return any(isinstance(each, tuple) and "tools" in each for code in _codes(agent) for each in code.co_consts)


def _codes(agent: Any) -> Iterator[CodeType]:
    """The code of an agent: of a function and those inside it, or of a class or object with its methods."""
    if isinstance(agent, LastingAgent):
        agent = agent.source
    while isinstance(agent, functools.partial):
        agent = agent.func
    agent = inspect.unwrap(agent)
    if isinstance(agent, CodeType):
        yield agent
        for each in agent.co_consts:
            if isinstance(each, CodeType):
                yield from _codes(each)
    elif (code := getattr(agent, "__code__", None)) is not None:
        yield from _codes(code)
    else:
        for name, each in inspect.getmembers(agent if isinstance(agent, type) else type(agent), inspect.isfunction):
            if name != "__init__":
                yield from _codes(each)


def running_of(
    config: RunConfig,
    roles: Callable[[], Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    model: Any,
    agent: Agent | None,
    **more: Any,
) -> Running:
    """What a session on a run's roles has to know.

    Args:
        config: of the run.
        roles: the roles as they are now.
        tokenizer: the model's.
        model: its transformers config.
        agent: what works on a task.
        more: further fields of `Running`.
    """
    limits = (context_length(model), config.rollout.max_tokens)
    return Running(
        roles,
        tokenizer,
        seed=config.seed,
        group_size=config.algorithm.group_size,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        longest=min((limit for limit in limits if limit is not None), default=None),
        vocabulary=getattr(model, "vocab_size", None),
        at_once=config.agent.at_once or config.rollout.max_rows * len(roles()["rollout"]),
        chat_args=config.data.chat_args,
        evaluation={name: getattr(config.evaluation, name) for name in ("temperature", "top_p", "max_new_tokens")},
        agent=agent,
        timeout=None if agent is None else config.agent.timeout,
        call_format=config.agent.call_format,
        **more,
    )
