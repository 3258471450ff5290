"""The agent of a run, by its configuration.

In: a configuration and its flow, or an agent that was passed. Out: `async def agent(task, llm)` with its arguments
bound, and what plays in the model's place. Mistakes are told by key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlinf.agents.agent import Agent, LastingAgent, lasts
from rlinf.agents.chat import ChatFormat
from rlinf.agents.environments import ENVIRONMENTS, Adapting
from rlinf.agents.player import Player
from rlinf.agents.tools.formats import FORMATS, CallFormat
from rlinf.config.importing import RAISED, mistake_in, resolve
from rlinf.config.load import ConfigError, Problem
from rlinf.config.schema import nearest
from rlinf.config.text import RunConfig
from rlinf.runtime.base.errors import UserError

Mistake = tuple[str, Any, str]
"""Key, value and advice."""


def _is_format(path: str) -> bool:
    """The dotted path names a format of calls, a class or an object."""
    if mistake_in(path):
        return False
    try:
        named = resolve(path)
    except RAISED:
        return False
    return isinstance(named, CallFormat) or (isinstance(named, type) and issubclass(named, CallFormat))


def configured_agent(config: RunConfig, flow: Any, passed: Agent | None = None) -> tuple[Agent | None, list[Mistake]]:
    """Return the agent that works on tasks, if there is one, and the mistakes in how it is configured.

    Args:
        config: right by itself.
        flow: one step.
        passed: an agent that was passed instead of being named.

    Returns:
        The agent with its arguments, None where there is none; and what is wrong.
    """
    wanted = config.agent
    key, agent_or_name = ("agent", passed) if passed is not None else ("agent.function", wanted.function)
    mistakes: list[Mistake] = []
    if wanted.call_format is not None and wanted.call_format not in FORMATS and not _is_format(wanted.call_format):
        advice = f"take one of {', '.join(sorted(FORMATS))}, the dotted path of a CallFormat, or null"
        mistakes.append(("agent.call_format", wanted.call_format, advice))
    if agent_or_name is None:
        if wanted.args:
            mistakes.append(("agent.args", dict(wanted.args), "there is no agent.function to give them to"))
        return None, mistakes
    if "session" not in inspect.signature(flow).parameters:
        advice = f"the flow {config.flow} takes no session, so no agent works in it: leave `flow` out"
        mistakes.append((key, agent_or_name, advice))
    function: Any = passed
    if passed is None:
        try:
            function = resolve(ENVIRONMENTS.get(str(wanted.function), str(wanted.function)))
        except RAISED as error:
            close = nearest(str(wanted.function).replace("-", "_"), ENVIRONMENTS)
            hint = f"; did you mean {close}?" if close else ""
            advice = f"importing it failed: {type(error).__name__}: {error}{hint}"
            return None, [*mistakes, (key, agent_or_name, advice)]
    if not callable(function) and not lasts(function):
        return None, [
            *mistakes,
            (key, agent_or_name, "this is no `async def agent(task, llm)`, and no plain function of these"),
        ]
    try:
        agent, wrong = _bound(function, wanted.args)
    except UserError as error:
        agent, wrong = None, str(error)
    if wrong:
        at, value = ("agent.args", dict(wanted.args)) if wanted.args else (key, agent_or_name)
        mistakes.append((at, value, wrong))
    return agent, mistakes


def configured_player(
    config: RunConfig, agent: Agent | None, passed: Player | None = None
) -> tuple[Player | None, list[Mistake]]:
    """Return what answers in the model's place in the warm-up's episodes, if anything does, and the mistakes in how it
    is configured.

    Args:
        config: right by itself.
        agent: the run's, which may have a player of its own.
        passed: a player that was passed instead of being named.
    """
    named, steps = config.agent.player, config.sft.steps
    if passed is None and named is None:
        source = source_of(agent)
        own = None if inspect.isclass(source) else getattr(source, "player", None)
        if own is None and config.sft.least_reward is not None:
            advice = "there is no player whose episodes could earn it: name one in agent.player"
            return None, [("sft.least_reward", config.sft.least_reward, advice)]
        return (own if steps else None), []
    player: Any = passed
    if passed is None:
        try:
            player = resolve(str(named))
        except RAISED as error:
            return None, [("agent.player", named, f"importing it failed: {type(error).__name__}: {error}")]
    wrong = _unfit(player, (None, None), {}, "player(task, messages)") if callable(player) else "this is no function"
    if agent is None:
        wrong = "there is no agent.function whose episodes it could play"
    elif not steps:
        wrong = wrong or "nothing is learned of what it says: set sft.steps, the optimizer steps of the warm-up"
    return player, [("agent.player", named or player, wrong)] if wrong else []


_OPENED_BY = (
    "what is opened once for all episodes is an async context manager: a function with @asynccontextmanager, or a "
    "class with `async def __aenter__` and `async def __aexit__`"
)


def _bound(function: Any, arguments: Mapping[str, Any]) -> tuple[Agent, str]:
    """An agent with its arguments, and what is wrong with them; "" where nothing is."""
    if not lasts(function) or _opens_otherwise(function):
        wrong = _unfit(function, (None, None), arguments, "agent(task, llm, **agent.args)")
        agent = functools.partial(function, **arguments) if arguments else function
        return agent, _OPENED_BY if _opens_otherwise(function) else wrong
    if not inspect.isroutine(function) and not inspect.isclass(function):
        wrong = "the agent is made already: give these to it where it is made" if arguments else ""
        return LastingAgent(function), wrong
    wrong = _unfit(function, (), arguments, f"{function.__name__}(**agent.args)")
    if inspect.isclass(function) and not hasattr(function, "__aenter__"):
        called = next((vars(each)["__call__"] for each in function.__mro__ if "__call__" in vars(each)), None)
        wrong = wrong or _unfit(called, (None, None, None), {}, f"{function.__name__}(…)(task, llm)")
    if not wrong and brings_tasks(function):  # they are read before anything is opened
        environment: Any = function(**arguments)
        return LastingAgent(environment) if lasts(environment) else environment, ""
    return LastingAgent(function, arguments), wrong


def source_of(agent: Agent | None) -> Any:
    """The object that a user passed or named: of an agent that is opened once, the one that opens it."""
    return agent.source if isinstance(agent, LastingAgent) else agent


def brings_tasks(agent: Any) -> bool:
    """An agent has `tasks()`, rows of its own to learn from, as environments do."""
    return callable(getattr(agent, "tasks", None))


def adapting(agent: Agent | None) -> Adapting | None:
    """An agent's environment, where its tasks depend on what came of those before."""
    source = source_of(agent)
    return source if isinstance(source, Adapting) and not inspect.isclass(source) else None


