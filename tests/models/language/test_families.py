"""What is known of kinds of models before anything is built."""

import pytest
from transformers import AutoConfig

from rlinf.models.language.sources import unsupported


@pytest.mark.parametrize("kind", ["bart", "recurrent_gemma", "deepseek_v4"])
def test_a_kind_that_cannot_be_decoded_is_named_with_the_reason(kind):
    assert str(unsupported(AutoConfig.for_model(kind))).startswith(f"model_type={kind}: ")


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt_oss", "jamba", "mamba"])
def test_nothing_is_said_of_others(kind):
    assert unsupported(AutoConfig.for_model(kind)) is None
