"""Reinforcement learning for foundation models as plain async Python: write the flow, the runtime interleaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.cli.validate import load_config

    from .runtime.actor.actor import Actor, endpoint
    from .runtime.streams.channel import Channel
    from .runtime.streams.stream import Stream
    from .runtime.system.handles import ActorGroup
    from .runtime.system.system import ActorSystem
    from .runtime.system.torchrun import run
    from .runtime.values.promise import Promise

__version__ = "0.1.0"

_HOME = {
    "Actor": "runtime.actor.actor",
    "endpoint": "runtime.actor.actor",
    "ActorSystem": "runtime.system.system",
    "ActorGroup": "runtime.system.handles",
    "Promise": "runtime.values.promise",
    "Stream": "runtime.streams.stream",
    "Channel": "runtime.streams.channel",
    "run": "runtime.system.torchrun",
    "load_config": "cli.validate",
}

__all__ = ["Actor", "ActorGroup", "ActorSystem", "Channel", "Promise", "Stream", "endpoint", "load_config", "run"]


def __getattr__(name: str) -> Any:
    """Import public names at first use, so that `--help` and config errors need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'rlinf' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
