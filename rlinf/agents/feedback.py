"""Online feedback: answers wait for their rewards, and rewarded ones for the batch that learns from them.

In: answers as they are served, then rewards by the answers' ids. Out: batches of groups. Who wakes whom: the reward
that completes a batch wakes whoever waits for one.

All of it is in a journal, a file to which a line is appended for whatever happens, so that a process that is killed
loses nothing: who opens the journal again after step N has every answer that was not learned from by step N, whether
its reward has come or not.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rlinf.agents.arguments import WrongType, WrongValue, at_least_one, number, shown
from rlinf.config.reading import parse_json
from rlinf.data.sample import Group, Prompt, Sample

TOGETHER = 4
"""Batches that one step learns from at most: what a step costs besides its answers is small by then, and so is what
larger ones bring."""
_ARRAYS = {"response_ids": np.int64, "logprobs": np.float32, "versions": np.int32, "loss_mask": np.bool_}


@dataclass(slots=True)
class Counts:
    """Counts of answers and of feedback, by what became of them."""

    served: int = 0
    """Answers."""
    told: int = 0
    """Rewards that were matched with their answers."""
    unknown: int = 0
    """Rewards of answers that there are not, were forgotten, or had a reward already."""
    stale: int = 0
    """Rewarded answers that were too old to be learned from."""
    forgotten: int = 0
    """Answers without a reward that made room for newer ones."""
    trained: int = 0
    """Answers that were learned from."""

    def metrics(self) -> dict[str, float]:
        """Return the counts as a run's metrics."""
        return {f"online/{name}": float(getattr(self, name)) for name in Counts.__dataclass_fields__}


@dataclass(slots=True, eq=False)
class _Served:
    """An answer that was not learned from yet."""

    samples: Sequence[Sample]
    """Samples of the answer, for the trainer."""
    step: int
    """After how many steps the model said it."""
    reward: float | None = None
    """Reward by people; None: none yet."""


