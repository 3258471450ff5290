"""Reinforcement learning for foundation models as plain async Python: write the flow, the runtime interleaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import load_config
    from .runtime.actor import Actor, endpoint
    from .runtime.channel import Channel
    from .runtime.group import ActorGroup
    from .runtime.promise import Promise
    from .runtime.run import run
    from .runtime.stream import Stream
    from .runtime.system import ActorSystem

__version__ = "0.1.0"

_HOME = {
    "Actor": "runtime.actor",
    "endpoint": "runtime.actor",
    "ActorSystem": "runtime.system",
    "ActorGroup": "runtime.group",
    "Promise": "runtime.promise",
    "Stream": "runtime.stream",
    "Channel": "runtime.channel",
    "run": "runtime.run",
    "load_config": "config",
}

__all__ = ["Actor", "ActorGroup", "ActorSystem", "Channel", "Promise", "Stream", "endpoint", "load_config", "run"]


def __getattr__(name: str) -> Any:
    """Import public names at first use, so that `--help` and config errors need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'rlinf' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
