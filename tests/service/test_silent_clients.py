"""Clients that are heard of no more: their sessions end, what they saved stays, and a restart agrees."""

import asyncio
from types import SimpleNamespace

import pytest

from rlinf.config.text import ServeConfig
from rlinf.runs.rules import load_config
from rlinf.runtime.base.clock import virtual
from rlinf.service.checkpoints import Refused
from rlinf.service.journal import SERVICE
from rlinf.service.keys import KEY, Keys
from rlinf.service.promises import Lives
from rlinf.service.serve import serving
from rlinf.service.service import Service
from tests.service.serving import TINY, Http


def service(root, seconds=60.0):
    keys = Keys({"local": "tml-a", "anna": "tml-b"}, 9, 9)
    return Service(SimpleNamespace(step=0), ServeConfig(session_seconds=seconds), root, keys)


def refused(call, *about):
    with pytest.raises(Refused) as told:
        call(*about)
    return told.value.status, "silent" in str(told.value)


def test_everything_ends_exactly_when_it_was_silent_for_so_long():
    async def main():
        over, loop = [], asyncio.get_running_loop()
        lives = Lives(lambda key: over.append((key, loop.time())), 10.0)
        for key in "abc":
            lives.begin(key)
            await asyncio.sleep(1)
        lives.sign("a")
        lives.sign("nobody")
        await asyncio.sleep(100)
        lives.begin("d")
        lives.close()
        await asyncio.sleep(100)
        return over

    with virtual() as clock:
        assert clock.run(main()) == [("b", 11.0), ("c", 12.0), ("a", 13.0)]


@pytest.mark.parametrize("seconds", [60.0, None])
def test_a_session_lives_by_whatever_its_client_asks_and_a_restart_agrees(tmp_path, seconds):
    async def before():
        ours = service(tmp_path, seconds)
        KEY.set("anna")  # whose request sets the timer
        beating = ours.create_session()
        KEY.set("local")
        sampling, silent = ours.create_session(), ours.create_session()
        samplers = [ours.create_sampler(each, 0, None) for each in (sampling, silent)]
        KEY.set(None)
        for _ in range(5):
            await asyncio.sleep(59.0)
            ours.check_session(beating)
            ours.sampler(samplers[0])
        if seconds is None:
            ours.check_session(silent)
        else:
            assert refused(ours.check_session, silent) == (410, True)
            assert refused(ours.sampler, samplers[1]) == (404, True)
        await ours.close()
        return sampling, silent, samplers

    async def after(sampling, silent, samplers):
        ours = service(tmp_path, seconds)
        ours.restore(ours.journal.recover()[SERVICE], "base")
        await asyncio.sleep(59.0)
        ours.sampler(samplers[0])
        assert refused(ours.check_session, silent) == (410, True)
        assert refused(ours.sampler, samplers[1]) == (404, True)
        await asyncio.sleep(60.0)
        assert refused(ours.check_session, sampling) == (410, True)
        await ours.close()

    with virtual() as clock:
        known = clock.run(before())
        if seconds is not None:
            clock.run(after(*known))


async def test_models_of_a_silent_client_go_though_a_request_is_missing_and_its_checkpoints_stay(tmp_path):
    config = load_config("configs/serve/tiny.yaml", [*TINY, f"output_dir={tmp_path}"], 1)
    async with serving(config, lambda line: None) as (url, key, app), Http(url, key) as http:
        model = await http.model()
        saved = await http.done("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        await http.learn(model, 2)
        await http.ask("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}})  # 3 never comes
        app._service._lapse(model.partition(":")[0])
        for number, named in ((3, "finished"), (4, "step"), (5, "unload_model")):
            result = (await http.ask("retrieve_future", {"request_id": f"{model}:{number}"}))[1]
            assert named in str(result)
        status, answer = await http.ask("get_info", {"model_id": model})
        assert (status, "silent" in answer["error"]) == (404, True)
    async with serving(config, lambda line: None) as (url, key, app), Http(url, key) as http:
        assert (await http.ask("get_info", {"model_id": model}))[0] == 404
        assert (await http.ask("session_heartbeat", {"session_id": model.partition(":")[0]}))[0] == 410
        asked = {"session_id": (await http.ask("create_session", {}))[1]["session_id"], "model_seq_id": 0}
        loaded = await http.done("load_weights", {**asked, "path": saved["path"], "optimizer": True})
        assert loaded["type"] == "load_weights"
    assert not (tmp_path / "tiny-service" / "journal" / model.replace(":", "-")).exists()
