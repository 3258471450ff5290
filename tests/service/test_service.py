"""The API as any program could speak it: order, repetition, bad requests, several models on one base."""

import asyncio
import tracemalloc

import numpy as np
import pytest
import torch

from rlinf.models.language.tenants import Apart
from rlinf.runs.rules import load_config
from rlinf.service import app, wire
from rlinf.service.serve import serving
from rlinf.training.fsdp import FsdpBackEnd
from tests.engines.vllm.test_vllm_engine import PYTHON
from tests.service.serving import TINY, Http, read_sample, tiny

ADAM = {"learning_rate": 0.01}


async def test_requests_run_in_the_order_of_their_numbers_and_the_same_again_has_its_answer(tmp_path, monkeypatch):
    async with tiny(tmp_path) as url, Http(url) as http:
        model = await http.model()
        step = await http.ask(
            "optim_step", {"model_id": model, "seq_id": 2, "adam_params": ADAM}
        )  # before its gradient
        assert step[0] == 200
        with monkeypatch.context() as patch:
            patch.setattr(app, "_POLL", 0.0)
            status, waits = await http.ask("retrieve_future", step[1])
            assert (status, waits["queue_state"]) == (408, "paused_capacity")
            assert "request 1 " in waits["queue_state_reason"]
        for _ in range(2):
            status, promise = await http.learn(model, 1)
            assert (status, promise["request_id"]) == (200, f"{model}:1")
        first = await http.ask("retrieve_future", promise)
        assert first == await http.ask("retrieve_future", promise)
        _, taken = await http.ask("retrieve_future", step[1])
        assert taken["metrics"]["loss"] == pytest.approx(3 * np.log(20), rel=0.3)
        again = await http.ask("optim_step", {"model_id": model, "seq_id": 2, "adam_params": ADAM})
        assert (await http.ask("retrieve_future", again[1]))[1] == taken
        third = await http.done("optim_step", {"model_id": model, "seq_id": 3, "adam_params": ADAM})
        assert third["category"] == "user"
        assert "forward_backward" in third["error"]  # it was taken once
        key = {"X-Idempotency-Key": "1"}
        sessions = [await http.ask("create_session", {}, headers=key) for _ in range(2)]
        assert sessions[0] == sessions[1] != await http.ask("create_session", {})


async def test_requests_without_numbers_at_one_moment_are_each_their_own(tmp_path):
    config = load_config("configs/serve/tiny.yaml", [*TINY, f"output_dir={tmp_path}"], 1)
    async with serving(config, lambda line: None) as (url, key, face), Http(url, key) as http:
        model = await http.model()
        asked = {"model_id": model, "adam_params": ADAM}
        ids = [(await face._optim_step(asked))["request_id"] for _ in range(3)]  # none of which has begun
        assert ids == [f"{model}:{number}" for number in (1, 2, 3)]


async def test_models_that_learn_at_the_same_time_learn_bit_for_bit_what_each_learns_alone(tmp_path):
    learned = []
    for at_once in (False, True):
        async with tiny(tmp_path / str(at_once), "serve.max_whole=1") as url, Http(url) as http:
            models = [await http.model(seed=seed, rank=rank) for seed, rank in ((1, 1), (2, 0), (3, 3), (3, 0))]

            async def steps(model, seed, http=http):
                metrics = []
                for number in (1, 3, 5):
                    await http.learn(model, number, tokens=range(3, 3 + 3 * seed), targets=[seed] * 3 * seed,
                                     weights=[1] * 3 * seed)  # fmt: skip
                    step = {"model_id": model, "seq_id": number + 1, "adam_params": ADAM}
                    metrics.append((await http.done("optim_step", step))["metrics"])
                return metrics

            if at_once:
                learned.append(await asyncio.gather(*(steps(model, n) for n, model in enumerate(models, 1))))
            else:
                learned.append([await steps(model, n) for n, model in enumerate(models, 1)])
    assert learned[0] == learned[1]


