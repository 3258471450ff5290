"""The format of `rlinf.flows.record`: a directory with two files for each episode.

`episode_000000.safetensors` holds its tensors (`observation.NAME`, `actions`, `rewards`, `valid`), and
`episode_000000.json` how it ended and what was to be done. The second is written last, so an episode without it is
incomplete and is not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlinf.config.reading import parse_json
from rlinf.data.demonstrations.episode import Demonstration, instruction_from
from rlinf.data.demonstrations.source import IGNORED, NOTHING, About, Episodes, broken

_NAME = "episode_{:06d}"
_PREFIX = "observation."
PATTERN = "episode_*.json"
"""Files that a directory of this format holds."""


class Records(Episodes):
    """Episodes that `write_demonstrations` wrote. `names` renames arrays of the observation."""

    format = "rlinf"

    def __init__(self, path: Path, names: Mapping[str, str] | None = None):
        super().__init__(path, names)
        self._files = sorted(path.glob(PATTERN))
        if not self._files:
            raise FileNotFoundError(
                f"{path} holds no {PATTERN}: record demonstrations there first, with `rlinf record`"
            )
        self._read = [_about(file) for file in self._files]
        self.abouts = [about for about, _ in self._read]

    def read(self, index: int, *, pictures: bool = True) -> Demonstration:
        file, (about, terminated) = self._files[index].with_suffix(".safetensors"), self._read[index]
        with broken(file, "tensors"):
            tensors = load_file(file)  # mapped into memory: what is left out is not read
        seen = {name.removeprefix(_PREFIX): rows for name, rows in tensors.items() if name.startswith(_PREFIX)}
        names = {name: name for name in seen} if self.names is None else self.names
        with broken(file, "observation"):
            seen = {ours: seen[theirs] for theirs, ours in names.items() if ours != IGNORED}
        if not pictures:
            seen = {name: rows for name, rows in seen.items() if rows.dtype != torch.uint8}
            seen = seen or {NOTHING: torch.zeros(about.rows + 1, 0)}
        with broken(file, "actions, rewards, valid"):
            parts = (tensors["actions"], tensors["rewards"], tensors["valid"])
            return Demonstration(seen, *parts, terminated, about.success, about.instruction)


def _about(file: Path) -> tuple[About, bool]:
    with broken(file, "the text"):
        about = parse_json(file.read_text(encoding="utf-8"))
    checked = {}
    for name, kinds in (
        ("chunks", int),
        ("terminated", bool),
        ("success", bool | None),
        ("instruction", str | list | None),
    ):
        with broken(file, name):
            if not isinstance(about, dict) or not isinstance(about[name], kinds):  # type: ignore[arg-type]
                raise ValueError(f"{about[name]!r:.60} is not of the kind {kinds}")
            checked[name] = about[name]
    with broken(file, "instruction"):
        words = instruction_from(checked["instruction"])
    return About(checked["chunks"], checked["success"], words), checked["terminated"]


def write_demonstrations(directory: Path, demonstrations: Iterable[Demonstration]) -> int:
    """Add episodes to a directory, which is made if it is not there.

    Args:
        directory: episodes that are there stay, and new ones are numbered after them.
        demonstrations: what is added.

    Returns:
        How many were added.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first = max((int(path.stem.rpartition("_")[2]) + 1 for path in directory.glob("episode_*")), default=0)
    number = first
    for shown in demonstrations:
        name = _NAME.format(number)
        tensors = {"actions": shown.actions, "rewards": shown.rewards, "valid": shown.valid}
        tensors |= {f"observation.{each}": rows for each, rows in shown.observation.items()}
        save_file({each: rows.contiguous() for each, rows in tensors.items()}, directory / f"{name}.safetensors")
        about = {
            "chunks": len(shown.actions),
            "return": float(shown.rewards[shown.valid].double().sum()),
            "terminated": shown.terminated,
            "success": shown.success,
            "instruction": shown.instruction,
        }
        unfinished = directory / f".{name}.json"
        unfinished.write_text(json.dumps(about) + "\n", encoding="utf-8")
        unfinished.replace(directory / f"{name}.json")  # so that it is there whole, or not at all
        number += 1
    return number - first