class Feedback:
    """Answers that were served and not learned from yet.

    Args:
        batch: rewarded answers that are learned from together, at least; where more have come meanwhile, as people
            answer faster than the model learns, up to `TOGETHER` times as many, so that they are learned and not stale.
        max_age: an answer is learned from if the policy has taken at most so many steps since it was given.
        keep: answers that wait for a reward; the oldest is forgotten for one more.
        journal: the file in which all of it is kept; None keeps nothing.
        done: steps that were taken: what an earlier process has learned in later ones is learned again.

    Raises:
        ValueError, TypeError: a bound is no whole number from 1 (`max_age`: from 0) on.
    """

    def __init__(
        self, batch: int, *, max_age: int = 4, keep: int = 10_000, journal: Path | None = None, done: int = 0
    ) -> None:
        self.batch_size = at_least_one(batch, "batch", "online")
        self.keep = at_least_one(keep, "keep", "online")
        if isinstance(max_age, bool) or not isinstance(max_age, int) or max_age < 0:
            raise WrongValue(f"online: max_age={shown(max_age)} must be a whole number of steps, 0 or more")
        self.max_age = max_age
        self.counts = Counts()
        """Counts of answers and feedback, including those of earlier processes."""
        self._waiting: dict[str, _Served] = {}  # for a reward, oldest first
        self._ready: dict[str, _Served] = {}  # for a batch, in the order of their rewards
        self._enough = asyncio.Event()
        self._numbers = 0  # of groups
        self._file: TextIO | None = None
        if journal is not None:
            self._open(journal, done)

    # Serving ----------------------------------------------------------------------------------------------------

    def served(self, samples: Sequence[Sample], step: int, id: str | None = None) -> str:
        """An answer was given: it waits for its reward.

        Args:
            samples: what the model said, at least one.
            step: after how many steps of learning the model began to say it.
            id: that feedback will name; None makes one that cannot be guessed.

        Returns:
            The id.

        Raises:
            ValueError: no sample, or the id is taken.
        """
        name = secrets.token_hex(12) if id is None else id
        if not samples:
            raise WrongValue(f"online: answer {name!r} has no sample, so there is nothing to learn from")
        if name in self._waiting or name in self._ready:
            raise WrongValue(f"online: there is an answer {name!r} already; give each an id of its own")
        self._add(name, _Served(tuple(samples), step))
        self._note(served=name, step=step, samples=[_plain(sample) for sample in samples])
        return name

    def record_reward(self, id: str, reward: float) -> bool:
        """Record the reward of an answer; the first one counts.

        Args:
            id: of the answer.
            reward: the higher the better; such as 1 for accepted and 0 for rejected.

        Returns:
            Whether there is such an answer without a reward.

        Raises:
            ValueError, TypeError: no number.
        """
        value = number(reward, "online.feedback")
        if not isinstance(id, str):
            raise WrongType(f"online.feedback: {shown(id)} is no id of an answer")
        matched = self._reward(id, value)
        if matched:
            self._note(told=id, reward=value)
        return matched

    # Learning ---------------------------------------------------------------------------------------------------

    async def batch(self, step: int) -> dict[str, Group]:
        """Wait until enough answers have their rewards; there is no deadline: people take their time.

        Args:
            step: steps that were taken; answers that are too old by now are dropped and counted.

        Returns:
            A group for each answer, by its id. They count as learned from by step `step` + 1: who opens the journal
            after an earlier one has them again.
        """
        while True:
            old = [name for name, each in self._ready.items() if step - each.step > self.max_age]
            for name in old:
                del self._ready[name]
                self._note(stale=name)
            self.counts.stale += len(old)
            if len(self._ready) >= self.batch_size:
                break
            self._enough.clear()
            await self._enough.wait()
        names = [*self._ready][: TOGETHER * self.batch_size]
        groups = {name: self._group(self._ready.pop(name)) for name in names}
        self.counts.trained += len(names)
        self._note(trained=names, step=step + 1)  # before it is: a checkpoint of that step must not come first
        return groups

    def close(self) -> None:
        """Write what is left to be written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # ------------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Answers that wait for a reward."""
        return len(self._waiting)

    @property
    def ready(self) -> int:
        """Rewarded answers that wait to be learned from."""
        return len(self._ready)

    def _add(self, name: str, served: _Served) -> None:
        self._waiting[name] = served
        self.counts.served += 1
        if len(self._waiting) > self.keep:
            del self._waiting[next(iter(self._waiting))]
            self.counts.forgotten += 1

    def _reward(self, name: str, value: float) -> bool:
        served = self._waiting.pop(name, None)
        if served is None:
            self.counts.unknown += 1
            return False
        served.reward = value
        self._ready[name] = served
        self.counts.told += 1
        if len(self._ready) >= self.batch_size:
            self._enough.set()
        return True

    def _group(self, served: _Served) -> Group:
        self._numbers += 1
        prompt = replace(served.samples[0].prompt, id=self._numbers)
        count = len(served.samples)
        return Group(
            prompt,
            tuple(
                replace(
                    sample,
                    prompt=prompt if index == 0 else replace(sample.prompt, id=prompt.id),
                    index=index,
                    reward=served.reward,
                    weight=sample.weight / count,
                )
                for index, sample in enumerate(served.samples)
            ),
        )

    # The journal ------------------------------------------------------------------------------------------------

    def _note(self, **entry: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()  # to the system, which keeps it if this process is killed

    def _open(self, path: Path, done: int) -> None:
        """Take up what the journal has, and leave in it what is still of use."""
        if path.exists():
            with path.open(encoding="utf-8") as lines:
                for entry in _entries(lines):
                    self._replay(entry, done)
        fresh = path.with_name(f"{path.name}.new")
        with fresh.open("w", encoding="utf-8") as self._file:
            self._note(counts={name: getattr(self.counts, name) for name in Counts.__dataclass_fields__})
            for name, served in (*self._ready.items(), *self._waiting.items()):
                self._note(kept=name, step=served.step, reward=served.reward, samples=[*map(_plain, served.samples)])
            os.fsync(self._file.fileno())
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")

    def _replay(self, entry: Mapping[str, Any], done: int) -> None:
        match entry:
            case {"counts": dict(counts)}:
                self.counts = Counts(**counts)
            case {"kept": str(name), "step": step, "reward": reward, "samples": samples}:
                served = _Served([*map(_sample, samples)], step, reward)
                (self._waiting if reward is None else self._ready)[name] = served
            case {"served": str(name), "step": step, "samples": samples}:
                self._add(name, _Served([*map(_sample, samples)], step))
            case {"told": str(name), "reward": reward}:
                self._reward(name, reward)
            case {"stale": str(name)}:
                self.counts.stale += self._ready.pop(name, None) is not None
            case {"trained": list(names), "step": step} if step <= done:
                self.counts.trained += sum(self._ready.pop(name, None) is not None for name in names)


def _entries(lines: TextIO) -> Iterator[Mapping[str, Any]]:
    """The entries of a journal; a process that was killed may have left half a line at the end."""
    for line in lines:
        if line.endswith("\n"):
            yield parse_json(line)


def _plain(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values; the exact bits of its arrays."""
    arrays = {name: getattr(sample, name) for name in _ARRAYS}
    return {
        "prompt_ids": _text(np.asarray(sample.prompt.token_ids, np.int64)),
        "prompt": sample.prompt.text,
        **{name: None if array is None else _text(array) for name, array in arrays.items()},
        "routes": None if sample.routes is None else _shaped(sample.routes),
        "log_mass": None if sample.log_mass is None else _text(sample.log_mass),
        **{name: getattr(sample, name) for name in ("text", "truncated", "temperature", "weight", "agent")},
    }


def _sample(plain: Mapping[str, Any]) -> Sample:
    rest = {name: plain[name] for name in ("text", "truncated", "temperature", "weight", "agent")}
    arrays: dict[str, Any] = {
        name: None if plain[name] is None else _array(plain[name], kind) for name, kind in _ARRAYS.items()
    }
    routes = plain.get("routes")  # of journals from before there were any, none
    arrays["routes"] = None if routes is None else _of_shape(**routes)
    log_mass = plain.get("log_mass")  # likewise
    arrays["log_mass"] = None if log_mass is None else _array(log_mass, np.float32)
    return Sample(Prompt(0, _array(plain["prompt_ids"], np.int64), plain["prompt"]), 0, **arrays, **rest)


def _shaped(array: np.ndarray) -> dict[str, Any]:
    return {"kind": array.dtype.str, "shape": list(array.shape), "text": _text(np.ascontiguousarray(array))}


def _of_shape(kind: str, shape: Sequence[int], text: str) -> np.ndarray:
    return _array(text, np.dtype(kind)).reshape(shape)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _array(text: str, kind: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind).copy()
