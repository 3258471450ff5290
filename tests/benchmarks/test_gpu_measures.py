"""`make bench-gpu`: every measure runs in a rehearsal, and what it counts is counted right."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu import harness
from benchmarks.gpu.harness import BUDGET
from benchmarks.gpu.measures import decode, training
from benchmarks.gpu.measures.__main__ import MEASURES, measure
from benchmarks.gpu.measuring.bars import BARS
from benchmarks.gpu.measuring.flops import Shape
from tests.launching import Forked

TINY = Qwen2Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=160, tie_word_embeddings=True,
)  # fmt: skip


# The whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.repeated  # each measure runs by `make bench-gpu GPU_ARGS=--rehearse` too
@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_all_measures_run_in_a_rehearsal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
    out = tmp_path / "out.json"
    common = ["--rehearse", "--out", str(out), "--work", str(tmp_path / "work")]

    assert measure(common) == 0, capsys.readouterr().out

    told = capsys.readouterr().out
    outcomes = json.loads(out.read_text())["outcomes"]
    assert {name: found["state"] for name, found in outcomes.items()} == {one.name: "measured" for one in MEASURES}
    assert "was not reached" not in told
    for name, bars in BARS.items():
        figures = outcomes[name]["figures"]
        assert figures["peak_gb"] > 0
        for bar in bars:
            assert full_scale(bar.figure) or bar.figure in figures, bar
            assert bar.limit is None or full_scale(bar.limit) or figures[bar.limit] > 0, bar
    assert told.count("rehearsed\n") == sum(
        bar.figure in outcomes[name]["figures"] for name in BARS for bar in BARS[name]
    )

    # once more, nothing is left to do; and a file stands beside itself with ratios of 1
    assert measure([*common, "--against", str(out)]) == 0
    ratios = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("head: ")]
    assert len(ratios) == len(outcomes["head"]["figures"])
    assert set(ratios) <= {"1.000", "-"}
    with pytest.raises(SystemExit, match=r"--against .*missing\.json:"):
        measure([*common, "--against", str(tmp_path / "missing.json")])


def full_scale(figure: str) -> bool:
    """Whether a rehearsal names it otherwise, by its own sizes; and a real run would have it."""
    names = [f"graphed_r{rows}_c{context}" for context, rows in (*decode.CELLS, (600, 256))]
    names += [f"t{tokens}_{way}" for tokens in training.SIZES for way in training.WAYS]
    return any(figure.startswith(f"{name}_") for name in names)


def test_all_limits_together_stay_within_the_time_of_one_call() -> None:
    assert sum(one.limit for one in MEASURES) <= BUDGET


# What is counted ------------------------------------------------------------------------------------------------------


def angles_of(model: Any, length: int) -> int:
    """What torch counts for the angles of rotary embeddings: a product in some releases of transformers."""
    with FlopCounterMode(display=False) as counter:
        model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    return counter.get_total_flops()


def test_flops_are_those_that_torch_counts() -> None:
    shape, lengths = Shape.of(TINY), [7, 19]
    model = AutoModelForCausalLM.from_config(TINY, attn_implementation="eager")

    forward, training, angles = 0, 0, 0
    for length in lengths:  # each by itself: torch counts the products of padding too
        ids = torch.randint(160, (1, length))
        with FlopCounterMode(display=False) as counter:
            loss = model(input_ids=ids).logits.sum()
        forward += counter.get_total_flops()
        angles += angles_of(model, length)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        training += counter.get_total_flops()

    ours = shape.forward_flops(lengths, sum(lengths), causal=False)
    assert forward == ours + angles
    assert training == 2 * ours
    causal = ours - shape.forward_flops(lengths, sum(lengths))
    above = sum(1 for length in lengths for row in range(length) for column in range(length) if column > row)
    assert causal == shape.pairs_flops(above)
    assert shape.training_flops(lengths, 5) == 3 * shape.forward_flops(lengths, 5)
