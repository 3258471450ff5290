"""Settings by model, card and number of cards, with the memory that `--dry-run` counts: the table of docs/gpu.md.

    python -m benchmarks.gpu.settings        prints the table; tests/docs/test_gpu_page.py compares the page with it

In: `configs/gpu/qwen2.5.yaml`, Qwen2.5's shapes, and what is changed for each case. Out: a row per case: what was
chosen, and GB at the peak of trainer and rollout; or that the run is refused. No model is read and no GPU needed.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from rlinf.config.load import ConfigError
from rlinf.runs.dry_run.footprint import GB, spread_of
from rlinf.runs.rules import load_config
from rlinf.runs.start import prepare

CONFIG = Path(__file__).parents[2] / "configs" / "gpu" / "qwen2.5.yaml"
WIDTH = 8
"""Cards of a machine."""
CARDS = {"80 GB": 78, "141 GB": 138}
"""Cards by their name (H100, H200), and GB (10^9 bytes) of them that roles may fill: 0.92 of what the driver shows."""
SHAPES = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}
"""Shapes of Qwen2.5: hidden, inner, layers, heads, key heads, vocabulary, whether the embeddings are one."""
_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
CASES = [(size, cards, card) for size in SHAPES for cards in (1, WIDTH, 64) for card in CARDS]
_LORA = ("model.lora.r=16", "optimizer.lr=1e-5")
CHANGES: dict[tuple[str, int, str], tuple[str, ...]] = {
    ("7B", 1, "80 GB"): _LORA,
    ("32B", 8, "80 GB"): ("rollout.max_tokens=16384", "rollout.max_rows=64", "optimizer.kind=adamw_8bit"),
    ("32B", 64, "80 GB"): ("rollout.max_tokens=16384", "rollout.max_rows=64"),
    ("32B", 8, "141 GB"): ("rollout.max_tokens=196608",),
    ("32B", 64, "141 GB"): ("rollout.max_tokens=196608",),
}
"""Changed keys for a model on so many of these cards, where the file as it is does not do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A case, and what `--dry-run` says of it."""

    size: str
    """Size of the model."""
    cards: int
    """How many."""
    card: str
    """Which."""
    changes: tuple[str, ...]
    """Keys that differ from the file."""
    choice: str
    """The choice, or why it is refused."""
    memory: str
    """GB at the peak: trainer, rollout."""


def setting_of(size: str, cards: int, card: str, folder: Path) -> Setting:
    """Read what `--dry-run` says of a case.

    Args:
        size, cards, card: the case.
        folder: for the shape of the model as a saved one has it.
    """
    directory = folder / size
    directory.mkdir(exist_ok=True)
    shape = dict(zip(_KEYS, SHAPES[size], strict=True))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", **shape}), encoding="utf-8")
    changes = CHANGES.get((size, cards, card), ())
    said = [f"model.path={directory}", "placement.device_kind=cuda", f"placement.device_memory_gb={CARDS[card]}"]
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(min(cards, WIDTH))}):
        config = load_config(str(CONFIG), [*said, *changes], cards)
        try:
            prepared = prepare(config, cards)
        except ConfigError as error:
            needs = error.problems[0].advice.split(" (")[0].partition(" needs ")[2]
            return Setting(size, cards, card, changes, f"refused: needs {needs}", "")
        config, placed = prepared.config, prepared.placed
        sharding = spread_of(config, prepared.model_config, placed).sharding if cards > 1 else "one copy"
    memory = {role: active / GB for role, (active, _) in prepared.held.items() if active}
    trainer = config.trainer
    again = "computed again" if trainer.gradient_checkpointing else "kept"
    stays = "nobody parks" if sum(memory.values()) <= CARDS[card] else "take turns, parked"
    assert not prepared.warnings, (size, cards, card, prepared.warnings)  # a setting of the page has room
    choice = f"{sharding}; activations of {trainer.micro_batch_tokens:,} tokens {again}; {stays}"
    return Setting(
        size, cards, card, changes, choice, ", ".join(f"{memory[role]:.0f}" for role in ("trainer", "rollout"))
    )


def line(row: Setting) -> str:
    """A row of the table, in Markdown."""
    keys = "<br>".join(f"`{each}`" for each in row.changes) or "none"
    return f"| {row.size} | {row.cards} x {row.card} | {keys} | {row.choice} | {row.memory or '-'} |"


if __name__ == "__main__":
    print("| model | cards | changed keys | what `--dry-run` chooses | GB: trainer, rollout |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            print(line(setting_of(*case, Path(folder))))
