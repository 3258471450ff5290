"""Stand-ins for packages that an author's module imports and that what is tried here never calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


class _Anything(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]):
        self._names = {*names}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        packages = {".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 2)}
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if packages & self._names else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(*names: str) -> None:
    """Have modules of these names, and all below them, be there without a content of their own."""
    sys.meta_path.insert(0, _Finder(names))


def bare(*names: str) -> None:
    """Have packages whose own first lines, which import everything that the author has, are not run."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split("."))) for folder in sys.path]
        sys.modules[name] = package
