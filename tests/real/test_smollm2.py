"""A real pretrained chat model answers, learns, is published, saved and read again as transformers itself would do it.

`make test-real` runs these; where the registry does not give the model each is skipped with the reason, and one that
cannot be converted is a failure. All is computed in float32.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlinf
from benchmarks.smollm2 import smollm2
from rlinf.agents.chat import ChatFormat
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine
from tests.agents.test_chat_tools import QWEN25, TOOLS

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUESTIONS = ["What is the capital of France?", "Count from 1 to 5.", "7 + 5 =", "Write one word.", "Name a colour."]
SUMS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(2, 8) for b in range(3, 9)]
SETTINGS = {
    "data.chat": True,
    "steps": 2,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 8,
    "lr": 1e-4,
    "warmup_steps": 0,
    "checkpoint.dtype": "float32",
    "placement.device_kind": "cpu",
    "reward.isolate": "never",  # each run would start two more processes
}
NEAR = 1e-4
"""Nats. Sums of 576 and 1,536 products in float32, in another order, through 30 layers."""


@pytest.fixture(scope="module")
def directory():
    try:
        return str(smollm2())
    except OSError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def right(response, answer):
    """A little for any answer, so that groups differ in what they earn."""
    return float(re.findall(r"\d+", response)[-1:] == [answer]) + 0.01 * len(response)


def trained(directory, run_dir, **more):
    return rlinf.train(directory, right, SUMS, evaluation=SUMS[::6], run_dir=run_dir, **{**SETTINGS, **more})


@pytest.fixture(scope="module")
def full(directory, tmp_path_factory):
    return trained(directory, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def with_adapters(directory, tmp_path_factory):
    pytest.importorskip("peft", reason="peft is not installed: pip install 'rlinf[lora]'")
    lora = {"model.lora": {"r": 4, "alpha": 8, "target_modules": "all-linear"}, "lr": 1e-3}
    return trained(directory, tmp_path_factory.mktemp("adapters"), **lora)


def ids_of(tokenizer, question):
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def greedy(model, ids, tokens):
    """What `generate` of transformers writes, end token included."""
    with torch.no_grad():
        whole = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    return whole[0, len(ids) :].tolist()


def logprobs(model, ids, response):
    """Of each token of a response, by reading the whole text at once."""
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *response]])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


async def answered(model, tokenizer, sampling):
    prompts = [ids_of(tokenizer, question) for question in QUESTIONS]
    asked = [Request(number, np.array(ids), sampling, number) for number, ids in enumerate(prompts)]
    done = {each.id: each async for each in TransformersEngine(model).generate(asked)}
    return [(prompts[number], done[number]) for number in range(len(prompts))]


async def test_greedy_answers_are_those_of_transformers(model, tokenizer):
    sampling = Sampling(24, 0.0, stop_ids=(tokenizer.eos_token_id,))
    pairs = await answered(model, tokenizer, sampling)
    for ids, answer in pairs:
        assert answer.response_ids.tolist() == greedy(model, ids, 24)
    assert "Paris" in tokenizer.decode(pairs[0][1].response_ids)


async def test_logprobs_of_sampled_answers_are_those_of_transformers(model, tokenizer):
    for ids, answer in await answered(model, tokenizer, Sampling(24, 1.0, stop_ids=(tokenizer.eos_token_id,))):
        response = answer.response_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, logprobs(model, ids, response), atol=NEAR)


def test_engine_and_trainer_agree_before_and_after_weights_are_published(full):
    assert len(full.metrics) == 2
    assert max(full.history("mismatch/max")) < NEAR
    assert min(full.history("grad_norm")) > 0


def test_what_was_learned_is_saved_and_answers_as_the_run_did(full, model, tokenizer):
    again = full.model().float().eval()
    changed = [name for name, values in again.state_dict().items() if not torch.equal(values, model.state_dict()[name])]
    assert len(changed) > 200
    assert full.tokenizer().get_vocab() == tokenizer.get_vocab()
    for group in full.after.groups:
        ids = [int(token) for token in group.prompt.token_ids]
        assert group.samples[0].text == tokenizer.decode(greedy(again, ids, 8), skip_special_tokens=True)


def test_adapters_are_saved_as_peft_reads_them_and_merged(with_adapters, model):
    from peft import PeftModel

    assert max(with_adapters.history("mismatch/max")) < NEAR
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32),
        with_adapters.model_dir.parent / "adapter",
    ).eval()
    merged = with_adapters.model().float().eval()
    ids = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours, before = (torch.log_softmax(each(ids).logits, -1) for each in (adapted, merged, model))
    assert (theirs - ours).abs().max() < 10 * NEAR < 0.1 < (theirs - before).abs().max()


def test_chats_with_tools_and_a_system_prompt_are_rendered_as_by_the_template(tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7 + 5 ="}]
    reply = {"role": "assistant", "content": "12"}
    more = {"role": "user", "content": "And 3 more?"}
    for template, tools in ((tokenizer.chat_template, None), (QWEN25, TOOLS)):
        tokenizer.chat_template = template
        chat = ChatFormat(tokenizer) if tools is None else ChatFormat(tokenizer).with_arguments(tools=tools)
        opening = [*chat.opening(asked)]
        assert opening == _rendered(tokenizer, asked, tools)
        spoken = [*opening, *tokenizer("12", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        whole = [*spoken, *chat.following([*asked, reply], [more], ended_by=tokenizer.eos_token_id)]
        assert whole == _rendered(tokenizer, [*asked, reply, more], tools)


def _rendered(tokenizer, messages, tools):
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
