"""GGUF files, llama.cpp's format of a model in one file: each becomes a Hugging Face directory, written once.

In: a path that ends in .gguf. Out: a directory in the user's cache with what the file holds: configuration, tokenizer,
chat template, and weights, which are no longer quantised. Everything else reads models as such directories.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

CACHE = Path("~/.cache/rlinf")
"""Where directories lie that were made of files."""
RECORD = "gguf.json"
"""File in such a directory: the name of its source, and the sum of it."""

_DTYPES = {0: "float", 1: "half"}
"""Precision by the file's own mark of its type. All others are written as bfloat16: they were published so, or are
quantised, to which the 8 bits of bfloat16 add an error that is far below the quantisation's."""
_AS_GPT2 = {"gpt-2", "default", "mpt", "olmo", "phi-2"}
"""Rules, by llama.cpp's names, that split text into words as GPT-2 does."""
_BY_DIGIT = {"smollm", "starcoder", "refact", "command-r"}
"""Rules that make every digit a word first; transformers has GPT-2's in their place."""
_ABOUT = ("general.name", "general.file_type", "general.license", "tokenizer.ggml.pre")


def directory_of(path: str) -> str:
    """Directory of a model: the path itself, `~` replaced; of a GGUF file the one that holds what is in it.

    Raises:
        ValueError: there is no such file, or it cannot be read; the message says why.
    """
    place = Path(os.path.expanduser(path))
    if place.suffix != ".gguf":
        return os.path.expanduser(path)
    try:
        stat = place.resolve().stat()
    except OSError as error:
        raise ValueError(f"the GGUF file cannot be read: {error.strerror}") from None
    mark = hashlib.sha256(f"{place.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = CACHE.expanduser() / "gguf" / f"{place.stem}-{mark}"
    write_directory(place, directory)
    return str(directory)


def write_directory(file: Path, directory: Path) -> None:
    """Write what a GGUF file holds as a Hugging Face directory, unless that is there; processes wait for each other.

    Raises:
        ValueError: the file cannot be read; the message says why.
    """
    if (directory / RECORD).is_file():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(f".{directory.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / RECORD).is_file():
            _write(file, directory)


def sum_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(file: Path, directory: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files are read by the package gguf: pip install 'rlinf[gguf]'") from None
    import transformers

    how: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    of_blocks = getattr(transformers, "GgufConfig", None)  # versions that have it may leave the weights quantised
    whole = {} if of_blocks is None else {"quantization_config": of_blocks(dequantize=True)}

    try:
        fields = gguf.GGUFReader(file).fields
        about = {name: fields[name].contents() for name in _ABOUT if name in fields}
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), **how)
        kind = transformers.AutoModelForCausalLM
        model: Any = kind.from_pretrained(str(file.parent), dtype="float32", **how, **whole)
    except Exception as error:  # of whatever the bytes made the two libraries do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"transformers cannot read this GGUF file: {reason}") from error
    _split_text_by(str(about.get("tokenizer.ggml.pre", "default")), tokenizer, file)
    getattr(model, _DTYPES.get(about.get("general.file_type", -1), "bfloat16"))()
    model.hf_quantizer = model.config.quantization_config = None  # it is a plain model now, which may be saved
    del model.config.quantization_config
    # The record comes last: a directory without it was left by a process that died, and is written over.
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    record = {"file": file.name, "sha256": sum_of(file), "dtype": str(model.dtype), **about}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _split_text_by(rule: str, tokenizer: Any, file: Path) -> None:
    """Let a byte-level tokenizer split text into words by its file's rule, where transformers took GPT-2's for it."""
    from tokenizers import pre_tokenizers

    taken = tokenizer.backend_tokenizer.pre_tokenizer
    if not isinstance(taken, pre_tokenizers.ByteLevel) or rule in _AS_GPT2:
        return
    if rule not in _BY_DIGIT:
        warnings.warn(
            f"{file}: its tokenizer splits text by the rule {rule}, for which transformers takes GPT-2's; compare its "
            "tokens with the published tokenizer's, or name that one in model.tokenizer",
            stacklevel=2,
        )
        return
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, taken])
