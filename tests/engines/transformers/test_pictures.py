"""The engine answers prompts with pictures as the policy would."""

import numpy as np
import pytest
import torch

from rlinf.data.packing import Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.models.language.build import build_model, pictures_of
from rlinf.models.language.policy_model import PolicyModel
from tests.pictured import MODELS, TOKENIZER, asked, pictures

TEXT = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("kind", MODELS)
async def test_answers_have_the_log_probs_of_the_policy_and_no_placeholder(kind):
    tokenizer = load_tokenizer(TOKENIZER)
    shown = pictures((16, 16), (16, 24), (8, 40), (16, 16))
    sets = [shown[:1], shown[:1], shown[1:3], (), shown[3:]]
    shows = pictures_of(MODELS[kind], tokenizer)
    net = build_model(MODELS[kind], tokenizer, seed=1)
    with torch.no_grad():  # so that it would say them all the time
        net.lm_head.weight[shows.placeholder] = 5 * net.lm_head.weight[3]
    engine = TransformersEngine(net, pictures=shows)
    requests = [
        Request(number, asked(kind, images), Sampling(12), seed=number, images=images)
        for number, images in enumerate(sets)
    ]
    found = {answer.id: answer async for answer in engine.generate(requests)}
    answers = [found[number] for number in range(len(sets))]
    assert not any((answer.response_ids == shows.placeholder).any() for answer in answers)
    policy = PolicyModel(net, pictures=shows)
    rows = [
        Row(asked(kind, images), one.response_ids, images=images) for images, one in zip(sets, answers, strict=True)
    ]
    logprobs, _ = policy(pack(rows))
    said = np.concatenate([answer.logprobs for answer in answers])
    np.testing.assert_allclose(logprobs.detach().numpy(), said, atol=1e-5)
    # the last picture is of the first one's size: the same tokens, and another answer's log-probs
    assert np.array_equal(requests[0].prompt_ids, requests[4].prompt_ids)
    swapped = pack([Row(rows[0].prompt_ids, rows[0].response_ids, images=sets[4])])
    assert np.abs(policy(swapped)[0].detach().numpy() - answers[0].logprobs).max() > 1e-3


async def test_an_engine_without_pictures_refuses_them():
    engine = TransformersEngine(build_model(TEXT, load_tokenizer(TOKENIZER)))
    request = Request(7, np.array([3, 4]), Sampling(2), images=pictures((16, 16)))
    with pytest.raises(ValueError, match=r"request 7.*1 images"):
        await anext(engine.generate([request]))
