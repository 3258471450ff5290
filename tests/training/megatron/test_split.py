"""A model that Megatron-core splits gives the log-probs and the gradients of transformers' own, however it is split; in
bfloat16, as nearly as FSDP2 does. What of it is published needs little memory."""

import math
from pathlib import Path

import pytest
import torch

from rlinf.data.weights import BUCKET_BYTES
from rlinf.training.weight_sync import PIECE_BYTES
from tests.training.programs.split import PUBLISHED_BUCKET

PROGRAM = Path(__file__).parents[1] / "programs" / "split.py"
PATIENCE = 200.0
CASES = (
    "qwen2:",
    "qwen2:tensor=2",
    "llama+checkpointed:tensor=2",
    "qwen2:pipeline=2",
    "qwen3+checkpointed:pipeline=2,interleave=2",
    "qwen3:context=2",
    "qwen2+values:pipeline=2",
    "llama+values:context=2",
    "qwen3_moe:expert=2",
    "qwen3_moe:tensor=2,expert=2",
    "qwen3_moe:context=2,expert=2",
)
"""On two ranks; where one copy takes one of them, they share the data."""
ROUNDED = (
    "qwen2+bfloat16:",
    "qwen3+bfloat16+checkpointed:pipeline=2,interleave=2",
    "qwen2+values+bfloat16:pipeline=2",
    "qwen3_moe+bfloat16:tensor=2,expert=2",
)
PUBLISHED = ("published:tensor=2", "published:pipeline=2")
UNIT = 2.0**-9
"""By how much a number is rounded to bfloat16 at most, relative to it."""
ROUNDINGS = 30
"""That a number of the last hidden states has behind it: 2 layers of some 13 operations each, and the ends."""
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(zygotes, tmp_path_factory):
    out = tmp_path_factory.mktemp("split") / "out.pt"
    ranks = zygotes.run(PROGRAM, 2, out, *CASES, *ROUNDED, *PUBLISHED)
    try:
        assert ranks.codes(PATIENCE) == [0, 0], ranks.everything()
    finally:
        ranks.end()
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_gradients_are_those_of_transformers(results, case):
    for rank in results[case]:
        assert rank["outputs"] < 1e-5
        assert rank["gradient"][0] < 1e-6 < 0.01 < rank["largest"]
        assert rank["norm"] < 1e-5
        assert rank["loss"] < 1e-5
        assert rank["tokens"][0] == rank["tokens"][1] > 100


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_is_for_computing_alone(results, case):
    """Independent roundings add up as their root: a logit, of which no two are further apart than the largest log-prob
    is from 0, is off by UNIT x sqrt(ROUNDINGS) of that, and the most of all tokens by three times as much. Their mean,
    in which none weighs more than 3, is off by a root of their number less."""
    ranks = results[case]
    off = UNIT * math.sqrt(ROUNDINGS) * ranks[0]["size"]
    mean = 3 * off / math.sqrt(ranks[0]["tokens"][0])
    for rank in ranks:
        assert rank["outputs"] / ranks[0]["size"] > UNIT / 100, "it computes in bfloat16"
        assert rank["outputs"] < 3 * off
        assert rank["dtypes"] == {torch.float32}, "of weights, gradients and means"
        assert rank["sent"] == ({torch.bfloat16} if "pipeline" in case else set())
        assert rank["moved"] > 0.01, "what it computes with has learned"
        assert rank["returned"], "and is what was taken over"
        if "FSDP's loss" in rank:
            assert rank["own loss"] == pytest.approx(rank["FSDP's loss"], abs=mean)
    along, own, other = (sum(rank["cosine"][place] for rank in ranks) for place in range(3))
    assert along / math.sqrt(own * other) > 0.999


@pytest.mark.parametrize("case", PUBLISHED)
def test_publishing_takes_an_eighth_of_a_bucket_beside_it(results, case):
    for rank in results[case]:
        assert rank["equal"]
        assert 0 < rank["most"] <= PUBLISHED_BUCKET * PIECE_BYTES / BUCKET_BYTES <= 0.2 * PUBLISHED_BUCKET
