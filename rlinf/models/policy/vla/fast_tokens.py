"""FAST (arXiv:2501.09747): chunks of actions as few tokens, by what is slow and what is quick in them.

    numbers [H, D] ─▶ DCT over time ─▶ x scale, rounded ─▶ slow before quick ─▶ characters ─▶ BPE ─▶ tokens

Where a chunk is smooth, most coefficients are 0, and byte-pair encoding makes a token of many. A directory of the
authors has `tokenizer.json`, the pairs, and `processor_config.json`, in which `scale` and `min_token` are, the least
coefficient, which is character 0. `fit` makes one from chunks. Not all tokens in a row say as many coefficients as a
chunk has: `decode` says which rows do not.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, Self

import torch
from tokenizers import Tokenizer, decoders, models, trainers
from torch import Tensor

logger = logging.getLogger(__name__)

WrongLength = Literal["padded", "zeros"]
"""Meaning of tokens that do not say as many coefficients as a chunk has: those that they say, cut or with zeros behind
(lerobot); or zeros alone (the authors)."""
TOKENIZER, PROCESSOR = "tokenizer.json", "processor_config.json"
"""Files of a directory."""
_LONGEST = 10_000
"""Characters of the longest token, as the authors fit: no bound to speak of."""
_LAST = 0xD7FF
"""The last character before those that no text can have alone."""
_FEWEST = 2
"""Times that a pair must be seen to become a token, as the authors fit."""
_ROOM = 100
"""Tokens at least that stand for pairs, below which the authors warn."""


def dct(count: int) -> Tensor:
    """Matrix of the orthonormal discrete cosine transform (DCT-II), float64 [H, H]; its transpose is its inverse.

        c_k = s_k sum_t x_t cos(pi k (2 t + 1) / (2 H)),    s_0 = sqrt(1 / H), s_k = sqrt(2 / H)

    Args:
        count: H.
    """
    places = torch.arange(count, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * count) * places[:, None] * (2 * places + 1)) * math.sqrt(2 / count)
    matrix[0] *= math.sqrt(0.5)
    return matrix


class FastTokens:
    """Between chunks and tokens, in both directions.

    Args:
        tokenizer: characters to tokens.
        scale: of coefficients before they are rounded.
        least: the coefficient that is character 0.
    """

    def __init__(self, tokenizer: Tokenizer, scale: float, least: int):
        self._tokenizer, self.scale, self.least = tokenizer, scale, least
        self.size: int = tokenizer.get_vocab_size()
        """Tokens in all, F."""
        self._nearest = lru_cache(maxsize=None)(self._character_near)

    @classmethod
    def of_files(cls, files: Mapping[str, bytes], where: str) -> Self:
        """Read a directory of the authors.

        Args:
            files: contents by name.
            where: they lie, for errors.

        Raises:
            ValueError: a file is missing or damaged.
        """
        if missing := [name for name in (TOKENIZER, PROCESSOR) if name not in files]:
            raise ValueError(f"{where} has no {' and no '.join(missing)}: it is no directory of FAST's tokens")
        try:
            about = json.loads(files[PROCESSOR])
            tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
            return cls(tokenizer, float(about["scale"]), int(about["min_token"]))
        except Exception as error:  # of files that may hold anything
            raise ValueError(f"{where}: its {TOKENIZER} or {PROCESSOR} is damaged: {error!r}") from error

    @classmethod
    def fit(cls, chunks: Tensor, *, scale: float = 10.0, size: int = 1024) -> Self:
        """Make tokens for chunks like some.

        Args:
            chunks: normalised, [N, H, D].
            scale: of coefficients before they are rounded: more is more exact, and more tokens (paper, section V).
            size: tokens at most, a character for each coefficient between the least and the greatest included.

        Raises:
            ValueError: there are more coefficients than tokens.
        """
        rows = _coefficients(chunks, scale)
        least, most = int(rows.min()), int(rows.max())
        if (alphabet := most - least + 1) > size:
            raise ValueError(
                f"FAST: coefficients go from {least} to {most}, which is more than size={size} tokens: let size be "
                f"more, or scale less than {scale}"
            )
        if alphabet + _ROOM > size:
            logger.warning("FAST: of size=%d tokens, %d are coefficients: few are left for pairs", size, alphabet)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=_FEWEST,
            show_progress=False,
            initial_alphabet=[chr(number) for number in range(alphabet)],
            max_token_length=_LONGEST,
        )
        tokenizer.train_from_iterator(map(_text, (rows - least).tolist()), trainer)
        return cls(tokenizer, scale, least)

    def files(self) -> dict[str, bytes]:
        """Files of a directory, by name."""
        about = {"processor_class": "UniversalActionProcessor", "scale": self.scale, "min_token": self.least}
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        more = {"vocab_size": self.size, "action_dim": None, "time_horizon": None}
        return {
            TOKENIZER: self._tokenizer.to_str().encode(),
            PROCESSOR: (json.dumps({**about, **more}, indent=2) + "\n").encode(),
            "tokenizer_config.json": (json.dumps(words, indent=2) + "\n").encode(),
        }

    def encode(self, chunks: Tensor) -> list[list[int]]:
        """Tokens of each of the normalised chunks [N, H, D]; a coefficient that has no character is the nearest that
        has one."""
        rows = (_coefficients(chunks, self.scale) - self.least).clamp(0, _LAST)
        texts = [_text(row) for row in rows.tolist()]
        if unknown := {each for text in texts for each in set(text) if self._nearest(each) != each}:
            texts = [text.translate({ord(each): self._nearest(each) for each in unknown}) for text in texts]
            _tell_unknown(self.least + ord(max(unknown)), self.least + ord(self._nearest(max(unknown))))
        return [each.ids for each in self._tokenizer.encode_batch_fast(texts)]

    def _character_near(self, character: str) -> str:
        """The nearest character that tokens can say, which drop those that they cannot."""
        place = ord(character)
        for far in range(_LAST):
            for each in (place - far, place + far):
                if 0 <= each <= _LAST and self._says(chr(each)):
                    return chr(each)
        raise ValueError("FAST: its tokens say no coefficient at all")

    def _says(self, character: str) -> bool:
        text: str = self._tokenizer.decode(self._tokenizer.encode(character).ids, skip_special_tokens=False)
        return text == character

    def decode(
        self, rows: Sequence[Sequence[int]], horizon: int, numbers: int, wrong: WrongLength = "padded"
    ) -> tuple[Tensor, Tensor]:
        """Chunks of tokens.

        Args:
            rows: tokens of N chunks.
            horizon: H.
            numbers: D.
            wrong: see `WrongLength`.

        Returns:
            float32 [N, H, D]; and which rows do not say H x D coefficients, bool [N].
        """
        count = horizon * numbers
        coefficients = torch.zeros(len(rows), count, dtype=torch.float64)
        broken = torch.zeros(len(rows), dtype=torch.bool)
        for place, row in enumerate(rows):
            text = self._tokenizer.decode(list(row), skip_special_tokens=False)
            # half a character, which tokens of bytes can say, is no coefficient
            values = [0 if each == "\ufffd" else ord(each) + self.least for each in text]
            broken[place] = len(values) != count or "\ufffd" in text
            if not broken[place] or wrong == "padded":
                coefficients[place, : len(values)] = torch.tensor(values[:count], dtype=torch.float64)
        slow = coefficients.view(len(rows), horizon, numbers) / self.scale
        return (dct(horizon).T @ slow).float(), broken


def _coefficients(chunks: Tensor, scale: float) -> Tensor:
    """Rounded coefficients of chunks [N, H, D], the slow ones first, int64 [N, H x D]."""
    exact = dct(chunks.shape[1]) @ chunks.detach().cpu().double()
    return (exact * scale).round().long().flatten(1)


@lru_cache(maxsize=64)  # told once for each
def _tell_unknown(coefficient: int, nearest: int) -> None:
    logger.warning(
        "FAST: no token says coefficient %d, so that %d stands for it: are actions on the scale that tokens were made "
        "for?",
        coefficient,
        nearest,
    )


def _text(row: Sequence[int]) -> str:
    return "".join(map(chr, row))
