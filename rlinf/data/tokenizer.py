"""Tokenizers: a saved one, or one token per character for generated tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlinf.config.importing import looks_local
from rlinf.data.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

TokenizerSource = str | Mapping[str, Any]
"""A Hugging Face directory (or hub name), or `{"characters": "0123456789>"}`; as text, `characters:0123456789>`, or
`characters+pictures:0123456789>` for a model that reads pictures."""
CHARACTERS = "characters:"
"""Beginning of the source of a tokenizer of single characters, as text."""
PICTURED = "characters+pictures:"
"""Beginning of the source of one that has `IMAGE_TOKENS` besides."""
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""Tokens before, in place of and behind a picture, as in Qwen's models."""


def character_tokenizer(characters: str, *, pictures: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, that saves and loads like any other.

    Args:
        characters: the alphabet, each character once; ids follow their order, after those of `<pad>`, `<eos>` and
            `<unk>`.
        pictures: it has `IMAGE_TOKENS` behind the alphabet.

    Raises:
        ValueError: a character stands twice, or there is none.
    """
    from transformers import PreTrainedTokenizerFast

    twice = sorted({each for each in characters if characters.count(each) > 1})
    if not characters or twice:
        why = f"{''.join(twice)!r} stands twice, a space behind the colon included" if twice else "there is none"
        raise ValueError(f"characters={characters!r} must be a text in which every character stands once: {why}")
    more = IMAGE_TOKENS if pictures else ()
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, UNK, *characters, *more])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special: dict[str, Any] = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    if more:
        special["additional_special_tokens"] = list(more)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def pretrained(loader: Any, source: str | Path, **how: Any) -> Any:
    """`loader.from_pretrained(source, **how)` without running code that comes with the files, and without a question.

    Every loader of this package goes through here: left to its default, transformers asks on the terminal whether to
    run a model's own Python files, in the middle of whatever command is reading the model.

    Args:
        loader: `AutoConfig`, `AutoTokenizer`, `AutoModelForCausalLM` and their like.
        source: a directory or a hub name.
        how: the loader's own arguments.

    Raises:
        ValueError: the files can only be read by code that comes with them; the message names it.
        OSError: as the loader raises it.
    """
    try:
        return loader.from_pretrained(os.path.expanduser(source), trust_remote_code=False, **how)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{source} cannot be read without {_own_code(Path(source))}, and code that comes with a model is never run "
            "here; take a model that transformers has a class for"
        ) from None


def without_own_code(kind: Any, config: Any, **how: Any) -> Any:
    """An empty model, `kind.from_config(config, **how)`, by classes of transformers alone; see `pretrained`.

    Raises:
        ValueError: transformers has no class for it.
    """
    return kind.from_config(config, trust_remote_code=False, **how)


def _own_code(source: Path) -> str:
    """Name the Python files of a model's directory."""
    files = sorted(path.name for path in source.glob("*.py")) if source.is_dir() else []
    return f"its own {', '.join(files[:3])}" if files else "Python code of its own"


def load_tokenizer(source: TokenizerSource) -> PreTrainedTokenizerBase:
    """Make or read a tokenizer.

    Args:
        source: a Hugging Face directory (or hub name), `{"characters": alphabet}`, `characters:alphabet`, or
            `characters+pictures:alphabet`.

    Raises:
        ValueError: there is no tokenizer, or a mapping that says anything else.
    """
    if isinstance(source, str) and source.startswith(CHARACTERS):
        return character_tokenizer(source.removeprefix(CHARACTERS))
    if isinstance(source, str) and source.startswith(PICTURED):
        return character_tokenizer(source.removeprefix(PICTURED), pictures=True)
    if isinstance(source, str):
        if looks_local(source) and not Path(source).expanduser().is_dir():
            raise ValueError(f"tokenizer: there is no directory {source}, looked for from {Path.cwd()}")
        try:
            tokenizer: PreTrainedTokenizerBase = pretrained(_class_of(source), source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"tokenizer: {source} has none that transformers can load: {reason}") from error
        return tokenizer
    if set(source) != {"characters"}:
        raise ValueError(f'tokenizer: expected a directory or {{"characters": alphabet}}, got keys {sorted(source)}')
    return character_tokenizer(str(source["characters"]))


class LateTokenizer:
    """A tokenizer that is made or read when it is first asked for something: transformers, which has them, takes half a
    second to import, and who draws tokens asks for nothing but stop texts. Blocking then.

    Args:
        source: see `load_tokenizer`.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # nothing of its own is missing because a tokenizer cannot be read
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def _class_of(source: str) -> Any:
    """The loader that reads a tokenizer as its file has it, if that is of no model's kind, such as single characters.

    `AutoTokenizer` would go by the model beside it: as Qwen2's, it has no token for a space or a line break.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = Path(source).expanduser() / "tokenizer_config.json"
    general = file.is_file() and json.loads(file.read_text()).get("tokenizer_class") == PreTrainedTokenizerFast.__name__
    return PreTrainedTokenizerFast if general else AutoTokenizer


def padding_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: int | None) -> tuple[int, ...]:
    """Token ids of a model that its tokenizer has not, in order: heads are padded to round numbers of rows.

    Args:
        tokenizer: the model's.
        vocabulary: the model has ids below it; None: exactly those of the tokenizer.
    """
    if vocabulary is None:
        return ()
    ids = set(tokenizer.get_vocab().values())
    return tuple(id for id in range(vocabulary) if id not in ids)


def shown_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The text that a model read, for a row of samples.jsonl: `prompt`, and beside it the `task` where that is another.

    An agent makes messages of its task, and a harness adds system prompts and tools: what was asked is not what was
    read. Empty where `prompt.text` is what was read, where tokens are not known, and for pictures, whose are no text.
    """
    if prompt.images or not len(prompt.token_ids):
        return {}
    if (text := str(tokenizer.decode(prompt.token_ids, skip_special_tokens=False))) == prompt.text:
        return {}
    return {"prompt": text, "task": prompt.text} if prompt.text else {"prompt": text}
