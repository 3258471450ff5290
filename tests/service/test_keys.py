"""Several keys of one service: what is another's is not there, nobody takes all, models wait on the disk."""

import pytest

from rlinf.config.load import InputError
from rlinf.service.keys import Busy, Keys
from tests.service.serving import Http, tiny

ADAM = {"learning_rate": 0.01}
KEYS = "serve.keys={anna: tml-anna, bert: tml-bert}"


def test_a_key_has_room_for_so_many_requests_and_tokens():
    keys = Keys({"anna": "tml-a", "bert": "tml-b"}, 3, 100)
    assert keys.named("tml-b") == "bert"
    keys.admit("anna", 500)  # its only one
    keys.begin("1", "anna", 500)
    with pytest.raises(Busy, match="500"):
        keys.admit("anna", 1)
    keys.admit("bert", 100)
    keys.end("1")
    keys.end("1")
    for id in "234":
        keys.admit("anna", 10)
        keys.begin(id, "anna", 10)
    with pytest.raises(Busy, match="3 requests"):
        keys.admit("anna", 0)


async def test_what_another_key_made_is_not_there(tmp_path):
    async with (
        tiny(tmp_path, KEYS, "serve.token=null") as url,
        Http(url, "tml-anna") as anna,
        Http(url, "tml-bert") as bert,
    ):
        model = await anna.model()
        session = model.partition(":")[0]
        promise = (await anna.learn(model, 1))[1]
        saved = (await anna.done("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "a"}))["path"]
        state = (await anna.done("save_weights", {"model_id": model, "seq_id": 3, "path": "a"}))["path"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved}
        sampler = (await anna.ask("create_sampling_session", body))[1]["sampling_session_id"]
        own = (await bert.ask("create_session", {}))[1]["session_id"]
        prompt = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {}}
        for path, asked in (
            ("get_info", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 4, "adam_params": ADAM}),
            ("save_weights", {"model_id": model, "seq_id": 4, "path": "b"}),
            ("unload_model", {"model_id": model}),
            ("session_heartbeat", {"session_id": session}),
            (
                "create_model",
                {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1}},
            ),
            ("create_sampling_session", {**body, "session_id": own}),
            ("load_weights", {"session_id": own, "model_seq_id": 0, "path": state, "optimizer": True}),
            ("weights_info", {"tinker_path": saved}),
            ("asample", {"sampling_session_id": sampler, **prompt}),
            ("retrieve_future", promise),
        ):
            status, answer = await bert.ask(path, asked)
            assert (status, answer["category"]) == (404, "user"), (path, answer)
        assert (await bert.learn(model, 4))[0] == 404
        run = f"training_runs/{model}"
        for path in (run, f"sessions/{session}", f"samplers/{sampler}"):
            assert (await bert.ask(path, method="GET"))[0] == 404
        assert (await bert.ask(f"{run}/checkpoints/weights/a", method="DELETE"))[0] == 404
        for path, name in (
            ("training_runs", "training_runs"), ("checkpoints", "checkpoints"), (f"{run}/checkpoints", "checkpoints"),
        ):  # fmt: skip
            assert (await bert.ask(path, method="GET"))[1][name] == []
            assert (await anna.ask(path, method="GET"))[1][name]
        assert (await bert.ask("sessions", method="GET"))[1]["sessions"] == [own]
        assert (await bert.ask("usage", method="GET"))[1]["usage"] == {}
        step = await anna.done("optim_step", {"model_id": model, "seq_id": 4, "adam_params": ADAM})
        assert step["type"] == "optim_step"  # nothing of all that touched it
        await anna.done("asample", {"sampling_session_id": sampler, "seq_id": 1, **prompt})
        usage = (await anna.ask("usage", method="GET"))[1]["usage"]["anna"]
        assert usage.items() >= {"tokens": 3, "learned": 3, "steps": 1, "prompts": 1}.items()
    async with (
        tiny(tmp_path, KEYS, "serve.token=null") as url,
        Http(url, "tml-anna") as anna,
        Http(url, "tml-bert") as bert,
    ):
        assert (await anna.ask("usage", method="GET"))[1]["usage"]["anna"] == usage
        assert (await bert.ask("get_info", {"model_id": model}))[0] == 404
        await anna.done("unload_model", {"model_id": model})
        assert (await anna.ask("usage", method="GET"))[1]["usage"]["anna"] == usage
    with pytest.raises(InputError, match=r"serve\.keys"):
        async with tiny(tmp_path, "serve.keys={anna: tml-of-the-tests}"):
            pass


async def test_a_request_too_many_is_sent_again_and_has_its_turn_then(tmp_path):
    async with tiny(tmp_path, "serve.max_requests=2") as url, Http(url) as http:
        model = await http.model()
        key = {"X-Idempotency-Key": "k"}
        steps = [{"model_id": model, "seq_id": number, "adam_params": ADAM} for number in (2, 3, 4, 5)]
        promises = [(await http.ask("optim_step", step))[1] for step in steps[:2]]  # they wait for the first
        status, answer = await http.ask("optim_step", steps[2], headers=key)
        assert (status, answer["category"]) == (429, "user")
        assert (await http.learn(model, 1))[0] == 200  # others wait for it
        for promise in promises:
            await http.ask("retrieve_future", promise)
        assert (await http.ask("optim_step", steps[2], headers=key))[0] == 200


async def test_models_that_nobody_asks_for_wait_on_the_disk_and_go_on_bit_for_bit(tmp_path):
    results = {}
    for most in (64, 1):
        async with tiny(tmp_path / str(most), f"serve.max_open={most}") as url, Http(url) as http:
            models = [await http.model(seed=seed) for seed in range(3)]
            taken = []
            for number in range(1, 7, 2):
                for model in models:
                    await http.learn(model, number)
                    step = {"model_id": model, "seq_id": number + 1, "adam_params": ADAM}
                    taken.append(await http.done("optim_step", step))
            results[most] = taken
            states = [*(tmp_path / str(most) / "tiny-service" / "journal").glob("*/*.state")]
            assert len(states) == (0 if most > 1 else 3)
    assert results[1] == results[64]
