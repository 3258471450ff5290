"""A model that Megatron-core splits gives the log-probs and the gradients of transformers' own, however it is split."""

from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "programs" / "split.py"
PATIENCE = 200.0
CASES = (
    "qwen2:",
    "qwen2:tensor=2",
    "llama:tensor=2",
    "qwen2:pipeline=2",
    "qwen3:pipeline=2,interleave=2",
    "qwen3:context=2",
    "qwen2+values:pipeline=2",
    "qwen3+values:tensor=2",
    "llama+values:context=2",
    "qwen3_moe:pipeline=2",
    "qwen3_moe:expert=2",
    "qwen3_moe:tensor=2,expert=2",
    "qwen3_moe:context=2,expert=2",
)
"""On two ranks; where one copy takes one of them, they share the data."""
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(zygotes, tmp_path_factory):
    out = tmp_path_factory.mktemp("split") / "out.pt"
    ranks = zygotes.run(PROGRAM, 2, out, *CASES)
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
