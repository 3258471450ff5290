"""Frames of videos, by their exact numbers; and pictures as PNG.

In: a file, its rate, and which frames. Out: pictures, uint8 [n, H, W, 3]. A frame's number follows from its timestamp
in the file, never from how many were decoded before it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.demonstrations.episode import broken, needs

_SLACK = 0.25
"""How far a frame's timestamp may be off its number, in frames: containers round timestamps to their own time base."""


def read_frames(file: Path, first: int, count: int, fps: float) -> Tensor:
    """Neighbouring frames of a video.

    Args:
        file: the video.
        first: number of the first one: its timestamp times `fps`.
        count: how many, n.
        fps: frames per second.

    Returns:
        uint8 [n, H, W, 3], RGB.

    Raises:
        ValueError: the file cannot be decoded, or lacks one of them.
    """
    with needs("reading videos"):
        import av
    found: list[Any] = [None] * count
    with broken(file, f"frames {first} to {first + count - 1}"), av.open(str(file)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        base = stream.time_base
        if base is None:
            raise ValueError("it has no time base")
        start = stream.start_time or 0
        # to the key frame before the first one wanted; half a frame earlier, since timestamps are rounded
        container.seek(
            max(start, start + int((Fraction(first) - Fraction(1, 2)) / Fraction(fps) / base)), stream=stream
        )
        for frame in container.decode(stream):
            if frame.pts is None:
                raise ValueError("a frame has no timestamp")
            place = float((frame.pts - start) * base) * fps
            number = round(place)
            if abs(place - number) > _SLACK:
                raise ValueError(f"a frame stands at {place:.2f} frames of {fps:g} a second, between two of them")
            if first <= number < first + count:
                found[number - first] = frame.to_ndarray(format="rgb24")
            if number >= first + count - 1:
                break
        missing = [first + place for place, picture in enumerate(found) if picture is None]
        if missing:
            raise ValueError(f"it has no frame {missing[0]}, and lacks {len(missing)} of these in all")
        return torch.from_numpy(np.stack(found))


class VideoWriter:
    """Writes a video, part by part: H.264 in MP4, which loses some of the colours' sharpness.

    Args:
        file: to write.
        size: height and width.
        fps: frames per second.
    """

    def __init__(self, file: Path, size: Sequence[int], fps: float):
        with needs("writing videos"):
            import av
        self._av, self._file, self._frames = av, file, 0
        self._container = av.open(str(file), "w")
        height, width = size
        self._stream: Any = self._container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        self._stream.width, self._stream.height = width, height
        # half as many colours as points need even sizes
        self._stream.pix_fmt = "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"
        # every second frame is a key frame, which makes any of them quick to reach
        self._stream.options = {"crf": "18", "g": "2", "bf": "0"}

    def add(self, pictures: Tensor) -> None:
        """Append frames, uint8 [n, H, W, 3]."""
        with broken(self._file, "video"):
            for row in pictures.numpy():
                frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(row), format="rgb24")
                frame.pts = self._frames
                self._frames += 1
                self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        """Write what is left."""
        with broken(self._file, "video"):
            if self._frames:
                self._container.mux(self._stream.encode())
            self._container.close()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def png_of(picture: Tensor) -> bytes:
    """A picture as PNG, without loss; uint8 [H, W, 3]."""
    with needs("writing pictures"):
        from PIL import Image
    made = io.BytesIO()
    Image.fromarray(picture.numpy()).save(made, "png")
    return made.getvalue()


def pictures_of(cells: Sequence[Any], directory: Path) -> Tensor:
    """Pictures out of a column: each the bytes of a PNG or JPEG, a path, or a struct of both.

    Args:
        cells: of the column.
        directory: that paths are relative to.

    Returns:
        uint8 [n, H, W, 3].

    Raises:
        ValueError: one cannot be read.
    """
    with needs("reading pictures"):
        from PIL import Image
    found = []
    for cell in cells:
        content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(content, str):
            content, path = None, content
        if content is None and path is None:
            raise ValueError("a picture has neither bytes nor a path")
        if content is None and not (directory / str(path)).resolve().is_relative_to(directory.resolve()):
            raise ValueError(f"the picture {path!r} lies outside of the data set")
        with Image.open(directory / str(path) if content is None else io.BytesIO(content)) as picture:
            found.append(np.asarray(picture.convert("RGB")))
    return torch.from_numpy(np.stack(found))
