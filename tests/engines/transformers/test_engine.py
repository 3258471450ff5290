"""The engine around a Hugging Face model: right tokens, right log-probs, whatever shares the batch."""

from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.data.weights import Weights
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers import engine as engines
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.model import LeanForward, ModelForward, fastest, join_parts

VOCABULARY = 23
SHAPES = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "gpt_neox": {"max_position_embeddings": 64},
}


def tiny(kind="qwen2", seed=0, **settings):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        **({"num_key_value_heads": 2} if kind != "gpt_neox" else {}),
        **{**SHAPES.get(kind, {}), **settings},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # the usual initialisation is nearly uniform over tokens; this one has opinions
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def request(number, prompt, sampling, seed=None):
    return Request(number, np.array(prompt, dtype=np.int64), sampling, number if seed is None else seed)


def ragged(count, sampling, seed=0):
    rng = np.random.default_rng(seed)
    return [request(i, rng.integers(0, VOCABULARY, rng.integers(1, 12)), sampling) for i in range(count)]


async def answers(engine, requests):
    found = [completion async for completion in engine.generate(requests)]
    assert len({completion.id for completion in found}) == len(found)
    return {completion.id: completion for completion in found}


@torch.no_grad()
def teacher_forced(model, prompt, response, temperature=1.0):
    ids = torch.tensor([[*prompt, *response]])
    logprobs = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]


@pytest.mark.parametrize("kind", SHAPES)
async def test_logprobs_are_those_of_the_model_reading_the_whole_text(kind):
    model, temperature = tiny(kind), 0.7
    requests = ragged(20, Sampling(15, temperature, stop_ids=(0,)))
    done = await answers(TransformersEngine(model), requests)
    assert len({len(completion.response_ids) for completion in done.values()}) > 3  # they end at different times
    for asked in requests:
        found = done[asked.id]
        expected = teacher_forced(model, asked.prompt_ids, found.response_ids, temperature)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)


class Watching(ModelForward):
    """Writes down how many rows each call had."""

    def __init__(self, model):
        super().__init__(model, 0)
        self.reads, self.steps = [], []

    def read(self, ids, *rest):
        self.reads.append(tuple(ids.shape))
        return super().read(ids, *rest)

    def step(self, ids, positions, bands):
        self.steps.append(len(ids))
        return super().step(ids, positions, bands)


def watched(model, **settings):
    forward = Watching(model)
    with mock.patch.object(engines, "fastest", return_value=forward):
        return TransformersEngine(model, **settings), forward


async def test_ended_rows_leave_the_batch():
    model = tiny()
    engine, forward = watched(model)
    requests = [request(i, [3] * (1 + i % 3), Sampling(1 + i)) for i in range(16)]
    done = await answers(engine, requests)
    assert forward.reads == [(3, 3)]  # equal prompts are read once
    assert len(forward.steps) == 15
    for step, width in enumerate(forward.steps, start=1):
        alive = 16 - step
        assert alive <= width <= max(alive / 0.875, alive + 1)
    for asked in requests:
        found = done[asked.id]
        expected = teacher_forced(model, asked.prompt_ids, found.response_ids)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox"])
async def test_rows_of_very_different_length_are_answered_alike(kind):
    model = tiny(kind, max_position_embeddings=512)
    rng = np.random.default_rng(1)
    requests = [
        request(i, rng.integers(0, VOCABULARY, length), Sampling(6 + i))
        for i, length in enumerate([400, 3, 150, 9, 330])
    ]
    done = await answers(TransformersEngine(model, max_rows=4), requests)
    for asked in requests:
        found = done[asked.id]
        np.testing.assert_allclose(
            found.logprobs, teacher_forced(model, asked.prompt_ids, found.response_ids), atol=1e-5
        )


@pytest.mark.parametrize(("settings", "text"), [((0,), "max_new_tokens=0"), ((5, -0.1), "temperature=-0.1")])
def test_settings_out_of_range_are_named(settings, text):
    with pytest.raises(ValueError, match=text):
        Sampling(*settings)


def packed(model, version):
    return Weights.pack(model.named_parameters(), version)


