"""Supervised training, DPO and reward models as whole runs: they learn, repeat and go on bit for bit, and share work
between processes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.launching import launch, learned, metrics_of, weights_of
from tests.stand_in import save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parent / "programs"
CONFIGS = {"sft": "configs/sft.yaml", "dpo": "configs/dpo.yaml", "reward-model": "configs/reward-model.yaml"}
SMALL = ("steps=4", "checkpoint.every=2", "evaluation.every=0", "evaluation.problems=20", "supervised.batch_size=9",
         "model.config.hidden_size=16", "model.config.intermediate_size=16", "model.config.num_hidden_layers=1",
         "log_every=1", "trace=false", "trainer.micro_batch_tokens=64", "optimizer.warmup_steps=0",
         "optimizer.schedule=constant")  # fmt: skip
LORA = ("model.lora.r=2", "reference.kind=adapters_off", "optimizer.lr=0.01")
VARIANTS = {
    "sft": ("sft",),
    "sft with lora": ("sft", "model.lora.r=2"),
    "dpo": ("dpo",),
    "dpo under the adapters": ("dpo", *LORA),
    "ipo": ("dpo", "supervised.dpo.loss=ipo"),
    "reward model": ("reward-model",),
    "reward model with lora": ("reward-model", "model.lora.r=2"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By variant a whole run, and what goes on from its checkpoint of two steps of four."""
    directory = tmp_path_factory.mktemp("supervised")
    for config in CONFIGS:
        lines = []
        for name, (wanted, *changes) in VARIANTS.items():
            common = [*SMALL, *changes, f"name={name.replace(' ', '_')}"]
            if wanted == config:
                older = directory / "whole" / name.replace(" ", "_") / "checkpoints" / "step_000002"
                lines.append(["never", *common, f"output_dir={directory}/whole"])
                lines.append([str(older), *common, f"output_dir={directory}/half"])
        text = "".join(json.dumps(line) + "\n" for line in lines)
        launch(CONFIGS[config], program=PROGRAMS / "many.py", text=text, timeout=200)
    return {name: (directory / "whole" / name.replace(" ", "_"), directory / "half" / name.replace(" ", "_"))
            for name in VARIANTS}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_it_goes_on_bit_for_bit(runs, name):
    whole, half = runs[name]
    assert [step["step"] for step in learned(half)] == [3, 4]
    assert learned(half) == learned(whole)[2:]
    mine, expected = weights_of(half), weights_of(whole)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[key], expected[key]) for key in expected)
    assert "evaluation/loss" in learned(half)[-1]


@pytest.mark.parametrize(
    "config", ["sft", *(pytest.param(name, marks=pytest.mark.repeated) for name in ("dpo", "reward-model"))]
)
def test_it_learns_what_it_is_shown(config, tmp_path):
    done = launch(
        "--config", CONFIGS[config], f"output_dir={tmp_path}", "evaluation.every=0", "evaluation.problems=200"
    )
    last = metrics_of(tmp_path / config)[-1]
    if config == "sft":
        assert last["evaluation/loss"] < 0.05, done.stdout
        answer = sorted_by(tmp_path / config / "checkpoints" / "latest" / "hf", "4170>")
        assert answer == "0147"
    else:
        assert last["evaluation/rewards/accuracies"] > 0.95, done.stdout
    assert "held-out loss" in done.stdout
    assert "reward " not in done.stdout, "no column of rewards"


def sorted_by(directory, text):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return tokenizer.decode(model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] : -1])


def test_a_saved_reward_model_is_a_sequence_classifier(runs):
    directory = runs["reward model"][0] / "checkpoints" / "latest" / "hf"
    model, info = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.num_labels == 1
    assert torch.equal(model.score.weight, weights_of(runs["reward model"][0])["score.weight"])


@pytest.mark.torchrun
@pytest.mark.parametrize("config", CONFIGS)
def test_two_processes_learn_what_one_learns(config, tmp_path):
    common = ("--config", CONFIGS[config], *SMALL, "optimizer.lr=1e-3")
    launch(*common, f"output_dir={tmp_path}/one")
    launch(*common, f"output_dir={tmp_path}/two", "placement.trainer=0-1", processes=2)
    one, two = (metrics_of(tmp_path / which / config) for which in ("one", "two"))
    for here, there in zip(one, two, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], abs=2e-5)
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-3)
    assert two[-1]["evaluation/loss"] == pytest.approx(one[-1]["evaluation/loss"], abs=1e-4)


def test_conversations_of_ones_own_from_a_saved_model(tmp_path):
    model = save_model(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}]}
            for n in range(12)]  # fmt: skip
    rows.append({"messages": [{"role": "user", "content": "?" * 99}, {"role": "assistant", "content": "1"}]})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = launch(
        "--config", CONFIGS["sft"], f"model.path={model}", f"data.train={path}", f"evaluation.data={path}",
        "supervised.max_tokens=90", "supervised.epochs=2", "supervised.batch_size=5", f"output_dir={tmp_path}",
        "name=chat", "log_every=1",
    )  # fmt: skip
    assert len(metrics_of(tmp_path / "chat")) == 6, "two epochs of thirteen rows, by five"
    assert "13 rows; messages from messages" in done.stdout
    assert "evaluation on 12 of them; 1 are left out: too long, or nothing to learn" in done.stdout
    assert "of 32 rows drawn, 2 " in done.stdout


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("algorithm=sft", "rollout.temperature=0.5"), "rollout.temperature"),
        (("algorithm=sft", "supervised.dpo.beta=0.5"), "supervised.dpo"),
        (("algorithm=sft", "algorithm.group_size=4"), "algorithm.group_size"),
        (("algorithm=dpo", "reference.kind=ema"), "reference.kind"),
        (("algorithm=dpo", "supervised.dpo.loss=ipo", "supervised.dpo.label_smoothing=0.1"), "ipo has none"),
        (("algorithm=dpo", "flow=rlinf.flows.grpo"), "it takes rollout"),
        (("algorithm=reward_model", "supervised.epochs=-1"), "supervised.epochs"),
    ],
)
def test_settings_that_nothing_reads_are_one_message(overrides, said, tmp_path):
    done = launch("--config", CONFIGS["sft"], *overrides, f"output_dir={tmp_path}", expect=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
