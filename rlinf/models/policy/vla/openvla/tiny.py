"""Tiny random OpenVLA checkpoints: the published files, names and structure with small sizes, for tests and trials.

In: where to, and sizes. Out: a directory that `policy.path` takes, with a quarter of the encoders' depth at most and a
tokenizer that knows the prompt's words; the ids that OpenVLA gives a meaning to (1, 2, 29871, 32000) are the true ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from rlinf.models.policy.build import build_policy_model
from rlinf.models.policy.vla.embodiment.table import OPENVLA_PROMPT
from rlinf.models.policy.vla.openvla.prompts import SPACE

_BYTES, _PAD = 3, 32000  # Llama's tokens of bytes begin behind those for unknown, begin and end
_WORDS = "up down left right go to reach push pull pick place put the a and on in object goal plate bowl cube red"
"""What instructions are mostly made of; other words are read letter by letter."""

NETWORK: Mapping[str, Any] = {
    "image_sizes": [28, 28],
    "vision_sizes": [
        {"image": 28, "width": 32, "depth": 3, "heads": 2, "mlp": 64},
        {"image": 28, "width": 48, "depth": 2, "heads": 3, "mlp": 80},
    ],
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}
"""Sizes of the network, as keys of config.json: four patches of 14 pixels, and no more parameters than the vocabulary
needs."""


def write_tiny(
    directory: Path,
    kind: str = "openvla-oft",
    *,
    action_size: int = 7,
    network: Mapping[str, Any] | None = None,
    norm_stats: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a checkpoint with random weights in the published form.

    Args:
        directory: made if need be.
        kind: `openvla` or `openvla-oft`; their files are alike.
        action_size: numbers in an action.
        network: keys that go before those of `NETWORK`.
        norm_stats: statistics by data set; None: those of a data set `tiny` in which all numbers lie in -1..1.
        seed: of the weights.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if norm_stats is None:
        norm_stats = {"tiny": {"action": unit_statistics(action_size)}}
    policy = build_policy_model(
        {
            "type": kind,
            "embodiment": "plain",
            "image": (28, 28, 3),
            "action_size": action_size,
            "value_level": None,
            "network": {**NETWORK, **(network or {})},
            "norm_stats": dict(norm_stats),
            "statistics": next(iter(norm_stats), None),
            "seed": seed,
        }
    )
    (directory / "tokenizer.json").write_text(tokenizer().to_str(), encoding="utf-8")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<PAD>"}
    about = json.dumps({"tokenizer_class": "LlamaTokenizer", **special}, indent=2)
    (directory / "tokenizer_config.json").write_text(about + "\n", encoding="utf-8")
    policy.write_published(directory, policy.state_dict())
    return directory


def unit_statistics(size: int) -> dict[str, Any]:
    """Statistics of numbers that fill -1..1, [size] each."""
    low, high = [-1.0] * size, [1.0] * size
    middle, spread = [0.0] * size, [0.5] * size
    return {"mean": middle, "std": spread, "min": low, "max": high, "q01": low, "q99": high, "mask": [True] * size}


def tokenizer(words: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer that works as Llama's does, with a token for each word of the prompt.

    Args:
        words: more that get a token.
    """
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": _BYTES + byte for byte in range(256)}}
    merges: dict[tuple[str, str], None] = {}
    known: list[str] = []
    template = OPENVLA_PROMPT.replace("{instruction}", "").split()
    for word in ("Out:", *(f"▁{word}" for word in (*template, *_WORDS.split(), *words))):
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            known.append(word[: end + 1])
    letters = [chr(code) for code in range(33, 127)]
    for token, number in zip(dict.fromkeys(known), range(_BYTES + 256, SPACE), strict=False):
        vocabulary[token] = number
    vocabulary |= dict(zip(["▁", *letters], range(SPACE, _PAD), strict=False))
    taken = set(vocabulary.values())
    vocabulary |= {f"<unused{number}>": number for number in range(_PAD) if number not in taken}
    found = Tokenizer(models.BPE(vocabulary, [*merges], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    found.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "<PAD>")])
    return found
