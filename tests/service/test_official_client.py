"""The official client of the Tinker API, unmodified, through every call that a training program makes."""

import asyncio
import json
import math
import os
import runpy
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

from rlinf.config.load import InputError
from rlinf.runtime.base.errors import UserError
from rlinf.service.client import ServiceClient
from rlinf.service.local import local_service
from tests.launching import ROOT
from tests.service.serving import KEY, TINY, tiny

tinker = pytest.importorskip("tinker", reason="the official client is not installed: pip install tinker")


@pytest.mark.parametrize("rank", [3, 0])  # 0: all weights
async def test_the_official_client_trains_samples_saves_and_goes_on(tmp_path, rank):
    async with tiny(tmp_path, "serve.max_whole=1") as url:
        await asyncio.to_thread(program, url, rank)


def datum(**more):
    types = tinker.types
    inputs: dict = {"target_tokens": [4, 5, 6], **(more or {"weights": [0.0, 1.0, 1.0]})}
    return types.Datum(model_input=types.ModelInput.from_ints([3, 4, 5]), loss_fn_inputs=inputs)


def program(url, rank):
    types = tinker.types
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    (supported,) = rest.get_server_capabilities().result().supported_models
    assert (supported.model_name, supported.max_context_length) == ("tiny", 32)
    trained = service.create_lora_training_client(base_model="tiny", rank=rank, seed=5).result()
    told = trained.get_info()
    assert (told.is_lora, told.lora_rank) == (rank > 0, rank or None)
    assert trained.get_tokenizer().encode("12") == [4, 5]

    before = trained.forward([datum()], "cross_entropy").result()
    assert len(before.loss_fn_outputs[0]["logprobs"].tolist()) == 3
    double = datum(target_tokens=[[4, 9], [5, 9], [6, 9]], weights=[[0.0, 0.0], [1.0, 0.25], [1.0, -0.5]])
    both = trained.forward([datum(), double], "cross_entropy").result()
    of_one, of_two = (each["logprobs"].to_numpy() for each in both.loss_fn_outputs)
    assert (of_one.shape, of_two.shape) == ((3,), (3, 2))
    assert of_two[:, 0] == pytest.approx(of_one, abs=1e-6)
    assert both.metrics["loss:sum"] == pytest.approx(
        2 * before.metrics["loss:sum"] - 0.25 * of_two[1, 1] + 0.5 * of_two[2, 1], rel=1e-5
    )
    wide = {"target_tokens": torch.tensor([[4], [5], [6]]), "weights": torch.tensor([[0.0], [1.0], [1.0]])}
    wide = {name: torch.nn.functional.pad(each, (0, 4)) for name, each in wide.items()}  # which the client sends sparse
    wide["target_tokens"][1, 1], wide["weights"][1, 1] = 9, 0.25
    assert all(datum(**wide).loss_fn_inputs[name].sparse_crow_indices for name in wide)
    sparse = trained.forward([datum(**wide)], "cross_entropy").result()
    assert sparse.metrics["loss:sum"] == pytest.approx(before.metrics["loss:sum"] - 0.25 * of_two[1, 1], rel=1e-5)
    assert sparse.loss_fn_outputs[0]["logprobs"].to_numpy()[:, 0] == pytest.approx(of_one, abs=1e-6)
    sums = []
    for _ in range(4):  # both are sent before either is waited for
        learned = trained.forward_backward([datum()] * 2, "cross_entropy")
        taken = trained.optim_step(types.AdamParams(learning_rate=0.01))
        sums.append(learned.result().metrics["loss:sum"])
        assert taken.result().metrics["grad_norm"] > 0
    assert sums[0] == pytest.approx(2 * before.metrics["loss:sum"], rel=1e-6)
    assert sums[-1] < 0.97 * sums[0]
    drawn = {"logprobs": [0.0, -2.5, -2.6], "advantages": [0.0, 1.0, -0.5]}
    for loss, settings in [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
        ("gspo", {"clip_low_threshold": 0.9}),
    ]:
        if loss == "gspo":
            drawn["sequence_ratio_mask"] = [0.0, 1.0, 1.0]
        learned = trained.forward_backward([datum(**drawn)], loss, loss_fn_config=settings)
        trained.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        assert math.isfinite(learned.result().metrics["loss:sum"])
    custom = trained.forward_backward_custom([datum()], lambda data, logprobs: (-logprobs[0].sum(), {"mine": 1.0}))
    assert custom.result().metrics["mine"] == 1.0
    trained.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=4, seed=1, temperature=1.0)
    answers = [sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result() for _ in range(2)]
    assert [each.tokens for each in answers[0].sequences] == [each.tokens for each in answers[1].sequences]
    first = answers[0].sequences[0]
    assert first.stop_reason in ("stop", "length")
    whole = types.ModelInput.from_ints([3, 4, *first.tokens])
    assert sampler.compute_logprobs(whole).result()[2:] == pytest.approx(first.logprobs, abs=1e-5)
    asked = np.array([[4, 9], [-1, 7], *[[-1, -1]] * (len(first.tokens) - 1)])
    for targets in (
        types.TensorData.from_numpy(asked),
        types.TensorData.from_torch_sparse(torch.tensor(asked), pad_value=-1),
    ):
        answer = sampler.sample(whole, 1, params, include_prompt_logprobs=True, target_prompt_logprobs=targets).result()
        found = answer.target_prompt_logprobs.to_torch()
        found = found.to_dense() if found.is_sparse_csr else found
        assert found.shape == asked.shape
        assert found[0, 0].item() == pytest.approx(answer.prompt_logprobs[1], abs=1e-6)
        assert (found[1, 1].item() < 0, found[1, 0].item(), found[2:].abs().sum().item()) == (True, 0.0, 0.0)
    likeliest(sampler, service.create_sampling_client(base_model="tiny").result())
    named = trained.save_weights_for_sampler("named").result().path
    again = service.create_sampling_client(model_path=named).result()
    assert (
        again.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens == first.tokens
    )
    base = service.create_sampling_client(base_model="tiny").result()
    assert base.compute_logprobs(whole).result()[1:] != sampler.compute_logprobs(whole).result()[1:]

    saved = trained.save_state("state").result().path
    other = service.create_training_client_from_state_with_optimizer(saved).result()
    results = []
    for client in (trained, other):
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()
        results.append(client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist())
    assert results[0] == results[1]
    listed = {each.checkpoint_id for each in rest.list_checkpoints(trained.model_id).result().checkpoints}
    assert listed == {"weights/state", "sampler_weights/named", "sampler_weights/session-0"}
    assert rest.get_weights_info_by_tinker_path(saved).result().lora_rank == (rank or None)
    assert rest.list_training_runs().result().cursor.total_count == 2
    rest.delete_checkpoint_from_tinker_path(named).result()
    assert len(rest.list_user_checkpoints().result().checkpoints) == 2
    kept = other.save_weights_external("kept").result().path
    urls = rest.get_external_weights_urls(kept).result().urls
    config, key, value = ("adapter_config.json", "r", rank) if rank else ("config.json", "model_type", "qwen2")
    assert set(urls) >= {config, "adapter_model.safetensors" if rank else "model.safetensors"}
    with urllib.request.urlopen(urls[config]) as file:
        assert json.load(file)[key] == value
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urls[config] + "0")
    copied = rest.copy_weights(saved, "any project", ttl_seconds=7200).result()
    rest.set_checkpoint_ttl_from_tinker_path(copied, None).result()
    (copy,) = rest.list_checkpoints(copied.split("/")[2]).result().checkpoints
    assert (copy.tinker_path, copy.expires_at) == (copied, None)
    assert rest.get_training_run_by_tinker_path(copied).result().lora_rank == (rank or None)
    handle = sampler.get_sampler_handle()
    joined = tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY)
    answer = joined.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    assert answer.sequences[0].tokens == first.tokens
    with pytest.raises(tinker.BadRequestError, match="stable_reinforce"):
        other.forward_backward([datum()], "stable_reinforce").result()
    with pytest.raises(tinker.NotFoundError):
        service.create_lora_training_client(base_model="another").result()
    service.close("success").result()
    assert rest.list_training_runs().result().cursor.total_count == 0  # its models are gone, its checkpoints are not
    assert len(rest.list_user_checkpoints().result().checkpoints) == 4


