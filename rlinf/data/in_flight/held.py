"""Which samples are in flight: of a run that goes on, and of a checkpoint, as its ledger is held against them.

In: entries, or the file of a checkpoint. Out: indices by the prompt's id; or how many there are, where not all answers
to a prompt are complete, so that nobody knows yet which will come of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json
from rlinf.data.in_flight.admission import Entry
from rlinf.data.sample import Group, Sample

Counted = dict[int, list[int] | int]
"""Samples by the prompt's id: which, or how many."""


def sample_number(sample: Sample) -> int:
    """Which of the samples that were asked for a prompt it is."""
    return sample.index if sample.attempt is None else sample.attempt


def sample_numbers(results: Iterable[Any]) -> set[int]:
    """Of all samples of groups."""
    return {sample_number(one) for group in results if isinstance(group, Group) for one in group.samples}


def held_of(entries: Iterable[Entry]) -> Counted:
    """The samples of entries."""
    return _held(
        (
            entry.id,
            entry.size,
            None if entry.result is None else sample_numbers(entry.result),
        )
        for entry in entries
    )


def held_in(path: Path) -> Counted:
    """The samples in the file `in_flight.json` of a checkpoint; see `kept_files`. No array is read.

    Raises:
        ValueError: it is no such file.
    """
    try:
        objects = parse_json(path.read_text(encoding="utf-8"))["objects"]
        return _held(
            (parts["id"], parts["size"], _numbers(parts["result"], objects))
            for name, parts in objects
            if name == Entry.__name__
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _numbers(result: Any, objects: list[Any]) -> list[int] | None:
    """Of the samples of a result, None if there is none yet."""
    if result is None:
        return None
    found = []
    for group in result["t"]:
        for sample in objects[group["o"]][1]["samples"]["t"]:
            parts: Mapping[str, Any] = objects[sample["o"]][1]
            found.append(parts["index"] if parts.get("attempt") is None else parts["attempt"])
    return found


def _held(entries: Iterable[tuple[int, int, Iterable[int] | None]]) -> Counted:
    """The samples of (prompt id, how many, which if that is known)."""
    known: dict[int, set[int]] = {}
    unknown: dict[int, int] = {}
    for number, size, indices in entries:
        if indices is None:
            unknown[number] = unknown.get(number, 0) + size
        else:
            known.setdefault(number, set()).update(indices)
    return {
        number: len(known.get(number, ())) + unknown[number] if number in unknown else sorted(known[number])
        for number in {**known, **unknown}
    }
