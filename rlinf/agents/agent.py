"""Agents: programs `async def agent(task, llm)`, their `llm` with its record, and the samples made of what they return.

In: a function `async def agent(task, llm)`, which calls the model as often as it likes, and returns a reward. Out:
samples of everything that the model said. Who wakes whom: the model's answers wake the agent.

    async def agent(task, llm):
        messages = [{"role": "user", "content": task.text}]
        answer = await llm.chat(messages, tools=[search])
        while answer.calls:
            messages += [answer.message, *await answer.results()]
            answer = await llm.chat(messages, tools=[search])
        return float(answer.text == task.answer)
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rlinf.agents.arguments import Awaited, WrongType, WrongValue, number, running_loop, shown, token_ids
from rlinf.agents.chat import ChatFormat, Message, are_messages, begins_thought, copied
from rlinf.agents.llm import ContextFull, Listener, Reply, Setting
from rlinf.agents.player import Seat
from rlinf.agents.tools.formats import CallFormat, ToolCall
from rlinf.agents.tools.tool import Tools
from rlinf.agents.trajectories import Counts, Trajectories, Turn, add_reward
from rlinf.data.rng import mix
from rlinf.data.sample import Prompt, Sample
from rlinf.engines.base import TextScores
from rlinf.engines.grammars import Form, unenforceable
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread

Agent = Callable[..., Any]
"""`async def agent(task, llm) -> float | Score | list[Sample] | {agent's name: float | Score}`; or a plain `def`, which
works in a thread of its own and writes `llm.chat(…).result()` for `await llm.chat(…)`; or a `LastingAgent`."""


Wanted = tuple[Mapping[str, Any] | Form | None, str]
"""`schema` and `tool_choice` of a call."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer(Reply):
    """An answer in a chat: text, and calls of tools."""

    content: str = ""
    """Text beside its calls."""
    calls: tuple[ToolCall, ...] = ()
    """The tools that it calls, in order."""
    broken: tuple[str, ...] = ()
    """For each call that cannot be read, why: a sentence that the model can be told."""
    message: Message = field(default_factory=dict)
    """Message to put behind those that it answers."""
    turn: Turn | None = None
    """Its place in the record."""
    tools: Tools | None = None
    """The tools that the model was offered, where they can be run."""

    home: asyncio.AbstractEventLoop | None = None
    """The event loop on which tools run."""

    def results(self) -> Awaited[list[Message]]:
        """Run the calls, all at the same time; await it.

        Returns:
            A message per call, and one that says what was wrong where a call could not be read: to put behind
            `message`. Nothing that a tool does raises here; the model is told.

        Raises:
            UserError: the tools were given as schemas, so nobody can run them.
        """
        if self.calls and self.tools is None:
            raise UserError("answer.results: the tools were given as schemas; give functions or tools to llm.chat")
        return Awaited(self._results(), "answer.results()", self.home)

    async def _results(self) -> list[Message]:
        messages = [] if self.tools is None else await self.tools.run(self.calls)
        return [*messages, *({"role": "tool", "content": why} for why in self.broken)]


class OnlyPast(UserError):
    """In an episode that went well, only an earlier version of the policy spoke."""


@dataclass(slots=True)
class Attempt:
    """State that all agents of one episode share."""

    setting: Setting
    """The model and its limits."""
    calls: CallFormat
    """How the model writes calls of tools."""
    fresh: Callable[[], int]
    """Gives numbers to conversations."""
    task: Prompt | None = None
    """Task that is worked on."""
    index: int = 0
    """Index of the episode in its group."""
    past: str | None = None
    """Name of the earlier version of the policy that plays in it; None: none does."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Names of the adapters of agents that have weights of their own."""
    open: Callable[[AgentLLM], tuple[str, str]] | None = None
    """Opens an endpoint for foreign frameworks: its URL and key; None where there is none."""
    agents: dict[str, AgentLLM] = field(default_factory=dict)
    closed: bool = False
    seat: Seat | None = None
    """A player answers in the model's place; None: the model does."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when the episode is over."""
    start: float = field(default_factory=time.monotonic)
    """When the episode began."""
    home: asyncio.AbstractEventLoop | None = field(default_factory=running_loop)
    """The event loop of the run: calls from other threads are answered there."""


