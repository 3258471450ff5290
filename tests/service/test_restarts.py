"""A service that died goes on where its clients believe it is: nothing is lost, and nothing happens twice."""

import random

import numpy as np
import pytest

from rlinf.config.load import InputError
from rlinf.runs.rules import load_config
from rlinf.runtime.system.system import ActorSystem
from rlinf.service import wire
from rlinf.service.serve import serving
from tests.drills.service import Progress, imitated, normal, reference, script, weights
from tests.service.serving import TINY, Http, tiny


async def test_a_killed_service_goes_on_bit_for_bit(tmp_path):
    wanted = await reference(3, tmp_path / "reference")
    progress = Progress(script(3))
    last = await imitated(progress, tmp_path / "killed", random.Random(7), 1)
    assert normal(progress) == wanted[0]
    assert weights(last) == wanted[1]


async def test_models_are_not_put_on_another_base(tmp_path):
    async with tiny(tmp_path) as url, Http(url) as http:
        model = await http.model()
        await http.learn(model, 1)
        promise = (await http.ask("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}))[1]
    with pytest.raises(InputError, match="base model"):
        async with tiny(tmp_path, "seed=7"):
            pass
    async with tiny(tmp_path) as url, Http(url) as http:
        assert (await http.ask("retrieve_future", promise))[1]["type"] == "optim_step"
        assert (await http.done("unload_model", {"model_id": model}))["type"] == "unload_model"
        assert (await http.ask("get_info", {"model_id": model}))[0] == 404
    assert not (tmp_path / "tiny-service" / "journal" / model.replace(":", "-")).exists()


async def test_a_trainer_that_can_have_no_models_of_clients_is_refused_at_the_start(tmp_path):
    with pytest.raises(InputError, match=r"trainer\.working_copy"):
        async with tiny(tmp_path, "trainer.dtype=bfloat16", "trainer.working_copy=false"):
            pass
    with pytest.raises(InputError, match=r"serve\.max_rank.*adapter_rank=8"):
        async with tiny(tmp_path, "rollout.engine_args={adapter_rank: 8}"):
            pass


async def test_at_its_start_it_says_what_programs_need_past_a_proxy(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    config, said = load_config("configs/serve/tiny.yaml", [*TINY, f"output_dir={tmp_path}"], 1), []
    async with serving(config, said.append) as (url, *_):
        assert any(url in line and "NO_PROXY=127.0.0.1" in line for line in said)


async def learned_and_answered(http):
    model = await http.model()
    await http.learn(model, 1)
    step = await http.done("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.3}})
    body = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
    sampler = (await http.done("save_weights_for_sampler", body))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"seed": 1}}
    return step, await http.done("asample", {**body, "num_samples": 2, "topk_sample_logprobs": 3})


async def test_roles_in_processes_of_their_own_give_what_one_process_gives(tmp_path):
    async with tiny(tmp_path / "one") as url, Http(url) as http:
        wanted = await learned_and_answered(http)
    apart = ("placement.trainer=0", "placement.rollout=1", "placement.judge=0")
    async with (
        ActorSystem.local(2, serialize=True) as system,  # as torchrun's processes are
        tiny(tmp_path / "two", *apart, system=system) as url,
        Http(url) as http,
    ):
        step, answered = await learned_and_answered(http)
    assert step == wanted[0]
    (found, logprobs), (one, of_one) = without_logprobs(answered), without_logprobs(wanted[1])
    assert found == one
    for mine, other in zip(logprobs, of_one, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)  # who is decoded beside whom rounds otherwise


def without_logprobs(body):
    """A sample's answers without the log-probs of their tokens; and these."""
    message = wire.read("SampleResponse", body)
    logprobs = [np.frombuffer(each.logprobs, "<f4") for each in message.sequences]
    for each in message.sequences:
        each.logprobs = b""
    return message.SerializeToString(), logprobs


async def test_a_step_is_a_step_though_no_state_can_be_saved_after_it(tmp_path):
    async with tiny(tmp_path, "serve.replay_seconds=0") as url, Http(url) as http:
        model = await http.model()
        await http.learn(model, 1)
        (tmp_path / "tiny-service" / "journal" / model.replace(":", "-") / ".000000002.state").write_text("in its way")
        taken = [await http.done("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})]
        await http.learn(model, 3)
        taken.append(await http.done("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}}))
        assert [each["type"] for each in taken] == ["optim_step"] * 2
