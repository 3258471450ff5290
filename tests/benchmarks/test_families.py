"""Kinds of models go through three steps of GRPO; the page says what comes of it."""

import re

import pytest

from benchmarks.families import PAGE, outcomes, row

KINDS = [
    *("apertus", "bamba", "bloom", "cohere2", "cwm", "deepseek_v3", "exaone4", "falcon_h1", "gemma", "gemma2"),
    *("gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoehybrid", "jamba", "lfm2", "llama"),
    *(
        "llama4_text",
        "mamba2",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo3",
        "olmoe",
        "opt",
        "phi3",
        "qwen2",
        "qwen2_moe",
    ),
    *("qwen3", "qwen3_moe", "qwen3_next", "smollm3", "stablelm"),
]


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.repeated] * (place % 6 > 0)) for place, kind in enumerate(KINDS)]
)
async def test_a_kind_learns_and_the_page_says_how_it_is_run(kind, page):
    (found,) = await outcomes([kind])
    assert found.works, found
    assert f"| {' | '.join(row(found))} |" in page


async def test_a_kind_that_does_not_work_is_named_with_the_reason(page):
    (found,) = await outcomes(["recurrent_gemma"])
    assert re.search("RecurrentGemmaForCausalLM.*does not give the same token by token", found.problem)
    assert "| `recurrent_gemma` | RecurrentGemmaForCausalLM" in page


def test_the_page_counts_what_it_lists(page):
    listed = len(re.findall(r"\| (?:lean|own) \| (?:packed|padded) \|$", page, re.M))
    assert f"{listed} kinds work." in page
    assert listed >= 100
