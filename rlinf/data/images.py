"""Pictures: references in prompts, placeholders in texts, and pixels as a model's own preprocessor has them.

In: paths, bytes of image files, PIL images, as data sets have them. Out: `ImageRef`s, which tell whether two pictures
are the same without looking at their pixels. Pictures of files are read where they are needed; all others travel with
their prompts.

`Pictures` gives the number of placeholder tokens that stand for each, and the tensors that the model's `forward` takes.
It works without network and without torchvision: transformers' preprocessors on PIL are taken whatever is installed, so
that all roles of a run have the same pixels.

`pictured` puts the model's tokens where pictures stand in a prompt: at `<image>` in the texts of data sets, at parts of
chat messages, or where nothing at all says so.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.sample import DataError, ImageRef
from rlinf.data.tokenizer import IMAGE_TOKENS, pretrained

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_AS_PNG = ("1", "L", "P", "RGB", "RGBA")
"""Modes of PIL images that a PNG file holds as they are; others are made RGB first."""
_SIXTEEN_BITS = 65_535.0
"""White, in grey of 16 bits."""
_UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""Exceptions that PIL's readers raise of files that are damaged."""
_URL = "data:"
"""Beginning of an image within a text: `data:image/png;base64,…` (RFC 2397)."""


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
            reason = error.strerror or error
            raise DataError(f"{where}: the picture {cell} cannot be read: {reason}; looked for at {path}") from error
    if hasattr(cell, "save") and hasattr(cell, "mode"):
        file = io.BytesIO()
        try:
            # as it stands: whoever opened it has turned it, or has not, as transformers' processors leave it
            (cell if cell.mode in _AS_PNG else _rgb(cell)).save(file, format="PNG", exif=b"")
        except _UNDECODABLE as error:
            raise DataError(f"{where}: a picture cannot be read: {error}") from error
        return _of_bytes(file.getvalue())
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

    picture_rgba = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture_rgba.size, (255, 255, 255)), picture_rgba).convert("RGB")


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


PIXELS = "pixel_values"
"""Name that models have for the pixels; what else there is about pictures lies beside it."""
GRID = "image_grid_thw"
"""Patches of each picture, [pictures, 3]: frames, rows, columns."""

_SETTINGS = "preprocessor_config.json"
"""File of a saved preprocessor."""
_KEPT_BYTES = 256 << 20
"""Pixels that are kept for when a picture comes round again, as it does for every micro-batch with its prompt."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one kind of model reads pictures."""

    tokens: tuple[str, str, str]
    """Before, in place of and behind a picture."""
    preprocessor: str
    """Class of transformers that makes its pixels with PIL."""
    gridded: bool
    """Pictures are of any size, as patches with a grid, and positions have three dimensions; otherwise as tiles of one
    size, of a fixed number of tokens each."""


_QWEN = Family(IMAGE_TOKENS, "Qwen2VLImageProcessorPil", gridded=True)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    "internvl": Family(("<img>", "<IMG_CONTEXT>", "</img>"), "GotOcr2ImageProcessorPil", gridded=False),
}
"""By `model_type`."""


