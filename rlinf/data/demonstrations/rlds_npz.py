"""Episodes laid out as RLDS has them, in NumPy's archives: arrays of all steps, one below the other.

| array | rows |
|---|---|
| `observation/NAME` (or `observation.NAME`) | what was seen before each step's action |
| `action`, `reward` | of each step |
| `is_first`, `is_last`, `is_terminal` | where episodes begin and end; the last one: the task ended |
| `language_instruction` | a text for each step, or one for all |
| `success` | one for each step, or one for all; not of RLDS |

An archive holds one episode, or several, cut where `is_first` is set. Pickled objects are refused. RLDS leaves open
whether the step that `is_last` has an action: here it has one, as in the data sets of OpenVLA and Octo, unless the
archive has `final_observation` set: then that step only shows what was seen after the last action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf.data.demonstrations import episode as base

FINAL = "final_observation"
_STATES = ("state", "proprio")
_PICTURE = "image"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an episode is."""

    file: Path
    """Its archive."""
    first: int
    """Number of its first step in there."""
    steps: int
    """How many, the one that only shows included."""
    terminal: bool
    """The task ended with it."""


class RldsNpz(base.Episodes):
    """RLDS-like archives: one, or all of a directory.

    By default `state` or `proprio` becomes state, every picture (`uint8`, three dimensions) rgb in the order of their
    names with `image` first; other arrays of the observation keep their names. A mapping names arrays as they stand in
    the archive, such as {observation/image: rgb}.
    """

    format = "rlds"

    def __init__(self, path: Path, names: Mapping[str, str] | None = None):
        super().__init__(path, names)
        files = [path] if path.is_file() else sorted(path.glob("*.npz"))
        if not files:
            raise FileNotFoundError(f"{path} holds no *.npz")
        places = [each for file in files for each in _places(file)]
        self._places, self.abouts = [place for place, _ in places], [about for _, about in places]
        self._open: tuple[Path, dict[str, np.ndarray]] | None = None  # the archive that was read last

    def read(self, index: int, *, pictures: bool = True) -> base.Demonstration:
        place, about = self._places[index], self.abouts[index]
        whole = self._archive(place.file)
        names = _own_names(whole) if self.names is None else self.names
        arrays: dict[str, Tensor] = {}
        for theirs, ours in names.items():
            if ours != base.IGNORED and theirs in whole and (pictures or whole[theirs].dtype != np.uint8):
                with base.broken(place.file, theirs):
                    arrays[theirs] = torch.from_numpy(whole[theirs][place.first : place.first + place.steps])
                    if ours in (base.ACTIONS, base.REWARDS):
                        arrays[theirs] = arrays[theirs][: about.rows]
        with base.broken(place.file, "observation, action"):
            return base.assembled(arrays, names, about.rows, about, place.terminal, pictures=pictures)

    def _archive(self, file: Path) -> dict[str, np.ndarray]:
        if self._open is None or self._open[0] != file:
            self._open = (file, _read(file))
        return self._open[1]


def write_rlds(directory: Path, demonstrations: Iterable[base.Demonstration]) -> int:
    """Write an archive for each episode.

    Args:
        directory: empty or not there.
        demonstrations: of single actions, at least one.

    Returns:
        How many were written.

    Raises:
        ValueError: there is none, or one was recorded in chunks.
    """
    directory.mkdir(parents=True, exist_ok=True)
    number = -1
    for number, demo in enumerate(base.alike(demonstrations, "RLDS", mixed=True)):
        count = len(demo.actions)
        steps = np.arange(count + 1)

        def padded(rows: Tensor) -> np.ndarray:
            return np.concatenate([rows.numpy(), np.zeros_like(rows[:1].numpy())])

        arrays = {f"observation/{name}": rows.numpy() for name, rows in demo.observation.items()}
        arrays |= {"action": padded(demo.actions[:, 0]), "reward": padded(demo.rewards[:, 0])}
        arrays |= {
            "is_first": steps == 0,
            "is_last": steps == count,
            "is_terminal": (steps == count) & demo.terminated,
        }
        arrays[FINAL] = np.array(True)
        if demo.instruction is not None:
            words = demo.instruction if isinstance(demo.instruction, str) else [*demo.instruction, demo.instruction[-1]]
            arrays["language_instruction"] = np.array(words)
        if demo.success is not None:
            arrays["success"] = np.array(demo.success)
        np.savez_compressed(directory / f"episode_{number:06d}.npz", allow_pickle=False, **arrays)
    return number + 1


def _read(file: Path, only: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an archive."""
    with base.broken(file, "the archive"), np.load(file, allow_pickle=False) as archive:
        arrays = {}
        for name in archive.files:
            if only is None or name in only:
                with base.broken(file, name):
                    arrays[name] = archive[name]
        return arrays


def _places(file: Path) -> list[tuple[_Place, base.About]]:
    """The episodes of an archive, without their observations."""
    names = ("is_first", "is_last", "is_terminal", "language_instruction", "success", "action", FINAL)
    arrays = _read(file, names)
    with base.broken(file, "action"):
        steps = len(arrays["action"])
    final = bool(arrays.get(FINAL, np.array(False)).any())
    starts = [0]
    if "is_first" in arrays:
        with base.broken(file, "is_first"):
            starts = [int(place) for place in np.flatnonzero(arrays["is_first"])]
            if len(arrays["is_first"]) != steps or starts[:1] != [0]:
                raise ValueError(f"it must have {steps} rows as the actions do, and the first one must be set")
    places = []
    for first, end in zip(starts, [*starts[1:], steps], strict=True):
        with base.broken(file, f"steps {first} to {end - 1}"):
            rows = end - first - final
            if rows < 1:
                raise ValueError("they are too few for an episode")
            terminal = bool(arrays["is_terminal"][first:end].any()) if "is_terminal" in arrays else False
            success = None if "success" not in arrays else bool(_part(arrays["success"], first, end).any())
            words = None
            if "language_instruction" in arrays:
                texts = _part(arrays["language_instruction"], first, first + rows).reshape(-1)
                words = base.instruction_of([base.text_of(each) for each in texts])
        places.append((_Place(file, first, end - first, terminal), base.About(rows, success, words)))
    return places


def _part(array: np.ndarray, first: int, end: int) -> np.ndarray:
    """Rows of an array that has one for each step, or of one value the whole."""
    return array[first:end] if array.ndim else array


def _own_names(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Our names for the arrays of an archive, if nobody says otherwise."""
    names: dict[str, str] = {}
    pictures = []
    for name, array in arrays.items():
        short = name.removeprefix("observation/").removeprefix("observation.")
        if short == name:
            continue
        if array.dtype == np.uint8 and array.ndim == 4 and array.shape[-1] % 3 == 0:
            pictures.append(name)
        elif array.dtype.kind in "biuf":  # a text, such as an instruction among the observations, is no array
            names[name] = base.STATE if short in _STATES else short
    pictures.sort(key=lambda name: (_PICTURE not in name or "wrist" in name, name))
    names |= dict.fromkeys(pictures, base.RGB)
    if "action" in arrays:
        names["action"] = base.ACTIONS
    if "reward" in arrays:
        names["reward"] = base.REWARDS
    return names
