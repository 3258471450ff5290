"""Off-policy learning over several processes gives what one process gives."""

from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs" / "off_policy.py"
WORLDS = (1, 2)
PATIENCE = 150.0
"""Seconds for a job; generous, since tests share their cores."""


@pytest.fixture(scope="module")
def results(zygotes, tmp_path_factory):
    """The weights that every number of ranks came to."""
    found = {}
    for world in WORLDS:
        out = tmp_path_factory.mktemp("off_policy") / "out.pt"
        ranks = zygotes.run(PROGRAM, world, out)
        try:
            assert ranks.codes(PATIENCE) == [0] * world, ranks.everything()
        finally:
            ranks.end()
        found[world] = torch.load(out, weights_only=False)
    return found


@pytest.mark.parametrize("stage", ["imitated", "learned"])
def test_the_number_of_ranks_does_not_matter(results, stage):
    one, two = (results[world][stage] for world in WORLDS)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_resumed_ends_where_the_uninterrupted_run_does(results, world):
    learned, resumed = results[world]["learned"], results[world]["resumed"]
    assert not torch.equal(learned["actor.0.weight"], results[world]["imitated"]["actor.0.weight"])
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in learned.items())
