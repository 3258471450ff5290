"""Packages that are not installed, for as long as a test runs."""

import sys
from types import ModuleType


def stand_in(monkeypatch, modules: dict[str, dict]) -> None:
    """Let packages be imported: modules by their dotted names, each with what it holds."""
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if whole not in sys.modules:
                monkeypatch.setitem(sys.modules, whole, ModuleType(whole))
        vars(sys.modules[name]).update(contents)


def missing(monkeypatch, *names: str) -> None:
    """Let packages not be there, whether they are installed or not."""
    for name in names:
        for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)
