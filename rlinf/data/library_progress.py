"""Progress bars of transformers, huggingface_hub and datasets, reported as work of ours instead of being drawn by them.

In: the bars that these libraries make while they download, load and prepare. Out: `rlinf.runtime.base.progress`, whose
listener shows them, where there is one. Their own drawing is switched off in every process: it would tear the lines of
a run apart, and a log would be full of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from rlinf.runtime.base.progress import Work, begin_work, listener

_UNITS = {"B": "bytes", "it": ""}
"""Ours by theirs."""
_SENTENCES = ("Loading", "Fetching", "Downloading", "Generating", "Writing", "Saving", "Setting", "Resolving")
"""How descriptions begin that are no file names: they go on in lower case, as ours do."""
_FOLDED = "_told_by_rlinf"
"""Attribute of classes that are done with."""


def fold_transformers() -> None:
    """Take over the bars of transformers, and of huggingface_hub, which it downloads with; once is enough."""
    from huggingface_hub.utils import tqdm as hub_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_tqdm_hook(_bar_of_transformers)
    _fold(hub_bars)


def fold_datasets() -> None:
    """Take over the bars of datasets; once is enough."""
    import datasets
    from datasets.utils import tqdm as bars

    datasets.disable_progress_bars()
    _fold(bars)


class Bar:
    """Stand-in for tqdm's bar in other libraries.

    Args:
        items: gone through by iterating over it; None: `update` is called instead.
        keys: tqdm's arguments.
    """

    def __init__(self, items: Iterable[Any] | None = None, **keys: Any) -> None:
        self._items = items
        self._keys = {"total": len(items) if isinstance(items, Sized) else None, **keys}
        self.n: float = keys.get("initial") or 0
        self._work = _begun(self._keys.get("desc"), self._keys["total"], self._keys.get("unit"))
        self._work.at(self.n)

    def __iter__(self) -> Iterator[Any]:
        assert self._items is not None
        try:
            for item in self._items:
                yield item
                self.update()
        finally:
            self.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._work.end(broken=kind is not None)

    def update(self, amount: float | None = 1) -> None:
        """So much more is done."""
        self.n += amount or 0
        self._work.at(self.n)

    def close(self) -> None:
        """It is over, whether or not all of it was done."""
        self._work.end(broken=self.n < (self._keys["total"] or 0))

    def __getattr__(self, name: str) -> Any:
        """Everything else is about how tqdm draws."""
        return lambda *_, **__: None


def _bar_of_transformers(factory: Any, args: tuple[Any, ...], keys: dict[str, Any]) -> Any:
    """See `transformers.utils.logging.set_tqdm_hook`."""
    return Bar(*args[:1], **keys) if listener() is not None else factory(*args, **keys)


def _fold(bars: type[Any]) -> None:
    """Have every bar of a class, which is switched off, tell what it would have drawn."""
    if getattr(bars, _FOLDED, False):
        return
    begins, updates, closes = bars.__init__, bars.update, bars.close

    def init(self: Any, *args: Any, **keys: Any) -> None:
        begins(self, *args, **keys)
        self._told = None
        if listener() is not None:
            described = keys.get("desc") or (args[1] if len(args) > 1 else None)
            self._told = _begun(described, self.total, keys.get("unit"))
            self._done = keys.get("initial") or 0
            self._told.at(self._done)

    def update(self: Any, amount: float | None = 1) -> Any:
        if self._told is not None:
            self._done += amount or 0
            self._told.at(self._done, self.total)  # of a download the size may come later
        return updates(self, amount)

    def close(self: Any) -> None:
        if (work := getattr(self, "_told", None)) is not None:
            self._told = None  # tqdm closes again when it is collected
            work.end(broken=self._done < (self.total or 0))
        closes(self)

    def iterate(self: Any) -> Iterator[Any]:
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    bars.__init__, bars.update, bars.close, bars.__iter__ = init, update, close, iterate
    setattr(bars, _FOLDED, True)


def _begun(desc: str | None, total: float | None, unit: str | None) -> Work:
    named = " ".join((desc or "").split()).rstrip(":") or "working"
    if named.split()[0] in _SENTENCES:
        named = named[0].lower() + named[1:]
    unit = (unit or "it").strip()
    return begin_work(named, total, _UNITS.get(unit, unit))
