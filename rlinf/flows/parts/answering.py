"""Answers of a run's model, asked for one by one: the part of a session that does not learn.

In: what is said. Out: replies, and groups of answers. Who wakes whom: the rollout's answers wake conversations.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlinf.agents.agent import Agent, AgentLLM
from rlinf.agents.awaited import Awaited
from rlinf.agents.chat import ChatFormat
from rlinf.agents.checks import WrongType, at_least_one, shown
from rlinf.agents.conversation import Conversation
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.agents.endpoint.served import Served, serving_config
from rlinf.agents.episodes import Tally, here
from rlinf.agents.llm import Reply, Setting
from rlinf.agents.prompts import are_messages, prompt_of
from rlinf.agents.rollout_model import RolloutModel
from rlinf.agents.tools.calls import call_format
from rlinf.config.text import EndpointConfig
from rlinf.data.sample import Group, Prompt
from rlinf.runtime.streams.stream import Stream, each

TASKS, ANSWERS, TRIALS = 1, 2, 3
"""Kinds of what is drawn: episodes to learn from, answers outside of them, episodes of evaluations. Part of their
seeds, so that none draws what another has drawn."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a session has to know of its run."""

    roles: Callable[[], Mapping[str, Any]]
    """The roles as they are now."""
    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    seed: int
    """Of all that is drawn."""
    group_size: int
    """Episodes per task, answers per prompt."""
    temperature: float
    """Of answers."""
    max_new_tokens: int
    """Of answers."""
    longest: int | None
    """Tokens of a whole conversation; None: nobody knows."""
    vocabulary: int | None
    """Token ids are below it."""
    at_once: int
    """Episodes that are played at the same time."""
    compares: str | None
    """Name of the algorithm, if it compares the samples of a group with each other."""
    judges: bool
    """The judge has a reward function that was asked for."""
    counters: dict[str, int]
    """How many tasks and single answers were asked for: what seeds depend on, kept by checkpoints."""
    reward_chosen: bool = True
    """Somebody chose that function: no other says how good an episode was."""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """`temperature`, `max_new_tokens` and `top_p` of evaluations."""
    critic_only: Callable[[], bool] = lambda: False
    """Only the critic learns yet."""
    moving_reference: bool = False
    """The reference follows the policy."""
    say: Callable[[str], None] = print
    """Prints a line for people."""
    dropped: Callable[[int, str, Sequence[int]], None] = lambda task, reason, attempts: None
    """Told of attempts that nothing will be learned from, by the number of their task."""
    agent: Agent | None = None
    """What works on a task, where the run names it."""
    timeout: float | None = None
    """Seconds of an episode, where a call does not say."""
    call_format: str | None = None
    """How the model writes calls of tools; None: as its chat template says."""
    endpoint: Endpoint | None = None
    """Where agents in other frameworks find the model."""


