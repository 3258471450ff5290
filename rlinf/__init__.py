"""Reinforcement learning for foundation models as plain async Python: write the flow, the runtime interleaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.actors.critic import Critic
    from rlinf.actors.judge import Judge
    from rlinf.actors.reference import Reference
    from rlinf.actors.rollout import Rollout
    from rlinf.actors.trainer import Trainer
    from rlinf.agents.agent import AgentLLM
    from rlinf.agents.conversation import Conversation
    from rlinf.agents.llm import ContextFull, Reply
    from rlinf.agents.tools.tool import Tool, Tools, tool
    from rlinf.config.load import ConfigError, InputError, RunFailure
    from rlinf.data.sample import Group, Prompt, Sample
    from rlinf.rewards.base import Score
    from rlinf.runs.library.session import Session
    from rlinf.runs.library.train import Result, train, train_async
    from rlinf.runs.rules import load_config
    from rlinf.runtime.actor.actor import Actor, endpoint
    from rlinf.runtime.streams.channel import Channel
    from rlinf.runtime.streams.stream import Stream
    from rlinf.runtime.system.handles import ActorGroup
    from rlinf.runtime.system.system import ActorSystem
    from rlinf.runtime.system.torchrun import run
    from rlinf.runtime.values.promise import Promise

__version__ = "0.1.0"

_HOME = {
    "Actor": "runtime.actor.actor",
    "ActorGroup": "runtime.system.handles",
    "ActorSystem": "runtime.system.system",
    "AgentLLM": "agents.agent",
    "Channel": "runtime.streams.channel",
    "ConfigError": "config.load",
    "ContextFull": "agents.llm",
    "Conversation": "agents.conversation",
    "Critic": "actors.critic",
    "Group": "data.sample",
    "InputError": "config.load",
    "Judge": "actors.judge",
    "Promise": "runtime.values.promise",
    "Prompt": "data.sample",
    "Reference": "actors.reference",
    "Reply": "agents.llm",
    "Result": "runs.library.train",
    "Rollout": "actors.rollout",
    "RunFailure": "config.load",
    "Sample": "data.sample",
    "Score": "rewards.base",
    "Session": "runs.library.session",
    "Stream": "runtime.streams.stream",
    "Tool": "agents.tools.tool",
    "Tools": "agents.tools.tool",
    "Trainer": "actors.trainer",
    "endpoint": "runtime.actor.actor",
    "load_config": "runs.rules",
    "run": "runtime.system.torchrun",
    "tool": "agents.tools.tool",
    "train": "runs.library.train",
    "train_async": "runs.library.train",
}

__all__ = [
    "Actor", "ActorGroup", "ActorSystem", "AgentLLM", "Channel", "ConfigError", "ContextFull", "Conversation", "Critic",
    "Group", "InputError", "Judge", "Promise", "Prompt", "Reference", "Reply", "Result", "Rollout", "RunFailure",
    "Sample", "Score", "Session", "Stream", "Tool", "Tools", "Trainer", "endpoint", "load_config", "run", "tool",
    "train", "train_async",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import public names at first use, so that `--help` and config errors need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'rlinf' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