def _opens_otherwise(function: Any) -> bool:
    """A context that blocks, or an async generator that no decorator has made a context."""
    kind = function if inspect.isclass(function) else type(function)
    blocks = hasattr(kind, "__enter__") and not hasattr(kind, "__aenter__")
    return blocks or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(inspect.unwrap(function))


def _unfit(function: Any, positional: tuple[Any, ...], arguments: Mapping[str, Any], call: str) -> str:
    """Why a function cannot be called with these arguments; "" where it can."""
    try:
        inspect.signature(function).bind(*positional, **arguments)
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
    messages = [{"role": "user", "content": "a"}]
    chat = ChatFormat(tokenizer, config.data.chat_args)
    try:
        chat.opening(messages)
    except UserError:
        return  # it wants other messages than these, and whoever sends some hears of it
    try:
        chat.with_arguments(tools=[_PROBE_TOOL]).opening(messages)
    except UserError as error:
        advice = f"the agent offers the model tools (tools=…), and {error}"
        raise ConfigError([Problem("configuration", "data.chat_template", MISSING, advice)]) from None


def _offers_tools(agent: Any) -> bool:
    """An agent says that it offers tools, see `agents.tools.tool.offers_tools`."""
    agent = source_of(agent)
    while isinstance(agent, functools.partial):
        agent = agent.func
    return bool(getattr(agent, "offers_tools", False))
