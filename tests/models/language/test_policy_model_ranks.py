"""Ranks settle together how a model is run: none computes otherwise than the rest, and none waits for ever."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("lies", [pytest.param("whole", marks=pytest.mark.repeated), "sliced"])
def test_one_rank_of_three_that_cannot_pack_makes_all_pad(zygote, lies):
    ranks = zygote.run(PROGRAMS / "agreement.py", 3, lies)
    assert ranks.codes() == [0] * 3, ranks.everything()
    for rank in range(3):
        (_, padded), (_, refused) = map(json.loads, ranks.printed(rank).splitlines())
        assert "padded" in padded
        assert refused.startswith("trainer.attention=packed: ")
        assert ("no such kernel" in refused) == (rank == 1)


def test_a_rank_without_pictures_keeps_step_with_one_that_has_them(zygote):
    ranks = zygote.run(PROGRAMS / "pictured.py", 2)
    assert ranks.codes() == [0, 0], ranks.everything()
    for rank in range(2):
        told = next(line for line in ranks.printed(rank).splitlines() if line[0] == "{")  # beside it stands gloo's
        assert all(far < 1e-5 for far in json.loads(told).values()), told


@pytest.mark.repeated  # it compiles for half a minute
def test_blocks_in_slices_are_compiled_on_both_ranks_or_on_none(zygote):
    ranks = zygote.run(PROGRAMS / "agreement.py", 2, "compiled")
    assert ranks.codes(110) == [0, 0], ranks.everything()
    for rank in range(2):
        told = [line for line in ranks.printed(rank).splitlines() if line[0] in '"[']  # beside it stands gloo's
        assert len(told) == 2, ranks.everything()
        refused, (words, apart) = map(json.loads, told)
        assert refused.startswith("trainer.compile=true: blocks not compiled: ")
        assert ("C++ compiler" in refused) == (rank == 1)
        assert "blocks and head" in words
        assert apart < 1e-5
