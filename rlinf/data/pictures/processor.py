"""What a model reads of pictures: placeholders in its prompt, and pixels as its own preprocessor has them.

In: references. Out: how many placeholder tokens stand for each, and the tensors that the model's `forward` takes. It
works without network and without torchvision: transformers' preprocessors on PIL are taken whatever is installed, so
that all roles of a run have the same pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from rlinf.data.datasets.rows import DataError
from rlinf.data.pictures.images import opened
from rlinf.data.sample import ImageRef
from rlinf.data.tokenizer import IMAGE_TOKENS, pretrained

PIXELS = "pixel_values"
"""What models call the pixels; what else there is about pictures lies beside it."""
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
        """What a text has in place of a picture; the model's chat template writes the same."""
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
        """What the model takes besides token ids, of pictures one behind the other, on the host.

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
        found = np.empty((3, len(ids)), dtype=np.int64)
        places = np.flatnonzero(ids == self.placeholder)
        next_position = done = used = 0
        for _, rows, columns in (grids // torch.tensor([1, merge, merge])).tolist():
            start = int(places[used])
            found[:, done:start] = next_position + np.arange(start - done)
            next_position += start - done
            done, used = start + rows * columns, used + rows * columns
            where = np.arange(rows * columns)
            found[:, start:done] = next_position + np.stack([0 * where, where // columns, where % columns])
            next_position += max(rows, columns)
        found[:, done:] = next_position + np.arange(len(ids) - done)
        return found

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
        found = np.ones(len(ids), dtype=np.int64)
        found[places] = [self.count(image) for image in images]
        return found

    def expand(self, ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """A prompt's token ids with so many placeholders. Raises as `repeats`."""
        found: list[int] = np.repeat(np.asarray(ids, dtype=np.int64), self.repeats(ids, images)).tolist()
        return found

    def save(self, directory: str | Path) -> None:
        """Write the preprocessor's settings where a model is saved."""
        self._processor.save_pretrained(directory)

    def _read(self, image: ImageRef) -> dict[str, Tensor]:
        found = self._kept.pop(image.digest, None)
        if found is None:
            made = self._processor(
                images=[np.asarray(opened(image))], return_tensors="pt", input_data_format="channels_last"
            )
            found = {name: made[name] for name in (PIXELS, GRID) if name in made}
            self._bytes += _size(found)
        self._kept[image.digest] = found
        while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return found

    def _tokens_of(self, patches: int) -> int:
        if self.family.gridded:
            return int(patches // self._config.vision_config.spatial_merge_size**2)
        return int(patches * self._config.image_seq_length)


MARK = "<image>"
"""What stands for a picture in the texts of data sets (verl's and EasyR1's among them), of whatever model."""


def auto_class(config: PretrainedConfig, kind: type[Any] = AutoModelForCausalLM) -> type[Any]:
    """What makes a model of this configuration: where a language model is wanted, one that reads pictures besides, if
    that is what it describes."""
    pictured = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if kind is AutoModelForCausalLM and pictured else kind


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

    made = getattr(transformers, family.preprocessor)
    # InternVL's processor cuts pictures into tiles whatever its preprocessor's own settings say
    more = {} if family.gridded else {"crop_to_patches": True}
    if directory is not None and (not Path(directory).is_dir() or (Path(directory) / _SETTINGS).exists()):
        return pretrained(made, directory, **more)
    vision: Any = config.vision_config
    if not family.gridded:
        height, width = vision.image_size
        return made(size={"height": height, "width": width}, **more)
    side = vision.patch_size * vision.spatial_merge_size
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    # a new model takes pictures as they are, down to a token's size
    return made(**sizes, temporal_patch_size=vision.temporal_patch_size, min_pixels=side**2, max_pixels=4096 * side**2)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