class _Asked(NamedTuple):
    """One call of the model."""

    call: str
    """Which, for errors."""
    parent: Turn | None
    """The turn that it goes on from."""
    new_ids: np.ndarray
    """Tokens to read behind that, int64 [tokens]."""
    sampling: Mapping[str, Any]
    """Settings of this call."""
    listener: Listener | None
    """Hears the answer as it comes."""
    messages: Sequence[Message] = ()
    """All that is read, where it is messages."""


class AgentLLM:
    """A language model as an agent sees it. Every call is recorded, and learned from.

    Any number of calls may be under way at the same time.

    Args:
        attempt: what all agents of the episode share.
        chat: how messages become tokens.
        key: of its randomness: an answer depends on (key, agent's name, what is read, how often that was asked).
        sampling: where a call does not say.
        name: of the agent; "" for the only one.
    """

    def __init__(
        self,
        attempt: Attempt,
        chat: ChatFormat,
        key: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> None:
        self._attempt, self._chat, self._key, self._sampling = attempt, chat, tuple(key), dict(sampling or {})
        self._repeats: dict[tuple[bytes, Any], int] = {}  # how often the same tokens were answered, with which seed
        self._lines: set[int] = set()  # conversations that the engine may know of
        self._address: tuple[str, str] | None = None
        self.name = name
        """Name of the agent; "" for the only one."""
        self.weight = 1.0
        """Weight of its trajectories in the batch."""
        self.adapter: str | None = attempt.own.get(name)
        """Name of the adapters that answer; None: the weights that all agents share."""
        self.learns = True
        """Its trajectories are learned from: no earlier version of the policy answers."""
        self.trajectories = Trajectories(chat)
        """The record."""
        attempt.agents[name] = self

    @property
    def call_format(self) -> CallFormat:
        """How the model writes calls of tools."""
        return self._attempt.calls

    def agent(self, name: str, *, weight: float = 1.0, **sampling: Any) -> AgentLLM:
        """The model as another agent of the same task calls it: its trajectories are compared with those of agents of
        that name, and may have a reward of their own.

        Args:
            name: such as `planner`; the same name gives the same agent.
            weight: what its trajectories count for in the batch, more than 0.
            sampling: where a call does not say.
        """
        if (llm := self._attempt.agents.get(name)) is None:
            llm = AgentLLM(self._attempt, self._chat, self._key, {**self._sampling, **sampling}, name)
        llm.weight = weight
        return llm

    def past(self, name: str, **sampling: Any) -> AgentLLM:
        """An agent of the same task that is an earlier version of the policy, where one was drawn for the task: nothing
        that it says is learned from. Elsewhere, and where the run keeps none (`agent.past`), it is `agent(name)`.

        Args:
            name, sampling: as of `agent`.

        Raises:
            UserError: the policy itself has spoken as the agent of this name.
        """
        llm = self.agent(name, **sampling)
        if self._attempt.past is not None:
            if llm.trajectories.turns and llm.learns:
                raise UserError(f"llm.past: agent {name!r} has spoken as the policy itself: give this one another name")
            llm.adapter, llm.learns = self._attempt.past, False
        return llm

    @property
    def start(self) -> float:
        """When the episode began, by `time.monotonic`."""
        return self._attempt.start

    # Calls ------------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        tool_choice: str = "auto",
        schema: Mapping[str, Any] | Form | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        listener: Listener | None = None,
        **sampling: Any,
    ) -> Awaited[Answer]:
        """Let the model answer messages; await it.

        Args:
            messages: all that was said so far, the answers' own `message`s among them; those are not encoded again.
            tools: that the model may call: functions with type hints, `Tool`s, or schemas.
            tool_choice: `auto`; or `required`, or the name of one of the tools: while it is decoded the answer is kept
                to calls of tools, or of that one, with arguments of its schema.
            schema: JSON schema, or a form; while it is decoded the answer is kept to it. The model is not told of it.
            chat_template_kwargs: further arguments of the chat template, such as `{"enable_thinking": False}`.
            listener: hears the answer as it comes.
            sampling: any of `max_new_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `min_new_tokens`, `stop`; and
                `seed`, with which the same tokens get the same answer each time.

        Raises:
            UserError: the chat template refuses the messages; `ContextFull`: not one token fits.
            ValueError, TypeError: no messages, a setting that cannot be, or a schema that cannot be enforced.
        """
        if not are_messages(messages, "llm.chat"):
            raise WrongType(f"llm.chat: {shown(messages)} is no list of messages such as {{'role': 'user', …}}")
        copies, template = [copied(message) for message in messages], chat_template_kwargs or {}
        asking = self._chatted(copies, tools, (schema, tool_choice), template, sampling, listener)
        return Awaited(asking, "llm.chat(…)", self._attempt.home)

    async def _chatted(
        self,
        messages: list[Message],
        tools: Any,
        wanted: Wanted,
        template: Mapping[str, Any],
        sampling: Mapping[str, Any],
        listener: Listener | None,
    ) -> Answer:
        schemas, runnable = _offered(tools)
        chat = self._chat.with_arguments(**template, **({"tools": schemas} if schemas else {}))
        form = await self._form(wanted, schemas)
        parent, new_ids = self.trajectories.of_messages(messages, chat)
        plain = {"min_new_tokens": 0}  # an answer of a form ends with it, whatever the run wants of others
        if form is not None and form.free:  # its free text has the thought, too
            sampling = {**plain, **sampling, "form": form.text}
        elif form is not None:
            form = replace(
                form, thought="begun" if begins_thought(chat.tokenizer, new_ids) else "may" if chat.thinks else ""
            )
            sampling = {**plain, **sampling, "form": form.text}

        def said(reply: Reply, id: str) -> tuple[list[Message], Any]:
            parsed = self._attempt.calls.parse(reply.text, schemas)
            calls = tuple(call.of_answer(id, place) for place, call in enumerate(parsed.calls))
            message: dict[str, Any] = {"role": "assistant", "content": parsed.content if calls else reply.text}
            if calls:
                message["tool_calls"] = [call.message for call in calls]
            return [*messages, message], (parsed, calls)

        question = _Asked("llm.chat", parent, new_ids, sampling, listener, messages)
        reply, turn, (whole, (parsed, calls)) = await self._answered(question, said, chat)
        broken = ({"broken": why} for why in parsed.broken)
        turn.calls = (*({"name": each.name, "arguments": each.arguments} for each in calls), *broken)
        own = (reply.text, reply.ids, reply.logprobs, reply.versions, reply.finish)
        more: dict[str, Any] = {"message": whole[-1], "turn": turn, "tools": runnable, "home": self._attempt.home}
        return Answer(*own, parsed.content, calls, parsed.broken, **more)

    async def _form(self, wanted: Wanted, tools: Sequence[Mapping[str, Any]]) -> Form | None:
        """The form of an answer of a schema, or with calls of tools; None: it may be anything."""
        schema, choice = wanted
        if choice == "auto":
            if schema is None:
                return None
            form: Form | None = schema if isinstance(schema, Form) else Form(json.dumps(schema))
        elif schema is not None:
            raise WrongValue("llm.chat: tool_choice asks for calls of tools, and schema for no call: take one of them")
        elif callable_tools := [one for one in tools if choice in ("required", one["function"]["name"])]:
            form = self._attempt.calls.form(callable_tools)
        else:
            raise WrongValue(f"llm.chat: tool_choice={choice!r} must be auto, required or the name of a tool")
        if (why := await self.unenforced(form)) is not None:
            raise WrongValue(f"llm.chat: {why}")
        return form

    async def unenforced(self, form: Form | None) -> str | None:
        """Why answers are not kept to a form while they are decoded; None: they are.

        Args:
            form: as `Attempt.calls` makes it; None: there is none.
        """
        if (why := self._attempt.setting.no_forms) is not None:
            return why
        if form is None:
            return f"tool calls of the format {self._attempt.calls.name} are no JSON that answers could be kept to"
        return await in_thread(lambda: unenforceable(form))

    @property
    def no_forms(self) -> str | None:
        """Why the engine keeps no answer to a form; None: it does."""
        return self._attempt.setting.no_forms

    def generate(self, prompt: Any, *, listener: Listener | None = None, **sampling: Any) -> Awaited[Reply]:
        """Let the model go on from token ids, or from a text as it stands; await it.

        Args:
            prompt: all that it reads: int [tokens], or a text. Ids that begin with what an earlier call read and
                answered go on from it; a text is encoded whole.
            listener, sampling: as of `chat`.

        Raises:
            UserError: as `chat`; `ContextFull`: not one token fits.
        """
        return Awaited(self._generated(prompt, sampling, listener), "llm.generate(…)", self._attempt.home)

    async def _generated(self, prompt: Any, sampling: Mapping[str, Any], listener: Listener | None) -> Reply:
        text_ids = self._chat.ids(prompt, first=True) if isinstance(prompt, str) else prompt
        ids = token_ids(text_ids, self._attempt.setting.vocabulary, "llm.generate")
        parent, new_ids = self.trajectories.of_ids(ids)
        question = _Asked("llm.generate", parent, new_ids, sampling, listener)
        reply, _, _ = await self._answered(question, lambda *_: ([], None), None)
        return reply

    async def _answered(
        self, question: _Asked, parse: Callable[[Reply, str], tuple[list[Message], Any]], chat: ChatFormat | None
    ) -> tuple[Reply, Turn, tuple[list[Message], Any]]:
        attempt, setting = self._attempt, self._attempt.setting
        call, parent, new_ids, sampling, listener, messages = question
        if attempt.closed:
            raise UserError(f"{call}: the episode is over; await every call before the agent returns")
        before = np.empty(0, np.int64) if parent is None else parent.ids()
        ids = np.concatenate([before, new_ids])
        token_ids(ids, setting.vocabulary, call)
        fixed = sampling.get("seed")
        sampling = {name: value for name, value in sampling.items() if name != "seed"}
        settings = setting.sampling_of(call, len(ids), self._sampling, sampling)
        digest = hashlib.blake2b(f"{self.name}/".encode() + ids.tobytes(), digest_size=8).digest()
        repeat = self._repeats[(digest, fixed)] = self._repeats.get((digest, fixed), -1) + 1
        if fixed is None:
            seed = mix(*self._key, int.from_bytes(digest, "little"), repeat)
        else:
            seed = mix(fixed, int.from_bytes(digest, "little"))
        line = attempt.fresh() if parent is None or parent.claimed else parent.conversation
        self._lines.add(line)
        if parent is not None:
            parent.claimed = True
        start = time.monotonic()
        more: dict[str, Any] = {} if self.adapter is None else {"adapter": self.adapter}
        name = f"{digest.hex()} {fixed} {repeat}"
        if listener is not None:
            listener.reads(new_ids, len(before), name)
            more["hear"] = listener.tells
        try:
            if attempt.seat is None or attempt.task is None:
                done = await setting.llm.answer(ids, seed=seed, conversation=line, **more, **settings)
            else:
                history = messages or [{"role": "user", "content": str(self._chat.tokenizer.decode(ids))}]
                done = await attempt.seat.answer(attempt.task, history, settings["max_new_tokens"])
        except asyncio.CancelledError:
            self.trajectories.counts.given_up += 1
            raise
        if attempt.closed:
            raise UserError(f"{call}: the episode was over before the answer came; await every call")
        reply = Reply.of(done, self._chat.tokenizer.decode)
        whole, parsed = parse(reply, name)
        turn = self.trajectories.add(parent, new_ids, done, settings["temperature"], line, whole, chat)
        turn.start, turn.took = start - attempt.start, time.monotonic() - start
        return reply, turn, (whole, parsed)

    async def scores(self, texts: Sequence[Any], top: int = 0) -> list[TextScores]:
        """Say how likely the model finds the tokens of texts; it generates nothing, and nothing is recorded.

        Args:
            texts: token ids of each, int [tokens].
            top: so many of the likeliest tokens are told in place of each, too.

        Raises:
            UserError: the episode is over, a text has ids that the model has not, or the engine tells no log-probs.
            ContextFull: a text is longer than the model takes.
        """
        setting, call = self._attempt.setting, "llm.scores"
        if self._attempt.closed:
            raise UserError(f"{call}: the episode is over; await every call before the agent returns")
        rows = [token_ids(text, setting.vocabulary, call).astype(np.int64) for text in texts]
        longest = max(map(len, rows), default=0)
        if setting.longest is not None and longest > setting.longest:
            raise ContextFull(f"{call}: a text has {longest} tokens, and the model takes {setting.longest}")
        scores: list[TextScores] = await setting.llm.scores(rows, top)
        return scores

    def reward(self, value: float | Sequence[float], answer: Answer | None = None) -> None:
        """Reward an answer; several rewards of one answer add.

        Args:
            value: the reward, which falls at the answer's last token; or one for each token of `answer.ids`.
            answer: of `chat`; None for the newest one.

        Raises:
            UserError: the model has not answered yet.
            TypeError, ValueError: no number, and no numbers as many as tokens.
        """
        turns = self.trajectories.turns
        if not turns:
            raise UserError("llm.reward: the model has not answered yet; call it after `await llm.chat(…)`")
        turn = turns[-1] if answer is None or answer.turn is None else answer.turn
        add_reward(turn, value, len(turn.answer.token_ids), "llm.reward")

    # For foreign frameworks -------------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """An OpenAI-compatible endpoint of this agent's own: what is asked there is recorded as by `chat`."""
        return self._opened()[0]

    @property
    def api_key(self) -> str:
        """The key of `base_url`."""
        return self._opened()[1]

    def _opened(self) -> tuple[str, str]:
        if self._address is None:
            if self._attempt.open is None:
                raise UserError("llm.base_url: this model has no endpoint; take the `llm` that a session gives agents")
            self._address = self._at_home(functools.partial(self._attempt.open, self))
        return self._address

    def _at_home(self, call: Callable[[], Any]) -> Any:
        """Call a function on the run's event loop, from whatever thread, and return its result."""
        home = self._attempt.home
        if home is None or running_loop() is home:
            return call()

        async def called() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(called(), home).result()

    # What came of it --------------------------------------------------------------------------------------------

    @property
    def agents(self) -> Mapping[str, AgentLLM]:
        """All agents of the task, by name."""
        return self._attempt.agents

    @property
    def index(self) -> int:
        """Which attempt at its task this is, from 0: with the task's id, its name, also when it is run again."""
        return self._attempt.index

    def samples(self, reward: Any = None) -> list[Sample]:
        """Return everything said so far as samples, see `Trajectories.samples`; none of an earlier version of the
        policy.

        Args:
            reward: a number or a `Score`; None takes the rewards of the answers, or leaves the samples to a judge.

        Raises:
            ValueError, TypeError: no number.
        """
        if not self.learns:
            return []
        more: dict[str, Any] = {"agent": self.name}
        if isinstance(reward, Score):
            more |= {"scores": dict(reward.scores), "extracted": reward.extracted}
            reward = reward.value
        value = None if reward is None else number(reward, "agent")
        more["weight"] = self.weight
        return self.trajectories.samples(self._attempt.task, self._attempt.index, value, **more)

    def counts(self) -> Counts:
        """Sum the counts of all agents of the task."""
        all_of_them = [agent.trajectories.counts for agent in self._attempt.agents.values()]
        return Counts(*(sum(getattr(each, name) for each in all_of_them) for name in Counts.__dataclass_fields__))

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have a function called when the episode is over."""
        self._attempt.at_end.append(call)

    def leave_out(self) -> None:
        """Learn nothing of what was said here."""
        self.trajectories = Trajectories(self._chat)

    def end(self) -> None:
        """The episode is over: the engine need keep nothing of it."""
        self._attempt.closed = True
        while self._attempt.at_end:
            self._attempt.at_end.pop()()
        for agent in self._attempt.agents.values():
            for line in sorted(agent._lines):
                self._attempt.setting.llm.ended(line)


def _offered(tools: Any) -> tuple[list[Any], Tools | None]:
    """Schemas of tools, and the tools themselves where they can be run.

    Raises:
        TypeError: they are neither functions, tools nor schemas.
    """
    if tools is None:
        return [], None
    if isinstance(tools, Tools):
        return tools.schemas, tools
    if isinstance(tools, (str, Mapping)) or callable(tools) or not isinstance(tools, Iterable):
        raise WrongType(f"llm.chat: tools={shown(tools)} is no list of tools")
    listed = list(tools)
    if listed and all(isinstance(each, Mapping) for each in listed):
        return listed, None
    runnable = Tools(listed)
    return runnable.schemas, runnable


def is_agent(function: Any) -> bool:
    """True if a function takes a task and a model, rather than a task alone."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [each for each in parameters if each.kind in positional and each.default is each.empty]
    return len(wanted) >= 2 or "llm" in {each.name for each in parameters}


