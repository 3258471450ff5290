"""Two processes, each with a device too small for its roles: sharded weights and optimizer states take turns on it."""

from pathlib import Path

import pytest
import torch

from tests.actors.programs import sharing

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs" / "sharing.py"
PATIENCE = 120.0
"""Seconds for a job; generous, since tests share their cores."""


def ran(zygotes, out, memory):
    ranks = zygotes.run(PROGRAM, 2, out, str(memory))
    try:
        assert ranks.codes(PATIENCE) == [0] * 2, ranks.everything()
    finally:
        ranks.end()
    return torch.load(out, weights_only=False)


def test_ranks_that_share_devices_learn_the_same_to_the_last_bit_and_never_have_more_than_fits(zygotes, tmp_path):
    memory = max(sharing.declared(2).values())
    alone, found = (ran(zygotes, tmp_path / f"{limit}.pt", limit) for limit in (0, memory))
    assert found["metrics"] == alone["metrics"]
    assert found["said"] == alone["said"]
    assert found["weights"].keys() == alone["weights"].keys()
    assert all(torch.equal(found["weights"][name], tensor) for name, tensor in alone["weights"].items())
    for rank in range(2):
        (trainer, highest, looks, moves), *_ = found["weighed"][rank::2]
        assert memory / 2 < highest <= memory < alone["weighed"][rank][1]
        assert trainer <= memory
        assert looks > 50
        assert {move[1:] for move in moves} == {
            f"{role}[{rank}]" for role in ("trainer", "critic", "reference", "rollout")
        }