async def test_a_whole_model_waits_for_the_step_of_another_when_there_is_room_for_one(tmp_path, monkeypatch):
    config = load_config("configs/serve/tiny.yaml", [*TINY, f"output_dir={tmp_path}", "serve.max_whole=1"], 1)
    async with serving(config, lambda line: None) as (url, key, face), Http(url, key) as http:
        spare, first, other = [await http.model(rank=0) for _ in range(3)]
        promise = (await http.learn(first, 1))[1]
        assert isinstance((await http.ask("retrieve_future", promise))[1], bytes)
        waiting = (await http.learn(other, 1))[1]
        lora = await http.model(rank=1)  # adapters wait for nobody
        await http.learn(lora, 1)
        with monkeypatch.context() as patch:
            patch.setattr(app, "_POLL", 0.0)
            status, answer = await http.ask("retrieve_future", waiting)
            assert (status, answer["queue_state"]) == (408, "paused_capacity")
            assert "serve.max_whole=1" in answer["queue_state_reason"]
            assert first in answer["queue_state_reason"]
        assert (await http.done("unload_model", {"model_id": spare}))["type"] == "unload_model"  # from the disk
        await http.done("optim_step", {"model_id": first, "seq_id": 2, "adam_params": ADAM})
        assert isinstance((await http.ask("retrieve_future", waiting))[1], bytes)
        assert [each for each in (first, other) if face._service.models[each].open] == [other]
        third = (await http.learn(first, 3))[1]
        assert (await http.done("unload_model", {"model_id": other, "seq_id": 2}))["type"] == "unload_model"
        assert isinstance((await http.ask("retrieve_future", third))[1], bytes)


async def test_half_a_batch_is_never_a_step(tmp_path):
    async with tiny(tmp_path) as url, Http(url) as http:
        model = await http.model()
        assert (await http.learn(model, 1))[0] == 200
        status, refused = await http.learn(model, 2, weights=[1, float("nan"), 1])
        assert status == 400
        assert "datum 0: weights" in refused["error"]
        step = await http.done("optim_step", {"model_id": model, "seq_id": 3, "adam_params": ADAM})
        assert "datum 0: weights" in step["error"]
        await http.learn(model, 4)
        step = await http.done("optim_step", {"model_id": model, "seq_id": 5, "adam_params": ADAM})
        assert step["metrics"]["loss"] == pytest.approx(3 * np.log(20), rel=0.3)  # of one batch


async def test_answers_are_those_of_the_weights_named_whoever_asks_at_the_same_time(tmp_path):
    async with tiny(tmp_path, "serve.max_whole=1") as url, Http(url) as http:
        samplers = {}
        for seed, rank in ((1, 1), (2, 0)):
            model = await http.model(seed=seed, rank=rank)
            for number in range(1, 9, 2):
                await http.learn(model, number, targets=(seed + 3,) * 3)
                await http.done(
                    "optim_step", {"model_id": model, "seq_id": number + 1, "adam_params": {"learning_rate": 0.3}}
                )
            body = {"model_id": model, "seq_id": 9, "sampling_session_seq_id": 0}
            samplers[seed] = (await http.done("save_weights_for_sampler", body))["sampling_session_id"]
        session = (await http.ask("create_session", {}))[1]["session_id"]
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        samplers[0] = (await http.ask("create_sampling_session", base))[1]["sampling_session_id"]

        async def answers(sampler, number):
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
            params = {"max_tokens": 6, "seed": 5, "stop": []}
            body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params}
            return await http.done("asample", {**body, "num_samples": 2, "prompt_logprobs": True})

        alone = {seed: await answers(sampler, 0) for seed, sampler in samplers.items()}
        assert len({*alone.values()}) == 3
        together = await asyncio.gather(*(answers(samplers[n % 3], n) for n in range(1, 13)))
        for number, answer in enumerate(together, 1):
            tokens, logprobs = read_sample(answer)
            own_tokens, own_logprobs = read_sample(alone[number % 3])
            assert tokens == own_tokens
            for one, own in zip(logprobs, own_logprobs, strict=True):
                np.testing.assert_allclose(one, own, rtol=0, atol=1e-5)  # more rows at a time round otherwise


SERVED = (
    "rollout.engine=vllm", f"rollout.engine_args={{python: {PYTHON}, adapter_rank: 8}}", "serve.max_rank=8",
    "model.config.hidden_size=64", "model.config.num_key_value_heads=1",
)  # fmt: skip
"""A real vLLM; heads of its sizes."""
REAL = (
    pytest.mark.servers,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: `make vllm` creates it"),
)