@pytest.mark.parametrize("tie", [True, False])
async def test_tied_weights_travel_once_and_arrive(tie):
    old, new = tiny(seed=0, tie_word_embeddings=tie), tiny(seed=1, tie_word_embeddings=tie)
    engine = TransformersEngine(old)
    await engine.load(packed(new, 1))
    for theirs, ours in zip(new.state_dict().values(), old.state_dict().values(), strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("laid", [True, False], ids=["laid out", "as they came"])
@pytest.mark.parametrize(("kind", "settings"), [("qwen2", {}), ("llama", {}), ("llama", {"tie_word_embeddings": True})])
async def test_an_engine_answers_by_a_trainers_own_tensors_as_by_copies_of_them(kind, settings, laid):
    engine, trained = TransformersEngine(tiny(kind, **settings)), tiny(kind, seed=1, **settings)
    if laid:
        join_parts(trained)
    asked, versions = ragged(4, Sampling(6)), [1]
    for _ in range(3):
        await engine.load(Weights.lent(trained.named_parameters(), lambda: versions[-1]))
        copied = TransformersEngine(tiny(kind, **settings))
        await copied.load(packed(trained, versions[-1]))
        ours, theirs = await answers(engine, asked), await answers(copied, asked)
        for number in range(4):
            assert ours[number].response_ids.tolist() == theirs[number].response_ids.tolist()
            assert ours[number].logprobs.tolist() == theirs[number].logprobs.tolist()
            assert ours[number].versions.tolist() == theirs[number].versions.tolist()
        versions.append(versions[-1] + 1)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.1)
        with pytest.raises(RuntimeError, match=f"version {versions[-1]} by now"):
            await answers(engine, asked)
    inside = dict(engine._forward._model.named_parameters())
    shared = {name for name, each in trained.named_parameters() if inside[name].data_ptr() == each.data_ptr()}
    assert (shared == inside.keys()) is laid


async def test_weights_of_another_type_are_cast():
    engine = TransformersEngine(tiny(seed=0))
    new = tiny(seed=1)
    await engine.load(Weights.pack(((n, p.detach().bfloat16()) for n, p in new.named_parameters()), 3))
    for parameter, theirs in zip(engine._forward._model.parameters(), new.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, theirs.bfloat16().float())


async def test_the_last_weights_that_come_while_it_sleeps_are_used_when_it_wakes():
    kind = "gpt_neox"
    engine = TransformersEngine(tiny(kind))
    requests = ragged(4, Sampling(6, temperature=0.0))
    before = await answers(engine, requests)
    await engine.sleep()
    with pytest.raises(ValueError, match="do not fit"):
        await engine.load(Weights.pack([("a", torch.ones(1))], 5))
    await engine.load(packed(tiny(kind, seed=2), 1))
    await engine.load(packed(tiny(kind, seed=1), 2))
    assert engine.version == 2
    await engine.wake()
    after = await answers(engine, requests)
    expected = await answers(TransformersEngine(tiny(kind, seed=1)), requests)
    for number in range(4):
        assert after[number].response_ids.tolist() == expected[number].response_ids.tolist()
        assert after[number].versions.tolist() == [2] * 6
    assert any(after[i].response_ids.tolist() != before[i].response_ids.tolist() for i in range(4))


@pytest.mark.parametrize("settings", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_llamas_of_all_kinds_are_run_leanly(settings):
    for kind in ("llama", "qwen2", "qwen3"):
        known = settings if kind == "llama" else {k: v for k, v in settings.items() if k != "mlp_bias"}
        assert type(fastest(tiny(kind, **known), 0)) is LeanForward


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ],
)
async def test_windows_are_of_the_rows_own_tokens(kind, settings):
    model = tiny(kind, **settings)
    engine = TransformersEngine(model)
    assert type(engine._forward) is LeanForward
    requests = ragged(20, Sampling(15, stop_ids=(0,)))
    done = await answers(engine, requests)
    for asked in requests:
        found = done[asked.id]
        expected = teacher_forced(model, asked.prompt_ids, found.response_ids)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma", "olmo2", "phi3"])
def test_other_models_run_their_own_forward(kind):
    assert type(fastest(tiny(kind, pad_token_id=0, bos_token_id=1, eos_token_id=2), 0)) is ModelForward


def test_a_llama_that_computes_something_else_runs_its_own_forward():
    model = tiny("llama")
    inner = model.forward

    def capped(*args, **kwargs):
        output = inner(*args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    model.forward = capped
    assert type(fastest(model, 0)) is ModelForward


def test_nothing_is_held_twice():
    model = tiny("qwen3")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    forward = fastest(model, 0)
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for block in forward.blocks:
        assert block.qkv[0].untyped_storage().data_ptr() in held
        assert block.gate_up[0].untyped_storage().data_ptr() in held
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


async def test_bf16_models_decode():
    model = tiny().bfloat16()
    assert type(fastest(model, 0)) is LeanForward
    done = await answers(TransformersEngine(model), ragged(6, Sampling(8)))
    assert all(np.isfinite(completion.logprobs).all() for completion in done.values())


async def test_logits_that_are_not_finite_are_told_where_they_came_from():
    model = tiny()
    engine = TransformersEngine(model)
    running = engine.generate([request(4, [1, 2], Sampling(3)), request(7, [1, 2, 3], Sampling(500))])
    assert (await anext(running)).id == 4
    broken = {name: tensor.clone() for name, tensor in model.named_parameters()}
    broken["model.norm.weight"][3] = torch.nan
    await engine.load(Weights.pack(broken.items(), 6))
    with pytest.raises(
        FloatingPointError,
        match=r"(?s)not finite.*1 of 1.*token \d+.*request 7.*3 tokens.*version 6.*torch.float32",
    ):
        async for _ in running:
            pass
    await engine.load(packed(tiny(), 7))
    assert len((await answers(engine, [request(0, [1], Sampling(3))]))[0].response_ids) == 3
