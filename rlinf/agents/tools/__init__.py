"""Tools that a model can call: made of functions or MCP servers, and the formats in which models call them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.agents.tools.arithmetic import calculator
    from rlinf.agents.tools.formats import CallFormat, Parsed, ToolCall, call_format
    from rlinf.agents.tools.tool import Tool, ToolFailed, Tools

_MODULES = {
    "formats": ("CallFormat", "Parsed", "ToolCall", "call_format"),
    "tool": ("Tool", "ToolFailed", "Tools"),
    "arithmetic": ("calculator",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["CallFormat", "Parsed", "Tool", "ToolCall", "ToolFailed", "Tools", "calculator", "call_format"]


def __getattr__(name: str) -> Any:
    """Import public names at first use: tools need what only the extra `agents` installs."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
