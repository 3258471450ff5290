"""`rlinf.train` with objects in memory, as a script or a notebook uses it, and what it says to wrong calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

import rlinf
from rlinf.algos import losses
from rlinf.config.load import load
from rlinf.config.text import RunConfig
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.base import RequestRefused
from rlinf.runs.library.objects import OF_GIVEN_TEXTS, OURS, Objects, configured, key_of
from rlinf.runtime.system.torchrun import SWITCH_INTERVAL
from tests.launching import ROOT, launch
from tests.runs.library.rewards import right, trl_style

ALPHABET = {"characters": "0123456789>"}
LOCK = threading.Lock()
MODEL = {
    "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
ROWS = [{"prompt": f"{first}{second}>", "answer": str(first)} for first in range(10) for second in range(10)]
SMALL = {"tokenizer": ALPHABET, "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 3, "trace": False}


def test_parts_of_an_algorithm_may_be_functions(tmp_path):
    called = []

    def nothing(answers, penalty, reduce):
        called.append(len(answers.rewards))
        return torch.zeros_like(answers.rewards)

    def loss(batch, aggregation, weights):
        called.append("loss")
        return losses.cispo(batch.logprobs, batch.need("old_logprobs"), batch.need("advantages"), batch.mask)

    algorithm = {"name": "grpo", "advantage": nothing, "loss": loss}
    result = rlinf.train(MODEL, right, ROWS, algorithm=algorithm, run_dir=tmp_path / "run", steps=1, **SMALL)
    assert "loss" in called
    assert len({*called}) > 1, "the advantage was asked too"
    assert result.history("grad_norm") == [0.0], "where every advantage is 0, nothing is learned"


def test_rewards_with_weights_are_summed_and_each_is_told(tmp_path):
    rewards = {"right": (lambda response, answer: float(response[:1] == answer), 2.0), "long": trl_style}
    result = rlinf.train(MODEL, rewards, ROWS, run_dir=tmp_path / "run", steps=2, **SMALL)
    for row in result.metrics:
        assert row["reward/mean"] == pytest.approx(2 * row["scores/right"] + row["scores/long"])
    assert (result.steps, len(result.history("reward/mean"))) == (2, 2)
    assert result.before is None
    assert type(result.model()).__name__ == "Qwen2ForCausalLM"
    assert result.tokenizer().decode(result.tokenizer()("12>")["input_ids"]) == "12>"
    shown = repr(result)
    assert shown.startswith("rlinf.Result: 2 steps in 0:0")
    assert str(result.model_dir) in shown
    assert len(result.frame()) == 2
    with pytest.raises(KeyError, match=r"step.*reward.*reward/mean"):
        result.history("reward")


def test_a_model_a_tokenizer_and_a_data_set_in_memory(tmp_path):
    tokenizer = load_tokenizer(ALPHABET)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(vocab_size=len(tokenizer), **MODEL))
    given = {**SMALL, "tokenizer": tokenizer, "evaluation": Dataset.from_list(ROWS[:10]), "lr": 1e-3}
    first = rlinf.train(model, right, Dataset.from_list(ROWS), run_dir=tmp_path / "run", steps=2, **given)
    assert first.before is not None
    assert first.after.metrics["accuracy"] == first.after.accuracy
    resolved = load(RunConfig, tmp_path / "run" / "resolved.yaml").model
    assert resolved.path == str(tmp_path / "run" / "model")
    kept = AutoModelForCausalLM.from_pretrained(resolved.path).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(first.model().state_dict()["lm_head.weight"], kept["lm_head.weight"])

    written = (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns
    rows = Dataset.from_list(ROWS)
    again = rlinf.train(model, right, rows, run_dir=tmp_path / "run", steps=4, resume="auto", **given)
    assert [row["step"] for row in again.metrics] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "what was saved aside is gone"


def test_a_run_without_reward_and_end_says_so_within_its_first_steps(tmp_path, capsys):
    tokenizer = load_tokenizer(ALPHABET)
    tokenizer.eos_token = None
    rows = [{"prompt": row["prompt"], "answer": "0000000"} for row in ROWS]
    rlinf.train(MODEL, data=rows, run_dir=tmp_path / "run", steps=3, **{**SMALL, "tokenizer": tokenizer})
    alarms = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert [alarm["step"] for alarm in alarms] == [1, 3]
    assert "rlinf.rewards.exact" in alarms[0]["text"]
    assert "(right: '0000000')" in alarms[0]["text"]
    assert "reward.function" in alarms[0]["do"]
    assert "same reward, 0" in alarms[1]["text"]
    assert "end token" in alarms[1]["do"]
    assert "end token" in capsys.readouterr().out.partition("step 1:")[0], "already before the first step"


def test_a_start_that_fails_leaves_the_earlier_run_where_it_was_and_auto_says_that_it_begins_anew(
    tmp_path, monkeypatch, capsys
):
    seen = []
    look = lambda *_: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))  # noqa: E731
    more = {**SMALL, "run_dir": tmp_path / "run", "placement": {"device_kind": "cpu"}, "steps": 1}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    first = rlinf.train(MODEL, right, ROWS, resume="auto", callbacks=[look], **more)
    assert seen == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert "beginning anew" in capsys.readouterr().out

    async def broken(step, session):
        raise ZeroDivisionError("a bug")

    async def in_a_session():
        objects = {"model": first.model(), "tokenizer": first.tokenizer()}
        async with rlinf.Session.local(run_dir=tmp_path / "run", trace=False, **objects):
            raise ZeroDivisionError("before the first step")

    for starts in (lambda: rlinf.train(MODEL, right, ROWS, flow=broken, **more), lambda: asyncio.run(in_a_session())):
        with pytest.raises(ZeroDivisionError):
            starts()
        assert "nothing was measured" in capsys.readouterr().err
        assert (tmp_path / "run" / "checkpoints" / "latest").exists()
        assert [path.name for path in tmp_path.iterdir() if "previous" in path.name] == []


@pytest.mark.parametrize(("ids", "said"), [([], "empty prompt"), ([1, 10_000], "token id 10000")])
def test_a_prompt_that_the_engine_refuses_ends_the_run_with_its_number_and_no_traceback_of_ours(tmp_path, ids, said):
    async def asks(step, rollout, judge, trainer):
        prompts = [replace(prompt, token_ids=np.array(ids, dtype=np.int64)) async for prompt in step.prompts]
        await rollout.generate(prompts, n=2).collect()
        return {}

    with pytest.raises(rlinf.RunFailure, match=f"^step 1: request.*.*{said}") as error:
        rlinf.train(MODEL, right, ROWS, flow=asks, run_dir=tmp_path / "run", steps=1, **SMALL)
    assert isinstance(error.value.__cause__, RequestRefused)


def test_given_texts_need_no_reward(tmp_path):
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in ROWS[10:]]
    texts = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    short = {"sft": {"max_tokens": 9}, "dpo": {"beta": 0.2}, "reward_model": {"center": 0.01}}  # of their own sections
    told: list[int] = []
    callbacks = [lambda step: told.append(step)]
    for algorithm, data in {"sft": texts, "dpo": pairs, "reward_model": pairs}.items():
        result = rlinf.train(
            MODEL, data=data, algorithm=algorithm, evaluation=data[:20], tokenizer=ALPHABET, steps=3, batch_size=8,
            lr=1e-2, run_dir=tmp_path / algorithm, trace=False, callbacks=callbacks, **short[algorithm],
        )  # fmt: skip
        assert result.after["loss"] < result.before["loss"]
        assert len(result.history("loss")) == 3
        assert re.search(r"loss +\S+ -> .*\n  held out +loss", repr(result))
        scores = type(result.model()).__name__ == "Qwen2ForSequenceClassification"
        assert scores == (algorithm == "reward_model")
    assert told == 3 * [1, 2, 3]


async def test_in_a_running_event_loop(tmp_path):
    asked, loop = [], asyncio.get_running_loop()
    sys.setswitchinterval(0.003)  # whatever the program has

    async def problems():
        for row in ROWS:
            yield row

    class Notes:
        async def on_samples(self, step, samples):
            assert asyncio.get_running_loop() is loop
            assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
            asked.append((step, len(samples), {"prompt", "response", "reward"} <= samples[0].keys()))

        def on_evaluate(self, step, evaluation, run):
            if step and evaluation["accuracy"] >= 0:
                run.stop()

    with pytest.raises(rlinf.InputError, match=r"await rlinf\.train_async"):
        rlinf.train(MODEL, right, ROWS, run_dir=tmp_path / "run", **SMALL)
    result = await rlinf.train_async(
        MODEL, right, problems, evaluation=ROWS[:4], run_dir=tmp_path / "run", callbacks=[Notes()], steps=9,
        checkpoint={"best": "evaluation/accuracy"}, **{"evaluation.every": 2}, **SMALL,
    )  # fmt: skip
    assert (result.steps, result.best_step, result.stopped) == (2, 2, "a callback said so")
    assert asked == [(1, 8, True), (2, 8, True)]
    assert result.best_model_dir is not None
    assert sys.getswitchinterval() == pytest.approx(0.003), "and it has it again"


async def test_cancelling_ends_the_run(tmp_path):
    begun = asyncio.Event()
    run = rlinf.train_async(
        MODEL, right, ROWS, run_dir=tmp_path / "run", steps=10_000, callbacks=[lambda step: begun.set()],
        reward={"isolate": "never"}, **SMALL,
    )  # fmt: skip
    task = asyncio.create_task(run)
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [each for each in asyncio.all_tasks() if each is not asyncio.current_task()] == []


@pytest.mark.torchrun
@pytest.mark.parametrize(("kind", "processes"), [("lambda", 0), ("lambda", 2), ("locked", 2)])
def test_a_script_passes_rewards_of_its_own(tmp_path, kind, processes):
    program = Path(__file__).parent / "programs" / "own_rewards.py"
    said = launch(str(tmp_path / "run"), kind, program=program, processes=processes).stdout
    part = "short" if kind == "locked" else "reward_2"
    assert f"{sorted(['scores/right', f'scores/{part}'])}" in said
    assert ("served" in said) == (processes == 2)
    assert ("rollout on host 0, 1" in said) == (processes == 2), "every process is used"
    assert ("train: short cannot" in said) == (kind == "locked")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


class Careless:
    def on_stpe(self):
        pass


WRONG = {
    "model": ({"model": 7}, "train: model = a int: give a directory, a hub name"),
    "no such model": ({"model": "./nowhere"}, "model.path = ./nowhere: there is no such directory"),
    "model type": ({"model": {"model_type": "qwen22"}}, "did you mean qwen2"),
    "tokenizer": ({"tokenizer": None}, "tokenizer = None: a new model needs one"),
    "tokenizer object": ({"tokenizer": 3}, "tokenizer = a int: give a directory"),
    "characters": ({"tokenizer": {"chars": "12"}}, "tokenizer = a dict: .*characters"),
    "characters by key": ({"**": {"model.tokenizer": {"characters": "12"}}}, "model.tokenizer = .*characters:0123"),
    "rewards": ({"rewards": []}, "rewards = a list: there is none"),
    "reward": ({"rewards": 0.5}, "rewards = a float: a reward is a function"),
    "reward path": ({"rewards": "rlinf.rewards.exactt"}, "reward.function = rlinf.rewards.exactt: .*did you mean"),
    "weight": ({"rewards": {"a": {"function": right, "wieght": 1}}}, "wieght"),
    "column": ({"rewards": lambda response, solution: 0.0}, "solution"),
    "data": ({"data": 5}, "a int holds no rows"),
    "empty": ({"data": []}, "a list has no rows"),
    "splits": ({"data": {"train": ROWS, "test": ROWS}}, "data = {train, test}: these are several data sets"),
    "evaluation": ({"evaluation": {"every": 2}}, "evaluation.every = 2: .*pass evaluation too"),
    "agent": ({"agent": {"functoin": "my_agent.ep"}}, "functoin"),
    "system": ({"system": 3}, "system = 3: .*host_timeout"),
    "nothing to evaluate on": ({"**": {"evaluation.every": 2}}, "evaluation.every = 2: .*pass evaluation too"),
    "algorithm": ({"algorithm": "grppo"}, "grppo"),
    "setting": ({"**": {"learning_rate": 1e-6}}, "learning_rate = 1e-06: .*TRL's name; here it is lr"),
    "value": ({"steps": "many"}, "steps = many: expected a whole number"),
    "TRL's name in given texts": (
        {"algorithm": "sft", "rewards": None, "max_length": 9},
        "max_length = 9: .*TRL's name; here it is max_tokens",
    ),
    "run_dir": ({"run_dir": 3}, "train: run_dir = 3: give a path"),
    "one callback": ({"callbacks": right}, r"train: callbacks: give a list of them"),
    "callback": ({"callbacks": [Careless()]}, "on_stpe, which nothing calls; did you mean on_step"),
    "rewards of given texts": ({"algorithm": "dpo"}, "train: rewards: dpo learns from given texts"),
    "settings of given texts": (
        {"algorithm": "sft", "rewards": None, "prompts_per_step": 1},
        "algorithm.prompts_per_step = 1: algorithm sft does not read it",
    ),
    "flow": ({"flow": right}, "this is no `async def` function"),
    "resume": ({"resume": "./nowhere"}, "train: resume=./nowhere: no checkpoint there"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_gets_a_message_without_our_traceback(tmp_path, case):
    changed, said = WRONG[case]
    given = {"model": MODEL, "rewards": right, "data": ROWS, "run_dir": tmp_path / "run", "steps": 1, **SMALL}
    given |= {name: value for name, value in changed.items() if name != "**"} | changed.get("**", {})
    with pytest.raises(rlinf.InputError, match=f"(?s){said}") as raised:
        rlinf.train(**given)
    ours = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if "/rlinf/" in frame.filename]
    assert [frame.name for frame in ours] == ["train"]
    assert not list(tmp_path.glob(".*")), "nothing is left behind"


def test_a_text_is_no_section():
    assert configured(None, {"system": "Be brief."}, "train").data.system == "Be brief."
    assert configured(None, {"system": {"host_timeout": 5.0}}, "train").system.host_timeout == 5.0


def locked(response):
    with LOCK:
        return 1.0


def test_a_reward_of_a_script_whose_globals_no_other_process_can_have_stays_here(monkeypatch, capsys):
    monkeypatch.setattr(locked, "__module__", "__main__")
    objects = Objects("train")
    objects.take_rewards(locked)
    assert objects.passed.reward is locked
    assert objects.settings == {"reward.isolate": "never"}
    assert capsys.readouterr().out.count("locked cannot be") == 1


def test_arguments_may_be_their_sections():
    async def agent(task, llm):
        return 0.0

    objects = Objects("train")
    objects.take_agent({"function": agent, "endpoint": {"host": "::1"}, "timeout": 5.0})
    objects.take_data({"train": ROWS, "system": "Be brief."}, {"data": ROWS[:1], "every": 2})
    assert (objects.passed.agent, objects.passed.train, objects.passed.evaluation) == (agent, ROWS, ROWS[:1])
    config = configured(None, objects.settings, "train")
    assert (config.agent.endpoint.host, config.agent.timeout) == ("::1", 5.0)
    assert (config.data.system, config.evaluation.every) == ("Be brief.", 2)


def test_every_name_of_trl_that_is_translated_leads_to_a_call_that_works():
    named = set(inspect.signature(rlinf.train).parameters) - {"settings"}
    for theirs, ours in OURS.items():
        code = ours.partition(";")[0]
        if "=" not in code and "**" not in code:
            assert code in named or key_of(code) is not None, (theirs, ours)
            continue
        call = eval(f"dict({code})", {"f": right, "g": trl_style})
        configured(None, {name: value for name, value in call.items() if name not in named}, theirs)


def test_the_tables_in_the_docs_say_the_same():
    page = (ROOT / "docs" / "coming-from.md").read_text()
    first, _, second = page.partition("## TRL")[2].partition("## slime")[0].partition("`SFTTrainer`")
    cells = [dict(re.findall(r"^\| `(\w+)` \| `(.+?)`(?:;.*)? \|$", part, re.M)) for part in (first, second)]
    assert cells[0] == {theirs: ours.partition(";")[0] for theirs, ours in OURS.items()}
    given = {theirs: ours.partition(";")[0] for theirs, ours in OF_GIVEN_TEXTS.items()}
    assert {theirs: cells[1][theirs] for theirs in given} == given
