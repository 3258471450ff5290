"""The list, the most valuable first."""

from __future__ import annotations

import sys

from benchmarks.gpu.harness import Check, main

CHECKS: tuple[Check, ...] = (
    Check("decode-steps", "decode:steps", 90, "no decode step is slow because its window is new: p99 < 1.5 x median"),
    Check("packed-training", "training:beside_float32", 60, "bfloat16, packed, is float32 up to rounding"),
    Check("ways", "ways:ways", 150, "bfloat16 models of four shapes are decoded and trained in the fastest ways"),
    Check("generate", "decode:beside_generate", 60, "the engine takes the tokens that transformers finds likeliest"),
    Check("engine-and-trainer", "training:beside_engine", 60, "both give sampled tokens the same log-probs"),
    Check("recorded-steps", "decode:recorded", 60, "recorded decode steps give the answers of plain ones"),
    Check("quickstart", "runs:quickstart", 240, "a run learns, in one process and in two on the card"),
    Check(
        "collocated", "flow:collocated", 120, "three GRPO steps with parking: finite, versions 1 2 3, peak as declared"
    ),
    Check(
        "parking", "memory:parking", 60, "parked 20 times, all bits come back, within 1.1 x its bytes of host memory"
    ),
    Check("peaks", "memory:peaks", 75, "a step's peak is at most what --dry-run says, and at least 0.8 of it"),
    Check("compiled", "training:compiled", 120, "compiled blocks are uncompiled ones up to rounding, for any lengths"),
    Check("checkpoint", "flow:checkpoint", 75, "restored bit by bit; the next loss is the same within 1e-5"),
    Check("sends", "sends:sends", 60, "500 sends, half discarded, a holder killed: the sender's memory comes back"),
    Check("publish", "publishing:publish", 120, "engines answer as the masters, cast: in one process and between two"),
    Check("out-of-memory", "failing:out_of_memory", 45, "a named error within 30 s, and the engine is still usable"),
    Check("two-ranks", "failing:two_ranks", 60, "two ranks on one card train, or are refused by name"),
    Check("maniskill", "simulators:maniskill", 60, "steps, on the right device"),
)

if __name__ == "__main__":
    sys.exit(main("checks", "benchmarks.gpu.checks", CHECKS))
