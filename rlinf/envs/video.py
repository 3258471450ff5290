"""Videos of episodes, one file each.

They show what a simulator renders, before the first and after every step of the episodes that are wanted.
`<name>epoch0002-env0005-episode0000-success.mp4` is whole or not there at all: files are written aside and renamed.

The format is mp4 (H.264) where imageio and its ffmpeg are installed, which ManiSkill brings along, and otherwise
animated WebP by pillow. Browsers play both.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import Simulator

_EVEN = 2
"""H.264 stores colour at half resolution, so that both sides of a picture must be multiples of this."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Settings of videos: which episodes, and where they are written."""

    directory: str
    """Made if it is not there."""
    envs: tuple[int, ...] = (0,)
    """Environments to watch, counted over all workers and slices."""
    episodes: int = 1
    """So many first episodes of each in an epoch."""
    fps: int = 20
    """Pictures per second of the video; one picture is one step."""
    name: str = ""
    """Prefix of file names."""


class Recorder:
    """Collects pictures while episodes run, and writes each episode when it is over.

    Raises:
        ModuleNotFoundError: nothing that could write a video is installed.
    """

    def __init__(self, recording: Recording):
        self._recording = recording
        self._write = _writer()
        self._frames: dict[int, list[np.ndarray]] = {}
        self._names: dict[int, str] = {}

    def watch(self, envs: Sequence[int]) -> None:
        """Keep videos of these environments from now on, counted over all workers and slices; () for none."""
        self._recording = replace(self._recording, envs=tuple(envs))
        self._frames.clear()

    def begin(self, simulator: Simulator, envs: Sequence[int], names: Sequence[tuple[int, int, int]]) -> None:
        """Episodes begin; those that are wanted get their first picture. One that was never ended is dropped.

        Args:
            simulator: draws.
            envs: its environments.
            names: of each the environment's number over all workers and slices, the epoch, and the episode's number.
        """
        wanted = []
        for env, (number, epoch, episode) in zip(envs, names, strict=True):
            self._frames.pop(env, None)
            if number in self._recording.envs and episode < self._recording.episodes:
                wanted.append(env)
                self._names[env] = f"{self._recording.name}epoch{epoch:04}-env{number:04}-episode{episode:04}"
        for env in wanted:
            self._frames[env] = []
        self._draw(simulator, wanted)

    def add(self, simulator: Simulator, active: Tensor) -> None:
        """Every active environment, bool [N], did a step."""
        if self._frames:
            stepped = set(active.nonzero().flatten().tolist())
            self._draw(simulator, [env for env in self._frames if env in stepped])

    def end(self, env: int, success: bool | None) -> None:
        """An episode is over; `success` becomes part of the file's name unless it is None."""
        frames = self._frames.pop(env, None)
        if frames is not None:
            outcome = "" if success is None else "-success" if success else "-failure"
            self._write(Path(self._recording.directory), self._names[env] + outcome, frames, self._recording.fps)

    def _draw(self, simulator: Simulator, envs: list[int]) -> None:
        if envs:
            pictures = simulator.render(torch.tensor(envs, dtype=torch.int64)).cpu().numpy()
            for env, picture in zip(envs, pictures, strict=True):
                self._frames[env].append(np.array(picture))


def _writer() -> Callable[[Path, str, list[np.ndarray], int], None]:
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        return _write_mp4
    if importlib.util.find_spec("PIL"):
        return _write_webp
    raise ModuleNotFoundError(
        "nothing here can write a video: pip install rlinf[envs] (pillow), or imageio and imageio-ffmpeg for mp4"
    )


def _write_mp4(directory: Path, name: str, frames: list[np.ndarray], fps: int) -> None:
    imageio: Any = importlib.import_module("imageio.v2")
    high, wide = (side - side % _EVEN for side in frames[0].shape[:2])
    aside = _aside(directory, name, ".mp4")
    with imageio.get_writer(aside, fps=fps, codec="libx264", macro_block_size=_EVEN) as writer:
        for frame in frames:
            writer.append_data(frame[:high, :wide])
    aside.rename(directory / f"{name}.mp4")


def _write_webp(directory: Path, name: str, frames: list[np.ndarray], fps: int) -> None:
    from PIL import Image

    first, *rest = (Image.fromarray(frame) for frame in frames)
    aside = _aside(directory, name, ".webp")
    first.save(aside, save_all=True, append_images=rest, duration=round(1000 / fps), loop=0, quality=90)
    aside.rename(directory / f"{name}.webp")


def _aside(directory: Path, name: str, suffix: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f".{name}.part{suffix}"
