"""Tells when the main thread of this process begins and ends to load a module that was not loaded yet.

In: the interpreter's imports. Out: calls of one function, `tell(True)` and `tell(False)` by turns. A first import may
take seconds (torch: two), which is nobody's fault whose deadline is running: `keeper.py` passes it on to the parent,
whose clock stands still meanwhile. Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any


class ImportWatch(importlib.abc.MetaPathFinder):
    """Finds modules as all finders behind it do, and tells of the outermost load. Takes effect when it is made.

    Args:
        tell: called with True before a module is loaded, and with False after it, and all that it imports, was.
    """

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self.tell = tell
        self.seconds = 0.0
        """Spent in loading so far."""
        self._loading = False
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give; its loader tells of what it does."""
        if self._loading or threading.current_thread() is not threading.main_thread():
            return None  # within another load; or the messages of two threads would mix
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for each in others if (found := each.find_spec(name, path, target)) is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Telling(self, spec.loader)
        return spec

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Tell that a module is loaded inside."""
        if self._loading:
            yield
            return
        self._loading, since = True, time.monotonic()
        self.tell(True)
        try:
            yield
        finally:
            self._loading = False
            self.seconds += time.monotonic() - since
            self.tell(False)


class _Telling(importlib.abc.Loader):
    """A loader that tells when it works, and leaves the module as if its own loader had been asked."""

    def __init__(self, watch: ImportWatch, loader: Any) -> None:
        self._watch, self._loader = watch, loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        spec.loader = self._loader  # some look at their spec
        try:
            return self._loader.create_module(spec)  # type: ignore[no-any-return]
        finally:
            spec.loader = self

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with self._watch.loading():
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