def likeliest(*samplers):
    """Those of three words, beside the log-probs of every word at the places of a prompt and of its answers."""
    types, every = tinker.types, range(18)
    prompt, params = types.ModelInput.from_ints([3, 4, 7]), types.SamplingParams(max_tokens=4, seed=2, temperature=0.5)
    for sampler in samplers:
        answer = sampler.sample(prompt, 2, params, topk_prompt_logprobs=3, topk_sample_logprobs=3).result()
        nothing, *places = answer.topk_prompt_logprobs
        assert nothing is None
        texts = [[3, 4, 7, *each.tokens] for each in answer.sequences]
        for place, best in enumerate(places, 1):
            ends = [[*texts[0][:place], word] for word in every]
            scores = [sampler.compute_logprobs(types.ModelInput.from_ints(end)).result()[-1] for end in ends]
            assert [word for word, _ in best] == sorted(every, key=lambda word: -scores[word])[:3]
            assert [score for _, score in best] == pytest.approx(sorted(scores)[:-4:-1], abs=1e-5)
        for each in answer.sequences:
            assert len(each.topk_logprobs) == len(each.tokens)
            for word, score, best in zip(each.tokens, each.logprobs, each.topk_logprobs, strict=True):
                assert best == sorted(best, key=lambda pair: -pair[1])
                if word in dict(best):
                    assert dict(best)[word] == pytest.approx(score, abs=1e-5)  # at the answers' temperature, too
                else:
                    assert score <= best[-1][1] + 1e-5
    last = samplers[0].sample(prompt, 1, params, True, topk_prompt_logprobs=2, prompt_logprobs_last_n=1).result()
    assert last.topk_prompt_logprobs[:2] == [None, None]
    pairs = zip(last.topk_prompt_logprobs[2], places_of(samplers[0], prompt, params), strict=True)
    for (word, score), (same, again) in pairs:  # of fewer places at a time it may be rounded otherwise
        assert (word, score) == (same, pytest.approx(again, abs=1e-5))


