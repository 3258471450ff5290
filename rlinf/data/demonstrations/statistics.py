"""Statistics of features (mean, spread, bounds, quantiles), and the files that published checkpoints keep them in.

In: rows, part by part, from data that need not fit into memory. Out: `FeatureStatistics`. Mean, standard deviation,
least and greatest value are exact. Quantiles are exact up to `keep` rows; of more, they are those of `keep` rows drawn
evenly by a fixed seed. Files are written whole or not at all:

| form | file | who reads it |
|---|---|---|
| `openvla` | `dataset_statistics.json` | OpenVLA, OpenVLA-OFT: `action`, `proprio`, by the name of the data set |
| `openpi` | `norm_stats.json` | pi0, pi0.5: `state`, `actions` |
| `groot` | `metadata.json` | GR00T: `state` and `action` by parts of the body, by the tag of the robot |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.demonstrations.episode import ACTIONS, STATE, Demonstration, Episodes
from rlinf.runtime.base.progress import track

logger = logging.getLogger(__name__)

_NARROW = 1e-6
"""Share of a number's whole range below which the one between its quantiles is none: dividing by it makes millions."""
KEEP = 1_000_000
"""Rows whose values are kept for quantiles. The share of all rows below the quantile q that is found is off by
sqrt(q (1 - q) / KEEP) (one standard deviation): 0.0001 for q01 and q99."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureStatistics:
    """Statistics of a feature of D numbers."""

    mean: Tensor
    """Float64 [D]."""
    std: Tensor
    """Standard deviation of the rows as they are (divided by their number), float64 [D]."""
    min: Tensor
    """Least value, float64 [D]."""
    max: Tensor
    """Greatest value, float64 [D]."""
    q01: Tensor
    """Below it lies 1 % of the rows, float64 [D]; linear between two rows. Of a number that is `rare`, `min`."""
    q99: Tensor
    """Below it lie 99 %, float64 [D]. Of a number that is `rare`, `max`."""
    rare: Tensor
    """Numbers that move, but in so few rows that both quantiles are one value, bool [D]: a button, a gripper. Scaled by
    those, the few rows would be lost, or become millions."""
    mask: Tensor
    """Numbers that are to be normalised, bool [D]; a gripper's are often not."""
    count: int
    """Rows."""

    def masked(self, unscaled: Sequence[int]) -> FeatureStatistics:
        """Copy in which some numbers are not to be normalised.

        Args:
            unscaled: their places; negative ones count from the end.

        Raises:
            ValueError: there is no such place.
        """
        mask, size = torch.ones_like(self.mask), len(self.mask)
        if odd := [place for place in unscaled if not -size <= place < size]:
            raise ValueError(f"there is no number {odd[0]} in a feature of {size}")
        mask[list(unscaled)] = False
        return replace(self, mask=mask)