@pytest.mark.parametrize(
    ("kind", "tied", "more", "unembeds"),
    [
        ("qwen2", True, (), True),
        ("stablelm", False, (), True),
        ("stablelm", True, (), False),
        pytest.param("llama", True, SERVED, True, marks=REAL),
        pytest.param("qwen2", True, SERVED, False, marks=REAL),
    ],
)
async def test_the_output_embedding_has_adapters_wherever_answers_can_be_by_them(tmp_path, kind, tied, more, unembeds):
    own = [f"model.config.model_type={kind}", f"model.config.tie_word_embeddings={tied}", *more]
    async with tiny(tmp_path, *own) as url, Http(url) as http:
        model = await http.model()  # which asks for them, as clients do
        await http.learn(model, 1)
        await http.done("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.3}})
        await http.learn(model, 3)
        await http.done("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.3}})
        saved = await http.done("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "a"})
        info = (await http.ask("weights_info", {"tinker_path": saved["path"]}))[1]
        assert info["train_unembed"] == unembeds
        session = (await http.ask("create_session", {}))[1]["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        sampler = (await http.ask("create_sampling_session", body))[1]["sampling_session_id"]

        async def answer(number, tokens, **more):
            prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
            params = {"max_tokens": 4, "seed": 5, "stop": []}
            body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params}
            return await http.done("asample", {**body, **more})

        (tokens,), (logprobs, _) = read_sample(await answer(0, [3, 4]))
        _, (_, of_trainer) = read_sample(
            await answer(1, [3, 4, *np.frombuffer(tokens, "<i4").tolist()], prompt_logprobs=True)
        )
        within = 1e-4 if more else 1e-5  # vLLM rounds otherwise
        np.testing.assert_allclose(of_trainer[2:], logprobs, rtol=0, atol=within)
        alone = {"rank": 2, "train_attn": False, "train_mlp": False}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": alone}
        status, refused = await http.ask("create_model", body)
        assert (status, "train_unembed" in str(refused)) == ((200, False) if unembeds else (400, True))


async def test_checkpoints_are_whole_listed_gone_on_from_and_deleted(tmp_path):
    async with tiny(tmp_path) as url, Http(url) as http:
        model = await http.model(train_mlp=False, train_unembed=False)
        await http.learn(model, 1)
        await http.done("optim_step", {"model_id": model, "seq_id": 2, "adam_params": ADAM})
        saved = await http.done("save_weights", {"model_id": model, "seq_id": 3, "path": "a.1"})
        assert saved["path"] == f"tinker://{model}/weights/a.1"
        taken = await http.done("save_weights", {"model_id": model, "seq_id": 4, "path": "a.1"})
        assert "a.1" in taken["error"]
        info = (await http.ask("weights_info", {"tinker_path": saved["path"]}))[1]
        assert (info["lora_rank"], info["train_mlp"], info["train_attn"], info["train_unembed"]) == (
            2,
            False,
            True,
            False,
        )
        session = model.partition(":")[0]
        body = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        other = (await http.done("load_weights", body))["model_id"]
        results = []
        for each, number in ((model, 5), (other, 1)):
            await http.learn(each, number)
            results.append(await http.done("optim_step", {"model_id": each, "seq_id": number + 1, "adam_params": ADAM}))
        assert results[0] == results[1]
        run = f"training_runs/{model}/checkpoints"
        assert [each["tinker_path"] for each in (await http.ask(run, method="GET"))[1]["checkpoints"]] == [
            saved["path"]
        ]
        assert (await http.ask("checkpoints?limit=0", method="GET"))[1]["cursor"]["total_count"] == 1
    async with tiny(tmp_path) as url, Http(url) as http:  # they outlive the service
        session = (await http.ask("create_session", {}))[1]["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "path": saved["path"], "optimizer": False}
        assert (await http.done("load_weights", body))["type"] == "load_weights"
        async with http._session.delete(f"{url}/api/v1/{run}/weights/a.1") as gone:
            assert gone.status == 204
        assert (await http.ask("load_weights", {**body, "model_seq_id": 1}))[0] == 404


BAD = [
    ("create_model", {"base_model": "other"}, 404, "other"),
    ("create_model", {"lora_config": None}, 400, "lora_config"),
    ("create_model", {"lora_config": {"rank": 0}}, 400, "rank"),
    ("create_model", {"lora_config": {"rank": 1000}}, 400, "rank"),
    ("create_model", {"lora_config": {"rank": "8"}}, 400, "rank"),
    (
        "create_model",
        {"lora_config": {"rank": 1, "train_attn": False, "train_mlp": False, "train_unembed": False}},
        400,
        "train_unembed",
    ),
    ("create_model", {"lora_config": {"rank": 1, "train_unembed": "no"}}, 400, "train_unembed"),
    ("create_model", {"session_id": "abc"}, 404, "abc"),
    ("create_model", {"optimizer_config": {"type": "dimuon"}}, 400, "dimuon"),
    ("create_model", {"model_seq_id": -1}, 400, "model_seq_id"),
    ("create_model", {"model_seq_id": 10**9}, 400, "model_seq_id"),
    ("create_model", {"lora_config": []}, 400, "lora_config"),
    ("create_model", {"session_id": ["x"]}, 400, "session_id"),
    ("create_model", {"session_id": "FINISHED"}, 410, "finished"),
    ("session_heartbeat", {"session_id": {"x": 1}}, 404, "x"),
    ("session_heartbeat", {"session_id": "FINISHED"}, 410, "finished"),
    ("get_info", {"model_id": "nobody:train:0"}, 404, "nobody"),
    ("get_info", {"model_id": 5}, 400, "model_id"),
    ("optim_step", {"adam_params": {"learning_rate": float("nan")}}, 400, "learning_rate"),
    ("optim_step", {"adam_params": None}, 400, "adam_params"),
    ("optim_step", {"seq_id": "1", "adam_params": {}}, 400, "seq_id"),
    ("optim_step", {"adam_params": {"learning_rate": -1}}, 400, "learning_rate"),
    ("optim_step", {"adam_params": {"lr": 1}}, 400, "lr"),
    ("optim_step", {"adam_params": {"beta2": "much"}}, 400, "beta2"),
    ("optim_step", {"optimizer_params": {"type": "dimuon"}}, 400, "optimizer_params"),
    ("save_weights", {"path": "../../x"}, 400, "path"),
    ("save_weights", {"path": "a/b"}, 400, "path"),
    ("save_weights", {"path": "x", "ttl_seconds": 5}, 400, "ttl_seconds"),
    ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True}, 400, "path"),
    ("load_weights", {"path": "tinker://abcdabcd:train:0/weights/../x", "optimizer": True}, 400, "path"),
    ("load_weights", {"path": "tinker://abcdabcd:train:0/weights/x", "optimizer": True}, 404, "abcdabcd"),
    ("load_weights", {"path": "/etc/passwd", "optimizer": True}, 400, "path"),
    ("load_weights", {"path": "tinker://abcdabcd:train:0/weights/x", "optimizer": "yes"}, 400, "optimizer"),
    ("save_weights", {"path": "..", "overwrite": True}, 400, "path"),
    ("save_weights", {"path": "x" * 200}, 400, "path"),
    ("save_weights_for_sampler", {"path": ".hidden"}, 400, "path"),
    ("save_weights_for_sampler", {}, 400, "sampling_session_seq_id"),
    ("weights_info", {"tinker_path": ["a"]}, 400, "path"),
    ("create_sampling_session", {"model_path": "tinker://abcdabcd:train:0/weights/x"}, 404, "abcdabcd"),
    ("asample", {"sampling_session_id": "x"}, 404, "x"),
    ("asample", {"num_samples": 0}, 400, "num_samples"),
    ("asample", {"topk_prompt_logprobs": 21}, 400, "topk_prompt_logprobs"),
    ("asample", {"topk_sample_logprobs": -1}, 400, "topk_sample_logprobs"),
    ("asample", {"topk_sample_logprobs": "5"}, 400, "topk_sample_logprobs"),
    ("asample", {"prompt_alt_tokens_k": 2}, 400, "prompt_alt_tokens_k"),
    ("asample", {"target_prompt_logprobs": {"data": [3], "shape": [1, 1]}}, 400, "target_prompt_logprobs"),
    ("asample", {"prompt": {"chunks": []}}, 400, "prompt"),
    ("asample", {"prompt": {"chunks": [{"tokens": [99]}]}}, 400, "prompt"),
    ("asample", {"prompt": {"chunks": [{"tokens": [3] * 40}]}}, 400, "40"),
    ("asample", {"sampling_params": {"temperature": -1}}, 400, "temperature"),
    ("asample", {"sampling_params": {"stop": [["x"]]}}, 400, "stop"),
    ("asample", {"sampling_params": {"stop": [2**40]}}, 400, "stop"),
    ("asample", {"sampling_params": {"seed": -1}}, 400, "seed"),
    ("asample", {"sampling_params": {"temperature": float("nan")}}, 400, "temperature"),
    ("asample", {"sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
    ("asample", {"num_samples": 10**9}, 400, "num_samples"),
    ("asample", {"prompt": {"chunks": [{"tokens": [True]}]}}, 400, "prompt"),
    ("asample", {"prompt": {"chunks": [{"type": "image", "tokens": [3]}]}}, 400, "prompt"),
    ("retrieve_future", {"request_id": "x"}, 404, "x"),
    ("save_weights_external", {"path": "a/b"}, 400, "path"),
    ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1"]}, 400, "age_encryption_recipients"),
    ("copy_weights", {"source_path": "tinker://abcdabcd:train:0/weights/x"}, 404, "abcdabcd"),
    ("join_sampling_session", {"sampling_session_id": "x"}, 404, "x"),
    ("sessions/x/finish", {}, 404, "x"),
    ("billing_usage", {}, 404, "billing_usage"),
]
DATA = [
    ({"tokens": range(40), "targets": range(40)}, "40"),
    ({"tokens": (3, 4, 99)}, "model_input"),
    ({"targets": (4, 5)}, "target_tokens"),
    ({"weights": [1, 1]}, "weights"),
    ({"targets": ()}, "target_tokens"),
    ({"tokens": (), "targets": ()}, "model_input"),
    ({"weights": [1, float("inf"), 1]}, "weights"),
    ({"loss": "importance_sampling", "logprobs": [0, 0], "advantages": [1, 1, 1]}, "logprobs"),
    ({"loss": "ppo"}, "weights"),
    ({"loss": "ppo", "logprobs": [0, 0, 0]}, "advantages"),
    ({"loss": "stable_reinforce"}, "stable_reinforce"),
    ({"settings": {"beta": 1.0}}, "beta"),
]


async def test_the_start_says_why_models_learn_one_after_the_other(tmp_path, monkeypatch):
    for why in ("a product of [7, 9]", ""):
        monkeypatch.setattr(FsdpBackEnd, "apart", Apart(None if why else 8, why))
        lines: list[str] = []
        config = load_config("configs/serve/tiny.yaml", [*TINY, f"output_dir={tmp_path}"], 1)
        async with serving(config, lines.append):
            assert sum("a product of [7, 9]" in line for line in lines) == bool(why)


def sparse(crow, columns, shape=(3, 2)):
    csr = {"values": np.arange(1, 1 + len(columns)), "crow_indices": np.array(crow), "col_indices": np.array(columns)}
    about = {name: array.astype("<i8").tobytes() for name, array in csr.items()}
    return wire.read("Tensor", wire.written("Tensor", sparse_csr=about, dtype=2, shape=shape))


def test_sparse_targets_are_read_as_torch_reads_them_and_refused_where_they_have_no_place():
    message = sparse([0, 1, 1, 3], [1, 0, 1])
    parts = (torch.tensor(each) for each in ([0, 1, 1, 3], [1, 0, 1], [1, 2, 3]))
    assert (wire._tensor(message, "x", 3) == torch.sparse_csr_tensor(*parts, (3, 2)).to_dense().numpy()).all()
    for bad in (
        ([0, 1, 1, 4], [1, 0, 1]), ([0, 2, 1, 3], [1, 0, 1]), ([0, 1, 3], [1, 0, 1]), ([1, 1, 1, 3], [1, 0, 1]),
        ([0, 1, 1, 3], [1, 0, 2]), ([0, 1, 1, 3], [1, -1, 1]), ([], []), ([0, 0], [], (1, 10**9)),
        ([0, 0], [], (10**12, 2)), ([0, 0], [], (1,)), ([0, 0], [], (-1, 2)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="weights"):
            wire._tensor(sparse(*bad), "weights", 3)


def test_sparse_numbers_of_a_text_that_is_too_long_take_no_memory():
    rows = 10**6
    crow, column = np.zeros(rows + 1, "<i8"), np.zeros(0, "<i8")
    csr = {"values": b"", "crow_indices": crow.tobytes(), "col_indices": column.tobytes()}
    tensor = {"sparse_csr": csr, "dtype": 2, "shape": [rows, 32]}
    inputs = [{"key": "target_tokens", "value": tensor}]
    tracemalloc.start()
    try:
        for tokens, named in ((rows, "model_input"), (4, "target_tokens")):
            chunk = {"encoded_text": {"tokens": np.zeros(tokens, np.int32).tobytes()}}
            data = [{"model_input": [chunk], "loss_fn_inputs": inputs}]
            message = wire.read("ForwardBackwardRequest", wire.written("ForwardBackwardRequest", data=data))
            tracemalloc.reset_peak()
            with pytest.raises(ValueError, match=f"datum 0: {named}"):
                wire.PassRequest.of(message, 32)
            assert tracemalloc.get_traced_memory()[1] < 10 * crow.nbytes  # all of them would be 32 times so much
    finally:
        tracemalloc.stop()


async def test_bad_requests_are_refused_by_what_is_wrong_and_touch_nothing(tmp_path):
    async with tiny(tmp_path, "serve.max_body_mb=0.01") as url, Http(url) as http:
        other, model = await http.model(), await http.model()
        session = model.partition(":")[0]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await http.ask("create_sampling_session", sampler))[1]["sampling_session_id"]
        good = {
            "create_model": {
                "session_id": session, "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 1},
            },
            "asample": {
                "sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {},
            },
            "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 3},
        }  # fmt: skip
        finished = (await http.ask("create_session", {}))[1]["session_id"]
        async with http._session.post(f"{url}/api/v1/sessions/{finished}/finish", json={}) as gone:
            assert gone.status == 204
        for path, change, status, named in BAD:
            if change.get("session_id") == "FINISHED":
                change = {**change, "session_id": finished}
            body = {**good.get(path, {"model_id": model}), **change}
            found, answer = await http.ask(path, body)
            assert (found, answer["category"]) == (status, "user"), (path, change, answer)
            assert named in answer["error"], (path, change, answer)
        for number, (change, named) in enumerate(DATA):
            await http.learn(other, 3 * number + 1)
            status, answer = await http.learn(other, 3 * number + 2, **change, only=number % 2 == 0)
            assert status == 400, (change, answer)
            assert named in answer["error"], (change, answer)
            step = {"model_id": other, "seq_id": 3 * number + 3, "adam_params": {"learning_rate": 0.0}}
            taken = await http.done("optim_step", step)  # what is refused has had its turn
            assert ("not taken" in str(taken)) == bool(number % 2), (change, taken)
        number, long = 3 * len(DATA) + 1, [3] * 9999  # what nobody reads to its end has its turn, too
        status, answer = await http.learn(other, number, tokens=long, targets=long, weights=long)
        assert (status, "serve.max_body_mb=0.01" in answer["error"]) == (413, True)
        taken = await http.done("optim_step", {"model_id": other, "seq_id": number + 1, "adam_params": ADAM})
        assert "serve.max_body_mb=0.01" in taken["error"]
        for garbage in (b"\xff\xff", b"\xff" * 99_999):
            kind = {"Content-Type": "application/x-protobuf"}
            assert (await http.ask("forward_backward", garbage, headers=kind))[0] == 400
        assert (await http.ask("forward_backward", {}))[0] == 415
        assert (await http.ask("create_session", b"{" * 99))[0] == 400
        status, answer = await http.ask("create_session", b"{" * 99_999)
        assert (status, "serve.max_body_mb=0.01" in answer["error"]) == (413, True)
        assert (await http.ask("create_session", {}, headers={"X-API-Key": "tml-other"}))[0] == 401
        assert (await http.ask("healthz", method="GET", headers={"X-API-Key": "none"}))[0] == 200
        runs = (await http.ask("training_runs", method="GET"))[1]["training_runs"]
        assert [each["training_run_id"] for each in runs] == [other, model]
        assert not [*(tmp_path / "tiny-service" / "checkpoints").glob("*")]
        assert (await http.ask("usage", method="GET"))[1]["usage"]["local"]["learned"] == 3 * len(DATA)  # other's
        half = await http.done("optim_step", {"model_id": model, "adam_params": ADAM})
        assert "not taken" in half["error"]
        steps = []
        for each in (model, await http.model()):  # nothing of all that is in the model
            await http.learn(each, 0)
            steps.append(await http.done("optim_step", {"model_id": each, "adam_params": ADAM}))
        assert steps[0] == steps[1]
        assert steps[0]["type"] == "optim_step"