def places_of(sampler, prompt, params):
    return sampler.sample(prompt, 1, params, topk_prompt_logprobs=2).result().topk_prompt_logprobs[2]


async def test_gradients_gather_until_a_step_and_are_of_sums(tmp_path):
    async with tiny(tmp_path) as url:
        await asyncio.to_thread(gathering, url)


def gathering(url):
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    data = [
        datum(weights=[1.0, 1.0, 1.0]),
        datum(weights=[0.5, -2.0, 0.0]),
        datum(target_tokens=[9, 9, 9], weights=[1.0, 1.0, 1.0]),
    ]
    learned = []
    for calls in ([data], [data[:1], data[1:]], [[each] for each in data]):
        model = service.create_lora_training_client(base_model="tiny", rank=2, seed=3).result()
        for _ in range(2):
            sent = [model.forward_backward(call, "cross_entropy") for call in calls]
            step = model.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
            sums = [each.result().metrics["loss:sum"] for each in sent]
            assert step.metrics["loss"] == pytest.approx(sum(sums), rel=1e-6)  # nothing is divided, nothing is left out
        with pytest.raises(tinker.TinkerError, match="forward_backward"):
            model.optim_step(tinker.AdamParams(learning_rate=0.05)).result()  # it was taken
        after = model.forward(data, "cross_entropy").result()
        learned.append(np.concatenate([each["logprobs"].to_numpy() for each in after.loss_fn_outputs]))
    assert learned[1] == pytest.approx(learned[0], abs=1e-5)
    assert learned[2] == pytest.approx(learned[0], abs=1e-5)


