"""Answers by several adapters in one batch, each as a model gives it that has its own merged in."""

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.data.weights import Weights
from rlinf.engines.base import RequestRefused, Sampling
from rlinf.engines.transformers.engine import TransformersEngine
from tests.engines.transformers.rehearsed import REHEARSED
from tests.engines.transformers.test_engine import answers, packed, request, teacher_forced, tiny

LAYERS = {
    "a": (3, ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]),
    "b": (2, ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]),
    "c": (1, ["self_attn.k_proj"]),
    "d": (2, ["lm_head", "self_attn.v_proj"]),
}
SAMPLING = Sampling(9, 1.0)


def added(model, path, rank, generator):
    """New adapters of a layer, merged in."""
    weight = model.get_submodule(path).weight
    down = torch.randn(rank, weight.shape[1], generator=generator)
    up = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
    weight.data += up @ down
    return {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}


def adapters(base, name, version, seed=0):
    """Weights of adapters, and the model with them merged in."""
    rank, layers = LAYERS[name]
    generator, merged, tensors = torch.Generator().manual_seed(seed), copy.deepcopy(base), {}
    for path in [f"model.layers.{number}.{layer}" for number in range(2) for layer in layers if layer != "lm_head"]:
        tensors |= added(merged, path, rank, generator)
    if "lm_head" in layers:  # of tied embeddings the output's alone
        merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
        tensors |= added(merged, "lm_head", rank, generator)
    return replace(Weights.pack(tensors.items(), version), adapter=name), merged


@pytest.mark.parametrize("tied", [True, False])
async def test_answers_in_one_batch_are_those_of_models_with_their_adapters_merged_in(tied):
    base = tiny(tie_word_embeddings=tied)
    engine = TransformersEngine(copy.deepcopy(base), max_rows=16)
    assert (engine.adapters, engine.unembeds) == ({}, True)
    models = {None: base}
    for version, name in enumerate("abcd", 11):
        weights, models[name] = adapters(base, name, version)
        await engine.load(weights)
    wanted = [(None, "a", "b", "c", "d")[number % 5] for number in range(14)]
    prompts = [[3, 4, 5] if number < 8 else list(range(2, 4 + number)) for number in range(14)]  # some are the same
    asked = [replace(request(n, prompts[n], SAMPLING), adapter=name) for n, name in enumerate(wanted)]
    found = await answers(engine, asked)
    for number, name in enumerate(wanted):
        answer = found[number]
        exact = teacher_forced(models[name], prompts[number], answer.response_ids.tolist())
        np.testing.assert_allclose(answer.logprobs, exact, atol=2e-4)
        assert set(answer.versions.tolist()) == {engine.version if name is None else 11 + "abcd".index(name)}
    other, merged = adapters(base, "a", 20, seed=1)
    await engine.load(other)
    (answer,) = (await answers(engine, [asked[1]])).values()
    np.testing.assert_allclose(answer.logprobs, teacher_forced(merged, prompts[1], answer.response_ids), atol=2e-4)
    assert set(answer.versions.tolist()) == {20}
    below = tiny(seed=3, tie_word_embeddings=tied)
    await engine.load(packed(below, 30))  # of the model itself, which is then below all adapters
    assert engine.adapters == {"a": 20, "b": 12, "c": 13, "d": 14}


async def test_adapters_that_do_not_fit_are_refused_and_those_that_answer_are_not_unloaded():
    base = tiny()
    engine = TransformersEngine(copy.deepcopy(base))
    fitting, _ = adapters(base, "a", 1)
    tensors = dict(fitting.named())
    first = "model.layers.0.self_attn.q_proj.lora_A.weight"
    for wrong, named in [
        ({**tensors, "lm_head.lora_A.weight": tensors[first]}, "lm_head"),
        ({**tensors, "model.embed_tokens.lora_A.weight": tensors[first]}, "embed_tokens"),
        ({**tensors, first.replace("layers.0", "layers.7"): tensors[first]}, "layers.7"),
        ({**tensors, first: tensors[first][:, 1:]}, "q_proj"),
        ({**tensors, first: tensors[first][1:]}, "q_proj"),
        ({name: each for name, each in tensors.items() if name != first}, "q_proj"),
    ]:
        with pytest.raises(ValueError, match=named):
            await engine.load(replace(Weights.pack(wrong.items(), 2), adapter="a"))
    assert engine.adapters == {}
    with pytest.raises(RequestRefused, match="'a'"):
        await engine.answer(replace(request(0, [3], SAMPLING), adapter="a"))
    await engine.load(fitting)
    answering = asyncio.create_task(engine.answer(replace(request(0, [3], Sampling(200, 1.0)), adapter="a")))
    while not engine.stats.steps:
        await asyncio.sleep(0)
    with pytest.raises(ValueError, match="a are"):
        await engine.unload("a")
    await engine.abort()
    await answering
    await engine.unload("a")
    assert engine.adapters == {}
    recorded = TransformersEngine(copy.deepcopy(base), graphs=REHEARSED)
    assert recorded.adapters is None
    with pytest.raises(ValueError, match="adapters a"):
        await recorded.load(fitting)