class Answering:
    """Conversations and single answers of a model that runs.

    Args:
        running: the run.
    """

    def __init__(self, running: Running) -> None:
        self._begin_with(running)

    def _begin_with(self, running: Running) -> None:
        self._running = running
        self._chat = ChatFormat(running.tokenizer, running.chat_args, running.say)
        self._model = RolloutModel(lambda: running.roles()["rollout"])
        self._setting = Setting(
            self._model, running.temperature, running.max_new_tokens, running.longest, running.vocabulary
        )
        self._calls = call_format(running.call_format, running.tokenizer)
        self._numbers = itertools.count()
        self._tally = Tally()
        self._untold: list[Tally] = []

    # What is at hand --------------------------------------------------------------------------------------------

    def _open(self, call: str) -> Running:
        """The run, if there is one now.

        Raises:
            UserError: the session is not open.
        """
        return self._running

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's, with its chat template: `session.tokenizer.apply_chat_template(…)`."""
        return self._open("tokenizer").tokenizer

    @property
    def rollout(self) -> Any:
        """The role that generates, for calls that the session does not have."""
        return self._open("rollout").roles()["rollout"]

    @property
    def trainer(self) -> Any:
        """The role that owns the weights."""
        return self._open("trainer").roles()["trainer"]

    @property
    def judge(self) -> Any:
        """The role that scores."""
        return self._open("judge").roles()["judge"]

    # Answers ----------------------------------------------------------------------------------------------------

    def llm(self, **sampling: Any) -> AgentLLM:
        """The model as agents call it, its calls recorded: `await session.llm().chat(messages)`.

        Args:
            sampling: for every call, such as temperature=0.7.
        """
        running, episode = self._open("llm"), here.get()
        setting = self._setting if episode is None else episode.recorded(self._setting)
        if episode is None:
            key: tuple[int, ...] = (running.seed, ANSWERS, self._counted("answers"))
            task, index = None, 0
        else:
            key, index = (*episode.seed, episode.index), episode.index
            task = episode.prompt or Prompt(episode.task, self._chat.ids(""))
            sampling = {**episode.sampling, **sampling}
        return AgentLLM.begin(
            setting, self._chat, self._calls, key=key, fresh=lambda: next(self._numbers), task=task, index=index,
            sampling=sampling, open=None if running.endpoint is None else running.endpoint.session,
        )  # fmt: skip

    def serve(self, *, idle: float = 3600.0, **settings: Any) -> Served:
        """Serve the model to any client: `async with session.serve(port=8000) as served:`, see `Served`.

        Args:
            idle: seconds after which a conversation that nobody goes on with or judges is forgotten.
            settings: over those of `agent.endpoint`: host, port, token and the limits.

        Raises:
            UserError: there is no such setting; when it is entered: the address cannot be had.
        """
        running = self._open("serve")
        config = EndpointConfig() if running.endpoint is None else running.endpoint.config
        return Served(serving_config(config, settings), self.llm, idle=idle)

    def conversation(
        self,
        system: str | None = None,
        *,
        prompt: Any = None,
        tools: Sequence[Any] | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> Conversation:
        """Begin a conversation: `async with session.conversation(system="…") as c:`.

        Args:
            system: what the system says first.
            prompt: what was said before: a text or token ids, as they are, messages, or a `Prompt`.
            tools: for the chat template.
            seed: of its randomness. None: within an episode, of (the session's seed, task, episode); elsewhere another
                one each time, the same for the same session seed and order of calls.
            sampling: for every `generate` in it, such as temperature=0.7.

        Raises:
            UserError, TypeError, ValueError: something that cannot be said.
        """
        return self._begin("conversation", system, prompt, tools, seed, next(self._numbers), sampling)

    def _begin(
        self,
        call: str,
        system: str | None,
        prompt: Any,
        tools: Sequence[Any] | None,
        seed: int | None,
        number: int | None,
        sampling: Mapping[str, Any],
    ) -> Conversation:
        """A conversation for a call of that name; arguments as of `conversation`, and its number among those of several
        turns."""
        running, episode = self._open(call), here.get()
        setting = self._setting if episode is None else episode.recorded(self._setting)
        if episode is not None:
            key = (*episode.seed, episode.index, len(episode.conversations))
            sampling = {**episode.sampling, **sampling}
        else:
            key = (running.seed, ANSWERS, self._counted("answers"))
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise WrongType(f"session.{call}: seed={shown(seed)} must be a whole number")
            key = (seed,)
        chat = self._chat if tools is None else self._chat.with_arguments(tools=tools)
        task = None if episode is None else episode.prompt or Prompt(episode.task, self._chat.ids(""))
        begun = Conversation(
            setting, chat, key, number, sampling, task,
            0 if episode is None else episode.index, lambda: next(self._numbers),
        )  # fmt: skip
        if system is not None:
            begun.system(system)
        if are_messages(prompt, f"session.{call}"):
            begun.begin(prompt)
        elif prompt is not None:
            made = prompt_of(prompt, 0, chat, self._setting.vocabulary, f"session.{call}")
            if task is None and isinstance(prompt, Prompt):
                begun.prompt = made
            begun.append(made.token_ids)
        if episode is not None:
            episode.conversations.append(begun)
        return begun

    def complete(
        self, prompt: Any, *, max_new_tokens: int | None = None, seed: int | None = None, **sampling: Any
    ) -> Awaited[Reply]:
        """One answer; await it. Many may be asked for at the same time.

        Args:
            prompt: a text, which stands as it is; messages, which get the chat template; token ids; or a `Prompt`.
            max_new_tokens: default: the run's.
            seed: the same seed gives the same answer; None: see `conversation`.
            sampling: temperature, top_p, top_k, min_p, min_new_tokens, stop; default: the run's.

        Raises:
            TypeError, ValueError, UserError: something that cannot be answered; by what and why.
        """
        chosen = sampling if max_new_tokens is None else {"max_new_tokens": max_new_tokens, **sampling}

        async def answer() -> Reply:
            async with self._begin("complete", None, prompt, None, seed, None, {}) as conversation:
                return await conversation.generate(**chosen)

        return Awaited(answer(), "session.complete(…)")

    def generate(
        self, prompts: Iterable[Any] | AsyncIterable[Any], n: int | None = None, **sampling: Any
    ) -> Stream[Group]:
        """Answer every prompt `n` times, and score the answers if the session has a reward function.

        Args:
            prompts: a list or a stream; each as in `complete`, or a mapping with `prompt`, `answer` and other columns.
            n: answers per prompt; default: the run's group size.
            sampling: temperature, max_new_tokens and the like; default: the run's.

        Returns:
            Groups as they are complete: `async for group in session.generate(…)`.

        Raises:
            TypeError, ValueError, UserError: at once for a list, otherwise when the prompt comes.
        """
        running = self._open("generate")
        count = at_least_one(running.group_size if n is None else n, "n", "session.generate")
        if isinstance(prompts, (str, Mapping, Prompt)) or not isinstance(prompts, (Iterable, AsyncIterable)):
            raise WrongType(f"session.generate: {shown(prompts)} is one prompt or none; give a list of them")
        made: Any
        if isinstance(prompts, (list, tuple)):
            made = [self._prompt(given) for given in prompts]
        else:
            made = self._prompts(prompts)
        answers = running.roles()["rollout"].generate(
            Stream.of(made, name="prompts"), n=count, listed=False, **sampling
        )
        scored: Stream[Group] = running.roles()["judge"].score.map(answers) if running.judges else answers
        return scored

    async def _prompts(self, prompts: Any) -> AsyncIterator[Prompt]:
        async for given in each(prompts):
            yield self._prompt(given)

    def _prompt(self, given: Any) -> Prompt:
        if isinstance(given, Prompt):
            return prompt_of(given, given.id, self._chat, self._setting.vocabulary, "session.generate")
        return prompt_of(given, self._counted("tasks"), self._chat, self._setting.vocabulary, "session.generate")

    def _counted(self, what: str) -> int:
        """How many of these there were before this one."""
        counters = self._running.counters
        counters[what] = counters.get(what, 0) + 1
        return counters[what] - 1
