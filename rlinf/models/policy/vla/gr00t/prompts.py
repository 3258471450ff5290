"""Instructions and pictures as the tokens of a chat, as Eagle 2.5 reads them.

In: texts. Out: rows of equal length, padded on the left, in which each picture is as many tokens as it has patches. The
tokenizer's files, and its chat template if it has one, are those of Eagle beside the checkpoint.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.data.tokenizer import pretrained

PICTURE, BEGIN, END = "<IMG_CONTEXT>", "<img>", "</img>"
"""The token of a patch, and what stands around a picture's."""
_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""Where the tokenizer has no template."""
_TEMPLATE = "chat_template.json"
"""The file of Eagle's template, which is a processor's, so that a tokenizer does not read it by itself."""
_PLACE = re.compile(r"<image-(\d+)>")
"""What Eagle's template writes for a picture."""


class Prompts:
    """Instructions to tokens.

    Args:
        files: of the tokenizer, by name.
        cameras: pictures in front of each instruction.
        patches: tokens of each picture.
        length: tokens in a row.

    Raises:
        ValueError: the files are no tokenizer with the tokens of pictures.
    """

    def __init__(self, files: Mapping[str, bytes], cameras: int, patches: int, length: int):
        self._tokenizer = _tokenizer(files)
        self.cameras, self.patches, self.length = cameras, patches, length
        self.picture: int = self._tokenizer.convert_tokens_to_ids(PICTURE)
        """The token of a patch."""
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, instructions: Sequence[str]) -> Tensor:
        """Tokens of instructions, int64 [N, length], -1 for padding.

        Raises:
            ValueError: one is too long; the text says which.
        """
        rows = [self._row(text) for text in instructions]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), self.length)

    def _encoded(self, instruction: str) -> tuple[int, ...]:
        tokens = self._tokenizer.encode(self.text(instruction), add_special_tokens=False)
        if (places := tokens.count(self.picture)) != self.cameras * self.patches:
            raise ValueError(
                f"policy gr00t: the chat template beside the checkpoint makes {places} tokens of {self.cameras} "
                f"pictures of {self.patches} tokens: it must write <image-1>, <image-2> … as Eagle's {_TEMPLATE} does"
            )
        if len(tokens) > self.length:
            raise ValueError(
                f"policy gr00t: prompt_length={self.length} is too short for {self.cameras} pictures of {self.patches} "
                f"tokens and {instruction!r}, which need {len(tokens)}"
            )
        return (*[-1] * (self.length - len(tokens)), *tokens)

    def text(self, instruction: str) -> str:
        """What is tokenized for an instruction."""
        places = "".join(f"<image-{number}>" for number in range(1, self.cameras + 1))
        said = _CHAT.format(content=places + instruction)
        if self._tokenizer.chat_template is not None:
            content: list[dict[str, Any]] = [{"type": "image", "image": number} for number in range(self.cameras)]
            content.append({"type": "text", "text": instruction})
            said = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
        patches = PICTURE * self.patches
        return _PLACE.sub(lambda found: f"<image {found[1]}>{BEGIN}{patches}{END}", said)


def _tokenizer(files: Mapping[str, bytes]) -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            found = pretrained(AutoTokenizer, folder)
            if _TEMPLATE in files:
                found.chat_template = json.loads(files[_TEMPLATE])["chat_template"]
        except Exception as error:  # of files that may hold anything
            raise ValueError(f"policy gr00t: the files of Eagle's tokenizer cannot be read: {error}") from error
    if missing := [token for token in (PICTURE, BEGIN, END) if len(found.encode(token, add_special_tokens=False)) != 1]:
        raise ValueError(f"policy gr00t: the tokenizer beside the checkpoint has no {' and no '.join(missing)}")
    return found