def test_the_example_goes_through_its_loop_with_a_service_in_its_own_process(tmp_path, monkeypatch, capsys):
    for name in ("TINKER_API_KEY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"http_proxy": "http://127.0.0.1:9", "STEPS": "2", "TINKER_BASE_URL": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with local_service("serve/tiny", *TINY, f"output_dir={tmp_path}"):
        runpy.run_path(str(ROOT / "examples/service/client.py"), run_name="__main__")
        text = (ROOT / "examples/service/client.py").read_text()
        exec(text.replace("import tinker", "import rlinf.service.client as tinker"), {"__name__": "__main__"})
        with pytest.raises(InputError, match="way"), local_service("serve/tiny", *TINY, f"output_dir={tmp_path}"):
            pass
    assert dict(os.environ) == before
    said = capsys.readouterr().out
    assert said.count("step 1: reward") == 2
    assert said.count("/weights/sevens") == 2


LOOP = """
import tinker

service = tinker.ServiceClient()
model = service.create_lora_training_client(base_model="tiny", rank=3, seed=5).result()
tokenizer, text = model.get_tokenizer(), tinker.ModelInput.from_ints
told = [model.get_info().lora_rank, tokenizer.encode("12")]


def datum(tokens, **inputs):
    return tinker.Datum(model_input=text(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


def told_of(learned):
    told.append([learned.metrics, *(each["logprobs"].tolist() for each in learned.loss_fn_outputs)])


adam, params = tinker.AdamParams(learning_rate=0.02), tinker.SamplingParams(max_tokens=6, seed=3, temperature=0.9)
inputs = {"target_tokens": [[4, 9], [5, 8]], "weights": tinker.TensorData([1, 0.5, 1, -0.25], "float32", [2, 2])}
double = tinker.Datum(model_input=text([3, 4]), loss_fn_inputs=inputs)
for step in range(3):
    sampler = model.save_weights_and_get_sampling_client().result()
    data = []
    for start in (3, 4):
        answer = sampler.sample(text([start, 7]), 1, params, topk_sample_logprobs=2, topk_prompt_logprobs=2).result()
        (one,) = answer.sequences
        told += [one.tokens, one.logprobs, one.stop_reason, one.topk_logprobs, answer.topk_prompt_logprobs]
        told.append(sampler.compute_logprobs(text([start, 7, *one.tokens])).result())
        drawn = {"logprobs": [0.0, *one.logprobs], "advantages": [0.0, *[start - 3.5] * len(one.tokens)]}
        data.append(datum([start, 7, *one.tokens], **drawn))
    sent = model.forward_backward(data, "ppo", {"clip_high_threshold": 1.3})  # nothing waits for it
    also = model.forward_backward([datum([3, 4, 5, 6], weights=[0.0, 1.0, 1.0]), double], "cross_entropy")
    custom = model.forward_backward_custom(data, lambda data, found: ((found[0] * found[1].mean()).sum(), {"my": 1.0}))
    taken = model.optim_step(adam)
    for each in (sent, also, custom):
        told_of(each.result())
    told.append(taken.result().metrics)
named = model.save_weights_for_sampler("named").result().path
saved = model.save_state("end").result().path
other = service.create_training_client_from_state_with_optimizer(saved).result()
told_of(other.forward([double], "cross_entropy").result())
try:
    told_of(other.forward_backward([datum([3, 99], weights=[1.0])], "cross_entropy").result())
except tinker.TinkerError as error:
    told.append("99" in str(error))
asked = tinker.TensorData([[4, 9]], "int64", [1, 2])
answer = service.create_sampling_client(model_path=named).result().sample(
    text([3, 4]), 1, params, True, target_prompt_logprobs=asked).result()
told += [answer.sequences[0].tokens, answer.prompt_logprobs, answer.target_prompt_logprobs.tolist()]
service.close("success").result()
"""


def test_a_loop_moves_from_the_service_into_the_library_by_changing_its_import(tmp_path):
    ways = {}
    for way, line in (("client", "import tinker"), ("library", "import rlinf.service.client as tinker")):
        with local_service("serve/tiny", *TINY, f"output_dir={tmp_path / way}"):
            ways[way] = {}
            exec(LOOP.replace("import tinker", line), ways[way])
        files = sorted((tmp_path / way).rglob("weights/end/*.safetensors"))
        assert [each.name for each in files] == ["adapter_model.safetensors", "optimizer.safetensors"]
        ways[way] = ways[way]["told"], [each.read_bytes() for each in files]
    assert ways["client"][0] == ways["library"][0]
    assert ways["client"][1] == ways["library"][1]
    with pytest.raises(UserError, match="local_service"):
        ServiceClient()
