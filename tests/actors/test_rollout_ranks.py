"""The rollout over two processes."""

from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(200)]
ENDLESS = Path(__file__).parent / "programs" / "endless.py"
PATIENCE = 100.0
"""Seconds for a job; generous, since tests share their cores."""


def test_one_call_goes_on_while_prompts_come_weights_change_and_it_pauses(zygote, tmp_path):
    out = tmp_path / "out.pt"
    ranks = zygote.run(ENDLESS, 2, out)
    assert ranks.codes(PATIENCE) == [0, 0], ranks.everything()
    found = torch.load(out, weights_only=False)
    assert sum(found["starved"]) <= 3, "a rank had nothing to do while prompts lay with another that had no rows free"
    assert found["most"] <= 6 + 1  # rows, and the other answer to a prompt that was taken for the last one free
    dropped = [id for rank in found["dropped"] for id in rank]
    assert dropped == [rank[0] for rank in found["still"]]
    assert all(tokens > 0 for rank in found["dropped"] for tokens in rank.values())
    ids = sorted(group.id for group in found["groups"])
    assert ids == [id for id in range(found["queued"] - 8) if id not in dropped]
    assert found["left"] == [0, 0]
    versions = [sample.versions.tolist() for group in found["groups"] for sample in group.samples]
    assert all(row == sorted(row) for row in versions)
    assert sum(row[0] == 0 and row[-1] == 1 for row in versions) >= 2  # weights changed in mid-answer
