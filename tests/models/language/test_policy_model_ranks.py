"""Ranks settle together how a model is run: none computes otherwise than the rest, and none waits for ever."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("lies", ["whole", "sliced"])
def test_one_rank_of_three_that_cannot_pack_makes_all_pad(zygote, lies):
    ranks = zygote.run(PROGRAMS / "agreement.py", 3, lies)
    assert ranks.codes() == [0] * 3, ranks.everything()
    for rank in range(3):
        (_, padded), (_, refused) = map(json.loads, ranks.printed(rank).splitlines())
        assert padded == "sequences padded to one length"
        assert refused.startswith("trainer.attention=packed: ")
        assert ("this card has no such kernel" if rank == 1 else "another rank could not") in refused
