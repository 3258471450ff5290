"""The rollout over two and three processes: its last answers move between them and stay the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(200)]
PROGRAM = Path(__file__).parent / "programs" / "moving.py"
ENDLESS = Path(__file__).parent / "programs" / "endless.py"
PATIENCE = 100.0
"""Seconds for a job; generous, since tests share their cores."""


@pytest.mark.parametrize("world", [2, 3])
def test_answers_that_move_between_processes_stay_the_same(zygote, tmp_path, world):
    out = tmp_path / "out.pt"
    ranks = zygote.run(PROGRAM, world, out)
    assert ranks.codes(PATIENCE) == [0] * world, ranks.everything()
    found = torch.load(out, weights_only=False)
    still, moved = ({(s.group, s.index): s for g in found[on]["groups"] for s in g.samples} for on in (False, True))
    assert sorted(moved) == sorted(still) == [(prompt, index) for prompt in range(12) for index in range(3)]
    for key, sample in moved.items():
        assert sample.response_ids.tolist() == still[key].response_ids.tolist()
        np.testing.assert_allclose(sample.logprobs, still[key].logprobs, atol=1e-5)
        assert sample.versions.tolist() == still[key].versions.tolist()
    assert sum(taken for taken, _, _ in found[True]["history"]) >= 1
    assert sum(taken for taken, _, _ in found[False]["history"]) == 0
    assert all(left == (0, 0) for _, *rest in found[True]["history"] for left in [tuple(rest)])


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
