"""Writes tiny random checkpoints of vision-language-action models, in the form in which the real ones are published.

    write_tiny_flow(Path("tiny-pi05"), "pi05")      # then policy.type: pi05, policy.path: tiny-pi05
    write_tiny_fast(Path("tiny-fast"))              # then policy.type: pi0_fast, policy.path: tiny-fast
    write_tiny_openvla(Path("tiny-openvla"))        # then policy.type: openvla, policy.path: tiny-openvla

True files, names and structure, small sizes: enough to try a configuration, a flow or a trainer within seconds, without
a download. They know nothing, and do not learn what the real ones know. pi0 and pi0.5 have about 100,000 weights,
pictures of 28 pixels and a tokenizer of single characters. OpenVLA's have a quarter of the encoders' depth at most and
a tokenizer that knows the prompt's words; the ids that OpenVLA gives a meaning to (1, 2, 29871, 32000) are true.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from torch import nn

from rlinf.models.policy.build import build_policy_model, save_policy
from rlinf.models.policy.published import EXTRA
from rlinf.models.policy.robots import OPENVLA_PROMPT
from rlinf.models.policy.vla.fast_tokens import FastTokens
from rlinf.models.policy.vla.gemma import AdaptiveNorm
from rlinf.models.policy.vla.openvla import SPACE

_LETTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SIZES: Mapping[str, Any] = {
    "vision": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    },
    "language": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "head_dim": 16, "vocab_size": 128,
    },
    "expert": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "head_dim": 16, "vocab_size": 128,
    },
}  # fmt: skip
"""Both stacks share the number of layers, of heads, and their width, since attention reads both."""


def write_tiny_flow(
    directory: Path,
    model: Literal["pi0", "pi05"],
    *,
    horizon: int = 4,
    state: Sequence[float] = (1.0,) * 8,
    actions: Sequence[float] = (1.0,) * 7,
    asset: str = "physical-intelligence/libero",
    width: int = 32,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> Path:
    """Write a directory as openpi would, and return it.

    Args:
        directory: made if need be.
        model: which.
        horizon: H.
        state, actions: how far each number of states and actions reaches from 0, in the robot's units.
        asset: name of the statistics.
        width: numbers that states and actions are padded to.
        sizes: changes of `SIZES`, part by part.
        seed: of the weights.
    """
    policy = build_policy_model(
        {
            "type": model, "image": [28, 28, 3], "action_size": len(actions), "horizon": horizon, "width": width,
            "seed": seed, "value_level": None,
            "statistics": {asset: {"state": _spread(state), "actions": _spread(actions)}},
            **{part: {**known, **(sizes or {}).get(part, {})} for part, known in SIZES.items()},
        }
    )  # fmt: skip
    for norm in policy.modules():
        if isinstance(norm, AdaptiveNorm):  # open gates, as trained ones have: closed ones let nothing through
            nn.init.ones_(norm.dense.bias[2 * norm.dense.in_features :])
    policy.files = {"tokenizer.json": flow_tokenizer().to_str().encode()}
    save_policy(policy, directory)
    for ours in ("policy.json", EXTRA):
        (directory / ours).unlink()
    return directory


def write_tiny_fast(
    directory: Path,
    model: Literal["pi0_fast"] = "pi0_fast",
    *,
    chunk: int = 4,
    state: Sequence[float] = (1.0,) * 7,
    actions: Sequence[float] = (1.0,) * 7,
    about: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> Path:
    """Write a directory of pi0-FAST as LeRobot would, and FAST's tokens for random smooth chunks, and return it.

    Args:
        directory: made if need be.
        model: the only one that there is.
        chunk: actions that tokens say, H.
        state, actions: how far each number of states and actions reaches from 0, in the robot's units.
        about: changes of config.json.
        sizes: changes of `SIZES`, part by part.
        seed: of the weights, and of these chunks.
    """
    draw = torch.Generator().manual_seed(seed)
    ends = torch.rand(2, 256, 1, len(actions), generator=draw) * 2 - 1
    along = torch.linspace(0.0, 1.0, chunk)[:, None]
    tokens = FastTokens.fit((1 - along) * ends[0] + along * ends[1], scale=4.0, size=128)
    words = flow_tokenizer(tokens.size)
    parts = {part: {**SIZES[part], **(sizes or {}).get(part, {})} for part in ("vision", "language")}
    parts["language"]["vocab_size"] = words.get_vocab_size()
    said: dict[str, Any] = {
        "chunk_size": chunk, "max_action_tokens": 64, "max_decoding_steps": 64, "fast_skip_tokens": 0,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
        "max_state_dim": len(state), "tokenizer_max_length": 96, **(about or {}),
    }  # fmt: skip
    policy = build_policy_model(
        {
            "type": model, "image": [28, 28, 3], "state_size": len(state), "action_size": len(actions),
            "chunk": chunk, "seed": seed, "value_level": None, "model": said, **parts,
            "statistics": {"actions": _spread(actions), **({"state": _spread(state)} if state else {})},
        }
    )  # fmt: skip
    files = {f"fast/{name}": content for name, content in tokens.files().items()}
    policy.files = {"tokenizer.json": words.to_str().encode(), **files}
    save_policy(policy, directory)
    for ours in ("policy.json", EXTRA):
        (directory / ours).unlink()
    return directory


def flow_tokenizer(more: int = 0) -> Tokenizer:
    """One token per character, with PaliGemma's special ones.

    Args:
        more: tokens behind them, which no text has.
    """
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *_LETTERS, *(f"<seg{number:03d}>" for number in range(more))]
    return Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[], unk_token="<unk>")
    )


def _spread(reach: Sequence[float]) -> dict[str, list[float]]:
    """Statistics of numbers that are spread evenly from -reach to reach."""
    return {
        "mean": [0.0 for _ in reach], "std": [each / 3**0.5 for each in reach],
        "q01": [-0.98 * each for each in reach], "q99": [0.98 * each for each in reach],
    }  # fmt: skip


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


def write_tiny_openvla(
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
    (directory / "tokenizer.json").write_text(openvla_tokenizer().to_str(), encoding="utf-8")
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


def openvla_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
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