class Accumulator:
    """Adds rows up to statistics.

    Args:
        keep: rows whose values are kept for quantiles.
    """

    def __init__(self, keep: int = KEEP):
        self._keep = keep
        self._count = 0
        self._mean = self._squares = self._least = self._greatest = np.zeros(0)
        self._kept, self._keys = np.zeros((0, 0)), np.zeros(0)
        self._draw = np.random.default_rng(0)

    def add(self, rows: Tensor) -> None:
        """Take rows, [n, D], into account.

        Raises:
            ValueError: a value is not finite, or rows have another length than those before.
        """
        if not len(rows):
            return
        part = rows.reshape(len(rows), -1).double().numpy()
        if not np.isfinite(part).all():
            raise ValueError("a value is not finite")
        if self._count == 0:
            size = part.shape[1]
            self._mean, self._squares = np.zeros(size), np.zeros(size)
            self._least, self._greatest = np.full(size, np.inf), np.full(size, -np.inf)
            self._kept = np.zeros((0, size))
        elif part.shape[1] != len(self._mean):
            raise ValueError(f"rows have {part.shape[1]} numbers, and those before them {len(self._mean)}")
        # Chan, Golub and LeVeque (1983), equation 2.1: sums of squares about the mean, merged
        count, mean = len(part), part.mean(0)
        total, apart = self._count + count, mean - self._mean
        self._squares = self._squares + ((part - mean) ** 2).sum(0) + apart**2 * (self._count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._least, self._greatest = np.minimum(self._least, part.min(0)), np.maximum(self._greatest, part.max(0))
        self._count = total
        self._sample(part)

    def _sample(self, part: np.ndarray) -> None:
        """Keep the rows with the smallest of random keys: each row is as likely as any other to be among them."""
        self._kept = np.concatenate([self._kept, part])
        self._keys = np.concatenate([self._keys, self._draw.random(len(part))])
        if len(self._keys) > self._keep:
            least = np.sort(np.argpartition(self._keys, self._keep)[: self._keep])
            self._kept, self._keys = self._kept[least], self._keys[least]

    def done(self) -> FeatureStatistics:
        """The statistics of all rows.

        Raises:
            ValueError: there were none.
        """
        if not self._count:
            raise ValueError("there is no row to compute statistics of")
        low, high = self.quantiles([0.01, 0.99])
        spread = self._greatest - self._least
        rare = (spread > 0) & (high - low <= _NARROW * spread)
        low, high = np.where(rare, self._least, low), np.where(rare, self._greatest, high)
        columns = (self._mean, np.sqrt(self._squares / self._count), self._least, self._greatest, low, high)
        mean, std, least, greatest, q01, q99 = (torch.from_numpy(np.asarray(each, dtype=float)) for each in columns)
        mask = torch.ones(len(mean), dtype=torch.bool)
        return FeatureStatistics(mean, std, least, greatest, q01, q99, torch.from_numpy(rare), mask, self._count)

    def quantiles(self, levels: Sequence[float]) -> np.ndarray:
        """Quantiles of all rows, [levels, D], as they are: of a rare number they may all be one value."""
        return np.asarray(np.quantile(self._kept, list(levels), axis=0))


def statistics_of(episodes: Episodes, places: Sequence[int], *, keep: int = KEEP) -> dict[str, FeatureStatistics]:
    """Statistics of the actions, of the state, and of every other array of numbers that is shown, one episode in
    memory at a time.

    Args:
        episodes: to read.
        places: which.
        keep: see `Accumulator`.

    Raises:
        ValueError: there are none, or a file is broken.
    """
    accumulators: dict[str, Accumulator] = {}
    for place in track(places, f"statistics of {episodes.path}", unit="episodes"):
        for name, rows in features_of(episodes.read(place, pictures=False)).items():
            try:
                accumulators.setdefault(name, Accumulator(keep)).add(rows)
            except ValueError as error:
                raise ValueError(
                    f"{episodes.path}: {name} of episode {place}: {error} (imitation.broken=drop leaves such out)"
                ) from error
    statistics = {name: each.done() for name, each in accumulators.items()} or {ACTIONS: Accumulator().done()}
    for name, each in statistics.items():
        tell_rare(f"{name} of {episodes.path}", each)
    return statistics


def tell_rare(feature: str, statistics: FeatureStatistics) -> None:
    """Say which numbers of a feature move so seldom that their bounds stand in for their quantiles."""
    if places := statistics.rare.nonzero().flatten().tolist():
        logger.warning(
            "%s: number %s moves in fewer than 1 %% of %d rows: its least and greatest value stand in for q01 and q99",
            feature,
            ", ".join(map(str, places)),
            statistics.count,
        )


def features_of(demo: Demonstration) -> dict[str, Tensor]:
    """The actions that were done, and what was shown before each row that is no picture: [n, D] by name."""
    numbers = {
        name: rows[:-1].flatten(1)
        for name, rows in demo.observation.items()
        if rows.dtype != torch.uint8 and rows[0].numel()
    }
    state = {STATE: numbers.pop(STATE)} if STATE in numbers else {}
    return {ACTIONS: demo.actions[demo.valid], **state, **numbers}


FILES = {"openvla": "dataset_statistics.json", "openpi": "norm_stats.json", "groot": "metadata.json"}
"""By form."""
GROOT_TAGS = ("new_embodiment", "gr1", "oxe_droid", "agibot_genie1")
"""Names of robots that GR00T N1.5's authors read; ours may have any."""
Part = tuple[int, int]
"""From and to which number of a feature."""


def as_openvla(statistics: Mapping[str, FeatureStatistics], name: str, episodes: int) -> dict[str, Any]:
    """Lay statistics out as OpenVLA's checkpoints have them.

    Args:
        statistics: with actions, and the state if there is one.
        name: of the data set, which is the key that a policy un-normalises by.
        episodes: how many there are.
    """
    mine: dict[str, Any] = {"action": _openvla(statistics[ACTIONS])}
    if STATE in statistics:
        mine["proprio"] = _openvla(statistics[STATE])
    return {name: {**mine, "num_transitions": statistics[ACTIONS].count, "num_trajectories": episodes}}


def as_openpi(statistics: Mapping[str, FeatureStatistics]) -> dict[str, Any]:
    """Lay statistics out as openpi's checkpoints have them; `statistics` has actions, and the state if there is one."""
    wanted = {name: statistics[name] for name in (STATE, ACTIONS) if name in statistics}
    return {"norm_stats": {name: _numbers(each, "mean", "std", "q01", "q99") for name, each in wanted.items()}}


def as_groot(
    features: Mapping[str, FeatureStatistics],
    tag: str,
    parts: Mapping[str, Mapping[str, Part]] | None = None,
    cameras: Mapping[str, Sequence[int]] | None = None,
    fps: float = 10.0,
) -> dict[str, Any]:
    """Lay statistics out as GR00T's checkpoints have them, below `experiment_cfg`.

    Args:
        features: with actions, and the state if there is one.
        tag: of the robot.
        parts: by `state` and `action`: which numbers are which part of the body. None makes one part of each.
        cameras: height, width and channels by name.
        fps: rows per second.
    """
    by_modality = {"state": features.get(STATE), "action": features[ACTIONS]}
    statistics: dict[str, Any] = {}
    modalities: dict[str, Any] = {
        "video": {
            name: {"resolution": [int(shape[1]), int(shape[0])], "channels": int(shape[2]), "fps": fps}
            for name, shape in (cameras or {}).items()
        }
    }
    for name, each in by_modality.items():
        if each is None:
            continue
        cut = (parts or {}).get(name) or {name: (0, len(each.mean))}
        numbers = _numbers(each, "max", "min", "mean", "std", "q01", "q99")
        statistics[name] = {
            part: {kind: values[low:high] for kind, values in numbers.items()} for part, (low, high) in cut.items()
        }
        modalities[name] = {
            part: {"absolute": name == "state", "rotation_type": None, "shape": [high - low], "continuous": True}
            for part, (low, high) in cut.items()
        }
    return {tag: {"statistics": statistics, "modalities": modalities, "embodiment_tag": tag}}


def write_statistics(path: Path, content: Mapping[str, Any]) -> None:
    """Write such a file; what is at that path stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _openvla(statistics: FeatureStatistics) -> dict[str, Any]:
    return {**_numbers(statistics, "mean", "std", "max", "min", "q01", "q99"), "mask": statistics.mask.tolist()}


def _numbers(statistics: FeatureStatistics, *kinds: str) -> dict[str, list[float]]:
    return {kind: getattr(statistics, kind).tolist() for kind in kinds}
