"""Simulators in another process or on another machine, with a Python and packages of their own; and real robots.

`client` is our side. `serve` is the other one: a single file, which needs numpy and Python 3.8 and nothing of ours.
"""

from typing import Any

__all__ = ["Remote"]


def __getattr__(name: str) -> Any:
    """Import our side when it is asked for, so that `python -m rlinf.envs.remote.serve` does not need it."""
    if name == "Remote":
        from rlinf.envs.remote.client import Remote

        return Remote
    raise AttributeError(name)
