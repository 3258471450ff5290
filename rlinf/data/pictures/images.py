"""Pictures by reference: what a cell of a data set holds, as `ImageRef`s; and these opened.

In: paths, bytes of image files, PIL images, as data sets have them. Out: references that tell whether two pictures are
the same without looking at their pixels. Pictures of files are read where they are needed; all others travel with
their prompts.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.datasets.rows import DataError
from rlinf.data.sample import ImageRef

_AS_PNG = ("1", "L", "P", "RGB", "RGBA")
"""Modes of PIL images that a PNG file holds as they are; others are made RGB first."""
_SIXTEEN_BITS = 65_535.0
"""White, in grey of 16 bits."""
_UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""What PIL's readers raise of files that are damaged."""
_URL = "data:"
"""What an image within a text begins with: `data:image/png;base64,…` (RFC 2397)."""


def image_refs(cell: Any, where: str) -> tuple[ImageRef, ...]:
    """The pictures of a cell.

    Args:
        cell: one or a list: a path, the bytes of an image file, `{"bytes": …, "path": …}` as in parquet files, a PIL
            image, or a `data:` URL; None for none.
        where: the row is, for errors.

    Raises:
        DataError: it is none of these, or a file that cannot be read.
    """
    if cell is None:
        return ()
    cells = list(cell) if isinstance(cell, list | tuple) or type(cell).__name__ == "ndarray" else [cell]
    return tuple(_image(each, where) for each in cells)


def _image(cell: Any, where: str) -> ImageRef:
    if isinstance(cell, Mapping) and {"bytes", "path"} & cell.keys():
        content, path = cell.get("bytes"), cell.get("path")
        if not content and not path:
            raise DataError(f"{where}: a picture has neither bytes nor a path")
        cell = content or path
    if isinstance(cell, bytes | bytearray | memoryview):
        if not len(cell):
            raise DataError(f"{where}: a picture has no bytes")
        return _of_bytes(bytes(cell))
    if isinstance(cell, str) and cell.startswith(_URL):
        try:
            return _of_bytes(base64.b64decode(cell.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise DataError(f"{where}: the picture {cell[:40]}… is no base64: {error}") from error
    if isinstance(cell, str | Path):
        path = Path(cell).expanduser().absolute()
        try:
            return ImageRef(hashlib.sha256(path.read_bytes()).hexdigest(), str(path))
        except OSError as error:
            told = error.strerror or error
            raise DataError(f"{where}: the picture {cell} cannot be read: {told}; looked for at {path}") from error
    if hasattr(cell, "save") and hasattr(cell, "mode"):
        kept = io.BytesIO()
        try:
            # as it stands: whoever opened it has turned it, or has not, as transformers' processors leave it
            (cell if cell.mode in _AS_PNG else _rgb(cell)).save(kept, format="PNG", exif=b"")
        except _UNDECODABLE as error:
            raise DataError(f"{where}: a picture cannot be read: {error}") from error
        return _of_bytes(kept.getvalue())
    raise DataError(
        f"{where}: a picture is a {type(cell).__name__}; it must be a path, the bytes of an image file, "
        '{"bytes": …}, a PIL image or a data: URL'
    )


def _of_bytes(content: bytes) -> ImageRef:
    return ImageRef(hashlib.sha256(content).hexdigest(), content=content)


def content_of(image: ImageRef) -> bytes:
    """The bytes of its image file.

    Raises:
        DataError: the file is gone, or has changed since its prompt was made.
    """
    if image.content:
        return image.content
    try:
        content = Path(image.source).read_bytes()
    except OSError as error:
        raise DataError(
            f"the picture {image.source} cannot be read here: {error.strerror or error}; every machine of a run needs "
            "the files that its data set names"
        ) from error
    if hashlib.sha256(content).hexdigest() != image.digest:
        raise DataError(f"the picture {image.source} has changed since its prompt was made")
    return content


def opened(image: ImageRef) -> Any:
    """The picture as a PIL image in RGB, as people see it: upright by its EXIF orientation, and on white where it is
    transparent.

    Raises:
        DataError: it cannot be read, or is no picture that PIL knows.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # takes time, and runs without pictures do not need it

    try:
        picture = Image.open(io.BytesIO(content_of(image)))
        picture.load()  # the first frame; whatever follows it may be broken
        return _rgb(ImageOps.exif_transpose(picture))
    except UnidentifiedImageError as error:  # whose text is an address in memory
        raise DataError(f"the picture {_name(image)} is none that PIL can read") from error
    except (Image.DecompressionBombError, *_UNDECODABLE) as error:  # pixels that end too early, among others
        raise DataError(f"the picture {_name(image)} cannot be decoded: {error}") from error


def _rgb(picture: Any) -> Any:
    """A PIL image as RGB with 8 bits, on white where it is transparent, as transformers' processors do it.

    Raises:
        ValueError: its numbers do not tell what is black and what is white.
    """
    if picture.mode.startswith(("I", "F")):
        picture = _eight_bits(picture)
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    from PIL import Image

    shown = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, (255, 255, 255)), shown).convert("RGB")


def _eight_bits(picture: Any) -> Any:
    """Grey of 16 bits, or of numbers from 0 to 1, as grey of 8 bits: PIL cuts it off at 255."""
    from PIL import Image

    if picture.mode == "I" and picture.format != "PNG":  # as older versions of PIL call the 16 bits of PNG files
        raise ValueError("its mode I has 32 bits, which do not tell what is white; give 8 or 16 bits, or 0 to 1")
    numbers = np.asarray(picture, dtype=np.float64)
    low, high = float(numbers.min()), float(numbers.max())
    whole = _SIXTEEN_BITS if picture.mode.startswith("I") else 1.0
    if not (low >= 0 and high <= whole):
        raise ValueError(
            f"its mode {picture.mode} has numbers from {low:g} to {high:g}; give 0 to {whole:g}, or 8 bits"
        )
    return Image.fromarray(np.round(numbers * (255 / whole)).astype(np.uint8))


def _name(image: ImageRef) -> str:
    return image.source or f"with SHA-256 {image.digest[:12]}…"
