"""Instructions as tokens of PaliGemma's tokenizer, which lies in a checkpoint's directory.

Either `tokenizer.json` (read by the package tokenizers) or the sentencepiece file as it was published, such as
`paligemma_tokenizer.model` (read by the package sentencepiece, where it is installed).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*tokenizer.model")
"""Patterns of the tokenizer's files."""
_BINS = 256  # of numbers of the state in prompts


class Prompts:
    """Rows of tokens of equal length: BOS, the prompt, and 0 on the right.

    Args:
        files: contents of a checkpoint's small files by name.
        length: tokens in a row.

    Raises:
        ValueError: there is no tokenizer among the files, or it cannot be read.
    """

    def __init__(self, files: Mapping[str, bytes], length: int):
        self.length = length
        self._bos, self._encode = _tokenizer(files)
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, parts: Sequence[tuple[str, ...]]) -> Tensor:
        """Tokens of prompts, int64 [N, length].

        Args:
            parts: texts of each prompt that are tokenized one by one, N of them.

        One that is too long loses its end, and is told of.
        """
        return torch.tensor([self._row(each) for each in parts], dtype=torch.int64).view(len(parts), self.length)

    def _encoded(self, parts: tuple[str, ...]) -> tuple[int, ...]:
        tokens = [self._bos, *(token for part in parts for token in self._encode(part))]
        if len(tokens) > self.length:
            logger.warning(  # once for each text: rows are kept
                "policy.settings.prompt_length=%d is too short for %r, which is %d tokens: its end is cut off, as by "
                "openpi", self.length, "".join(parts), len(tokens),
            )  # fmt: skip
            tokens = tokens[: self.length]
        return (*tokens, *[0] * (self.length - len(tokens)))


def cleaned(text: str) -> str:
    """An instruction as openpi puts it into prompts: on one line, with spaces for underscores."""
    return text.strip().replace("_", " ").replace("\n", " ")


def written(state: Tensor) -> str:
    """A state on the model's scale as pi0.5 reads it: 256 equal bins from -1 to 1, as whole numbers; float32 [S].

    What lies below -1 is -1, as in openpi, and what lies above 1 is 255.
    """
    edges = torch.linspace(-1.0, 1.0, _BINS + 1, dtype=torch.float64)[:-1]
    return " ".join(map(str, (torch.bucketize(state.double().cpu(), edges, right=True) - 1).tolist()))


def _tokenizer(files: Mapping[str, bytes]) -> tuple[int, Callable[[str], Sequence[int]]]:
    """The token that begins texts, and what encodes one."""
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # of a file that may hold anything
            raise ValueError(f"policy.path: its tokenizer.json cannot be read: {error}") from error
        if (bos := tokenizer.token_to_id("<bos>")) is None:
            raise ValueError("policy.path: its tokenizer.json has no token <bos>: it is not PaliGemma's")
        return bos, lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [name for name in files if name.endswith("tokenizer.model")]
    if not pieces:
        raise ValueError(
            "policy.path: the directory has no tokenizer: put PaliGemma's tokenizer.json, or its "
            "paligemma_tokenizer.model, beside the weights"
        )
    try:
        from sentencepiece import SentencePieceProcessor  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(
            f"policy.path: reading {pieces[0]} takes the package sentencepiece (pip install sentencepiece), or "
            "put PaliGemma's tokenizer.json in its place"
        ) from error
    processor = SentencePieceProcessor(model_proto=files[pieces[0]])
    return processor.bos_id(), processor.encode