async def worked_on(agent: Agent, task: Any, llm: AgentLLM) -> Any:
    """Run an agent on a task and return its result. A plain function works in a thread of its own, so that it may
    block."""
    call = functools.partial(agent, task, llm)
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
        return await call()
    returned = await in_thread(functools.partial(contextvars.copy_context().run, call))
    return await returned if isinstance(returned, Awaitable) else returned


def lasts(function: Any) -> bool:
    """It makes agents that have something for all episodes of a run: a class, a function with `@asynccontextmanager`,
    or an async context manager itself."""
    made_by_generator = inspect.isasyncgenfunction(inspect.unwrap(function)) and hasattr(function, "__wrapped__")
    return inspect.isclass(function) or made_by_generator or _is_context(function)


def _is_context(value: Any) -> bool:
    return hasattr(type(value), "__aenter__")


class LastingAgent:
    """An agent that has something for all episodes of a run, such as a server, a pool or a client: `async with` opens
    it before the first episode, and closes it behind the last one, however the run ends.

    Args:
        source: an async context manager, or a class or function that makes one: what it is entered as is the agent. An
            object of a class that is no context manager is the agent itself.
        arguments: of the class or function.
    """

    def __init__(self, source: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self.source, self._arguments = source, dict(arguments or {})
        self._stack = AsyncExitStack()
        self._agent: Agent | None = None

    async def __aenter__(self) -> LastingAgent:
        source = self.source if _is_context(self.source) else self.source(**self._arguments)
        async with AsyncExitStack() as stack:
            entered = await stack.enter_async_context(source) if _is_context(source) else source
            agent = source if entered is None else entered
            if not callable(agent):
                raise UserError(
                    f"agent: opened, {shown(source)} is {shown(agent)}, which cannot be called as agent(task, llm): "
                    "return or yield something that can"
                )
            self._stack, self._agent = stack.pop_all(), agent
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._agent = None
        await self._stack.__aexit__(*error)  # it may not swallow what ends the run

    async def __call__(self, task: Any, llm: AgentLLM) -> Any:
        if self._agent is None:
            raise UserError("agent: it is closed, as its run is not open")
        return await worked_on(self._agent, task, llm)


def opened(agent: Agent | None) -> AbstractAsyncContextManager[Any]:
    """A context in which an agent has what it needs for its episodes."""
    return agent if isinstance(agent, LastingAgent) else nullcontext()


def samples_of(returned: Any, llm: AgentLLM) -> list[Sample]:
    """Convert an agent's return value to samples.

    Args:
        returned: a number or `Score` for all that was said; `{agent's name: number or Score}`; samples; or None, if
            answers were rewarded by `llm.reward`, or a judge scores them.
        llm: what it called.

    Raises:
        TypeError, ValueError: it is something else.
        UserError: the model was never called.
    """
    if isinstance(returned, Sample):
        return [returned]
    if isinstance(returned, (list, tuple)) and returned and all(isinstance(each, Sample) for each in returned):
        return list(returned)
    if isinstance(returned, (str, bytes, list, tuple)):
        raise WrongType(
            f"agent: it returned {shown(returned)}; return a number, a Score, {{agent's name: number}}, or samples"
        )
    spoke = {name: one for name, one in llm.agents.items() if one.trajectories.turns and one.learns}
    if not spoke and any(one.trajectories.turns for one in llm.agents.values()):
        raise OnlyPast("agent: only an earlier version of the policy spoke, of which nothing is learned")
    if not spoke:
        raise UserError(
            "agent: it returned without asking the model anything, so there is nothing to learn "
            "from; was each `llm.chat(…)` awaited?"
        )
    if isinstance(returned, Mapping):
        if unknown := sorted(returned.keys() - llm.agents.keys()):
            raise UserError(
                f"agent: it returned a reward for {', '.join(map(repr, unknown))}, and its agents are "
                f"{', '.join(map(repr, sorted(llm.agents)))}: name them by llm.agent(name)"
            )
        rewards = dict(returned)
    else:
        rewards = dict.fromkeys(spoke, returned)
    return [sample for name, agent in spoke.items() for sample in _rewarded(agent, rewards.get(name))]


def _rewarded(llm: AgentLLM, reward: Any) -> list[Sample]:
    """The samples of one agent.

    Raises:
        UserError: some of its branches were rewarded by `llm.reward`, and others were not.
    """
    samples = llm.samples(reward)
    without = sum(sample.reward is None for sample in samples)
    if 0 < without < len(samples):
        whose = f" of agent {llm.name!r}" if llm.name else ""
        raise UserError(
            f"llm.reward: {without} of {len(samples)} branches{whose} have no rewarded answer, and a reward is that of "
            "its own branch: reward an answer of each, by llm.reward(value, answer), 0.0 too; or return one number, "
            "which is the reward of them all"
        )
    return samples
