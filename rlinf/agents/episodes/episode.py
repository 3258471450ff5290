"""One play of a task while it goes on, and which one the running code plays."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf.agents.agent import AgentLLM
from rlinf.agents.conversation import Conversation
from rlinf.agents.episodes.record import Record
from rlinf.agents.episodes.recorded_model import RecordedModel
from rlinf.agents.llm import Setting
from rlinf.data.sample import Prompt


@dataclass(slots=True, eq=False)
class Episode:
    """One play of a task, while it goes on: what a conversation that begins in it belongs to."""

    task: int
    """Number of the task."""
    index: int
    """Which of its episodes."""
    seed: tuple[int, ...]
    """What its randomness depends on, besides its index."""
    prompt: Prompt | None
    """The task itself, if it is a prompt."""
    sampling: Mapping[str, Any]
    """How its conversations sample where they do not say."""
    conversations: list[Conversation] = field(default_factory=list)
    """Those that began in it."""
    llm: AgentLLM | None = None
    """The model as its agents call it, if it is played by agents."""
    record: Record = field(default_factory=Record)
    """What it asked of the model."""

    def sibling(self, index: int, record: Record) -> Episode:
        """Another episode of the same task.

        Args:
            index: which.
            record: of its calls.
        """
        return replace(self, index=index, conversations=[], llm=None, record=record)

    def recorded(self, setting: Setting) -> Setting:
        """The setting with the model's calls going into the episode's record."""
        return replace(setting, llm=RecordedModel(setting.llm, self.record))

    def said(self) -> int:
        """How much was said so far: answers of the model to agents, messages of conversations."""
        by_agents = 0 if self.llm is None else self.llm.counts().calls
        return by_agents + sum(len(conversation.messages) for conversation in self.conversations)

    def end(self) -> None:
        """It is over: the engine need keep nothing of it."""
        for conversation in self.conversations:
            conversation.end()
        if self.llm is not None:
            self.llm.end()
        self.record.end()


here: ContextVar[Episode | None] = ContextVar("episode", default=None)
"""The episode that the running code plays."""
