"""Tiny random pi0 and pi0.5 of the true structure, in the form in which openpi publishes them.

    write_tiny(Path("tiny-pi05"), "pi05")        # then policy.type: pi05, policy.path: tiny-pi05

About 100,000 weights, pictures of 28 pixels, a tokenizer of single characters: enough to try a configuration, a flow or
a trainer within seconds. It knows nothing, and does not learn what the real ones know.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, models

from rlinf.models.policy.build import build_policy_model, save_policy
from rlinf.models.policy.published import EXTRA

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


def write_tiny(
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
) -> None:
    """Write a directory as openpi would.

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
    policy.files = {"tokenizer.json": tokenizer().to_str().encode()}
    save_policy(policy, directory)
    for ours in ("policy.json", EXTRA):
        (directory / ours).unlink()


def tokenizer() -> Tokenizer:
    """One token per character, with PaliGemma's special ones."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *_LETTERS]
    return Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[], unk_token="<unk>")
    )


def _spread(reach: Sequence[float]) -> dict[str, list[float]]:
    """Statistics of numbers that are spread evenly from -reach to reach."""
    return {
        "mean": [0.0 for _ in reach], "std": [each / 3**0.5 for each in reach],
        "q01": [-0.98 * each for each in reach], "q99": [0.98 * each for each in reach],
    }  # fmt: skip