class Pictures:
    """Reads pictures for one model.

    Args:
        config: of the model.
        tokenizer: its own.
        directory: where it was saved, with its preprocessor's settings; None makes one that fits a new model.

    Raises:
        ValueError: the tokenizer lacks the tokens of pictures, or pillow is not installed.
    """

    def __init__(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: str | None = None):
        if find_spec("PIL") is None:
            raise ValueError(
                f"model_type={config.model_type} reads pictures, which need pillow: pip install rlinf[data]"
            )
        self.family = FAMILIES[config.model_type]
        self.placeholder = int(config.image_token_id)
        """Token that stands in a prompt where a picture's features are put."""
        before, self.mark, behind = _texts(self.family, config, tokenizer)
        self.text = before + self.mark + behind
        """Text that stands in place of a picture; the model's chat template writes the same."""
        video = getattr(config, "video_token_id", None)
        size = config.get_text_config().vocab_size
        ids = {self.placeholder, *([] if video is None else [int(video)])}
        self.banned = tuple(sorted(token for token in ids if token < size))
        """Tokens that an answer never has: they stand for what is not there, and no model could read them."""
        self._config = config
        self._processor = _preprocessor(self.family, config, directory)
        self._kept: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0

    def count(self, image: ImageRef) -> int:
        """Placeholders that stand for a picture. Raises `DataError` if it is none."""
        width, height = opened(image).size  # decoded, so that a broken one is known where data are read
        try:
            patches = int(self._processor.get_number_of_image_patches(height, width, {}))
        except ValueError as error:  # too narrow
            raise DataError(f"the picture {image.source or image.digest[:12]} cannot be read: {error}") from error
        return self._tokens_of(patches)

    def inputs(self, images: Sequence[ImageRef]) -> dict[str, Tensor]:
        """Tensors that the model takes besides token ids, of pictures one behind the other, on the host.

        Raises:
            DataError: a picture cannot be read.
        """
        each = [self._read(image) for image in images]
        return {name: torch.cat([one[name] for one in each]) for name in each[0]} if each else {}

    def counts(self, inputs: Mapping[str, Tensor], images: Sequence[ImageRef]) -> list[int]:
        """Placeholders of each of the pictures that `inputs` was made of."""
        if GRID in inputs:
            return [self._tokens_of(int(patches)) for patches in inputs[GRID].prod(dim=-1)]
        return [self._tokens_of(len(self._read(image)[PIXELS])) for image in images]

    def positions(self, ids: np.ndarray, grids: Tensor) -> np.ndarray:
        """Time, row and column of each token of a text, int64 [3, tokens] (Qwen2-VL, arXiv:2409.12191, section 2.1).

        Text counts in all three; the tokens of a picture have one time, and rows and columns from there; what follows
        goes on behind the largest.

        Args:
            ids: int64 [tokens].
            grids: patches of its pictures, int64 [pictures, 3], see `GRID`.
        """
        merge = self._config.vision_config.spatial_merge_size
        axes = np.empty((3, len(ids)), dtype=np.int64)
        places = np.flatnonzero(ids == self.placeholder)
        next_position = done = used = 0
        for _, rows, columns in (grids // torch.tensor([1, merge, merge])).tolist():
            start = int(places[used])
            axes[:, done:start] = next_position + np.arange(start - done)
            next_position += start - done
            done, used = start + rows * columns, used + rows * columns
            where = np.arange(rows * columns)
            axes[:, start:done] = next_position + np.stack([0 * where, where // columns, where % columns])
            next_position += max(rows, columns)
        axes[:, done:] = next_position + np.arange(len(ids) - done)
        return axes

    def blank(self) -> tuple[dict[str, Tensor], int]:
        """The smallest picture, of zeros, and its placeholders: for a rank that has none and must take part."""
        vision: Any = self._config.vision_config
        if not self.family.gridded:
            pixels = torch.zeros(1, vision.num_channels, *vision.image_size)
            return {PIXELS: pixels}, self._tokens_of(1)
        merge = vision.spatial_merge_size
        features = _channels(vision) * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, merge, merge]])
        return {PIXELS: torch.zeros(merge**2, features), GRID: grid}, 1

    def repeats(self, ids: Sequence[int] | np.ndarray, images: Sequence[ImageRef]) -> np.ndarray:
        """How often each token of a text stands there once every placeholder is as many as its picture has features,
        int64 [tokens].

        Raises:
            DataError: there are more or fewer places for pictures than pictures.
        """
        places = np.flatnonzero(np.asarray(ids) == self.placeholder)
        if len(places) != len(images):
            raise DataError(
                f"the prompt has {len(places)} places for pictures and {len(images)} pictures; put {MARK} where each "
                "of them stands, or none anywhere, for all at the beginning"
            )
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [self.count(image) for image in images]
        return counts

    def expand(self, ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """A prompt's token ids with so many placeholders. Raises as `repeats`."""
        tokens: list[int] = np.repeat(np.asarray(ids, dtype=np.int64), self.repeats(ids, images)).tolist()
        return tokens

    def save(self, directory: str | Path) -> None:
        """Write the preprocessor's settings where a model is saved."""
        self._processor.save_pretrained(directory)

    def _read(self, image: ImageRef) -> dict[str, Tensor]:
        tensors = self._kept.pop(image.digest, None)
        if tensors is None:
            processed = self._processor(
                images=[np.asarray(opened(image))], return_tensors="pt", input_data_format="channels_last"
            )
            tensors = {name: processed[name] for name in (PIXELS, GRID) if name in processed}
            self._bytes += _size(tensors)
        self._kept[image.digest] = tensors
        while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return tensors

    def _tokens_of(self, patches: int) -> int:
        if self.family.gridded:
            return int(patches // self._config.vision_config.spatial_merge_size**2)
        return int(patches * self._config.image_seq_length)


MARK = "<image>"
"""Mark of a picture in the texts of data sets (verl's and EasyR1's among them), of whatever model."""


def auto_class(config: PretrainedConfig, kind: type[Any] | None = None) -> type[Any]:
    """The class of transformers that makes a model of this configuration: where a language model is wanted, as None
    is, one that reads pictures besides, if that is what it describes."""
    import transformers

    language = transformers.AutoModelForCausalLM  # looked up late: its module takes a second to import
    kind, texts = kind or language, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    pictured = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in texts
    return transformers.AutoModelForImageTextToText if kind is language and pictured else kind


def picture_tokens(model_type: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int] | None:
    """Ids of the tokens before, in place of and behind pictures; None if the tokenizer has none of them."""
    own = FAMILIES[model_type].tokens
    vocabulary = tokenizer.get_vocab()
    names = next((names for names in (own, IMAGE_TOKENS) if all(name in vocabulary for name in names)), None)
    return None if names is None else (vocabulary[names[0]], vocabulary[names[1]], vocabulary[names[2]])


def _texts(family: Family, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """The tokens before, in place of and behind a picture, as the tokenizer writes them."""
    ids = picture_tokens(config.model_type, tokenizer)
    if ids is None or ids[1] != config.image_token_id:
        raise ValueError(
            f"model_type={config.model_type} reads pictures in place of token {config.image_token_id}, and the "
            f"tokenizer has not {', '.join(family.tokens)} for that: take the model's own, or "
            "characters+pictures:ALPHABET for a new model"
        )
    before, mark, behind = (str(name) for name in tokenizer.convert_ids_to_tokens(list(ids)))
    return before, mark, behind


def _channels(vision: Any) -> int:
    return next(int(getattr(vision, name)) for name in ("in_channels", "in_chans") if hasattr(vision, name))


def _preprocessor(family: Family, config: PretrainedConfig, directory: str | None) -> Any:
    import transformers

    kind = getattr(transformers, family.preprocessor)
    # InternVL's processor cuts pictures into tiles whatever its preprocessor's own settings say
    more = {} if family.gridded else {"crop_to_patches": True}
    if directory is not None and (not Path(directory).is_dir() or (Path(directory) / _SETTINGS).exists()):
        return pretrained(kind, directory, **more)
    vision: Any = config.vision_config
    if not family.gridded:
        height, width = vision.image_size
        return kind(size={"height": height, "width": width}, **more)
    side = vision.patch_size * vision.spatial_merge_size
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    # a new model takes pictures as they are, down to a token's size
    return kind(**sizes, temporal_patch_size=vision.temporal_patch_size, min_pixels=side**2, max_pixels=4096 * side**2)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


_ASKING = frozenset({"user", "system", "developer"})
"""Roles whose texts may have marks. What an assistant or a tool says of `<image>` is what it says."""


def pictured(content: str | list[Any], count: int, pictures: Pictures) -> str | list[Any]:
    """A text, or chat messages, with the model's tokens where pictures stand.

    Args:
        content: parts `{"type": "image"}` show where and, if there is none, `<image>` or the model's own placeholders
            in the texts of who asks; nothing does where all stand before the first text of a user.
        count: of pictures.
        pictures: the model's.
    """
    if isinstance(content, str):
        return _marked(content, count, pictures)
    messages = [{**message, "content": _flat(message.get("content"), pictures.text)} for message in content]
    if any(_has_picture(message.get("content")) for message in content):
        return messages  # a text beside such parts means what it says
    asking = [number for number, message in enumerate(messages) if message["role"] in _ASKING]
    if not any(_is_marked(messages[number]["content"], pictures) for number in asking):
        first = next((number for number in asking if messages[number]["role"] == "user"), 0)
        messages[first]["content"] = MARK * count + messages[first]["content"]
        asking = [first]
    for number in asking:
        messages[number]["content"] = messages[number]["content"].replace(MARK, pictures.text)
    return messages


def _marked(text: str, count: int, pictures: Pictures) -> str:
    text = text if _is_marked(text, pictures) else MARK * count + text
    return text.replace(MARK, pictures.text)


def _is_marked(text: str, pictures: Pictures) -> bool:
    return MARK in text or pictures.mark in text


def _flat(content: Any, picture: str) -> str:
    """A message's parts as one text; none of a message that only calls tools."""
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return str(content)
    return "".join(picture if _is_picture(part) else _text(part) for part in content)


def _has_picture(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(_is_picture(part) for part in content)


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type", "text")).startswith("image")


def _text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return str(part.get(str(part.get("type", "text")), part.get("text", "")))
