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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.data.datasets.rows import DataError
from rlinf.data.sample import ImageRef

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
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, bytes | bytearray | memoryview):
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
        (cell if cell.mode in ("1", "L", "P", "RGB", "RGBA") else cell.convert("RGB")).save(kept, format="PNG")
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
    """The picture as a PIL image in RGB.

    Raises:
        DataError: it cannot be read, or is no picture that PIL knows.
    """
    picture = header(image)
    try:
        return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # pixels that end too early
        raise DataError(f"the picture {_name(image)} cannot be decoded: {error}") from error


def header(image: ImageRef) -> Any:
    """The picture as PIL opens it: its size is known, its pixels are not decoded yet. Raises as `opened`."""
    from PIL import Image, UnidentifiedImageError  # takes time to import, and runs without pictures do not need it

    try:
        return Image.open(io.BytesIO(content_of(image)))
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"the picture {_name(image)} is none that PIL can read: {error}") from error


def _name(image: ImageRef) -> str:
    return image.source or f"with SHA-256 {image.digest[:12]}…"
