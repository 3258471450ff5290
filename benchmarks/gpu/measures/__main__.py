"""The list, the most valuable first, and the table of bars."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.harness import Check, main
from benchmarks.gpu.measuring.bars import table

SUBJECTS: tuple[tuple[str, float, str], ...] = (
    ("step", 100.0, "a whole GRPO step: busy >= 0.85 of it, publishing and switching <= 0.03"),
    ("decode", 80.0, "decoding, 8 to 512 rows x 512 and 4,096 tokens: a step <= 2 x the bandwidth limit"),
    ("training", 100.0, "the trainer, 2k to 32k tokens at once: MFU >= 0.40 at 16k"),
    ("micro_batch", 30.0, "a micro-batch, profiled: the device busy >= 0.95 of it, 0 waits; what takes longest"),
    ("publishing", 70.0, "new weights in use: <= 0.2 s, 0 bytes through the host"),
    ("parking", 25.0, "18.5 GB to the host and back: >= 45 GB/s, the first time <= 2 s"),
    ("head", 25.0, "hidden states to log-probs and back: <= 0.30 of it besides matrix products"),
    ("prefill", 25.0, "reading 8k ragged tokens: >= 400 TFLOP/s"),
    ("large", 45.0, "decoding with 7B: a step <= 1.5 x the bandwidth limit; a step of LoRA"),
    ("launches", 25.0, "a graphed decode step: 1 launch and 1 wait of the host"),
)
"""Name, limit in seconds (the beginning of a process and the making of a model included), and what is to be reached."""
MEASURES: tuple[Check, ...] = (
    Check("limits", "limits:limits", 15.0, "what the card can do at most: its memory, its bus, its matrix products"),
    *(Check(name, f"{name}:{name}", limit, words) for name, limit, words in SUBJECTS),
)


def measure(arguments: Sequence[str] | None = None) -> int:
    """The command line; see `main`."""

    def ends(record: Mapping[str, Any]) -> str:
        return table(record["outcomes"], rehearsal=record["rehearsal"])

    return main("measures", "benchmarks.gpu.measures", MEASURES, arguments, ends=ends)


if __name__ == "__main__":
    sys.exit(measure())
